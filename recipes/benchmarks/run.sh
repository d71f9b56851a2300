#!/usr/bin/env bash
# Speed and memory on a CPU, compared with other implementations: bash recipes/benchmarks/run.sh [PART...]
# Without a PART, all parts run: operators, family, rules, training, long, generation, eval_lm, translation, fwl.
# The tests of the operators run first. If one fails, nothing is measured.
# Results: RESULTS.md and results/ in recipes/benchmarks. A part that is interrupted starts again.
# Use a machine without other work. Training takes about 10 minutes, long 15, translation 30, each other part 3 to 10.
# The first run of operators also builds fast-transformers, in about 5 minutes.
set -euo pipefail
LOAD_BEFORE=$(cut -d ' ' -f 1 /proc/loadavg)
export LOAD_BEFORE
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots dev -- "$@"
python "$root/recipes/benchmarks/run.py" "$@"
