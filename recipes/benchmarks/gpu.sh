#!/usr/bin/env bash
# Speed and memory on one NVIDIA GPU, in three calls of less than nine minutes each. See "One GPU" in RESULTS.md.
#   gpu.sh wheels FOLDER [PYTHON]          with a network: the packages that a GPU machine lacks, for its Python (3.12)
#   gpu.sh ours | peers | models [FLAGS]   on the GPU machine; --wheels FOLDER (or FWP_WHEELS) installs only from there
#   gpu.sh publish [--out FOLDER]          anywhere: writes the results of the calls in FOLDER into RESULTS.md
#   gpu.sh build                           without a GPU: the kernels for TORCH_CUDA_ARCH_LIST, into FWP_CACHE_DIR
# Flags: gpu.sh ours --help.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
python=${PYTHON:-python3}
wheels=${FWP_WHEELS:-}

run() { printf '+%s\n' "$(printf ' %q' "$@")" >&2; "$@"; }
die() { echo "gpu.sh: $*" >&2; exit 1; }

fetch_wheels() { # fetch_wheels FOLDER [PYTHON]
  local folder=${1:?"gpu.sh wheels: name a folder"} version=${2:-3.12} platforms=() tag
  [ -z "$(ls -A "$folder" 2>/dev/null)" ] || die "$folder must be new or empty: pip takes no two versions of a package."
  # What fairseq needs at import, and a peer. Its other needs are there wherever models are trained.
  set -- "$(grep -o 'fairseq-fixed==[0-9.]*' "$root/setup.py")" hydra-core==1.3.2 omegaconf==2.3.0 bitarray fla-core
  for tag in 2_28 2_27 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${tag}_x86_64"); done
  run "$python" -m pip download --quiet --no-deps --dest "$folder" --only-binary=:all: --python-version "$version" \
    --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 "$@"
  # No index has a wheel of it. It is pure Python, so any Python can build it.
  run "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" antlr4-python3-runtime==4.9.3
}

# Prints the modules that cannot be imported. Status 3 where PyTorch has CUDA: such a machine need not have a network.
missing_modules() {
  "$python" -c 'from importlib import import_module
missing, cuda = [], None
for name in ("torch", "matplotlib", "pytest", "hypothesis", "fairseq"):
    try:
        module = import_module(name)
        cuda = cuda or name == "torch" and module.version.cuda
    except ModuleNotFoundError as error:
        missing.append(error.name)
print(*missing)
raise SystemExit(3 if cuda else 0)'
}

case ${1:-} in
  wheels) fetch_wheels "${@:2}"; exit ;;
  ours | peers | models | publish | build) ;;
  -h | --help) sed -n '2,/^set/ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
  *) die "the first word must be wheels, ours, peers, models, publish or build, got '${1:-}'" ;;
esac

part=$1 flags=()
shift
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=${2:?"gpu.sh: --wheels needs a folder"}; shift ;;
    *) flags+=("$1") ;;
  esac
  shift
done

# A folder on the path, not a virtual environment: one made from another sees none of the packages of that, as PyTorch.
site=
if [ -n "$wheels" ]; then
  [ -n "$(ls "$wheels"/*.whl 2>/dev/null)" ] || die "--wheels must be a folder with wheels, got $wheels: gpu.sh wheels makes one."
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  run "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
fi
export PYTHONPATH=${site:+$site:}$root${PYTHONPATH:+:$PYTHONPATH}

status=0
missing=$(missing_modules) || status=$?
if [ -n "$missing" ]; then
  if [ -n "$wheels" ] || [ "$status" -ne 0 ]; then
    die "$python lacks ${missing// /, }: name a folder that gpu.sh wheels has made with --wheels, or install it there."
  fi
  # shellcheck source=recipes/env.sh
  . "$root/recipes/env.sh" plots dev --
  python=python
fi
run "$python" "$root/recipes/benchmarks/gpu.py" "$part" ${flags[@]+"${flags[@]}"}
