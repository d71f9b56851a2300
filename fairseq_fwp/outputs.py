"""Files and folders that are complete under their names, or not there, and commands that end by one sentence."""

import contextlib
import errno
import os
import platform
import shutil
import sys
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
            lock(folder, stack, wait)
            alone = True
        except (ImportError, OSError):
            alone = False
        yield alone


def lock(folder: Path, until: contextlib.ExitStack, wait: bool = False) -> None:
    """Lock a folder until the stack is closed or this process ends.

    Raises BlockingIOError if another process has it, ImportError or OSError where there are no locks.
    """
    import fcntl  # Windows has no such module

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    until.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@contextlib.contextmanager
def one_sentence(command: str) -> Iterator[None]:
    """End a command by one sentence where it raises ValueError or OSError, or cannot write to standard output."""
    failure, unwritten = "", None if sys.stdout else "it is closed"
    try:
        yield
    except (ValueError, OSError) as error:
        failure = " ".join(str(error).split())
        if isinstance(error, OSError) and error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC):
            failure, unwritten = "", error.strerror
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError as error:
        unwritten = error.strerror
    if sys.stdout and unwritten:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries once more, and complains
    if failure or unwritten:
        sys.exit(f"{command}: {failure or f'standard output cannot be written: {unwritten}'}")


def system_reason(error: BaseException) -> str:
    """Return the operating system's reason for an error: the message of torch's writer only gives a position."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).partition("\n")[0]
