"""Registration with fairseq, only when fairseq is imported: operators and layers need only torch.

`--user-dir fairseq_fwp` imports this package after fairseq. If this package is imported first, patches and registration
run as soon as anything imports fairseq.
"""

import logging
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register_with_fairseq() -> None:
    """Patch fairseq and register models, tasks and criterions: now, or right after its import."""
    if "fairseq" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterFairseq())


def _register() -> None:
    from fairseq_fwp import patches

    patches.apply()
    # Only here: they import more of fairseq, which must be patched first.
    from fairseq_fwp import distillation, models, tasks  # noqa: F401
    from fairseq_fwp.checkpoints import former_states  # noqa: F401
    from fairseq_fwp.models.fast_weight_layer import model  # noqa: F401
    from fairseq_fwp.tasks import synthetic  # noqa: F401


class _AfterFairseq(MetaPathFinder):
    """A finder that finds fairseq through the other finders, and registers at the end of its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "fairseq":
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            from fairseq_fwp.patches.imports import rare_packages_deferred
            from fairseq_fwp.patches.messages import silence_known_warnings

            silence_known_warnings()
            level, handlers = logging.root.level, logging.root.handlers[:]
            with rare_packages_deferred():
                execute(module)
            # A model of fairseq sets the root logger to DEBUG when it is imported.
            logging.root.setLevel(level)
            logging.root.handlers[:] = handlers
            sys.meta_path.remove(self)
            _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
