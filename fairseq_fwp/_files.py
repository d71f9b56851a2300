"""Files that fairseq writes and reads: none is left half-written, and one that is damaged is named.

Mends of fairseq as those in `_compat`, each conditional, and tested.
"""

import contextlib
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from fairseq_fwp._compat import replace

# As often as fairseq tries to save, and so long (seconds) in between: file systems of a network fail for moments.
ATTEMPTS, PAUSE = 3, 2.5
PREPROCESS = "run fairseq-preprocess again, or copy its folder again"


def apply() -> None:
    """Runs every mend; a second call changes nothing."""
    for mend in (save_whole, copy_whole, refuse_read_only_folder, refuse_damaged_data):
        mend()


def save_whole() -> None:
    """fairseq tries a failed save again behind the half of the first, leaves it on the full disk and names nothing."""
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    def mend(save: Callable[..., None]) -> Callable[..., None]:
        def save_or_explain(obj: Any, filename: str, async_write: bool = False) -> None:
            if async_write or PathManager.path_requires_pathmanager(filename):
                save(obj, filename, async_write)
            else:
                _save(obj, filename)

        return save_or_explain

    replace(checkpoint_utils, "torch_persistent_save", mend)


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


def copy_whole() -> None:
    """fairseq copies a checkpoint over checkpoint_last.pt, from which a run that is killed then cannot go on."""
    from fairseq.file_io import PathManager

    def mend(copy: Callable[..., Any]) -> Any:
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

    replace(PathManager, "copy", mend)


def refuse_read_only_folder() -> None:
    """fairseq tries to write into --save-dir before it trains; where it cannot, it names a file that nobody knows."""
    from fairseq import checkpoint_utils

    def mend(verify: Callable[[str], None]) -> Callable[[str], None]:
        def verify_or_explain(save_dir: str) -> None:
            try:
                verify(save_dir)
            except OSError as error:
                raise OSError(
                    f"--save-dir {save_dir} cannot be written ({_reason(error)}): give a folder that can"
                ) from error

        return verify_or_explain

    replace(checkpoint_utils, "verify_checkpoint_directory", mend)


def refuse_damaged_data() -> None:
    """A text that was cut short, or preprocessed with another dictionary, is named before anything learns from it."""
    from fairseq.data import indexed_dataset

    def mend(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_or_explain(path: str, *args: Any, dictionary: Any = None, **kwargs: Any) -> Any:
            text, index = indexed_dataset.data_file_path(path), indexed_dataset.index_file_path(path)
            if os.path.exists(index) and os.path.exists(text) and not os.path.getsize(text):
                raise ValueError(f"the text {text} is empty: preprocess a file with at least one token")
            try:
                dataset = make(path, *args, dictionary=dictionary, **kwargs)
            except (AssertionError, KeyError, ValueError, struct.error) as error:
                raise ValueError(f"{index} is no whole index of a text: {PREPROCESS}") from error
            if isinstance(dataset, indexed_dataset.MMapIndexedDataset):
                _check_text(text, dataset, dictionary)
            return dataset

        return make_or_explain

    def mend_end(close: Callable[[Any], None]) -> Callable[[Any], None]:
        def close_what_is_open(self: Any) -> None:
            with contextlib.suppress(AttributeError):
                close(self)

        return close_what_is_open

    replace(indexed_dataset, "make_dataset", mend)
    for kind in (indexed_dataset.MMapIndexedDataset, indexed_dataset.MMapIndexedDataset.Index):
        replace(kind, "__del__", mend_end)


def _check_text(path: str, dataset: Any, dictionary: Any) -> None:
    dtype = np.dtype(dataset._index.dtype)
    found, expected = os.path.getsize(path), int(dataset.sizes.sum(dtype=np.int64)) * dtype.itemsize
    if found != expected:
        raise ValueError(
            f"{path} has {found:,} bytes where its index counts {expected:,}: it was cut short, or is the text of "
            f"another index; {PREPROCESS}"
        )
    largest = int(np.frombuffer(dataset._bin_buffer, dtype).max(initial=0))
    if dictionary is not None and largest >= len(dictionary):
        raise ValueError(
            f"{path} has a word of number {largest:,}, and the dictionary beside it {len(dictionary):,} words: it is "
            f"not the one that the text was preprocessed with; {PREPROCESS}"
        )


@contextlib.contextmanager
def _in_place_of(path: str) -> Iterator[str]:
    """A path beside it: what is written there takes its place in one step, or goes away."""
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
        f"{path} could not be saved ({_reason(error)}): what was saved before it is whole; make room or give another "
        "--save-dir, and the same command goes on from there"
    )


def _reason(error: BaseException) -> str:
    """What the system said: torch's writer, on top of it, says no more than a position."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
        cause = cause.__cause__ or cause.__context__
    return cause.strerror if isinstance(cause, OSError) else str(error).splitlines()[0]
