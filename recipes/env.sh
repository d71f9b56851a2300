# Sourced first by every run.sh. Sets everything up (seconds once it is done), activates it, and gives `root` and `run`:
#   . "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" plots
# Name an extra, or '': without an argument of its own, a sourced file sees those of the script.
# shellcheck shell=bash

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/recipes/setup.sh" ${1:+"$@"}
if [ -n "${VIRTUAL_ENV:-}" ] || [ "${CONDA_DEFAULT_ENV:-base}" = base ]; then
  # shellcheck disable=SC1091
  . "${VIRTUAL_ENV:-$root/.venv}/bin/activate"
fi

run() { # prints the command, then runs it
  printf '+%s\n' "$(printf ' %q' "$@")" >&2
  "$@"
}
