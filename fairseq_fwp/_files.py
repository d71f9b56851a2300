"""Files that fairseq writes and reads: none is left half-written, one that is damaged is named, and none is run.

Mends of fairseq as those in `_compat`, each conditional, and tested.
"""

import ast
import contextlib
import os
import shutil
import struct
import sys
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
    for mend in (
        save_whole,
        copy_whole,
        refuse_read_only_folder,
        make_folder_of_log,
        refuse_damaged_data,
        evaluate_data_alone,
    ):
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


def make_folder_of_log() -> None:
    """fairseq makes the folder of --save-dir, but not that of --log-file, without which it does not start."""
    from fairseq.distributed import utils as distributed_utils

    def mend(call_main: Callable[..., Any]) -> Callable[..., Any]:
        def call_with_log(cfg: Any, main: Any, **kwargs: Any) -> Any:
            log = getattr(cfg.common, "log_file", None)
            if log is not None:
                try:
                    os.makedirs(os.path.dirname(os.path.abspath(log)), exist_ok=True)
                    open(log, "a").close()
                except OSError as error:
                    raise OSError(
                        f"--log-file {log} cannot be written ({_reason(error)}): give a file in a folder that can"
                    ) from error
            return call_main(cfg, main, **kwargs)

        return call_with_log

    replace(distributed_utils, "call_main", mend)


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


def evaluate_data_alone() -> None:
    """fairseq runs strings of a checkpoint's configuration, those for lists and pairs of numbers, as Python."""
    import fairseq.models  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name == "fairseq.utils" or name.startswith(("fairseq.models.", "fairseq.optim.", "fairseq.criterions.")):
            module.eval = evaluate  # type: ignore[attr-defined]  # a module's own name comes before Python's


def evaluate(text: str) -> Any:
    """The value of numbers, strings, lists, tuples and dictionaries, their sums and multiples: "[(512, 3)] * 4".

    Raises ValueError for anything else.
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{text!r} is no number, string or list of them: change the configuration") from error


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple() | ast.List():
            return (tuple if isinstance(node, ast.Tuple) else list)(map(_value, node.elts))
        case ast.Dict() if None not in node.keys:
            return dict(zip(map(_value, filter(None, node.keys)), map(_value, node.values), strict=True))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.BinOp(op=ast.Add()):
            return _value(node.left) + _value(node.right)
        case ast.BinOp(op=ast.Mult()):
            return _value(node.left) * _value(node.right)
    raise ValueError(f"{ast.unparse(node)!r} is code, and is not run: change the configuration")


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
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).partition("\n")[0]
