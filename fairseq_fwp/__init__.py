"""Fast weight programmers for fairseq: `fairseq-train --user-dir fairseq_fwp --arch delta_lm_wt103 ...`.

`ops` and `modules` need only torch. With fairseq, in either order of import, the package patches what today's torch,
numpy and Python break in fairseq (`patches`). It also registers the models, tasks and criterions.
"""

import importlib
from typing import Any

from fairseq_fwp.registration import register_with_fairseq

register_with_fairseq()

__version__ = "0.1.0"
__all__ = ["distillation", "load", "models", "modules", "ops", "synthetic", "tasks"]


def __getattr__(name: str) -> Any:
    """Import a part of the package when it is first asked for."""
    if name == "load":
        return importlib.import_module(f"{__name__}.pretrained").load
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
