"""Generated associations, and fairseq's commands over them."""

import math
import re
from argparse import Namespace
from dataclasses import fields
from itertools import pairwise as successive

import numpy as np
import pytest
import torch
from command_server import run
from pairwise import looped

from fairseq_fwp.synthetic.data import NOT_ASKED, Associations
from fairseq_fwp.synthetic.model import RETRIEVAL_PRESETS, FwpAssociativeRetrievalConfig
from fairseq_fwp.synthetic.tasks import FwpAssociativeRetrievalTask, FwpAssociativeRetrievalTaskConfig


def make_task(**flags):
    defaults = {option.name: option.default for option in fields(FwpAssociativeRetrievalTaskConfig)}
    return FwpAssociativeRetrievalTask.setup_task(Namespace(**{**defaults, "seed": 1, "update_freq": [1], **flags}))


def batches(task, split="train", epoch=1, **options):
    task.load_dataset(split)
    iterator = task.get_batch_iterator(task.dataset(split), max_sentences=4, epoch=epoch, **options)
    return list(iterator.next_epoch_itr())


def associations(num_keys, length, with_replacement, all_queries):
    return Associations(num_keys, with_replacement, all_queries, seed=(1, 2), count=None, length=length)


def test_setting_1_uses_each_key_and_value_once():
    item = associations(9, 9, False, True)[5]
    for name in ("keys", "values"):
        assert sorted(item[name]) == list(range(9))
    assert (item["values"][np.argsort(item["keys"])] == item["target"]).all()


def test_setting_2_asks_for_the_latest_value():
    data = associations(5, 12, True, True)
    repeated = missing = 0
    for index in range(50):
        item = data[index]
        pairs = dict(zip(item["keys"].tolist(), item["values"].tolist(), strict=True))  # the last of a key stays
        assert item["target"].tolist() == [pairs.get(key, NOT_ASKED) for key in range(5)]
        repeated += len(item["keys"]) - len(pairs)
        missing += 5 - len(pairs)
    assert repeated > 0 and missing > 0


def test_a_training_query_is_the_key_of_a_pair_drawn_evenly():
    data = associations(3, 4, True, False)
    counts = []
    for index in range(500):
        item = data[index]
        (query,), (target,) = item["queries"], item["target"]
        places = np.flatnonzero(item["keys"] == query)
        assert target == item["values"][places[-1]]
        counts.append(len(places))
    # A key that occurs n times of 4 is asked with probability n / 4, so that the mean of n is E[n^2] / E[n] = 2.
    assert np.mean(counts) == pytest.approx(2, abs=0.2)


def test_nothing_is_repeated_and_everything_is_reproducible():
    settings = [(epoch, seed, split) for epoch in (1, 2) for seed in (1, 2) for split in ("train", "valid")]
    seen = set()
    for epoch, seed, split in settings:
        sequences = []
        for _ in range(2):
            task = make_task(num_keys=12, seed=seed, updates_per_epoch=3, valid_sequences=12)
            made = batches(task, split, epoch)
            sequences.append(torch.cat([torch.cat(list(batch["net_input"].values())[:2], 1) for batch in made]))
        assert torch.equal(*sequences)
        seen |= {tuple(row) for row in sequences[0].tolist()}
    assert len(seen) == len(settings) * 12


def test_lengths_and_queries_of_both_settings():
    for flags, lengths in [
        ({}, (6, 6)),
        ({"with_replacement": True}, (12, 12)),
        ({"with_replacement": True, "valid_length": 6}, (12, 6)),
        ({"length": 4}, (4, 4)),
    ]:
        task = make_task(num_keys=6, updates_per_epoch=2, valid_sequences=5, **flags)
        for split, length, queries in zip(("train", "valid"), lengths, (1, 6), strict=True):
            made = batches(task, split)
            assert [batch["nsentences"] for batch in made] == ([4, 4] if split == "train" else [4, 1])
            for batch in made:
                assert batch["net_input"]["keys"].shape[1] == batch["net_input"]["values"].shape[1] == length
                assert batch["net_input"]["queries"].shape[1] == batch["target"].shape[1] == queries


def test_an_epoch_has_the_batches_of_all_its_updates():
    assert len(batches(make_task(num_keys=4, updates_per_epoch=3, update_freq=[2]))) == 6


def test_defaults_are_the_papers():
    task = make_task().cfg
    assert (task.num_keys, task.with_replacement, task.length, task.valid_length) == (20, False, None, None)
    assert (task.updates_per_epoch, task.valid_sequences) == (100, 20)
    assert (task.stop_loss, task.stop_updates) == (0.001, 1000)
    assert FwpAssociativeRetrievalConfig().key_dim == 64


def test_each_rule_is_normalised_as_the_paper_has_it():
    of_rule = dict.fromkeys(("delta", "gla", "gated_delta", "kda", "rwkv7"), "sum_normalization")
    of_rule |= {"softmax": None, "fwm": "norm_read_out"}
    for name, preset in RETRIEVAL_PRESETS.items():
        expected = of_rule.get(preset["update_rule"], "attention_normalization")
        if name == "sum_tanh_retrieval":  # its features may be negative
            expected = None
        assert [flag for flag in preset if "norm" in flag] == ([expected] if expected else []), name
        assert expected is None or preset[expected] is True


