#!/usr/bin/env bash
# Makes everything run: `bash recipes/setup.sh [plots] [dev] ...`. Once it is done, another run takes a moment.
# It uses the virtual (or conda) environment that is active, else .venv, which it makes in the checkout; a PyTorch
# that is there already stays. An environment with another fairseq is refused, since two cannot be in one.
# TORCH_SPEC='torch==2.12.0' chooses another PyTorch than the tested ones.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
tested_torch=(2.13.0) # with which all tests have passed, the newest first
fairseq=$(grep -o 'fairseq-fixed==[0-9.]*' "$root/setup.py")

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

# conda's base environment is on all the time, so nobody has chosen it.
if [ -n "${VIRTUAL_ENV:-}" ]; then
  env=$VIRTUAL_ENV lock=$env/.fairseq_fwp.lock
elif [ "${CONDA_DEFAULT_ENV:-base}" != base ]; then
  env=$CONDA_PREFIX lock=$env/.fairseq_fwp.lock
else
  env=$root/.venv lock=$root/.venv.lock
fi
python=$env/bin/python
known=(plots dev onnx tokenizers transformers peers)
state=$env/.fairseq_fwp # a stamp for every extra that is set up, the constraints, and pip's words
log=$state/pip.log

# The stamps hold what they were made from: a change of any of it sets up again.
key() { { echo "$root" && "$python" -VV && cat "$root/setup.py" "$root/recipes/setup.sh"; } | cksum; }

is_stamped() { [ -s "$state/$1.done" ] && [ "$(cat "$state/$1.done")" = "$(key)" ]; }

is_done() {
  local extra
  [ -x "$python" ] || return
  for extra in base "$@"; do is_stamped "$extra" || return; done
  # -I: what lies in the current folder or on PYTHONPATH is not what is installed.
  "$python" -I -c 'from importlib.util import find_spec
raise SystemExit(not all(map(find_spec, ["torch", "fairseq", "fairseq_fwp", "ninja", "sacrebleu"])))'
}

# bin/activate is written last and names its folder: it gives away a .venv that is half-made or was moved.
needs_venv() {
  # shellcheck disable=SC1091
  [ "$env" = "$root/.venv" ] &&
    ! ("$python" -c '' && . "$env/bin/activate" && [ "$VIRTUAL_ENV" -ef "$env" ]) 2>/dev/null
}

check_python() {
  local base=$python version
  ! needs_venv || base=python3
  version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    die "$base does not run: install Python 3.10 or later, or activate an environment that has one."
  case $version in
    3.[1-9][0-9]) ;;
    *) die "$base is Python $version, but 3.10 or later is needed: activate a virtual environment of such a Python." ;;
  esac
  [ "$base" = "$python" ] || "$base" -c 'import ensurepip, venv' 2>/dev/null ||
    die "Python's venv module is missing: install it (on Debian and Ubuntu: apt install python$version-venv)."
  "$base" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    die "Python's C headers are missing: install them (on Debian and Ubuntu: apt install python$version-dev)."
}

# `fairseq_fwp` of an environment is one checkout: a second one would take the first one's place without a word.
check_owner() {
  local link owner
  for link in "$env"/lib/python3.*/site-packages/fairseq_fwp; do
    [ -L "$link" ] || continue
    owner=$(readlink "$link")
    [ ! -d "$owner" ] || [ "$owner" -ef "$root/fairseq_fwp" ] ||
      die "$env runs the fairseq_fwp of ${owner%/*}: deactivate it (a .venv is made here then), or remove $link."
  done
}

