"""Samples that fairseq drops, reads twice or leaves out of a score."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

# The key of a batch whose scores are averaged.
EVERY_TOKEN = "every_token"
Original = Callable[..., Any]


def keep_last_batch(batch_by_size: Original) -> Any:
    """fairseq drops a last batch whose size is not a multiple of --required-batch-size-multiple (8 by default)."""

    def batch_all(indices: Any, *args: Any, **kwargs: Any) -> Any:
        indices = np.fromiter(indices, dtype=np.int64) if not isinstance(indices, np.ndarray) else indices
        batches = batch_by_size(indices, *args, **kwargs) if len(indices) else []
        # Fixed shapes divide the data in another way; otherwise batches are consecutive and only the last can be
        # missing.
        kept = sum(len(batch) for batch in batches)
        if kept < len(indices) and kwargs.get("fixed_shapes") is None:
            batches = [*batches, indices[kept:]]
        return batches

    return batch_all


def keep_batches_of_first_epoch(get_batch_iterator: Original) -> Any:
    """fairseq makes its batches once, but a resumed run makes others: it reads some samples twice and others never.

    Batches are made in the first epoch and shuffled in every epoch; a resumed run makes them with another seed.
    """

    def get_with_seed_of_first_epoch(
        self: Any, dataset: Any, *args: Any, seed: int = 1, epoch: int = 1, **kwargs: Any
    ) -> Any:
        rebuild = any(map(kwargs.get, ("disable_iterator_cache", "update_epoch_batch_itr")))
        kept = self.can_reuse_epoch_itr(dataset) and not rebuild and not getattr(self.cfg, "rebuild_batches", False)
        if epoch == 1 or not kept or dataset in self.dataset_to_epoch_iter:
            return get_batch_iterator(self, dataset, *args, seed=seed, epoch=epoch, **kwargs)
        # The sum of both seeds makes the batches; the iterator's own seed and epoch shuffle them.
        iterator = get_batch_iterator(self, dataset, *args, seed=seed + 1 - epoch, epoch=epoch, **kwargs)
        iterator.seed = seed
        return iterator

    return get_with_seed_of_first_epoch


def copy_data_in_each_epoch(init: Original) -> Any:
    """Workers that outlive an epoch keep their copy of the data set, which makes the first epoch's samples again."""

    def without_persistent_workers(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.persistent_workers = False

    return without_persistent_workers


def read_context_from_the_text(collater: Original) -> Any:
    """fairseq takes what a worker or a shard read last for the context of a block, instead of the text before it."""

    def collate(self: Any, samples: list[dict[str, Any]]) -> Any:
        if not samples:  # a shard without a last batch
            return {}
        context, block = np.empty(0, dtype=np.int64), int(samples[0]["id"])
        while block > 0 and len(context) < self.context_window:
            block -= 1
            context = np.concatenate([self.dataset[block]["source"].numpy(), context])
        self.prev_tokens = context[-self.context_window :]
        return collater(self, samples)

    return collate


def refuse_unscored_tokens(eval_lm_dataloader: Original) -> Any:
    """fairseq-eval-lm leaves out blocks longer than the model takes and reports the perplexity of the rest."""
    from fairseq.data.iterators import CountingIterator

    def check_lengths(
        self: Any, dataset: Any, *args: Any, max_positions: Any = None, context_window: int = 0, **kwargs: Any
    ) -> Any:
        longest = int(max(dataset.sizes, default=0)) + context_window
        limit = min(max_positions) if isinstance(max_positions, Iterable) else max_positions
        if longest == 0:
            raise ValueError("the data set must have at least one token to evaluate, got none")
        if limit is not None and longest > limit:
            raise ValueError(
                f"blocks of text must have at most {limit} tokens, the length in training, got one of {longest}: "
                f"pass --tokens-per-sample {limit} with --sample-break-mode none, or allow more with "
                f"--model-overrides \"{{'max_target_positions': {longest}}}\""
            )
        found = eval_lm_dataloader(
            self, dataset, *args, max_positions=max_positions, context_window=context_window, **kwargs
        )
        return CountingIterator(({**sample, EVERY_TOKEN: True} for sample in found), start=0, total=len(found))

    return check_lengths


def refuse_impossible_tokens(generate: Original) -> Any:
    """fairseq-eval-lm leaves out tokens of probability zero; the mean of no token is NaN."""

    def score(self: Any, models: Any, sample: Any, **kwargs: Any) -> Any:
        scored = generate(self, models, sample, **kwargs)
        for (hypothesis,) in scored:
            log_probs, tokens = hypothesis["positional_scores"], hypothesis["tokens"]
            if not sample.get(EVERY_TOKEN):
                if not len(tokens):
                    raise ValueError("a text to score must have at least one token, got none")
            elif not log_probs.isfinite().all():
                first = int(log_probs.isfinite().logical_not().nonzero()[0])
                raise ValueError(
                    f"probabilities must be above 0, got {log_probs[first].exp():g} for the token "
                    f"{models[0].decoder.dictionary[int(tokens[first])]!r}: the model diverged or overflows, or its "
                    "vocabulary lacks this word (in a converted model perhaps the end of a line)"
                )
        return scored

    return score