def test_processes_read_different_sequences():
    rows = []
    for shard in (0, 1):
        made = batches(make_task(num_keys=8, updates_per_epoch=3), num_shards=2, shard_id=shard)
        assert len(made) == 3
        rows += [tuple(row) for batch in made for row in batch["net_input"]["keys"].tolist()]
    assert len(set(rows)) == 24


def test_evaluations_see_other_sequences():
    task = make_task(num_keys=8)
    task.load_dataset("valid")
    task.load_dataset("train")
    before = task.dataset("valid")[0]["keys"].tolist()
    train = task.dataset("train")[0]["keys"].tolist()
    task.begin_valid_epoch(2, None)
    assert task.dataset("valid")[0]["keys"].tolist() != before
    assert task.dataset("train")[0]["keys"].tolist() == train


@looped(
    "losses, ended",
    [
        ([0.5, 0.002], False),
        ([0.5, 0.001], True),
        ([0.5, 0.4, 0.5, 0.4, 0.41], True),  # three evaluations without a better one
        ([0.5, 0.4, 0.5, 0.4, 0.39, 0.6, 0.6], False),
        ([math.nan, math.nan, math.nan], True),
    ],
)
def test_training_ends_when_solved_or_without_progress(losses, ended):
    task = make_task(stop_updates=300, updates_per_epoch=100)
    for index, loss in enumerate(losses):
        assert not task.ended
        task.post_validate(None, {"loss": loss, "num_updates": 100 * (index + 1)}, None)
        task.post_validate(None, {"loss": 0.0, "num_updates": 100 * (index + 1)}, None)  # of another subset
    assert task.ended == ended


@looped(
    "flags, message",
    [
        ({"num_keys": 0}, "--num-keys must be at least 1, got 0"),
        ({"valid_length": 0}, "--valid-length must be at least 1, got 0"),
        ({"stop_loss": math.nan}, "--stop-loss must be at least 0, got nan"),
        ({"stop_updates": -1}, "--stop-updates must be at least 0, got -1"),
        ({"length": 21}, "--length must be at most --num-keys = 20 without --with-replacement, got 21"),
        ({"valid_length": 21}, "--valid-length must be at most --num-keys = 20 without --with-replacement, got 21"),
    ],
)
def test_refusals(flags, message):
    with pytest.raises(ValueError, match=message):
        make_task(**flags)


def test_no_batch_size():
    task = make_task()
    task.load_dataset("train")
    with pytest.raises(ValueError, match="--batch-size"):
        task.get_batch_iterator(task.dataset("train"), max_tokens=100)


def train(save_dir, *flags):
    return run(
        "fairseq-train", "--task", "fwp_associative_retrieval", "--criterion", "fwp_squared_error", "--cpu",
        "--optimizer", "adam", "--lr", "1e-3", "--batch-size", 8, "--save-dir", save_dir, "--no-epoch-checkpoints",
        "--log-format", "simple", "--log-interval", 1, *flags,
    )  # fmt: skip


def evaluations(log):
    return re.findall(r"valid on 'valid' subset \| loss ([\d.e-]+)", log)


def training_losses(log):
    return re.findall(r"train_inner .* loss=([\d.e-]+)", log)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_bit_for_bit_and_ends_where_the_whole_one_does(tmp_path):
    """Interrupted in mid-epoch, with random draws of FAVOR+, and an end without progress."""
    flags = ["--arch", "sum_favor64_retrieval", "--num-keys", 6, "--key-dim", 8, "--updates-per-epoch", 4]
    flags += ["--stop-updates", 8, "--lr", "1e-9"]
    whole = train(tmp_path / "whole", *flags)
    assert "arning" not in whole and "the training ends" in whole and "done training" in whole
    parts = [train(tmp_path / "parts", *flags, "--max-update", update) for update in (7, 100_000)]
    assert [loss for part in parts for loss in training_losses(part)] == training_losses(whole)
    assert "the training ends" in parts[1]
    first, *others = (evaluations(log) for log in (whole, *parts))
    assert first == others[0][:1] + others[1]  # without the evaluation at update 7
    models = [torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True) for name in ("whole", "parts")]
    for name, value in models[0]["model"].items():
        assert torch.equal(value, models[1]["model"][name]), name


def test_no_epoch_follows_the_end():
    task = make_task(num_keys=4, updates_per_epoch=2)
    task.load_dataset("train")
    iterator = task.get_batch_iterator(task.dataset("train"), max_sentences=4)
    for _ in iterator.next_epoch_itr():
        pass
    assert iterator.next_epoch_idx <= math.inf
    task.post_validate(None, {"loss": 0.0, "num_updates": 2}, None)
    assert not iterator.next_epoch_idx <= math.inf  # what fairseq asks


def test_training_solves_a_small_task_and_ends(tmp_path):
    flags = ["--arch", "delta_dpfp1_retrieval", "--num-keys", 3, "--with-replacement", "--updates-per-epoch", 50]
    log = train(tmp_path, *flags, "--max-update", 3000, "--lr", "1e-2", "--stop-loss", 0.01)
    found = [float(loss) for loss in evaluations(log)]
    assert all(loss > 0.01 for loss in found[:-1]) and found[-1] <= 0.01
    assert all(later != earlier for earlier, later in successive(found))
