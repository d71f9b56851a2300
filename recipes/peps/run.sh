#!/usr/bin/env bash
# Language models on the Python Enhancement Proposals (PEPs), 1.7 million words: delta rule, sum rule and softmax.
# About an hour on 2 cores.
# --data FOLDER contains train, valid and test as .txt or .txt.gz. Without --data, data/peps is used if it exists;
# else the PEPs are downloaded.
# Other models (--models):
#   grid     every rule, map and normalisation of the papers' tables, about three minutes each
#   ablation recurrence, positions and loss of Transformer-XL
#   carried  a state that is carried from segment to segment, and Transformer-XL
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe language-model --text peps --merges 8000 --models delta sum softmax --per-word -- "$@"
