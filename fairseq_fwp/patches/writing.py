"""Files that fairseq writes: they are complete or do not exist."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Number of tries, as in fairseq, and seconds between them: network file systems fail for moments.
ATTEMPTS, PAUSE = 3, 2.5
Original = Callable[..., Any]


def save_whole(save: Original) -> Any:
    """fairseq appends the retry of a failed save to the incomplete file, and leaves both on the full disk."""
    from fairseq.file_io import PathManager

    def save_or_explain(obj: Any, filename: str, async_write: bool = False) -> None:
        if async_write or PathManager.path_requires_pathmanager(filename):
            save(obj, filename, async_write)
        else:
            _save(obj, filename)

    return save_or_explain


def _save(obj: Any, path: str) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with _in_place_of(path) as unfinished, open(unfinished, "wb") as file:
                torch.save(obj, file)
                file.flush()
                os.fsync(file.fileno())
            return
        except (OSError, RuntimeError) as error:
            if attempt == ATTEMPTS:
                raise _not_saved(path, error) from error
            time.sleep(PAUSE)


def copy_whole(copy: Original) -> Any:
    """fairseq copies a checkpoint over checkpoint_last.pt: a run that is killed meanwhile cannot be resumed."""
    from fairseq.file_io import PathManager

    def copy_or_explain(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if any(map(PathManager.path_requires_pathmanager, (src_path, dst_path))):
            return copy(src_path, dst_path, overwrite)
        try:
            with _in_place_of(dst_path) as unfinished:
                shutil.copyfile(src_path, unfinished)
        except OSError as error:
            raise _not_saved(dst_path, error) from error
        return True

    return staticmethod(copy_or_explain)


def make_folder_of_log(call_main: Original) -> Any:
    """fairseq opens --log-file before it makes the folder of --save-dir, in which the file may lie."""

    def call_with_log(cfg: Any, main: Any, **kwargs: Any) -> Any:
        log = getattr(cfg.common, "log_file", None)
        if log:
            os.makedirs(os.path.dirname(os.path.abspath(log)), exist_ok=True)
        return call_main(cfg, main, **kwargs)

    return call_with_log


@contextlib.contextmanager
def _in_place_of(path: str) -> Iterator[str]:
    """Yield a temporary path next to `path`: the file written there replaces it in one step, or is removed."""
    unfinished = f"{path}.tmp"
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(unfinished)
        raise


def _not_saved(path: str, error: BaseException) -> OSError:
    return OSError(
        f"{path} could not be saved ({_reason(error)}); earlier checkpoints are complete. Free some space or give "
        "another --save-dir, and run the same command to resume"
    )


def _reason(error: BaseException) -> str:
    """Return the message of the operating system: the message of torch's writer only gives a position."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).partition("\n")[0]
