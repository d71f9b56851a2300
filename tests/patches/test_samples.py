"""No sample is dropped, a block has the context that the text has, and a prompt does not depend on its batch."""

import copy
from argparse import Namespace

import numpy as np
import pytest
import torch
from fairseq.data import MonolingualDataset, TokenBlockDataset, data_utils
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import OmegaConf
from support.pairwise import looped
from support.small_models import build_model, make_dictionary
from support.small_text import write_text


@looped("multiple", [1, 2, 8])
@looped("count", [0, 1, 7, 16, 60])
def test_every_index_is_in_one_batch(multiple, count):
    sizes = np.random.randint(1, 9, count)
    for arguments in ({"max_sentences": 8}, {"max_tokens": 50}):
        batches = data_utils.batch_by_size(
            np.arange(count), lambda index: sizes[index], required_batch_size_multiple=multiple, **arguments
        )
        assert [index for batch in batches for index in batch] == list(range(count)) and all(map(len, batches))


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


@looped("mode", ["none", "complete", "complete_doc", "eos"])
def test_blocks_have_a_token(tmp_path, mode):
    settings = {"data": str(write_text(tmp_path)), "sample_break_mode": mode, "dataset_impl": None, "seed": 1}
    settings |= {"shorten_data_split_list": "", "shorten_method": "none", "use_plasma_view": False, "plasma_path": ""}
    settings |= {"pad_to_fixed_length": False, "pad_to_fixed_bsz": False, "add_bos_token": False}
    for length in (1, 0, -4):  # below 1 as in fairseq-eval-lm with a --context-window above --tokens-per-sample
        task = LanguageModelingTask(Namespace(tokens_per_sample=length, **settings), make_dictionary(40))
        if length == 1 or mode == "eos":
            task.load_dataset("valid")
            assert len(task.dataset("valid")) >= 12
        else:
            with pytest.raises(ValueError, match=f"at least one token, got {length}: .* subtracts the --context-wind"):
                task.load_dataset("valid")


PROMPTS = ("", "w1", "w2 w3 w1 w5 w6 w7 w2 w3", "w4 w4", "w3")
SETTINGS = (
    {"min_len": 0, "beam": 1},
    {"min_len": 1},
    {"min_len": 6},
    {"min_len": 6, "sampling": True, "sampling_topk": 1, "beam": 1},
    {"min_len": 7, "diverse_beam_groups": 2, "beam": 4},
    {"max_len_a": 0.5, "max_len_b": 6},
    {"match_source_len": True},
)


@pytest.fixture
def model():
    return build_model("delta_lm_wt103", vocabulary=12)


@looped("settings", SETTINGS)
@looped("bos", [False, True])
def test_a_prompt_does_not_depend_on_its_batch(model, settings, bos):
    """One of them has no start symbol, as the second block of a text in fairseq-generate."""
    dictionary = model.decoder.dictionary
    task = LanguageModelingTask(Namespace(add_bos_token=bos), dictionary)
    settings = {"beam": 2, "min_len": 1, "max_len_b": 14, **settings}
    generator = task.build_generator([model], Namespace(**settings))
    generator.token_indices_to_suppress = dictionary.encode_line("w7", append_eos=False).long()
    lines = [dictionary.encode_line(line, add_if_not_exist=False).long() for line in PROMPTS]
    dataset = task.build_dataset_for_inference(lines, [len(line) for line in lines])
    items = [dataset[index] for index in range(len(lines))]
    items[3] = {**items[3], "net_input.src_tokens": lines[3][:-1], "net_input.src_lengths": len(lines[3]) - 1}

    def generate(items):
        found = task.inference_step(generator, [model], dataset.collater(items))
        return [[(one["tokens"].tolist(), float(one["score"])) for one in hypotheses] for hypotheses in found]

    together = generate(items)
    for number, item in enumerate(items):
        (alone,) = generate([item])
        assert [tokens for tokens, _ in together[number]] == [tokens for tokens, _ in alone]
        assert [score for _, score in together[number]] == pytest.approx([score for _, score in alone])
        assert all(len(tokens) > settings["min_len"] for tokens, _ in alone) or "max_len_a" in settings


