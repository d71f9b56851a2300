#!/usr/bin/env bash
# Speed and memory against peers on a CPU: `bash recipes/benchmarks/run.sh [PART...]`, parts of those below; without one, all.
# Tests the operators first, and measures nothing when they fail. Results: recipes/benchmarks/results/ and RESULTS.md.
# A quiet machine, please: training takes about 10 minutes, long 15, translation 30, the other parts 3 to 10 each; the first
# time fast-transformers is built, 5 more.
set -euo pipefail

all=(operators family rules training long generation eval_lm translation fwl)
parts=("$@")
[ $# -gt 0 ] || parts=("${all[@]}")
for part in "${parts[@]}"; do
  case " ${all[*]} -h --help " in
    *" $part "*) ;;
    *) echo "run.sh: there is no part '$part': choose from ${all[*]}." >&2; exit 1 ;;
  esac
done

LOAD_BEFORE=$(cut -d ' ' -f 1 /proc/loadavg)
export LOAD_BEFORE
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots dev -- "$@"
here=$root/recipes/benchmarks

OMP_NUM_THREADS=1 run python -m pytest "$root/tests/laws" "$root/tests/ops" -q --numprocesses auto --maxprocesses 4 ||
  { echo "run.sh: the tests of the operators failed, so nothing is measured." >&2; exit 1; }

for part in "${parts[@]}"; do
  if [ "$part" = operators ]; then
    bash "$root/recipes/setup.sh" peers ||
      echo "run.sh: pytorch-fast-transformers was not set up; unless it is there already, its rows will say 'not available'" >&2
  fi
  case "$part" in
    # Freed memory stays with the process. Else every contender draws fresh pages from the system in every call, which
    # takes up to half of the time at small shapes, and which calls are spared is chance.
    operators | family) run env MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_MMAP_MAX_=0 python "$here/$part.py" ;;
    *) run python "$here/$part.py" ;;
  esac
  run python "$here/plots.py" "$part"
done
