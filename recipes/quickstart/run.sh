#!/usr/bin/env bash
# Start here. Sets everything up, then trains three small language models of one size: delta rule, sum rule and softmax.
# The text is the source code of Python's standard library. The models are evaluated on files that they have not seen.
# Then the first model writes three texts. 10 to 13 minutes on 2 cores. Only packages are downloaded.
# --data FOLDER contains your own train.txt, valid.txt and test.txt (or .txt.gz).
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe language-model --text stdlib --merges 4000 --models delta sum softmax --prompt "def read(self," -- "$@"
