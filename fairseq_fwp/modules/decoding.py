"""What a task, a scorer, a teacher or a command may ask of a language model that reads a text segment by segment.

They see a model only through these types, and `streaming` is the one place that looks what a model has. Shapes: B rows
of a batch, L tokens, D size of a feature.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar, cast

from torch import Tensor, nn

from fairseq_fwp.modules.adaptive_softmax import AdaptiveSoftmax

Sample: TypeAlias = dict[str, Any]  # a batch of fairseq's, by the names that its tasks and criteria read

# Values of --line-start: a model of separate lines reads </s> before each, or begins with the line's first word.
STARTS = END, WORD = "end", "word"


class Segment(TypedDict):
    """What a batch of streams says of its rows, next to fairseq's entries, to who carries their state.

    segment: the number of blocks that the streams have read; last: whether these are the last ones; streams: their
    numbers; fresh: whether the block begins a stream or a document, and so is read without a state.
    """

    segment: int
    last: bool
    streams: list[int]  # lists, not tensors: they are read on the CPU, wherever fairseq moves the batch
    fresh: list[bool]


def segment_of(sample: Sample) -> Segment | None:
    """Return what a batch says of its rows; None: there is no stream in it."""
    return cast(Segment, sample) if "segment" in sample else None


class State(Protocol):
    """What a decoder has read, in every row. Nobody else looks inside; in its place, None means that nothing was read.

    Methods return a new state. `torch.load` must know its type: see `torch.serialization.add_safe_globals`.
    """

    def detach(self) -> "State":
        """Return the state without its graph, so that gradients stay within a segment."""

    def reorder(self, rows: Tensor) -> "State":
        """Return the rows of these numbers (B',) int64."""

    def reset(self, rows: Tensor) -> "State":
        """Return the state, empty in the rows (B,) bool that are True."""


class Extra(TypedDict):
    """What a decoder returns next to its features."""

    state: State
    attn: list[None]
    scored: bool


class StreamingDecoder(Protocol):
    """A decoder that continues from a state, as every decoder of this package does.

    carries_state: whether the size of its state has a bound, so that a stream of any length can carry it;
    packs_documents: whether `first` can be given, so that a segment holds several documents;
    ages: whether its state goes on changing however long the text is, so that an old one may be unknown to the model;
    has_positions: whether absolute positions, which grow with the text, are added to its inputs;
    adaptive_softmax: the probabilities of words, from features.
    """

    carries_state: bool
    ages: bool
    has_positions: bool
    packs_documents: bool
    adaptive_softmax: AdaptiveSoftmax

    def __call__(self, tokens: Tensor, /, *, state: State | None, first: Tensor | None = None) -> tuple[Tensor, Extra]:
        """Return `extract_features` of all tokens, after `output_layer`. Criteria call it through the model."""

    def extract_features(
        self, tokens: Tensor, state: State | None = None, last: int | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return features (B, L, D) of tokens (B, L), read after those of `state`, and the new state.

        last: only the features (B, last, D) of the last tokens;
        first (B, L): True at tokens before which nothing has been read, because they begin a document; None = nowhere.
        """

    def output_layer(self, features: Tensor) -> Tensor:
        """Return the features as `adaptive_softmax` reads them."""

    def state_size(self, length: int, carried: bool = False) -> int:
        """Return the numbers in the state of a sequence of `length` tokens, or of such segments if it is carried."""


class Dictionary(Protocol):
    """fairseq's dictionary: a word for each number."""

    def __getitem__(self, number: int, /) -> str: ...

    def bos(self) -> int: ...

    def eos(self) -> int: ...


class Beginning(NamedTuple):
    """How a model begins to read a text, as it did in training.

    first: the token that it reads before the words; None: it reads the first word, which then is not predicted;
    of_lines: each line of the text is read by itself; else the text is one stream, whose parts also begin anywhere.
    """

    first: int | None
    of_lines: bool

    @classmethod
    def of(cls, dictionary: Dictionary, line_start: str | None, add_bos_token: bool | None) -> "Beginning":
        """Return the beginning of a model with these settings of its task, None if the task lacks them."""
        first = dictionary.bos() if add_bos_token else dictionary.eos()
        return cls(None if line_start == WORD else first, line_start is not None)

    @property
    def tokens(self) -> list[int]:
        """The tokens before the words: one or none."""
        return [] if self.first is None else [self.first]


class Decoder(Protocol):
    """A decoder of any of fairseq's language models."""

    dictionary: Dictionary

    def __call__(self, tokens: Tensor, /) -> tuple[Tensor, object]:
        """Return features or scores of all words (B, L, ...), for `get_normalized_probs`."""


Self = TypeVar("Self")


class Model(Protocol):
    """Any of fairseq's language models."""

    decoder: Decoder

    def eval(self: Self) -> Self: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def max_positions(self) -> int:
        """Return the number of tokens of the longest sample in training."""

    def get_normalized_probs(
        self, net_output: tuple[Tensor, object], log_probs: bool, sample: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Return (log-)probabilities (B, L, V) of words, from what the decoder returned."""


def streaming(model: Model) -> StreamingDecoder | None:
    """Return the decoder of a model if it continues from a state; None: it is one of fairseq's own, which does not."""
    decoder = model.decoder
    return cast(StreamingDecoder, decoder) if hasattr(decoder, "carries_state") else None
