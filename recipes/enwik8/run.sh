#!/usr/bin/env bash
# enwik8, byte by byte: the Transformer-XL models of Dai et al. 2019, one YAML each, with their protocols (evaluation.yaml):
# bash run.sh train --conf conf/base.yaml, then evaluate --conf conf/base.yaml.
# --data FOLDER: the file enwik8, 100,000,000 bytes; without it, it is downloaded. Another file is refused unless
# --any-text says that it is meant.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe language-model --text enwik8 -- "$@"
