#!/usr/bin/env bash
# Speed and memory on one NVIDIA GPU, in less than ten minutes: `bash recipes/benchmarks/gpu.sh [gpu.py's flags]`.
# Builds the kernels, runs the tests that need a GPU, and measures nothing when they fail. Results: gpu.* in
# recipes/benchmarks/results/ and RESULTS.md. Peers that are there are measured too: `pip install fla-core`, and
# --delta-peer and --decay-peer name checkouts of the published kernels (see gpu_peers.py).
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
here=$root/recipes/benchmarks
# A Python that has all it takes is used as it is: a machine with a GPU need not have a network.
python=${PYTHON:-python3}
if "$python" -c 'import fairseq, matplotlib, pytest, torch' 2>/dev/null; then
  run() { printf '+%s\n' "$(printf ' %q' "$@")" >&2; "$@"; }
else
  # shellcheck source=recipes/env.sh
  . "$root/recipes/env.sh" plots dev -- "$@"
  python=python
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
SECONDS=0 # bash counts on from here; what gpu.py begins before its time is up may take another minute

run "$python" "$here/gpu.py" build
workers=() # the laws are thousands of small launches: several processes share the GPU where pytest can do that
! "$python" -c 'import xdist' 2>/dev/null || workers=(-n 4)
run timeout 300 "$python" -m pytest "$root/tests/laws" "$root/tests/ops" -q -k cuda ${workers[@]+"${workers[@]}"} ||
  { echo "gpu.sh: the tests on the GPU failed or took more than 5 minutes, so nothing is measured." >&2; exit 1; }
run "$python" "$here/gpu.py" measure --seconds $((500 - SECONDS)) "$@"
