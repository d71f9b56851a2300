#!/usr/bin/env bash
# Fast weight layers (Clark et al. 2022) beside dynamic evaluation, on two small models of the Python Enhancement Proposals:
# local attention, read in blocks, and Transformer-XL, read in segments. About an hour on 2 cores; nothing is done twice.
#
#   bash recipes/fwl/run.sh [prepare|train|eval|all] [--data FOLDER] [--out FOLDER] [--models 'NAME ...']
#                                                                    [flags for fairseq-train]
#
# --data FOLDER   holds train, valid and test as .txt or .txt.gz (data/peps)
# --out FOLDER    where everything goes (runs/fwl)
# --models ...    which of conf/{local,xl}/*.yaml: base is trained first, and the others go on from it
#
# The paper's models, on WikiText-103, are conf/wt103/*.yaml for recipes/wikitext103/run.sh; each says how.
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=recipes/env.sh
. "$here/../env.sh" plots
# shellcheck source=recipes/lm_comparison.sh
. "$here/../lm_comparison.sh"

data=$root/data/peps
out=$root/runs/fwl
merges=8000
models="local/base local/slow local/fwl local/bias xl/base xl/slow xl/fwl xl/bias"
protocols=(valid test)
task=()
# Rates of dynamic evaluation, and step sizes of "test-time only": the best on the validation text is reported.
sgd="0.03 0.1 0.3"
rms="1e-6 3e-6 1e-5"
steps="3e-4 1e-3 3e-3 1e-2"
statistics=1000 # windows of the training text for RMS


# Reads as in training: blocks, or segments with the state carried on.
reading() {
  case $1 in
    local/*) echo "--context-window 0" ;;
    xl/*) echo "--carry-state" ;;
  esac
}

# evaluate_by NAME SPLIT LABEL FLAGS...: with the log-probability of each token beside the result.
evaluate_by() {
  local how
  read -ra how <<<"$(reading "$1")"
  score "$1" "$2" "$3" "${how[@]}" --scores "$out/$1/$2 $3.tsv" "${@:4}"
}

# tune NAME LABEL VALUES FLAGS...: @ in the flags is each value on the validation text, and the best of them on the test text.
tune() {
  local value best flags=("${@:4}")
  for value in $3; do evaluate_by "$1" valid "$2 $value" "${flags[@]//@/$value}"; done
  best=$(python "$here/rows.py" best "$out/$1" "$2")
  evaluate_by "$1" test "$2 $best" "${flags[@]//@/$best}"
}

evaluate_row() { # evaluate_row NAME
  local split
  for split in valid test; do evaluate_by "$1" "$split" plain; done
  case $1 in
    */base)
      tune "$1" sgd "$sgd" --dynamic sgd --dynamic-lr @
      tune "$1" rms "$rms" --dynamic rms --dynamic-statistics "$statistics" --dynamic-lr @ ;;
    */slow)
      tune "$1" test-time "$steps" --model-overrides "{'fwl_fast_weights':'both','fwl_decay':1.0,'fwl_step_size':@}" ;;
  esac
}

analyse() { # analyse BASE FLAGS...: where the layer helps
  [ -e "$out/$1/base/test plain.tsv" ] && [ -e "$out/$1/fwl/test plain.tsv" ] || return 0
  run python "$here/analysis.py" "$out/$1/base/test plain.tsv" "$out/$1/fwl/test plain.tsv" "$out/data/bin/dict.txt" \
    "$out/$1.png" "${@:2}"
}

read_arguments "$@"
[ -d "$data" ] || die "there is no folder $data: see recipes/peps/run.sh for what it holds, and give it with --data."
text=$out/data/bpe
case $stage in
  sample) die "there is no stage sample here: it is prepare, train, eval or all." ;;
  prepare | train | all) prepare ;;
esac
flags_for_all=("${extra[@]}")
case $stage in
  train | all)
    for name in $models; do
      extra=("${flags_for_all[@]}")
      base=$out/${name%/*}/base/checkpoint_best.pt
      [ "$name" = "${name%/*}/base" ] || extra+=(--finetune-from-model "$base")
      train "$name" "$here/conf/$name.yaml"
    done ;;
esac
case $stage in
  eval | all)
    for name in $models; do evaluate_row "$name"; done
    run python "$here/rows.py" table "$out" | tee "$out/table.md"
    analyse local --block 512
    analyse xl ;;
esac
