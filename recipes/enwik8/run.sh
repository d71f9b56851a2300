#!/usr/bin/env bash
# enwik8, byte by byte: the Transformer-XL models of Dai et al. 2019. Every model is one file in conf/, and evaluation.yaml
# has the paper's protocols. Example:
#   bash recipes/enwik8/run.sh train --conf conf/base.yaml
#   bash recipes/enwik8/run.sh evaluate --conf conf/base.yaml
# --data FOLDER contains the file enwik8 of 100,000,000 bytes. Without --data it is downloaded.
# Another file is refused, unless you give --any-text.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe language-model --text enwik8 -- "$@"
