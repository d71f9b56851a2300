"""Samples and prompts: none is dropped, read twice or left out of a score, and none depends on others of its batch."""

import functools
import hashlib
import math
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from fairseq_fwp.patches.hooks import Divided
from fairseq_fwp.patches.patch import patch

if TYPE_CHECKING:
    from fairseq.data import Dictionary

# The key of a batch whose scores are averaged.
EVERY_TOKEN = "every_token"
DIVISION = "division"  # the key of an epoch's batches in a checkpoint


@patch("fairseq.data.data_utils.batch_by_size")
def keep_last_batch(batch_by_size, indices, *args, **kwargs):
    """Keep a last batch that --required-batch-size-multiple (by default 8) does not divide: fairseq drops it."""
    indices = np.fromiter(indices, dtype=np.int64) if not isinstance(indices, np.ndarray) else indices
    batches = batch_by_size(indices, *args, **kwargs) if len(indices) else []
    # Fixed shapes divide the data in another way; otherwise batches are consecutive and only the last can be missing.
    count = sum(len(batch) for batch in batches)
    if count < len(indices) and kwargs.get("fixed_shapes") is None:
        batches = [*batches, indices[count:]]
    return batches


@patch("fairseq.tasks.FairseqTask.get_batch_iterator")
def keep_batches_of_first_epoch(get_batch_iterator, self, dataset, *args, seed=1, epoch=1, **kwargs):
    """Make the batches of the first epoch in a resumed run: fairseq makes others, and reads some samples twice."""
    rebuild = any(map(kwargs.get, ("disable_iterator_cache", "update_epoch_batch_itr")))
    reusable = self.can_reuse_epoch_itr(dataset) and not rebuild and not getattr(self.cfg, "rebuild_batches", False)
    if epoch == 1 or not reusable or dataset in self.dataset_to_epoch_iter:
        return get_batch_iterator(self, dataset, *args, seed=seed, epoch=epoch, **kwargs)
    # The sum of both seeds makes the batches; the iterator's own seed and epoch shuffle them.
    iterator = get_batch_iterator(self, dataset, *args, seed=seed + 1 - epoch, epoch=epoch, **kwargs)
    iterator.seed = seed
    return iterator


@patch("fairseq.data.iterators.EpochBatchIterator.state_dict")
def save_division(state_dict, self):
    """Save how an epoch is divided into batches, in which a resumed run finds its place: fairseq saves a count only."""
    state = state_dict(self)
    return {**state, DIVISION: division(self)} if state["iterations_in_epoch"] else state


@patch("fairseq.data.iterators.EpochBatchIterator.load_state_dict")
def refuse_other_division(load_state_dict, self, state):
    """Refuse to resume in mid-epoch with other batches or processes: fairseq leaves samples out, and repeats others."""
    saved = state.get(DIVISION) if state.get("iterations_in_epoch", 0) else None  # none in fairseq's own checkpoints
    if saved and saved != (now := division(self)):
        raise RuntimeError(
            f"a checkpoint in mid-epoch must be continued with its {saved}, got {now}: give the same text, --seed, "
            "batch size and number of processes, or --reset-dataloader to begin with the first epoch again"
        )
    load_state_dict(self, state)


def division(iterator: Any) -> str:
    """Return what an iterator calls its division, or the numbers of batches and processes, and a digest of batches."""
    from fairseq.data.iterators import GroupedEpochBatchIterator

    if isinstance(iterator, Divided):
        return iterator.division
    batches = iterator.frozen_batches
    if isinstance(iterator, GroupedEpochBatchIterator):  # of several data sets
        batches = [*chain.from_iterable(batches)]
    digest = hashlib.sha256(f"{iterator.seed} {iterator.grouped_shuffling}".encode())
    for batch in batches:
        digest.update(np.asarray(batch, dtype=np.int64).tobytes() + b" ")
    return f"batches ({len(batches):,}, processes {iterator.num_shards}, digest {digest.hexdigest()[:12]})"


@patch("fairseq.data.iterators.EpochBatchIterator.__init__")
def copy_data_in_each_epoch(init, self, *args, **kwargs):
    """Start new workers in each epoch: old ones keep their copy of the data set, with the first epoch's samples."""
    init(self, *args, **kwargs)
    self.persistent_workers = False


@patch("fairseq.data.lm_context_window_dataset.LMContextWindowDataset.collater")
def read_context_from_the_text(collater, self, samples):
    """Take the text before a block for its context: fairseq takes what the worker or the shard read last."""
    if not samples:  # a shard without a last batch
        return {}
    context, block = np.empty(0, dtype=np.int64), int(samples[0]["id"])
    while block > 0 and len(context) < self.context_window:
        block -= 1
        context = np.concatenate([self.dataset[block]["source"].numpy(), context])
    self.prev_tokens = context[-self.context_window :]
    return collater(self, samples)


@patch("fairseq.tasks.language_modeling.LanguageModelingTask.load_dataset")
def refuse_empty_blocks(load_dataset, self, *args, **kwargs):
    """Refuse blocks of text without a token, as a large --context-window leaves: fairseq has an error of numpy."""
    length = self.args.tokens_per_sample
    if length < 1 and self.args.sample_break_mode != "eos":  # there, blocks are lines
        remedy = "give a larger --tokens-per-sample, from which fairseq-eval-lm subtracts the --context-window"
        raise ValueError(f"blocks of text must have at least one token, got {length}: {remedy}")
    return load_dataset(self, *args, **kwargs)


