#!/usr/bin/env bash
# Synthetic associative retrieval (Schlag, Irie & Schmidhuber 2021, Sec. 6.1): trains a grid and draws Figures 2 to 5.
# Grids (--conf):
#   conf/quick.yaml     the default: half an hour on 2 cores
#   conf/slow.yaml      more numbers of keys, near the limit of each memory
#   conf/capacity.yaml  every rule with every map
#   conf/rules.yaml     the rules published later
#   conf/full.yaml      the paper's grid
# A file of your own works too.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
recipe retrieval -- "$@"
