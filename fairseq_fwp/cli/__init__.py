"""Console commands that fairseq lacks."""

import logging
import os

# OpenMP reads it when torch is imported. Threads that wait for others by spinning take the cores from those they wait
# for, where anything else runs on these.
if "GOMP_SPINCOUNT" not in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def start_logging() -> None:
    """Show the log from $LOGLEVEL on, INFO by default, as fairseq's commands do."""
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "INFO").upper())
