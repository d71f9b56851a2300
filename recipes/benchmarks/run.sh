#!/usr/bin/env bash
# Speed and memory against peers on a CPU: `bash recipes/benchmarks/run.sh [PART...]`, without one all of operators, family, rules,
# training, long, generation, eval_lm, translation, fwl (PARTS in run.py).
# Tests the operators first, and measures nothing when they fail. Results: recipes/benchmarks/results/ and RESULTS.md.
# A quiet machine, please: training takes about 10 minutes, long 15, translation 30, the other parts 3 to 10 each; the first
# time fast-transformers is built, 5 more.
set -euo pipefail
LOAD_BEFORE=$(cut -d ' ' -f 1 /proc/loadavg)
export LOAD_BEFORE
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots dev -- "$@"
python "$root/recipes/benchmarks/run.py" "$@"
