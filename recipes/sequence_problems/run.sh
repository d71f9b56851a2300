#!/usr/bin/env bash
# State tracking (parity, S3) and recall on generated sequences: trains each rule and draws the right answers.
#   bash recipes/sequence_problems/run.sh [train|report|all] [--conf YAML] [--out FOLDER] [--workers N]
# conf/quick.yaml, the default, takes some 15 minutes on 2 cores.
set -euo pipefail

# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run python "$root/recipes/sequence_problems/problems.py" "$@"
