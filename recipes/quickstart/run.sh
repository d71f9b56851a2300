#!/usr/bin/env bash
# Start here. Sets everything up, then trains a small language model with the delta rule, evaluates it on files that it
# has not seen, plots its validation perplexity, and lets it write three texts: in about eight minutes on 2 cores.
# The text is the source code of Python's standard library. Only packages are downloaded.
# `--models delta sum softmax` also trains models of the same size with the sum rule and softmax, and compares them.
# --data FOLDER contains your own train.txt, valid.txt and test.txt (or .txt.gz).
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe language-model --text stdlib --merges 2000 --models delta --prompt "def read(self," -- "$@"
