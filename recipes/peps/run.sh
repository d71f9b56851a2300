#!/usr/bin/env bash
# The quick start's comparison on a text that is read as a whole: the Python Enhancement Proposals, 1.7 million words.
# About an hour on 2 cores; what is done is not done again.
#
#   bash recipes/peps/run.sh [prepare|train|eval|sample|all] [--data FOLDER] [--out FOLDER] [--models NAME ...]
#                                                                    [flags for fairseq-train]
#
# --data FOLDER   holds train, valid and test as .txt or .txt.gz (data/peps); what is prepared needs it no more
# --lines N       evaluates on the first N lines of valid and test alone: a trial
# --out FOLDER    where everything goes (runs/peps)
# --models ...    which of conf/*.yaml (delta sum softmax), or rows of the grid, conf/grid/*.yaml, as grid/NAME; "grid" is
#                 all of them: every rule, map and normalisation of the papers' tables, about three minutes each; or
#                 "carried", conf/carried/*.yaml: a state that is carried from segment to segment, and Transformer-XL
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=recipes/env.sh
. "$here/../env.sh" plots -- "$@"
# shellcheck source=recipes/lm_comparison.sh
. "$here/../lm_comparison.sh"

data=$root/data/peps
out=$root/runs/peps
merges=8000
models="delta sum softmax"
protocols=(valid test "test 192")
per_word=--per-word

show_sample() { cat; }

read_arguments "$@"
[ "$models" != grid ] || models=$(python "$tools/lm_grid.py" names "$here/grid.yaml")
[ "$models" != carried ] || models=$(python "$tools/lm_state.py" names "$here/carried.yaml")
case " $models " in
*" grid/"*)
  protocols=(valid test)
  report() { # on the whole grid: other processes may have trained rows of it
    run python "$tools/lm_grid.py" csv "$out" "$here/grid.yaml" >"$out/grid/grid.csv"
    run python "$tools/lm_grid.py" picture "$out/grid/grid.csv" "$here/grid.yaml" "$out/grid/grid.png"
    run python "$tools/lm_grid.py" table "$out/grid/grid.csv" "$here/grid.yaml" >"$out/grid/table.unfinished"
    mv "$out/grid/table.unfinished" "$out/grid/table.md"
    cat "$out/grid/table.md"
    echo "The same is in $out/grid/table.md, its numbers in $out/grid/grid.csv, a picture in $out/grid/grid.png."
  }
  sample() { :; } # a row's budget writes nothing worth reading
  ;;
*" carried/"*)
  # shellcheck source=recipes/peps/carried.sh
  . "$here/carried.sh" ;;
esac
need_data "make it from the PEPs (https://github.com/python/peps, one paragraph per line, split by document into
train.txt, valid.txt and test.txt), or give any such folder with --data."
compare
