#!/usr/bin/env bash
# The quick start's comparison on a text that is read as a whole: the Python Enhancement Proposals, 1.7 million words.
# About an hour on 2 cores; what is done is not done again.
# --data FOLDER: train, valid and test as .txt or .txt.gz (data/peps, or else the PEPs are downloaded).
# --models grid: conf/grid/*.yaml, every rule, map and normalisation of the papers' tables, about three minutes each;
# --models carried: a state that is carried from segment to segment, and Transformer-XL.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe language-model --text peps --merges 8000 --models delta sum softmax --per-word -- "$@"
