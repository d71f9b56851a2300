"""Move padding to the left, so that distances between tokens do not count padding.

Shapes: B batch, S columns, of which the last L are queried.
"""

import torch
from torch import Tensor


class Alignment:
    """An alignment of rows: tokens move to the right in their order, padding to the left.

    padding (B, S): True at padding; length: L. Afterwards `padding` holds the moved mask.
    """

    def __init__(self, padding: Tensor, length: int) -> None:
        past = padding.shape[1] - length
        self._columns = (~padding).to(torch.uint8).argsort(dim=1, stable=True)
        # Queries of columns from the past, and outputs at padding, are never read.
        self._queries = (self._columns[:, past:] - past).clamp(min=0)
        self._outputs = (self._columns.argsort(dim=1)[:, past:] - past).clamp(min=0)
        self.padding = padding.gather(1, self._columns)

    def align(self, x: Tensor) -> Tensor:
        """Return x (B, ..., S, d) with its columns moved."""
        return _take(x, self._columns)

    def align_queries(self, x: Tensor) -> Tensor:
        """Return x (B, ..., L, d) moved to the last L columns."""
        return _take(x, self._queries)

    def restore(self, x: Tensor) -> Tensor:
        """Return x (B, ..., L, d) moved from the last L columns back to the places of the queries."""
        return _take(x, self._outputs)


def join_padding(past: Tensor | None, past_length: int, new: Tensor | None, length: int) -> Tensor | None:
    """Return the masks (B, past_length) and (B, length) joined; None means no padding."""
    if past is None and new is None:
        return None
    known = past if past is not None else new
    assert known is not None
    return torch.cat(
        [
            part if part is not None else known.new_zeros(known.shape[0], size)
            for part, size in ((past, past_length), (new, length))
        ],
        dim=1,
    )


def reset_padding(padding: Tensor | None, rows: Tensor, length: int) -> Tensor:
    """Return the mask (B, length), None = no padding, with all tokens padded in the rows (B,) that are True."""
    padded = rows.unsqueeze(1).expand(-1, length)
    return padded if padding is None else padding | padded


def _take(x: Tensor, columns: Tensor) -> Tensor:
    """Return the columns (B, n) of x (B, ..., m, d)."""
    index = columns.reshape(columns.shape[0], *[1] * (x.dim() - 3), -1, 1)
    return x.gather(-2, index.expand(*x.shape[:-2], -1, x.shape[-1]))
