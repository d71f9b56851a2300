#!/usr/bin/env bash
# Start here. Sets everything up, then trains three small language models of one size: with the delta rule, the sum rule and
# softmax. It compares them on files that they have not seen, in a table and a picture, and lets the first one write three
# texts. From nothing this is eight minutes on 2 cores, eleven of CPU time, of which the models take four.
# The text is the source code of Python's standard library. Only packages are downloaded.
# --models delta trains only that one; --models long trains longer. --data FOLDER contains your own train.txt, valid.txt and
# test.txt (or .txt.gz).
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe language-model --text stdlib --merges 1000 --models delta sum softmax --prompt "def read(self," --next "\
Next: your own text:     bash recipes/quickstart/run.sh --data FOLDER --out runs/mine
      your own rule:     CONTRIBUTING.md, \"A rule\"
      the trained model: fairseq_fwp.load(\"OUT/delta/checkpoint_best.pt\", dictionary=\"OUT/data/bin\")
      all else:          README.md, \"Where to go\"" -- "$@"
