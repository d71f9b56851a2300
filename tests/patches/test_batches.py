"""No sample is dropped, and a block has the context that the text has."""

from argparse import Namespace

import numpy as np
import torch
from fairseq.data import MonolingualDataset, TokenBlockDataset, data_utils
from fairseq.tasks.language_modeling import LanguageModelingTask
from models.conftest import make_dictionary
from pairwise import looped


@looped("multiple", [1, 2, 8])
@looped("count", [0, 1, 7, 16, 60])
def test_every_index_is_in_one_batch(multiple, count):
    sizes = np.random.randint(1, 9, count)
    for arguments in ({"max_sentences": 8}, {"max_tokens": 50}):
        batches = data_utils.batch_by_size(
            np.arange(count), lambda index: sizes[index], required_batch_size_multiple=multiple, **arguments
        )
        assert [index for batch in batches for index in batch] == list(range(count))


@looped("context", [1, 7])
@looped("mode", ["none", "complete"])
@looped("batch_size, shards, workers", [(1, 1, 0), (5, 1, 0), (1, 1, 2), (2, 2, 1), (1, 3, 0)])
def test_a_context_is_that_of_the_text(context, mode, batch_size, shards, workers):
    """Every block once, after the last tokens before it, however blocks are divided over batches and processes."""
    lines = [torch.cat([torch.randint(4, 50, (length,)), torch.tensor([2])]) for length in (2, 4, 0, 0, 3, 1, 4, 3)]
    dictionary, sizes = make_dictionary(50), [len(line) for line in lines]
    blocks = TokenBlockDataset(lines, sizes, 5, 1, 2, mode, include_targets=True)
    dataset = MonolingualDataset(blocks, blocks.sizes, dictionary, targets=["future"])
    task = LanguageModelingTask(Namespace(tokens_per_sample=5, seed=1), dictionary)
    text, found = torch.cat(lines), []
    for shard in range(shards):
        division = {"batch_size": batch_size, "num_shards": shards, "shard_id": shard, "num_workers": workers}
        for batch in task.eval_lm_dataloader(dataset, context_window=context, **division):
            if "id" in batch:  # not so after the last batch of a shard
                rows = zip(batch["net_input"]["src_tokens"], batch["target"], batch["start_indices"], strict=True)
                found += zip(batch["id"].tolist(), rows, strict=True)
    end, inputs = 0, torch.cat([torch.tensor([2]), text])
    for block, (number, (tokens, target, start)) in enumerate(sorted(found, key=lambda row: row[0])):
        begin, end = end, end + int(blocks.sizes[block])
        assert number == block and start == min(begin, context)
        assert tokens[tokens != 1].tolist() == inputs[begin - start : end].tolist()
        assert target[start : start + end - begin].tolist() == text[begin:end].tolist()
    assert end == len(text)
