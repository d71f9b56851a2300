"""Generation with fairseq: a prompt in a batch does not depend on the others, and a model stays a module."""

import functools
import math  # TorchScript compiles fairseq's own source here, with the names of this module
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Original = Callable[..., Any]


def separate_prompts(inference_step: Original) -> Any:
    """fairseq shares --max-len-a in a batch, and drops the symbol before a prompt only if all prompts have it."""

    def generate(
        self: Any, generator: Any, models: Any, sample: Any, prefix_tokens: Any = None, constraints: Any = None
    ) -> Any:
        tokens, lengths = (sample["net_input"][name] for name in ("src_tokens", "src_lengths"))
        limited = getattr(generator, "max_len_a", 0) or getattr(generator, "match_source_len", False)
        if limited and len(lengths.unique()) > 1:
            found: dict[int, Any] = {}
            for length in lengths.unique().tolist():
                rows = lengths.eq(length).nonzero().flatten()
                part = {"net_input": {"src_tokens": tokens[rows, :length], "src_lengths": lengths[rows]}}
                prefixes = None if prefix_tokens is None else prefix_tokens[rows]
                results = generate(self, generator, models, part, prefixes, constraints)
                found.update(zip(rows.tolist(), results, strict=True))
            return [found[row] for row in range(len(tokens))]
        dictionary = self.source_dictionary
        start = tokens[:, :1].eq(dictionary.bos() if getattr(self.args, "add_bos_token", False) else dictionary.eos())
        if prefix_tokens is None and start.any():
            prefix_tokens = torch.where(start, F.pad(tokens[:, 1:], (0, 1), value=dictionary.pad()), tokens)
        return inference_step(self, generator, models, sample, prefix_tokens, constraints)

    return generate


def forbid_in_each_sentence(prefix_tokens: Original) -> Any:
    """fairseq ignores --min-len, and the end of an empty prompt, up to the length of a batch's longest prompt."""

    def force(self: Any, step: int, lprobs: Any, scores: Any, tokens: Any, prefix: Any, beam_size: int) -> Any:
        lprobs, tokens, scores = prefix_tokens(self, step, lprobs, scores, tokens, prefix, beam_size)
        forbidden = [] if self.token_indices_to_suppress is None else self.token_indices_to_suppress.tolist()
        forbidden += [self.eos] * (step < self.min_len)
        free = prefix[:, step].eq(self.pad).repeat_interleave(beam_size)
        lprobs[:, forbidden] = lprobs[:, forbidden].masked_fill(free.unsqueeze(1), -math.inf)
        return lprobs, tokens, scores

    return force


def return_the_model(make_generation_fast: Original) -> Any:
    """After fairseq has prepared a model for inference, its `eval()` and `train(False)` return None."""

    def prepare(self: Any, **kwargs: Any) -> None:
        make_generation_fast(self, **kwargs)
        self.train = functools.partial(_stay_in_evaluation, self)

    return prepare


def _stay_in_evaluation(model: Any, mode: bool = True) -> Any:
    """Return the model, as `Module.train` does."""
    if mode:
        raise RuntimeError("a model that is prepared for inference cannot be trained: load it again")
    return model
