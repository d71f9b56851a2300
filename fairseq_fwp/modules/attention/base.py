"""The base class of all attentions: their heads, the interface that a decoder uses, states and padding.

A state is an immutable tree of tensors (B, ...). Shapes: B batch, L tokens, H heads, D embed_dim, d = D / H, S columns,
of which the last L are queried.
"""

import math
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fairseq_fwp.ops.checks import check

# The state of an attention that is known only when the model is built: a tree of tensors, of its own `AttentionState`.
StateTree: TypeAlias = Any
AttentionState = TypeVar("AttentionState")


@runtime_checkable
class Reordered(Protocol):
    """A part of a state that selects rows itself, because some of its tensors have no rows."""

    def reorder(self, rows: Tensor) -> "Reordered": ...


@runtime_checkable
class Padded(Protocol):
    """A named tuple in a state; its first tensor is (B, ..., S, d), of tokens; padding (B, S): True at padding."""

    padding: Tensor | None

    def __getitem__(self, index: int) -> Tensor: ...

    def _replace(self, *, padding: Tensor) -> "Padded": ...


_registered: set[type[StateTree]] = set()


def register_states(*kinds: type[StateTree]) -> None:
    """Let checkpoints in mid-epoch, and models saved by torch.export.save, hold states of these types.

    Raises TypeError for types that are no named tuples.
    """
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
            raise TypeError(f"the states of an attention must be a tuple of named tuples, got {kind!r} among them")
        if kind in _registered:
            continue
        _registered.add(kind)
        torch.serialization.add_safe_globals([kind])
        package = kind.__module__.partition(".")[0]
        module = package if package == "fairseq_fwp" else kind.__module__  # ours keep their names if they move
        torch.utils._pytree._register_namedtuple(kind, serialized_type_name=f"{module}.{kind.__qualname__}")


class Heads(nn.Module):
    """What all attentions of models have: heads, and what a model asks of their class.

    named_as_rule: whether models select it as an update rule, because it has none;
    states: the types of its state, named tuples.
    """

    named_as_rule = False
    states: tuple[type[StateTree], ...] = ()
    num_heads: int

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if not isinstance(cls.states, tuple):
            raise TypeError(f"the states of an attention must be a tuple of named tuples, got {cls.states!r}")
        register_states(*cls.states)

    def split_heads(self, x: Tensor) -> Tensor:
        """Return x (B, L, D) as (B, H, L, d)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        """Return x (B, H, L, d) as (B, L, D)."""
        return x.transpose(1, 2).flatten(2)


class Marks(NamedTuple):
    """What a call of an attention says of its tokens, and what layers share: see `Attention.forward`."""

    padding: Tensor | None = None
    first: Tensor | None = None
    shared: dict[str, Tensor] | None = None


NO_MARKS = Marks()


class Attention(Heads, Generic[AttentionState]):
    """Causal attention, as a decoder's layer calls it; AttentionState: the type, or the types, of its state.

    constant_state: whether the size of the state has a bound, so that a stream may have any length;
    ages: whether the state goes on changing however long the text is, as a sum does and a window of tokens does not;
    packs_documents: whether `first` can be given, so that a segment may hold several documents;
    reads_input: whether a pre-norm layer gives it its input as it is, and adds the output to the normalised one.
    """

    constant_state = True
    ages = True
    packs_documents = False
    reads_input = False

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        key_padding_mask: Tensor | None = None,
        first: Tensor | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """Return y (B, L, D) for x (B, L, D), and the state after the last token.

        state: before the first token, None = nothing was read;
        key_padding_mask (B, L): True at padding, which no token sees or counts;
        first (B, L): True at tokens that begin a document, before which nothing was read, None = nowhere;
        shared: what the layers of a model give to later ones in one pass, by name, None = there is no other layer. Only
            time_mix writes into it, the first layer's values.
        Raises ValueError for `first` without `packs_documents`.
        """
        check(
            first is None or self.packs_documents,
            f"`first` must be None for {type(self).__name__}, which reads one document at a time, got a mask",
        )
        return self.read(x, state, Marks(key_padding_mask, first, shared))

    def read(self, x: Tensor, state: AttentionState | None, marks: Marks) -> tuple[Tensor, AttentionState]:
        """Return what `forward` does; each attention has its own."""
        raise NotImplementedError

    def state_size(self, length: int, carried: bool = False) -> int:
        """Return the numbers in the state of a sequence of `length` tokens, or of such segments if it is carried."""
        raise NotImplementedError


AnyAttention: TypeAlias = Attention[StateTree]


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Raise ValueError unless num_heads divides embed_dim and heads are not empty."""
    divides = num_heads >= 1 and embed_dim >= 1 and embed_dim % num_heads == 0
    check(divides, f"`embed_dim` must be divisible by `num_heads`, got {embed_dim} and {num_heads}")


