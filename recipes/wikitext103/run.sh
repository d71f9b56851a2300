#!/usr/bin/env bash
# WikiText-103: the language models of Schlag et al. 2021, Tables 2 to 5, and of Dai et al. 2019. Every model is one file
# in conf/, and evaluation.yaml has the papers' protocols. Example:
#   bash recipes/wikitext103/run.sh train --conf conf/small/delta.yaml
#   bash recipes/wikitext103/run.sh evaluate --conf conf/small/delta.yaml
# --data FOLDER contains wiki.{train,valid,test}.tokens (or train.txt, ...). Without --data they are downloaded.
# The recipe counts the tokens. Another text is refused, unless you give --any-text.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe language-model --text wikitext103 -- "$@"
