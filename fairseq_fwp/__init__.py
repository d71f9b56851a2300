"""Fast weight programmers for fairseq: `fairseq-train --user-dir fairseq_fwp --arch delta_lm_wt103 ...`.

`ops` and `modules` need only torch. With fairseq, in either order of import, the package patches what today's torch,
numpy and Python break in fairseq (`patches`). It also registers the models, tasks and criterions.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from fairseq_fwp.registration import register_with_fairseq

if TYPE_CHECKING:
    from fairseq_fwp.checkpoints.pretrained import PretrainedModel

register_with_fairseq()

__version__ = "0.1.0"
__all__ = ["distillation", "load", "models", "modules", "ops", "tasks"]


def load(
    path: str | os.PathLike[str],
    *,
    dictionary: str | os.PathLike[str] | None = None,
    source: str = "fwp-lm",
    **options: object,
) -> "PretrainedModel":
    """Load a trained language model, in evaluation mode, float32, on the CPU.

    path: a checkpoint of fairseq-train, or a folder of `fwp-convert --to safetensors`;
    dictionary: dict.txt of the training, or its folder; None: dict.txt next to the weights;
    source: what wrote them, as for fwp-convert: such as gpt2 or llama, with a folder of transformers;
    options: those of fwp-convert for the source, such as end="[SEP]" and line_start="word".

    Raises ValueError that names a missing or damaged file, the dictionary of another training, or a model or an option
    that is not known.
    """
    if source == "fwp-lm" and not options:
        from fairseq_fwp.checkpoints import pretrained

        return pretrained.load(path, dictionary)
    from fairseq_fwp.checkpoints import convert

    return convert.load(path, dictionary, source, options)


def __getattr__(name: str) -> Any:
    """Import a part of the package when it is first asked for."""
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
