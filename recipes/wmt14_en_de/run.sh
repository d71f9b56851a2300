#!/usr/bin/env bash
# WMT14 English to German: the translation models of Schlag et al. 2021 (arXiv 2102.11174), Tables 1 and 6. See README.md:
# bash run.sh train --conf conf/NAME.yaml, then evaluate --conf conf/NAME.yaml [--average 10].
# --data FOLDER: the raw corpora, or the public tokenised set (train.tok.clean.bpe.32000.en, ...); without it: download.
# --any-text: FOLDER has train, valid and test .en and .de of another text, or corpora of another size.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" -- "$@"
recipe translation --pairs wmt14_en_de --merges 32000 --words "--nwordssrc 32768 --nwordstgt 32768" \
  --search "--beam 4 --lenpen 0.6" -- "$@"
