"""Packages that fairseq imports for one of its tasks and one of its criterions, and which nothing else needs."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# Of audio_classification and sentence_prediction, which call functions of them: with pandas, more than a second.
RARE = ("sklearn", "sklearn.metrics", "scipy.stats")


@contextlib.contextmanager
def rare_packages_deferred() -> Iterator[None]:
    """Within this context, an import of a package of RARE gives functions that import it when they are called."""
    names = [name for name in RARE if name not in sys.modules and find_spec(name.partition(".")[0])]
    sys.modules.update({name: _Deferred(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            if isinstance(sys.modules.get(name), _Deferred):
                del sys.modules[name]


class _Deferred(ModuleType):
    """A module whose attributes are functions or modules of the same kind."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Others may look for the package, too.
        self.__spec__ = None if "." in name else find_spec(name)
        self.__spec__ = self.__spec__ or ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        whole = f"{self.__name__}.{name}"
        return _Deferred(whole) if whole in RARE else _call_later(self.__name__, name)


def _call_later(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call
