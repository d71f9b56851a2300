"""Checkpoints that fairseq reads: no code runs, errors name damaged files, and options and dictionaries are kept.

With another dictionary of the same size, each number would be another word.
"""

import contextlib
import errno
import logging
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import torch

from fairseq_fwp.patches.data import check_file
from fairseq_fwp.patches.hooks import KEY, fingerprints, other_words, remember_options, take_fingerprints
from fairseq_fwp.patches.options import as_given, setting, word
from fairseq_fwp.patches.patch import patch

TRUST = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # the environment variable of torch 2.6 and later
REMEDY = "copy it again, or use another checkpoint of the same folder"
TENSORS_ONLY = "must hold a tensor for every name, got other objects, such as sparse, nested or quantised tensors"
SLACK = 2**24  # bytes that a file may need besides its own size
BEGINNING = ("line_start", "add_bos_token")  # settings of tasks that say what a model reads first
logger = logging.getLogger(__name__)


@patch("torch.load", since="torch 2.4")
def load_weights_only(load, f, map_location=None, pickle_module=None, **kwargs):
    """Load weights only, unless the user trusts the file: torch 2.4 and 2.5 run code that is pickled in it."""
    if kwargs.get("weights_only") is None and pickle_module is None:
        kwargs["weights_only"] = not trusted()
    return load(f, map_location, pickle_module, **kwargs)


def trusted() -> bool:
    """Return whether the user trusts all files of torch.save."""
    return os.environ.get(TRUST, "").lower() in ("1", "y", "yes", "true")  # torch's words


class NotStoredError(ValueError):
    """A file of torch.save does not hold all numbers of its tensors."""


def check_stored(path: str | os.PathLike[str]) -> None:
    """Raise `NotStoredError` for a file that could take any memory: its tensors have far more places than numbers.

    Few numbers may stand for many places, and loading adds those that are missing. So tensors are loaded without their
    numbers. torch.save does not compress. Raises also what torch.load raises for a damaged file.
    """
    if trusted():
        return
    size = os.path.getsize(path)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > 8 * size + SLACK:
            raise NotStoredError(
                f"{path} must be a file of torch.save, got an archive of {unpacked:,} bytes in {size:,}"
            )
    try:
        loaded = torch.load(path, map_location="meta", weights_only=True)
    except NotImplementedError as error:  # of nested and quantised tensors
        raise NotStoredError(f"{path} {TENSORS_ONLY}") from error
    missing = 0
    for x in _tensors_in(loaded):
        if x.layout == torch.strided:  # the numbers of others are in the file
            needed = x.numel() * x.element_size()
            missing += max(0, needed - min(x.untyped_storage().nbytes(), size))
            if missing > SLACK:
                got = f"one of the shape {tuple(x.shape)}, which needs {needed:,} bytes, in a file of {size:,} bytes"
                raise NotStoredError(f"{path} must hold a number for every place of its tensors, got {got}")