@patch("fairseq.tasks.language_modeling.LanguageModelingTask.eval_lm_dataloader")
def refuse_unscored_tokens(eval_lm_dataloader, self, dataset, *args, max_positions=None, context_window=0, **kwargs):
    """Refuse blocks longer than the model takes: fairseq-eval-lm leaves them out of the perplexity."""
    from fairseq.data.iterators import CountingIterator

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
    kwargs |= {"max_positions": max_positions, "context_window": context_window}
    iterator = eval_lm_dataloader(self, dataset, *args, **kwargs)
    return CountingIterator(({**sample, EVERY_TOKEN: True} for sample in iterator), start=0, total=len(iterator))


@patch("fairseq.sequence_scorer.SequenceScorer.generate")
def refuse_impossible_tokens(generate, self, models, sample, **kwargs):
    """Refuse tokens of probability zero, which fairseq-eval-lm leaves out, and no tokens, whose mean is NaN."""
    if "target" not in sample:
        remedy = "leave out --score-reference"
        raise ValueError(f"a text to score must have a reference, and fairseq-interactive has no reference: {remedy}")
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


@patch("fairseq.tasks.language_modeling.LanguageModelingTask.inference_step")
def separate_prompts(inference_step, self, generator, models, sample, prefix_tokens=None, constraints=None):
    """Continue each prompt by itself: fairseq shares --max-len-a in a batch, and drops all first symbols or none.

    It also drops what follows a </s> in a prompt, which is refused here.
    """
    tokens, lengths = (sample["net_input"][name] for name in ("src_tokens", "src_lengths"))
    limited = getattr(generator, "max_len_a", 0) or getattr(generator, "match_source_len", False)
    if limited and len(lengths.unique()) > 1:
        results_by_row: dict[int, Any] = {}
        for length in lengths.unique().tolist():
            rows = lengths.eq(length).nonzero().flatten()
            part = {"net_input": {"src_tokens": tokens[rows, :length], "src_lengths": lengths[rows]}}
            prefixes = None if prefix_tokens is None else prefix_tokens[rows]
            results = separate_prompts(inference_step, self, generator, models, part, prefixes, constraints)
            results_by_row.update(zip(rows.tolist(), results, strict=True))
        return [results_by_row[row] for row in range(len(tokens))]
    dictionary = self.source_dictionary
    start = tokens[:, :1].eq(dictionary.bos() if getattr(self.args, "add_bos_token", False) else dictionary.eos())
    if prefix_tokens is None and start.any():
        prefix_tokens = torch.where(start, F.pad(tokens[:, 1:], (0, 1), value=dictionary.pad()), tokens)
    if hasattr(generator, "beam_size"):  # else it scores
        _refuse_lost_words(dictionary, tokens if prefix_tokens is None else prefix_tokens)
    return inference_step(self, generator, models, sample, prefix_tokens, constraints)


def _refuse_lost_words(dictionary: "Dictionary", prompts: torch.Tensor) -> None:
    """Raise ValueError for words after </s>, where a continuation ends; prompts (B, L), padded at their ends."""
    eos, after = dictionary.eos(), prompts[:, 1:]
    lost = prompts.eq(eos).cumsum(1)[:, :-1].bool() & after.ne(eos) & after.ne(dictionary.pad())
    if lost.any():
        words = (dictionary[token] for token in prompts[lost.any(1)][0].tolist() if token != dictionary.pad())
        got = f"got {' '.join(words)[:80]!r}: give each line as a prompt of its own"
        raise ValueError(f"a prompt must not have words after {dictionary[eos]}, where a continuation ends, {got}")


@patch("fairseq.sequence_generator.SequenceGenerator._prefix_tokens")
def forbid_in_each_sentence(prefix_tokens, self, step, lprobs, scores, tokens, prefix, beam_size):
    """Forbid tokens after each prompt: fairseq ignores --min-len up to the longest prompt of a batch."""
    lprobs, tokens, scores = prefix_tokens(self, step, lprobs, scores, tokens, prefix, beam_size)
    forbidden = [] if self.token_indices_to_suppress is None else self.token_indices_to_suppress.tolist()
    forbidden += [self.eos] * (step < self.min_len)
    free = prefix[:, step].eq(self.pad).repeat_interleave(beam_size)
    lprobs[:, forbidden] = lprobs[:, forbidden].masked_fill(free.unsqueeze(1), -math.inf)
    return lprobs, tokens, scores


@patch("fairseq.search.DiverseBeamSearch.step")
def count_diverse_beams_by_batch(step, self, number, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
    """Count sentences by rows of the batch: diverse beam search mixes them up with their numbers in the data set."""
    if number == 0:
        self.sentences = original_batch_idxs
    # The row in the whole batch of each sentence that is still in the batch.
    rows = (original_batch_idxs.unsqueeze(1) == self.sentences).int().argmax(1)
    return step(self, number, lprobs, scores, prev_output_tokens, rows)


@patch("fairseq.models.BaseFairseqModel.make_generation_fast_")
def return_the_model(make_generation_fast, self, **kwargs):
    """Let `eval()` and `train(False)` return the model: they return None after fairseq prepared it for inference."""
    make_generation_fast(self, **kwargs)
    self.train = functools.partial(_stay_in_evaluation, self)


def _stay_in_evaluation(model: Any, mode: bool = True) -> Any:
    """Return the model, as `Module.train` does."""
    if mode:
        raise RuntimeError("a model that is prepared for inference cannot be trained: load it again")
    return model
