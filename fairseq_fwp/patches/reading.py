"""Checkpoints that fairseq reads: none runs code, a damaged one is named, and what it was trained with is known."""

import contextlib
import errno
import os
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fairseq_fwp.options import plain

# What torch.load asks the environment.
TRUST, DISTRUST = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
Original = Callable[..., Any]


def load_weights_only(load: Original) -> Any:
    """torch 2.4 and 2.5 run code that is pickled in a file; a file cut short ends in an error of the zip reader."""

    def load_or_explain(path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            with _weights_only():
                return load(path, *args, **kwargs)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            # A zip archive that was cut short sends its reader to places before its beginning.
            if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EISDIR):
                raise
            # Whole, but with other objects than tensors.
            if untrusted := re.search(r"GLOBAL (\S+)|unrecognized|only build", str(error)):
                raise RuntimeError(
                    f"{path} holds pickled objects ({untrusted[1] or 'of unknown types'}), which could run any "
                    f"code: if you trust where it comes from, set {TRUST}=1"
                ) from error
            size = os.path.getsize(path) if os.path.exists(path) else 0
            raise RuntimeError(
                f"{path} ({size:,} bytes) is not a complete checkpoint: it was cut short or is another kind of "
                "file; copy it again, or use another checkpoint of the same folder"
            ) from error
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            if not _holds_model(path):
                raise RuntimeError(
                    f"{path} must be a checkpoint of fairseq, got another file: give one that fairseq-train wrote, or "
                    "convert it with fwp-convert"
                ) from error
            if isinstance(error, KeyError):
                raise RuntimeError(
                    f"{path} has a model, but not all that fairseq saves with it (no {error}): it was damaged, "
                    "or written by something else; copy it again, or use another checkpoint of the same folder"
                ) from error
            raise

    return load_or_explain


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    """torch 2.4 and 2.5 run what is pickled in a file unless they are told not to, as later ones are unless trusted."""
    if os.environ.get(TRUST, "").lower() in ("1", "y", "yes", "true"):  # torch's own words
        yield
        return
    before = os.environ.get(DISTRUST)
    os.environ[DISTRUST] = "1"
    try:
        yield
    finally:
        os.environ.pop(DISTRUST)
        if before is not None:
            os.environ[DISTRUST] = before


def _holds_model(path: str) -> bool:
    """Return whether a file seems to be a checkpoint of fairseq."""
    try:
        with _weights_only(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has just said that the file is trusted
            found = torch.load(path, map_location="cpu")
    except Exception:  # whatever a damaged pickle leads to
        return False
    return isinstance(found, dict) and "model" in found


class Saved(NamedTuple):
    """A checkpoint's path, the options of its model, and whether other options were given in evaluation."""

    path: str
    options: dict[str, Any]
    overridden: bool


def keep_saved_options(load: Original) -> Any:
    """fairseq gives a model only weights: with other options they load as well, and compute something else."""

    def load_with_options(path: str, arg_overrides: dict[str, Any] | None = None, *args: Any, **kw: Any) -> Any:
        state = load(path, arg_overrides, *args, **kw)
        trained = load(path, None, *args, **kw) if arg_overrides else state
        options = getattr(trained.get("cfg"), "model", None)
        if options is not None and isinstance(state.get("model"), OrderedDict):
            state["model"].saved = Saved(path, plain(options), bool(arg_overrides))
        return state

    return load_with_options


def show_what_a_model_refuses(load: Original) -> Any:
    """In training fairseq reports every error of loading as other architectures, and hides what the model says."""

    def load_or_explain(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        except Exception as error:
            # What already says what is wrong may have a cause of that kind, too.
            if isinstance(error.__context__, ValueError) and not isinstance(error, ValueError):
                raise error.__context__ from None
            raise

    return load_or_explain
