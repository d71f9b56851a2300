"""Print the table of patches in Markdown, or what runs at a name of fairseq.

python -m fairseq_fwp.patches [SYMBOL]        such as fairseq.checkpoint_utils.load_checkpoint
"""

import inspect
import sys
from typing import Any

from fairseq_fwp.outputs import one_sentence
from fairseq_fwp.patches import PATCHES
from fairseq_fwp.patches.patch import find


def table() -> str:
    """Return a row for each patch."""
    rows = (f"| `{entry.symbol}` | {entry.reason} | {entry.since.removesuffix('fairseq 0.12')} |" for entry in PATCHES)
    return "\n".join(
        ("| symbol | what the patch does, and why | since (if not fairseq 0.12) |", "| --- | --- | --- |", *rows)
    )


def what_runs(symbol: str) -> str:
    """Return the functions that a call of a name goes through, a line each, fairseq's own last.

    Raises ValueError for a name that no module has.
    """
    try:
        owner, name = place = _defined_at(symbol)
        own = inspect.unwrap(getattr(owner, name))
    except (AttributeError, ImportError, StopIteration, ValueError) as error:
        example = "fairseq.checkpoint_utils.load_checkpoint"
        raise ValueError(f"the symbol must be a name of fairseq, such as {example}, got {symbol}") from error
    named = [entry for entry in PATCHES if entry.symbol.rpartition(".")[2] == name]
    patches = [entry for entry in named if _defined_at(entry.symbol) == place]
    lines = [f"{_source(entry.function)} {entry.name}: {entry.reason}" for entry in reversed(patches)]
    return "\n".join([*lines, f"{_source(own)} {name}"])


def _defined_at(symbol: str) -> tuple[Any, str]:
    """Return the module, or the class among the bases, that defines a symbol, and its name there."""
    owner, name = find(symbol)
    return next(base for base in owner.__mro__ if name in vars(base)) if inspect.isclass(owner) else owner, name


def _source(function: Any) -> str:
    return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"


if __name__ == "__main__":
    with one_sentence("fairseq_fwp.patches"):
        print(what_runs(sys.argv[1]) if len(sys.argv) > 1 else table())
