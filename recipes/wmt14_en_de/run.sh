#!/usr/bin/env bash
# WMT14 English to German: the translation models of Schlag et al. 2021 (arXiv 2102.11174), Tables 1 and 6. Every model is
# one file in conf/; README.md explains them. Example:
#   bash recipes/wmt14_en_de/run.sh train --conf conf/dpfp4.yaml
#   bash recipes/wmt14_en_de/run.sh evaluate --conf conf/dpfp4.yaml --average 10
# --data FOLDER contains the raw corpora, or the public tokenised set (train.tok.clean.bpe.32000.en, ...). Without --data
# the raw corpora are downloaded. Another text is refused, unless you give --any-text.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" -- "$@"
recipe translation --pairs wmt14_en_de --merges 32000 --words "--nwordssrc 32768 --nwordstgt 32768" \
  --search "--beam 4 --lenpen 0.6" -- "$@"
