"""Console commands that fairseq lacks."""

import logging
import os

# OpenMP reads it when torch is imported. Threads that wait for others by spinning take the cores from those they wait
# for, where anything else runs on these; those that sleep at once lose as much where nothing does.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")


def start_logging() -> None:
    """Show the log from $LOGLEVEL on, INFO by default, as fairseq's commands do."""
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "INFO").upper())
