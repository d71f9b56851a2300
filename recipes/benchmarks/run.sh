#!/usr/bin/env bash
# Speed and memory on a CPU, compared with other implementations: bash recipes/benchmarks/run.sh [PART...]
# Without a PART, all parts run: operators, family, rules, training, generation.
# The tests of the operators run first. If one fails, nothing is measured.
# Results: results/ in recipes/benchmarks, and a table that is printed. A part that is interrupted starts again.
# Use a machine without other work. A part takes 3 to 10 minutes.
# The first run of operators also builds fast-transformers, in about 5 minutes.
set -euo pipefail
LOAD_BEFORE=$(cut -d ' ' -f 1 /proc/loadavg)
export LOAD_BEFORE
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots dev -- "$@"
python "$root/recipes/benchmarks/run.py" "$@"
