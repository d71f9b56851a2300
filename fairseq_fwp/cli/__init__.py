"""Console commands that fairseq lacks."""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq_fwp.outputs import one_sentence, system_reason, unfinished

# OpenMP reads this when torch is imported. On a busy machine, threads that spin while they wait take cores from the
# threads they wait for. On an idle one, threads that sleep at once are as slow. So threads spin for a short time.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")

try:
    os.getcwd()
except FileNotFoundError:  # before torch is imported: there its library MKL ends the process
    sys.exit(f"{Path(sys.argv[0]).name}: the current folder must exist, got one that was removed: go to another one")


def start_logging() -> None:
    """Show the log from $LOGLEVEL on, INFO by default, as fairseq's commands do."""
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "INFO").upper())


class Parser(argparse.ArgumentParser):
    """The parser of a command. argparse itself exits with 0 where its help cannot be written."""

    def print_help(self, file: Any = None) -> None:
        with one_sentence(self.prog):
            print(self.format_help(), end="", file=file)


def make_parser(documentation: str | None) -> argparse.ArgumentParser:
    """Return a command's parser. The documentation begins with its name and a summary: "fwp-info: versions, ...".

    With `python -OO` there is none, and the name is that of the program.
    """
    summary, _, text = (documentation or "").partition("\n")
    name, _, description = summary.partition(": ")
    form = argparse.RawDescriptionHelpFormatter
    return Parser(name or None, None, description, text, formatter_class=form, allow_abbrev=False)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file elsewhere first, so that a file of this name is always complete.

    A link stays one. Raises OSError that names the file.
    """
    is_device = path.exists() and not path.is_file()  # such as /dev/stdout
    try:
        with contextlib.nullcontext(path) if is_device else unfinished(path.resolve()) as file:
            write(file)
    except (OSError, RuntimeError) as error:  # torch's writer raises the second
        raise OSError(f"{path} could not be written ({system_reason(error)})") from error