# Into an environment that this script has not set up, fairseq-fixed would come over any other fairseq.
check_fairseq() {
  local other
  if [ -d "$state" ] || needs_venv; then return; fi
  other=$("$python" -I -c 'import sys
from importlib.metadata import distributions
found = {"%s==%s" % (one.metadata["Name"], one.version) for one in distributions()}
print(*sorted(name for name in found - {sys.argv[1]} if name.startswith(("fairseq==", "fairseq-fixed=="))))' "$fairseq")
  [ -z "$other" ] || die "$env has $other, and $fairseq would replace it: deactivate it (a .venv is made here then)."
}

check_room() { # check_room FOLDER GB
  local free
  free=$(df -Pk "$1" | awk 'NR == 2 { print int($4 / 1048576) }')
  [ "$free" -ge "$2" ] || die "the disk of $1 has $free GB free, but $2 GB are needed: make room there."
}

has_torch() { [ -x "$python" ] && "$python" -I -c 'import torch' 2>/dev/null; }

check_machine() {
  local extra folder=${lock%/*}
  for extra; do
    case " ${known[*]} " in *" $extra "*) ;; *) die "an extra must be one of ${known[*]}, got '$extra'." ;; esac
  done
  check_python
  check_owner
  check_fairseq
  [ -w "$folder" ] || die "$folder cannot be written: work in a copy, or activate an environment of your own."
  command -v "${CXX:-g++}" >/dev/null ||
    die "the C++ compiler ${CXX:-g++} is missing: install it (on Debian and Ubuntu: apt install g++)."
  if has_torch; then
    "$python" -I -c 'import torch; raise SystemExit(torch.__version__ < (2, 4))' ||
      die "the PyTorch in $env must be 2.4 or later: install another, or activate another environment."
    check_room "$folder" 1
  else
    check_room "$folder" 3
  fi
  check_room "${TMPDIR:-/tmp}" 1
}

make_venv() {
  if needs_venv; then
    say "making .venv"
    python3 -m venv --clear "$env"
  fi
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null 2>&1 ||
    die "the environment $env has no pip: install pip there."
  mkdir -p "$state"
}

try_pip() {
  # Python compiles what is imported; pip would compile all of PyTorch, three quarters of the time that it takes.
  "$python" -m pip install --no-compile --quiet "$@" >"$log" 2>&1 && return
  ! grep -qF 'Retrying (Retry(total=0' "$log" ||
    die "the package index does not answer: check the network and pip's settings, then run this again."
  return 1
}

reason() { grep -iE '^ *error: ' "$log" | grep -vm 1 'subprocess-exited\|Ignored the following' | sed 's/^ *//' || echo "no reason given"; }

pip_install() { # pip_install WHAT PIP'S ARGUMENTS...
  say "installing $1"
  try_pip "${@:2}" || die "pip could not install $1 ($(reason)): its full words are in $log."
}

install_torch() {
  local spec=${TORCH_SPEC:-} version
  ! has_torch || return 0
  if [ -z "$spec" ] && ! command -v nvidia-smi >/dev/null && [ ! -e /proc/driver/nvidia ]; then
    say "installing PyTorch, the CPU build"
    for version in "${tested_torch[@]}"; do ! try_pip "torch==$version+cpu" numpy || return 0; done
    say "pip is offered no CPU build; the ordinary one brings several GB of CUDA packages on Linux"
  fi
  check_room "$env" 12
  # Not every index, and not every Python, has the newest.
  pip_install PyTorch "${spec:-torch>=2.4,<=${tested_torch[0]}}" numpy
}

# `--user-dir fairseq_fwp` in any folder: fairseq looks for the name next to its own folder, where an editable package is not.
link_plugin() {
  local site
  site=$("$python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # Nothing outside this environment is touched.
  case $site in "$env"/*) ln -sfn "$root/fairseq_fwp" "$site/fairseq_fwp" ;; esac
}

install() {
  local torch extra extras=
  for extra; do [ "$extra" = peers ] || extras+=${extras:+,}$extra; done
  install_torch
  # Nothing that follows may replace it. pip knows it by this version; torch.__version__ can have a +cu130 more.
  torch=$("$python" -I -c 'import torch; from importlib.metadata import version as v; print(v("torch"))') ||
    die "the PyTorch in $env cannot be imported: install another, or activate another environment."
  echo "torch==$torch" >"$state/constraints.txt"
  set -- --constraint "$state/constraints.txt"
  pip_install "the build tools" "$@" setuptools wheel cython numpy ninja
  compile_kernels &
  install_fairseq "$@"
  pip_install fairseq_fwp "$@" --no-build-isolation --editable "$root${extras:+[$extras]}"
  # fairseq asks for hydra-core 1.3.2, which does not run on Python 3.14.
  "$python" -c 'import sys; raise SystemExit(sys.version_info >= (3, 14))' ||
    pip_install hydra-core "$@" --no-deps "hydra-core>=1.3.8"
  # fairseq asks for torchaudio of any version and runs without: pip may bring one that cannot be loaded.
  if ! "$python" -I -c 'import torchaudio' 2>/dev/null; then
    say "removing torchaudio, which this PyTorch cannot load"
    "$python" -m pip uninstall --yes torchaudio >>"$log" 2>&1 || die "pip could not remove torchaudio: see $log."
  fi
  link_plugin
  install_nvcc
  say "waiting for the kernels"
  wait
}

# Meanwhile, on another core, as pip builds fairseq on one. If it fails, the first call of an operator says why.
compile_kernels() {
  local build='import sys; sys.path.insert(0, sys.argv[1]); from fairseq_fwp.ops.kernels import load_kernels; load_kernels("cpu")'
  "$python" -I -W ignore -c "$build" "$root" >/dev/null 2>&1 9>&- || true
}

# Three of fairseq's extensions include all C++ headers of PyTorch, which takes a minute each. Those that they use take a
# third of it. An isolated build would fetch a second PyTorch.
install_fairseq() {
  local headers=$state/headers/torch
  local -x CFLAGS="${CFLAGS:-} -g0 -O1 -I'$state/headers'"
  mkdir -p "$headers"
  printf '#include <torch/%s.h>\n' types csrc/utils/pybind | tee "$headers/torch.h" >"$headers/extension.h"
  set -- "$@" --no-deps --no-build-isolation "$fairseq"
  say "fairseq may have to be built, which takes a minute or two"
  pip_install fairseq "$@"
  # The index has one for Python 3.12, and pip keeps what it built: either may be for another PyTorch.
  "$python" -I -c 'import torch, alignment_train_cpu_binding' 2>/dev/null ||
    pip_install "fairseq for this PyTorch" --force-reinstall --no-cache-dir --no-binary fairseq-fixed "$@"
}

# The kernels are compiled for a GPU by the nvcc of PyTorch's CUDA, which pip has from CUDA 13 on. Without one all else runs.
install_nvcc() {
  local cuda nvcc part packages=()
  cuda=$("$python" -I -c 'import torch; print(torch.version.cuda if torch.cuda.is_available() else "")')
  [ -n "$cuda" ] && [ -z "${CUDA_HOME:-${CUDA_PATH:-}}" ] || return 0
  for nvcc in nvcc /usr/local/cuda/bin/nvcc; do
    ! "$nvcc" --version 2>/dev/null | grep -q "release ${cuda%%.*}\." || return 0
  done
  if [ "${cuda%%.*}" -lt 13 ]; then
    say "there is no nvcc of CUDA ${cuda%%.*}, and pip has none: install that CUDA toolkit for kernels on the GPU"
    return
  fi
  for part in cuda-nvcc nvvm cuda-crt cuda-cccl; do packages+=("nvidia-$part==$cuda.*"); done
  say "installing nvcc, for kernels on the GPU"
  try_pip --constraint "$state/constraints.txt" "${packages[@]}" ||
    say "pip could not install nvcc ($(reason)): install the CUDA toolkit ${cuda%%.*} for kernels on the GPU"
}

# PATH without nvcc: a folder that holds it gives way to links to all else in it.
path_without_nvcc() {
  local folder folders clean="" links
  IFS=: read -ra folders <<<"$PATH"
  for folder in "${folders[@]}"; do
    if [ -e "$folder/nvcc" ]; then
      links=$(mktemp -d "$1/XXXXXX")
      find "$folder" -mindepth 1 -maxdepth 1 ! -name nvcc -exec ln -s -t "$links" {} +
      folder=$links
    fi
    clean+=${clean:+:}$folder
  done
  echo "$clean"
}

# What the benchmarks compare with on a CPU. It builds with nvcc in sight only where PyTorch has CUDA too.
install_peers() {
  local links=$state/without_nvcc
  rm -rf "$links"
  mkdir "$links"
  say "pytorch-fast-transformers may have to be built, which takes some minutes"
  PATH=$(path_without_nvcc "$links") pip_install pytorch-fast-transformers --constraint "$state/constraints.txt" \
    --no-deps --no-build-isolation pytorch-fast-transformers==0.4.0
}

# With PYTHONDONTWRITEBYTECODE no later command would write it, and each would compile what it imports: many seconds.
compile_imports='
import importlib, os, pkgutil, sys
import fairseq_cli, fairseq_cli.train, fairseq_fwp
for package in fairseq_cli, fairseq_fwp:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        try:
            importlib.import_module(module.name)
        except (ImportError, SystemExit):  # of an extra that is not installed
            pass
cached = (getattr(module, "__cached__", None) for module in list(sys.modules.values()))
folders = sorted({os.path.dirname(path) for path in cached if isinstance(path, str) and not os.path.exists(path)})
sys.exit(f"{folders[0]} cannot be written" if folders else 0)
'

write_bytecode() {
  local words
  say "compiling what the commands import"
  words=$(env -u PYTHONDONTWRITEBYTECODE "$python" -W ignore -c "$compile_imports" 2>&1) ||
    say "not all of it could be compiled, so commands start some seconds later: ${words##*$'\n'}"
}

take_lock='
import fcntl
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("setup: waiting for another set-up of this environment", flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)
'

main() {
  local extras=("$@") extra
  if is_done "$@"; then return; fi
  check_machine "$@"
  # Of two runs at once the second waits, and then finds the work done.
  exec 9>"$lock"
  { "$python" -c "$take_lock" 2>/dev/null || python3 -c "$take_lock"; } >&2
  if is_done "$@"; then return; fi

  make_venv
  for extra in "${known[@]}"; do ! is_stamped "$extra" || extras+=("$extra"); done
  rm -f "$state"/*.done # until the end nothing counts as done
  install ${extras[@]+"${extras[@]}"}
  write_bytecode
  for extra in base ${extras[@]+"${extras[@]}"}; do [ "$extra" = peers ] || key >"$state/$extra.done"; done
  # Last: where these cannot be built, all else is set up.
  case " ${extras[*]-} " in
    *" peers "*)
      install_peers
      key >"$state/peers.done" ;;
  esac
  say "done; to use it by hand: source '$env/bin/activate'"
}

main "$@"
