"""The table of patches and how they are applied: each replaces one attribute of one fairseq module, never a file."""

import ast
import functools
import inspect
import pkgutil
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """A function that patches fairseq, or the package that the symbol names.

    symbol: the attribute that the function replaces, or the subject of a function without parameters;
    since: the version that made it necessary.
    """

    symbol: str
    function: Callable[..., Any]
    since: str

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def reason(self) -> str:
        """The first paragraph of its docstring, in one line: what it does, and why."""
        # From the source: with `python -OO` the function itself has none.
        source = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(self.function))))
        definition = next(node for node in source if isinstance(node, ast.FunctionDef))
        return " ".join((ast.get_docstring(definition) or "").split("\n\n")[0].split())


PATCHES: list[Patch] = []


def patch(symbol: str, since: str = "fairseq 0.12") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to the table: it is called with the symbol's old value, then with the arguments of each call.

    Arguments have no annotations, as in fairseq. A function without parameters is run instead, and must change nothing
    when it is run again.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        PATCHES.append(Patch(symbol, function, since))
        return function

    return add


def apply() -> None:
    """Apply every patch, in the order of the table; a second call changes nothing."""
    for entry in PATCHES:
        if inspect.signature(entry.function).parameters:
            _replace(entry)
        else:
            entry.function()


def find(symbol: str) -> tuple[Any, str]:
    """Return the module or class that has the symbol, and its name there."""
    path, _, name = symbol.rpartition(".")
    return pkgutil.resolve_name(path), name


def _replace(entry: Patch) -> None:
    owner, name = find(entry.symbol)
    attribute = inspect.getattr_static(owner, name)
    kind = type(attribute) if isinstance(attribute, classmethod | staticmethod) else None
    original = attribute.__func__ if kind else attribute
    if entry.name in (patches := getattr(original, "patches", ())):
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return entry.function(original, *args, **kwargs)

    # TorchScript compiles the original's source, with the names of its module.
    replacement: Any = FunctionType(call.__code__, original.__globals__, closure=call.__closure__)
    functools.update_wrapper(replacement, original)
    replacement.patches = (*patches, entry.name)
    setattr(owner, name, kind(replacement) if kind else replacement)
