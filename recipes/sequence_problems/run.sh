#!/usr/bin/env bash
# State tracking (parity, S3) and recall (MQAR) on generated sequences: trains each rule and draws the right answers.
# What is done is not done again; an interrupted grid goes on with the same command.
#
#   bash recipes/sequence_problems/run.sh [plan|train|report|all] [--conf YAML] [--out FOLDER] [--workers N]
#
# plan prints the trainings that are left, all (the default) is train and report.
# --conf YAML     conf/quick.yaml (the default: twenty minutes on 2 cores) or one of your own
# --out FOLDER    where everything goes (runs/sequence_problems)
# --workers N     trainings at once, each on one core (2)
set -euo pipefail

# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run python "$root/recipes/sequence_problems/problems.py" "$@"
