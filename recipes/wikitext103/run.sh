#!/usr/bin/env bash
# WikiText-103: the models of Schlag et al. 2021, Tables 2 to 5, and of Dai et al. 2019, one YAML each, with their protocols
# (evaluation.yaml): bash run.sh train --conf conf/small/delta.yaml, then evaluate --conf conf/small/delta.yaml.
# --data FOLDER: wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens (or train.txt, ...) of WikiText-103; without it
# they are downloaded. Its tokens are counted, and another text is refused unless --any-text says that it is meant.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe language-model --text wikitext103 -- "$@"
