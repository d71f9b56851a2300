#!/usr/bin/env bash
# The first thing to run: sets everything up, then trains a delta-rule, a sum-rule and a softmax language model of one
# size on the text of Python's own standard library, evaluates them on files none of them has seen, and lets the first
# write. About 10 minutes on 2 cores, and no download but packages. What is done is not done again.
# --data FOLDER: your own train.txt, valid.txt and test.txt (or .txt.gz) in place of the standard library.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe language-model --text stdlib --merges 4000 --models delta sum softmax --prompt "def read(self," -- "$@"
