"""A checkpoint and the flags of the training that loads it belong together: of what differs, the flags are named.

A mend of fairseq as those in `_compat`, tested. Models of ours know which flags their weights go with (`misfits`).
"""

import re
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from fairseq_fwp._compat import replace


def apply() -> None:
    """Runs the mend; a second call changes nothing."""
    name_misfits()


def name_misfits() -> None:
    """fairseq shows the names of all weights that a model has not, or has otherwise, and asks about architectures."""
    from fairseq import checkpoint_utils

    def mend(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_or_explain(cfg: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return load(cfg, trainer, *args, **kwargs)
            except Exception as error:
                failed = re.match("Cannot load model parameters from checkpoint (.*); please", str(error))
                sentence = failed and _difference(failed[1], trainer)
                if not sentence:
                    raise
                raise ValueError(sentence) from None

        return load_or_explain

    replace(checkpoint_utils, "load_checkpoint", mend)


def _difference(path: str, trainer: Any) -> str:
    """In what a checkpoint and a training differ; "" where that is not known."""
    from fairseq import checkpoint_utils

    model, state = type(trainer.get_model()), checkpoint_utils.load_checkpoint_to_cpu(path)
    if not hasattr(model, "misfits") or not state.get("cfg"):
        return ""
    saved, given = plain(state["cfg"].model), plain(trainer.cfg.model)
    found = model.misfits(state["model"], saved, given, trainer.task.target_dictionary)
    if not found:
        return ""
    theirs, ours = (", ".join(_flag(name, pair[side]) for name, pair in found.items()) for side in (0, 1))
    return (
        f"{path} goes with {theirs}, and this training has {ours}: give the flags of its model, or another checkpoint"
    )


def plain(settings: Any) -> dict[str, Any]:
    """The settings of a model by name, enumerations as their words."""
    if isinstance(settings, Namespace):
        return dict(vars(settings))
    return dict(OmegaConf.to_container(settings, resolve=True, enum_to_str=True))


def _flag(name: str, value: Any) -> str:
    """As it would be given."""
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return f"no {flag}"
    return flag if value is True else f"{flag} {value}"
