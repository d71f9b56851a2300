#!/usr/bin/env bash
# The first thing to run: sets everything up, then trains a delta-rule, a sum-rule and a softmax language model of one
# size on the text of Python's own standard library, evaluates them on files none of them has seen, and lets the first
# write. About 10 minutes on 2 cores, and no download but packages. What is done is not done again.
#
#   bash recipes/quickstart/run.sh [prepare|train|eval|sample|all] [--data FOLDER] [--out FOLDER] [--models NAME ...]
#                                                                    [flags for fairseq-train]
#
# --data FOLDER   your own train.txt, valid.txt and test.txt (or .txt.gz) in place of the standard library
# --lines N       evaluates on the first N lines of valid and test alone: a trial
# --out FOLDER    where everything goes (runs/quickstart)
# --models ...    which of conf/*.yaml (delta sum softmax)
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=recipes/env.sh
. "$here/../env.sh" plots -- "$@"
# shellcheck source=recipes/lm_comparison.sh
. "$here/../lm_comparison.sh"

data=''
out=$root/runs/quickstart
merges=4000
models="delta sum softmax"
protocols=(valid test)
prompt="def read(self,"
per_word='' # code has no words that mean something

own_text() { run python "$here/stdlib_text.py" "$1"; }
show_sample() { python "$here/stdlib_text.py" --show; }

read_arguments "$@"
compare