def _tensors_in(saved: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in what torch.save has saved, each once: parts may be shared any number of times."""
    waiting, seen = [saved], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list | tuple | set):
            waiting += part


@patch("fairseq.checkpoint_utils.load_checkpoint_to_cpu")
def explain_other_files(load, path, *args, **kwargs):
    """Name a file that is cut short, or no checkpoint: fairseq shows an error of the zip or pickle reader."""
    check_file(path)
    try:
        if os.path.isfile(path):
            check_stored(path)
        state = load(path, *args, **kwargs)
        state["model"]  # fairseq asks for it later
        return state
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        # In a truncated zip archive, the reader seeks to places before the beginning.
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EISDIR):
            raise
        # Complete, but with objects that are not tensors.
        if untrusted := re.search(r"GLOBAL (\S+)|unrecognized|only build", str(error)):
            code = f"pickled objects ({untrusted[1] or 'of unknown types'}), which could run any code"
            raise RuntimeError(f"{path} holds {code}: if you trust its source, set {TRUST}=1") from error
        size = os.path.getsize(path) if os.path.exists(path) else 0
        got = f"a truncated or different file of {size:,} bytes: {REMEDY}"
        raise RuntimeError(f"{path} must be a complete checkpoint, got {got}") from error
    except NotStoredError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        checkpoint = None
        with contextlib.suppress(Exception):  # a damaged pickle may raise anything
            checkpoint = torch.load(path, map_location="cpu")
        if not isinstance(checkpoint, dict) or "model" not in checkpoint:
            other = "another file: give one that fairseq-train wrote, or convert it with fwp-convert"
            raise RuntimeError(f"{path} must be a checkpoint of fairseq, got {other}") from error
        if isinstance(error, KeyError):
            whole = "everything that fairseq saves with a model"
            raise RuntimeError(f"{path} must have {whole}, got a file without {error}: {REMEDY}") from error
        raise


@patch("fairseq.checkpoint_utils.load_checkpoint_to_cpu")
def keep_saved_options(load, path, arg_overrides=None, *args, **kwargs):
    """Give a model the options of its training: with other options, weights load too, but compute something else."""
    state = load(path, arg_overrides, *args, **kwargs)
    trained = load(path, None, *args, **kwargs) if arg_overrides else state
    remember_options(state, trained.get("cfg"), path, bool(arg_overrides))
    return state


@patch("fairseq.checkpoint_utils.load_model_ensemble_and_task")
def warn_of_another_beginning(load, filenames, *args, **kwargs):
    """Warn of a task that reads another word first than in training: fairseq takes the task of the command's flags."""
    models, cfg, task = load(filenames, *args, **kwargs)
    given = task.args if task.cfg is None else task.cfg
    for name in BEGINNING:
        trained, now = (word(setting(settings, name, None)) or None for settings in (cfg.task, given))
        if trained != now:
            theirs, ours = as_given(name, trained), as_given(name, now)
            remedy = f"give --task {setting(cfg.task, '_name', None)}{f' {theirs}' if trained else ''} for the same"
            logger.warning(f"{filenames[-1]} was trained with {theirs}, but reads the text with {ours}: {remedy}")
    return models, cfg, task


@patch("fairseq.checkpoint_utils.load_checkpoint")
def show_what_a_model_refuses(load, *args, **kwargs):
    """Show the model's own message: in training, fairseq reports every loading error as a different architecture."""
    try:
        return load(*args, **kwargs)
    except Exception as error:
        # Errors that already explain themselves may also have such a cause.
        if isinstance(error.__context__, ValueError) and not isinstance(error, ValueError):
            raise error.__context__ from None
        raise


@patch("fairseq.models.BaseFairseqModel.load_state_dict")
def refuse_other_numbers(load, self, state_dict, *args, **kwargs):
    """Refuse integers in place of floating-point numbers, and the reverse: PyTorch rounds them silently."""
    for name, own in self.state_dict().items():
        given = state_dict.get(name, own)
        if torch.is_tensor(given) and given.is_floating_point() != own.is_floating_point():
            raise ValueError(f"{name} of the checkpoint must be {own.dtype}, got {given.dtype}: {REMEDY}")
    return load(self, state_dict, *args, **kwargs)


@patch("fairseq.models.transformer.TransformerDecoderBase.upgrade_state_dict_named")
def add_no_projection(upgrade, self, state_dict, name):
    """Add shared output vectors only to models that have them: fairseq does so with an adaptive softmax too."""
    upgrade(self, state_dict, name)
    if self.output_projection is None:
        state_dict.pop(f"{name}.output_projection.weight", None)
    return state_dict


@patch("fairseq.trainer.Trainer.state_dict")
def save_fingerprints(state_dict, self):
    """Save which words a model is trained with: fairseq does not.

    They are saved in two places: evaluation reads one, resumed training the other.
    """
    state = state_dict(self)
    for place in ("task_state", "extra_state"):
        state[place] = {**state[place], KEY: fingerprints(self.task)}
    return state


@patch("fairseq.tasks.FairseqTask.load_state_dict")
def refuse_in_evaluation(load, self, state_dict):
    """Refuse to evaluate with another dictionary of the same size: fairseq notices only another size."""
    state = dict(state_dict)
    saved = take_fingerprints(state)
    load(self, state)  # it may hold the task's dictionaries
    if sentence := difference(self, saved):
        raise ValueError(sentence)


@patch("fairseq.trainer.Trainer.load_checkpoint")
def refuse_at_resume(load, self, filename, reset_optimizer=False, *args, **kwargs):
    """Refuse to resume with another dictionary of the same size: fairseq notices only another size.

    With a new optimizer another training begins, which may replace words: that is a warning, not an error.
    A dictionary of another size never fits the weights. fairseq reports this as another architecture.
    """
    from fairseq import checkpoint_utils

    loaded = False
    try:
        extra_state = load(self, filename, reset_optimizer, *args, **kwargs)
        loaded = True
        sentence = difference(self.task, take_fingerprints(extra_state or {}))
    except Exception:
        saved: dict[str, str] = {}
        with contextlib.suppress(Exception):  # a checkpoint that cannot be read, or has none
            saved = take_fingerprints(checkpoint_utils.load_checkpoint_to_cpu(filename)["extra_state"])
        sentence = difference(self.task, saved)
        if not sentence:
            raise
    if sentence and not reset_optimizer:
        raise ValueError(f"{filename} cannot be resumed: {sentence}, or give a new training another --save-dir")
    if not loaded:
        raise ValueError(f"{filename} cannot be loaded: {sentence}")
    if sentence:
        logger.warning("%s: %s", filename, sentence)
    return extra_state


def difference(task: Any, saved: dict[str, str]) -> str:
    """Return the error message for a model trained with other dictionaries; "" for the same or unknown ones."""
    if not (words := other_words(task, saved)):
        return ""
    data = getattr(task.args if task.cfg is None else task.cfg, "data", None)
    return (
        f"{data} must have {words}: pass the data folder of the training, or preprocess the text with the dictionary "
        "from there (fairseq-preprocess --srcdict, --tgtdict)"
    )
