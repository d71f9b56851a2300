"""A checkpoint and the flags of what loads it belong together: of what differs, the flags are named.

Mends of fairseq as those in `_compat`, each tested. Models of ours know which flags their weights go with (`misfits`),
and which change what these compute (`changes`).
"""

import contextlib
import inspect
import logging
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import OmegaConf

from fairseq_fwp._compat import replace

logger = logging.getLogger(__name__)


def apply() -> None:
    """Runs every mend; a second call changes nothing."""
    for mend in (compare_in_training, compare_in_evaluation):
        mend()


def compare_in_training() -> None:
    """fairseq shows the names of all weights that a model has not, or has otherwise, and asks about architectures.

    Where all weights are there, it trains them on in whatever function the flags make of them: that is said here, and
    not refused, for it may be what a fine-tuning is for.
    """
    from fairseq import checkpoint_utils

    def mend(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_and_compare(cfg: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
            read: dict[str, Any] = {}
            try:
                with _noting_settings(read):
                    loaded = load(cfg, trainer, *args, **kwargs)
            except Exception as error:
                failed = re.match("Cannot load model parameters from checkpoint (.*); please", str(error))
                if failed:
                    _refuse_misfits(failed[1], trainer)
                raise
            for path, saved in read.items():
                _warn_of_changes(path, saved, trainer)
            return loaded

        return load_and_compare

    replace(checkpoint_utils, "load_checkpoint", mend)


@contextlib.contextmanager
def _noting_settings(read: dict[str, Any]) -> Iterator[None]:
    """Of every checkpoint that is read meanwhile: the settings of its model. (Of several processes, one reads.)"""
    from fairseq import checkpoint_utils

    load = checkpoint_utils.load_checkpoint_to_cpu

    def load_and_note(path: str, *args: Any, **kwargs: Any) -> Any:
        state = load(path, *args, **kwargs)
        read[path] = state["cfg"].model if state.get("cfg") else None
        return state

    checkpoint_utils.load_checkpoint_to_cpu = load_and_note
    try:
        yield
    finally:
        checkpoint_utils.load_checkpoint_to_cpu = load


def _refuse_misfits(path: str, trainer: Any) -> None:
    """Raises ValueError where options of the training do not let its model take the weights of the checkpoint."""
    found = _misfits(path, type(trainer.get_model()), trainer.cfg.model, trainer.task)
    if found:
        theirs, ours = _flags(found)
        raise ValueError(
            f"{path} goes with {theirs}, and this training has {ours}: give the flags of its model, or another "
            "checkpoint"
        ) from None


def _warn_of_changes(path: str, saved: Any, trainer: Any) -> None:
    """Names the options by which the weights, trained with other settings, now compute something else."""
    model = type(trainer.get_model())
    if saved is None or not hasattr(model, "changes"):
        return
    found = model.changes(plain(saved), plain(trainer.cfg.model))
    if found:
        theirs, ours = _flags(found)
        logger.warning(
            "%s was trained with %s, and goes on here with %s: its weights compute something else so",
            *(path, theirs, ours),
        )


def compare_in_evaluation() -> None:
    """fairseq shows the same names where --model-overrides asks for a model that has not the weights."""
    from fairseq import checkpoint_utils

    def mend(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_or_explain(*args: Any, **kwargs: Any) -> Any:
            try:
                return load(*args, **kwargs)
            except RuntimeError as error:
                if "loading state_dict" not in str(error):
                    raise
                call = inspect.signature(load).bind(*args, **kwargs)
                call.apply_defaults()
                _refuse_overrides(**call.arguments)
                raise

        return load_or_explain

    replace(checkpoint_utils, "load_model_ensemble_and_task", mend)


def _refuse_overrides(
    filenames: list[str], arg_overrides: dict[str, Any] | None, task: Any, state: Any, **_: Any
) -> None:
    """Raises ValueError for the first checkpoint whose weights do not fit the settings that were changed."""
    from fairseq import checkpoint_utils, tasks
    from fairseq.models import ARCH_MODEL_REGISTRY

    for path in filter(os.path.isfile, filenames):
        cfg = (state or checkpoint_utils.load_checkpoint_to_cpu(path, arg_overrides))["cfg"]
        model = ARCH_MODEL_REGISTRY.get(getattr(cfg.model, "arch", None) or cfg.model._name)
        found = _misfits(path, model, cfg.model, task or tasks.setup_task(cfg.task, from_checkpoint=True))
        if found:
            others = ", ".join(
                f"{name} to {ours!r} (trained with {theirs!r})" for name, (theirs, ours) in found.items()
            )
            raise ValueError(f"--model-overrides sets {others}, which the weights of {path} do not fit") from None


def _misfits(path: str, model: Any, given: Any, task: Any) -> dict[str, tuple[Any, Any]]:
    """The options, as given, that the weights of a checkpoint do not fit; {} where that is not known."""
    from fairseq import checkpoint_utils

    if not hasattr(model, "misfits"):
        return {}
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    if not state.get("cfg"):
        return {}
    found: dict[str, tuple[Any, Any]] = model.misfits(state["model"], plain(state["cfg"].model), plain(given), task)
    return found


def plain(settings: Any) -> dict[str, Any]:
    """The settings of a model by name, enumerations as their words."""
    if isinstance(settings, Namespace):
        return dict(vars(settings))
    return dict(OmegaConf.to_container(settings, resolve=True, enum_to_str=True))


def _flags(found: dict[str, tuple[Any, Any]]) -> tuple[str, str]:
    """The options of both sides, as they would be given."""
    theirs, ours = (", ".join(_flag(name, pair[side]) for name, pair in found.items()) for side in (0, 1))
    return theirs, ours


def _flag(name: str, value: Any) -> str:
    """As it would be given."""
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return f"no {flag}"
    return flag if value is True else f"{flag} {value}"
