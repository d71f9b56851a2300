"""Trained language models as modules: tokens and a state in, log-probabilities and the next state out."""

import math
from pathlib import Path

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqLanguageModel
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fairseq_fwp.models.decoder import DecoderState
from fairseq_fwp.modules.decoding import Beginning
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.words import Pieces


class PretrainedModel(nn.Module):
    """A language model as a function of tokens and a state.

    model: with fairseq's interface; dictionary: fairseq's, between words and numbers;
    line_start, add_bos_token: settings of its task, the first if it was trained on separate lines;
    beginning: what it therefore reads before a text;
    codes: of subword-nmt, by which words that the dictionary lacks are cut into its pieces; None: they are `<unk>`.
    """

    def __init__(
        self,
        model: FairseqLanguageModel,
        line_start: str | None = None,
        add_bos_token: bool | None = False,
        codes: Path | None = None,
    ) -> None:
        super().__init__()
        self.line_start = line_start
        self.model = model
        self.dictionary: Dictionary = model.decoder.dictionary
        self.pieces = Pieces(self.dictionary, codes)
        self.beginning = Beginning.of(self.dictionary, line_start, add_bos_token)
        self.eval()
        with torch.no_grad():
            one, two = (_shapes(self(torch.full((1, n), self.dictionary.unk()))[1]) for n in (1, 2))
        # Dimensions that depend on the number of tokens, and the first, which is the row, may differ.
        self._sizes = {
            path: [size if size == two[path][n] else None for n, size in enumerate(shape)][1:]
            for path, shape in one.items()
        }

    def forward(self, tokens: Tensor, state: DecoderState | None = None) -> tuple[Tensor, DecoderState]:
        """Return log-probabilities (B, L, V) of what follows each of the tokens (B, L), and the state after them.

        They are not logits, because a softmax with clusters of words has none. state: after earlier tokens; None: there
        are none, and the first token should be that of `beginning`, as in training.
        """
        if state is not None:
            self._check_state(tokens, state)
        features, extra = self.model(tokens, state=state)
        return self.model.get_normalized_probs((features, extra), log_probs=True), extra["state"]

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        length: int,
        *,
        top: int = 1,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return what the model writes after the tokens (B, L): at most `length` tokens, until each row ends its line.

        tokens: a row continues after its last one that is not padding;
        top: each token is drawn from so many of the most probable; 1: the most probable. Rows that have ended are
        filled with padding.

        Raises ValueError for tokens, a length, a top or a temperature that it cannot write with.
        """
        shape, words = tuple(tokens.shape), len(self.dictionary)
        check(len(shape) == 2 and tokens.numel(), f"tokens must be (B, L) with at least one token each, got {shape}")
        low, high = tokens.min().item(), tokens.max().item()
        numbers = f"tokens must be numbers from 0 to {words - 1}, the dictionary's, got {low if low < 0 else high}"
        check(low >= 0 and high < words, numbers)
        check(length >= 0, f"length must be at least 0, got {length}")
        check(1 <= top <= words, f"top must be from 1 to {words}, the dictionary's size, got {top}")
        check(0 < temperature < math.inf, f"temperature must be finite and above 0, got {temperature}")
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        words_before = tokens.ne(pad).long().cumsum(1)  # of each row, itself included
        empty = not words_before[:, -1].all()
        check(not empty, "each row of tokens must have one that is not padding, got a row of padding only")
        log_probs, state = self(tokens)
        log_probs = log_probs.take_along_dim(words_before.argmax(1).view(-1, 1, 1), 1)[:, 0]  # of the last given token
        written = tokens[:, :0]
        ended = tokens.new_zeros(len(tokens), dtype=torch.bool)
        for _ in range(length):
            scores = log_probs / temperature
            scores[:, pad] = -torch.inf
            best = scores.topk(top)
            drawn = torch.multinomial(best.values.softmax(1), 1, generator=generator)
            token = best.indices.gather(1, drawn).masked_fill(ended.unsqueeze(1), pad)
            written = torch.cat([written, token], 1)
            ended |= token[:, 0] == eos
            if ended.all():
                break
            log_probs, state = self.model.decoder.score_by_graph(token, state) or self(token, state)
            log_probs = log_probs[:, -1]
        return written

    def encode(self, text: str) -> Tensor:
        """Return the tokens (1, L) of words separated by blanks, after what the model reads before a text.

        That is the end of a line, with --add-bos-token <s>, and with --line-start word nothing. Words that the
        dictionary lacks are cut by the codes next to it. What it still lacks is `<unk>`, and told of once.
        """
        words = self.dictionary.encode_line(self.pieces(text), append_eos=False, add_if_not_exist=False).long()
        return torch.cat([words.new_tensor(self.beginning.tokens), words]).unsqueeze(0)

    def decode(self, tokens: Tensor) -> str:
        """Return the words of tokens (L,), without the ends of lines and padding; pieces are put together again."""
        joined = "@@ " if self.pieces.codes else None
        text: str = self.dictionary.string(tokens[tokens != self.dictionary.pad()], joined)
        return text

    def _check_state(self, tokens: Tensor, state: object) -> None:
        if not isinstance(state, DecoderState):
            raise ValueError(f"state must be None or what this model returned, got {type(state).__name__}")
        rows = len(state.positions)
        check(rows == len(tokens), f"state must have as many rows as the tokens, {len(tokens)}, got {rows}")
        shapes = _shapes(state)
        for path, sizes in self._sizes.items():
            shape = shapes.get(path, ())
            fits = len(shape) == len(sizes) + 1 and all(
                size in (None, actual) for size, actual in zip(sizes, shape[1:], strict=True)
            )
            expected = ", ".join("n" if size is None else str(size) for size in sizes)
            wrong = f"{path.strip('.')} must be (B, {expected}), got {tuple(shape)}"
            check(fits, f"state must be None or what this model returned: {wrong}")


def _shapes(state: DecoderState) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a state, by their places."""
    leaves = pytree.tree_flatten_with_path(state)[0]
    return {pytree.keystr(path): tuple(x.shape) for path, x in leaves if x is not None}
