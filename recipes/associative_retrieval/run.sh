#!/usr/bin/env bash
# Synthetic associative retrieval (Schlag, Irie & Schmidhuber 2021, Sec. 6.1): trains a grid and draws Figures 2 to 5.
# What is done is not done again; an interrupted grid goes on with the same command.
# --conf: conf/quick.yaml (the default: half an hour on 2 cores), conf/slow.yaml (nearer to the knees and more keys),
# conf/capacity.yaml (every rule with every map), conf/full.yaml or one of your own.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe retrieval -- "$@"
