"""Files and folders that are complete under their names, or not there."""

import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Only this machine knows which of its processes hold a lock.
PREFIX = f".fwp-unfinished-{platform.node()}-"


@contextlib.contextmanager
def unfinished(whole: Path) -> Iterator[Path]:
    """Give a path in a new folder next to `whole`: what is written there replaces it, unless there is an error.

    The new folder is removed in any case; those of killed processes, whose locks ended with them, are removed too.
    """
    for leftover in whole.parent.glob(f"{PREFIX}*"):
        with _locked(leftover, wait=False) as alone:
            if alone:
                shutil.rmtree(leftover, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        folder: Path | None = None
        while folder is None or not folder.exists():  # another process took it for a leftover before it was locked
            new = tempfile.TemporaryDirectory(prefix=PREFIX, dir=whole.parent, ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(new))
            stack.enter_context(_locked(folder, wait=True))
        work = folder / whole.name
        yield work
        os.replace(work, whole)


@contextlib.contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[bool]:
    """Hold the lock of a folder; yield False if another process has it, and without locks, as in some systems."""
    with contextlib.ExitStack() as stack:
        try:
            import fcntl  # Windows has no such module

            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            alone = True
        except (ImportError, OSError):
            alone = False
        yield alone