def head_size(embed_dim: int, num_heads: int, size: int | None, name: str = "key_dim") -> int:
    """Return the size of a head's keys, or of its values: `size`, None = D / H. Raises ValueError for invalid sizes."""
    if size is None:
        check_heads(embed_dim, num_heads)
        return embed_dim // num_heads
    check(num_heads >= 1, f"`num_heads` must be at least 1, got {num_heads}")
    check(size >= 1, f"`{name}` must be at least 1, got {size}")
    return size


def scores_are_cheaper(pairs: int, visits: int, sizes: tuple[int, int]) -> bool:
    """Return whether a number for each pair of tokens costs less than visits to memories of `sizes`, (Dk, Dv)."""
    return pairs * sum(sizes) < visits * math.prod(sizes)


def detach(state: AttentionState) -> AttentionState:
    """Return the state detached from the graph (truncated back-propagation through time)."""
    return tree_map(lambda part: part.detach() if isinstance(part, Tensor) else part, state)


def reorder(state: AttentionState, rows: Tensor) -> AttentionState:
    """Return the rows (B',) of the batch, as beam search selects them. A part with the method `reorder` does it."""

    def select(part: object) -> object:
        if isinstance(part, Tensor):
            return part.index_select(0, rows)
        return part.reorder(rows) if isinstance(part, Reordered) else part

    return tree_map(select, state, is_leaf=lambda part: isinstance(part, Reordered))


def reset(state: AttentionState, rows: Tensor) -> AttentionState:
    """Return the state, empty in the rows (B,) that are True. All tokens of a part with `padding` become padding."""

    def empty(part: object) -> object:
        if isinstance(part, Padded):
            padded = rows.unsqueeze(1).expand(-1, part[0].shape[-2])
            return part._replace(padding=padded if part.padding is None else part.padding | padded)
        if isinstance(part, Tensor):
            return part.masked_fill(rows.view(-1, *[1] * (part.dim() - 1)), 0)
        return part

    return tree_map(empty, state, is_leaf=lambda part: isinstance(part, Padded))


def join_padding(past: Tensor | None, past_length: int, new: Tensor | None, length: int) -> Tensor | None:
    """Return the masks (B, past_length) and (B, length) joined; None means no padding."""
    mask = new if past is None else past
    if mask is None:
        return None
    parts = ((past, past_length), (new, length))
    return torch.cat([mask.new_zeros(mask.shape[0], size) if part is None else part for part, size in parts], dim=1)


def visible_keys(
    length: int, total: int, padding: Tensor | None, device: torch.device, window: int | None = None
) -> Tensor:
    """Return a mask, True where one of the last `length` of `total` tokens sees a key: (L, S), or (B, 1, L, S).

    padding (B, S): True at padding; window: a token sees itself and window - 1 tokens before it, None = all.
    """
    distance = torch.arange(total - length, total, device=device)[:, None] - torch.arange(total, device=device)
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if padding is None:
        return visible
    # A padded query sees itself: a row without visible keys would be NaN.
    return ((visible & ~padding[:, None, :]) | (distance == 0)).unsqueeze(1)


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


def _take(x: Tensor, columns: Tensor) -> Tensor:
    """Return the columns (B, n) of x (B, ..., m, d)."""
    index = columns.reshape(columns.shape[0], *[1] * (x.dim() - 3), -1, 1)
    return x.gather(-2, index.expand(*x.shape[:-2], -1, x.shape[-1]))
