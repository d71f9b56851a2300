# Sourced first by every run.sh. Sets everything up (seconds once it is done), activates it, and gives `root`, `run` and `recipe`:
#   . "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots -- "$@"
# Extras, if any, then the script's own arguments: for --help nothing is set up.
# shellcheck shell=bash

run() { # prints the command, then runs it
  printf '+%s\n' "$(printf ' %q' "$@")" >&2
  "$@"
}

recipe() { # recipe KIND SETTINGS... -- ARGUMENTS...: become the driver, for the recipe in this folder
  exec "$python" "$root/recipes/driver" "$1" --recipe "$here" "${@:2}"
}

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[1]}")" && pwd -P)
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=python
extras=()
until [ "${1:---}" = -- ]; do extras+=("$1"); shift; done
for argument in "${@:2}"; do
  case $argument in
    -h | --help)
      python=python3
      # The driver prints its own help; of any other script the comment at its top is the help.
      if grep -q '^recipe ' "${BASH_SOURCE[1]}"; then return 0; fi
      sed -n '2,/^set/ { /^#/ s/^# \{0,1\}//p }' "${BASH_SOURCE[1]}"
      exit ;;
  esac
done
bash "$root/recipes/setup.sh" ${extras[@]+"${extras[@]}"}
if [ -n "${VIRTUAL_ENV:-}" ] || [ "${CONDA_DEFAULT_ENV:-base}" = base ]; then
  # shellcheck disable=SC1091
  . "${VIRTUAL_ENV:-$root/.venv}/bin/activate"
fi

# OpenMP's threads spin for a third of the usual time before they sleep: where anything else runs on the cores, those that
# spin take them from the threads they wait for. Set OMP_WAIT_POLICY or GOMP_SPINCOUNT for another way.
[ -n "${OMP_WAIT_POLICY:-}" ] || export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-100000}"