@looped("text", ["w1 </s> w3", "</s> w1 </s> </s> w2", "w1 </s> <s>"])
def test_words_after_an_end_are_not_dropped(model, text):
    """A prompt may end with </s>, but a continuation ends there: fairseq drops what follows, or has an assertion."""
    task = LanguageModelingTask(Namespace(add_bos_token=False), model.decoder.dictionary)
    generator = task.build_generator([model], Namespace(beam=2, max_len_b=9))
    for line, says in (
        ("w1 w2 </s> </s>", None),
        (text, f"must not have words after </s>, .* got {text.lstrip('</s> ')!r}"),
    ):
        lines = [task.dictionary.encode_line(line, add_if_not_exist=False).long() for line in ("w5", line)]
        batch = task.build_dataset_for_inference(lines, [len(line) for line in lines])
        batch = batch.collater([batch[0], batch[1]])
        if says is None:
            assert len(task.inference_step(generator, [model], batch)) == 2
        else:
            with pytest.raises(ValueError, match=says):
                task.inference_step(generator, [model], batch)


def test_a_model_prepared_for_inference_is_evaluated(model):
    model.prepare_for_inference_(OmegaConf.create({"generation": {}}))
    copied = copy.deepcopy(model)
    assert model.eval() is model and copied.eval() is copied is not model
    with pytest.raises(RuntimeError, match="cannot be trained"):
        model.train()


class Numbers(MonolingualDataset):
    """Samples of which a batch has the numbers."""

    def collater(self, samples):
        return [sample["id"] for sample in samples]


def iterate(epoch=1, size=3, seed=5, shards=1, shard=0):
    """Return an iterator over 23 samples in random order, as fairseq's trainer gets it."""
    dataset = Numbers(range(23), np.ones(23), None, shuffle=True)
    how = {"num_shards": shards, "shard_id": shard, "epoch": epoch, "seed": seed}
    return FairseqTask(None).get_batch_iterator(dataset, max_sentences=size, **how)


@looped("epoch", [1, 2, 3])
@looped("read", [1, 3])
def test_an_epoch_goes_on_with_its_own_batches(epoch, read):
    """With the same ones every sample is read once; with others some would be left out."""
    processes = [iterate(shards=2, shard=shard) for shard in (0, 1)]
    for iterator in processes * (epoch - 1):
        list(iterator.next_epoch_itr())
    begun = [iterator.next_epoch_itr() for iterator in processes]
    found = [index for itr in begun for _ in range(read) for index in next(itr)]
    saved = processes[0].state_dict()
    assert saved["iterations_in_epoch"] == read
    for shard in (0, 1):
        resumed = iterate(epoch, shards=2, shard=shard)
        resumed.load_state_dict(saved)
        found += [index for batch in resumed.next_epoch_itr() for index in batch]
    assert sorted(found) == list(range(23))
    for other in ({"shards": 1}, {"shards": 4}, {"size": 2, "shards": 2}, {"seed": 6, "shards": 2}):
        says = r"with its batches \(8, processes 2, .*\), got batches .* --reset-datal"
        with pytest.raises(RuntimeError, match=says):
            iterate(epoch, **other).load_state_dict(saved)
        iterate(epoch, **other).load_state_dict({**saved, "iterations_in_epoch": 0})  # a new epoch may have others


@looped("epoch", [1, 2, 3])
@looped("iterations", [0, 3, 7])
def test_the_rest_of_an_epoch_and_the_next(epoch, iterations):
    """A run that begins in a later epoch reads the same batches as an uninterrupted run."""

    def iterator(epoch, iterations=0):
        """Return the iterator as fairseq's trainer gets it, at the start or from a checkpoint."""
        found = iterate(epoch)
        if epoch > 1 or iterations:
            found.load_state_dict({"version": 2, "epoch": epoch, "iterations_in_epoch": iterations, "shuffle": True})
        return found

    whole = iterator(1)
    epochs = [list(whole.next_epoch_itr()) for _ in range(4)]
    assert all(sorted(i for batch in batches for i in batch) == list(range(23)) for batches in epochs)
    assert epochs[0] != epochs[1]
    resumed = iterator(epoch, iterations)
    assert list(resumed.next_epoch_itr()) == epochs[epoch - 1][iterations:]
    assert list(resumed.next_epoch_itr()) == epochs[epoch]
