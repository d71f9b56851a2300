#!/usr/bin/env bash
# Errors, speed and memory on one NVIDIA GPU, in calls of some minutes, also without a network. See "One GPU" in RESULTS.md.
#   gpu.sh lease 1 | 2 | 3 [--out FOLDER]     on the GPU machine: all parts, in three calls of 160, 290 and 240 seconds:
#     1: check, the errors and bits of every rule and dtype against float64; kernels, the time of each kernel
#     2: measure, operators: ours first, then PyTorch's attention and flash-linear-attention
#     3: models, updates and decoding; laws, what only a GPU can test, then all laws, then compute-sanitizer
#   gpu.sh PART [--seconds N] [--out FOLDER]  one of these parts: check, kernels, measure, models or laws
#   gpu.sh publish [--out FOLDER]             anywhere: prints the table of the calls in FOLDER
#   gpu.sh build                              without a GPU: the kernels for TORCH_CUDA_ARCH_LIST, into FWP_CACHE_DIR
#   gpu.sh wheels FOLDER [PYTHON]             with a network: the packages that a GPU machine lacks, for its Python (3.12)
# --wheels FOLDER (or FWP_WHEELS) installs only from there: for one call, or into FWP_SITE, if it is empty, for all of them.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
python=${PYTHON:-python3} part=${1:-} wheels=${FWP_WHEELS:-} flags=()
die() { echo "gpu.sh: $*" >&2; exit 1; }

fetch_wheels() { # fetch_wheels FOLDER [PYTHON]
  local folder=${1:?"gpu.sh wheels: name a folder"} version=${2:-3.12} platforms=() tag
  [ -z "$(ls -A "$folder" 2>/dev/null)" ] || die "$folder must be new or empty: pip takes no two versions of a package."
  # What fairseq needs at import, and fla. Their other needs are there wherever models are trained.
  set -- "$(grep -o 'fairseq-fixed==[0-9.]*' "$root/setup.py")" hydra-core==1.3.2 omegaconf==2.3.0 bitarray fla-core
  for tag in _2_28 _2_27 _2_17 _2_12 _2_5 2014; do platforms+=(--platform "manylinux${tag}_x86_64"); done
  "$python" -m pip download --quiet --no-deps --dest "$folder" --only-binary=:all: --python-version "$version" \
    --implementation cp "${platforms[@]}" "$@"
  # No index has a wheel of it. It is pure Python, so any Python can build it.
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" antlr4-python3-runtime==4.9.3
}

needs=torch
case $part in
  wheels) fetch_wheels "${@:2}"; exit ;;
  build) shift ;;
  check | kernels | measure) needs="torch, triton"; shift ;;
  publish) needs="torch, matplotlib"; shift ;;
  models) needs="torch, triton, fairseq"; shift ;;
  lease | laws) needs="torch, triton, fairseq, pytest, xdist, hypothesis"; shift ;;
  -h | --help) sed -n '2,/^set/ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
  *) die "the first word must be lease, check, kernels, measure, models, laws, publish, build or wheels, got '$part'" ;;
esac
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=${2:?"gpu.sh: --wheels needs a folder"}; shift ;;
    *) flags+=("$1") ;;
  esac
  shift
done

# The benchmarks and the inputs of the tests: processes import them before they know where they come from.
export PYTHONPATH=$root:$root/recipes/benchmarks:$root/tests${PYTHONPATH:+:$PYTHONPATH} PATH=$PATH:/usr/local/cuda/bin
# A folder on the path, not a virtual environment: one made from another sees none of the packages of that, as PyTorch.
if [ -n "$wheels" ]; then
  [ -n "$(ls "$wheels"/*.whl 2>/dev/null)" ] || die "--wheels must be a folder of gpu.sh wheels, got $wheels"
  site=${FWP_SITE:-}
  if [ -z "$site" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
  fi
  [ -n "$(ls -A "$site" 2>/dev/null)" ] ||
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
  export PYTHONPATH=$site:$PYTHONPATH
fi
"$python" -W ignore -c "import $needs" ||
  die "install what $python lacks, by recipes/setup.sh or from a folder of gpu.sh wheels with --wheels."
"$python" "$root/recipes/benchmarks/gpu.py" "$part" ${flags[@]+"${flags[@]}"}
