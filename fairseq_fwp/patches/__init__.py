"""Patches that fairseq 0.12 needs today, for any of its models: each is a function with `@patch(symbol)`.

A patch is here if fairseq does not work without it on today's Python, numpy and torch. It is also here if data or
checkpoints would be lost or silently wrong, code would run from a file, or time would be lost around the model.

    python -m fairseq_fwp.patches        prints the table of docs/fairseq_on_current_python.md
"""

# They are applied in this order. messages is the last: it undoes what imports of the others do to the root logger.
from fairseq_fwp.patches import stack, samples, checkpoints, training, updates, data, words, messages  # isort: skip  # noqa: F401
from fairseq_fwp.patches.patch import PATCHES, apply

__all__ = ["PATCHES", "apply"]
