#!/usr/bin/env bash
# Everything CI checks, after setting it up: `bash tests/run.sh [pytest's arguments]`, 17 minutes on two cores.
# `bash tests/run.sh nightly [--minutes 60]` runs the rest, oldest first: set-up, whole recipes, faults, long laws, mutants.
# `bash tests/run.sh lint` checks only the form; that is also the pre-commit hook.
set -euo pipefail
# shellcheck source=recipes/env.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../recipes/env.sh" dev plots -- "$@"
cd "$root"

lint() {
  local failed=0 # every check speaks, also after another has failed
  run ruff check --quiet --output-format concise || failed=1
  run ruff format --check --quiet || failed=1
  run shellcheck --severity=warning .ci/run recipes/*.sh recipes/*/*.sh tests/*.sh || failed=1
  run mypy || failed=1
  return $failed
}

kind=${1:-}
# The kernels and their emulator are compiled beside mypy, which has one thread, and the first tests: those of the emulator wait.
build='from fairseq_fwp.ops.kernels import load_kernels; load_kernels("cpu"); from cuda_binding import build_all; build_all()'
[[ $kind == lint ]] || PYTHONPATH=tests:tests/emulator python -c "$build" &
lint
case $kind in
  lint) exit ;;
  nightly) shift ;;
  *) kind=fast ;;
esac
# A process a core: threads of several processes would only wait for each other. One that dies prints where it was.
export OMP_NUM_THREADS=1 PYTHONFAULTHANDLER=1
pytest=(python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal --failed-first --durations 25)
case $kind in
  fast) run "${pytest[@]}" --ignore tests/nightly "$@" ;;
  nightly) run python tests/nightly/run.py "$@" ;;
esac
