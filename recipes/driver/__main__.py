"""The program that runs every recipe: `python recipes/driver KIND --recipe FOLDER SETTINGS... -- ARGUMENTS...`.

A recipe's run.sh gives the kind and its settings, then its user's arguments, which override them.
"""

import os
import signal
import sys
from pathlib import Path

# This checkout's package, even if that of another folder is installed.
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

import conversion
import fast_weight_layers
import grids
import language_models
import recurrent
import translation
from commands import RecipeError

# Kind of recipe: the function that puts it together.
KINDS = {
    "language-model": language_models.compose,
    "fast-weight-layer": fast_weight_layers.compose,
    "conversion": conversion.compose,
    "recurrent": recurrent.compose,
    "translation": translation.compose,
    "retrieval": grids.retrieval,
    "problems": grids.problems,
}


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] not in KINDS:
        sys.exit(f"usage: python recipes/driver {{{','.join(KINDS)}}} --recipe FOLDER ...")
    if sys.stdout is None:
        sys.exit("run.sh: standard output must be open, got a closed one: give a file, or /dev/null.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        KINDS[arguments[0]](arguments[1:]).run()
        sys.stdout.flush()  # here, where an error has its sentence
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries once more at its end
        sys.exit("run.sh: nobody reads the output; run the same command to resume.")
    except (RecipeError, ValueError, OSError) as error:
        sys.exit(f"run.sh: {error}")
    except KeyboardInterrupt:
        print("\nrun.sh: stopped; run the same command to resume.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
