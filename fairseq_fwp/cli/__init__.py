"""Console commands that fairseq lacks."""

import argparse
import logging
import os

# OpenMP reads this when torch is imported. On a busy machine, threads that spin while they wait take cores from the
# threads they wait for. On an idle one, threads that sleep at once are as slow. So threads spin for a short time.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")


def start_logging() -> None:
    """Show the log from $LOGLEVEL on, INFO by default, as fairseq's commands do."""
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "INFO").upper())


def make_parser(documentation: str | None) -> argparse.ArgumentParser:
    """Return a command's parser. The documentation begins with its name and a summary: "fwp-info: versions, ..."."""
    summary, _, text = (documentation or "").partition("\n")
    name, description = summary.split(": ", 1)
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(name, None, description, text, formatter_class=form, allow_abbrev=False)
