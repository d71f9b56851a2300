"""Generated associations and problems against separate definitions, and fairseq's commands over them."""

import itertools
import math
import re
from argparse import Namespace
from dataclasses import fields

import numpy as np
import pytest
from support.command_server import run
from support.jobs import check_same_bits, losses, validations
from support.pairwise import looped

from fairseq_fwp.tasks.synthetic.data import Associations
from fairseq_fwp.tasks.synthetic.problems import NOT_ASKED, PROBLEMS, Setting
from fairseq_fwp.tasks.synthetic.tasks import (
    FwpAssociativeRetrievalTask,
    FwpAssociativeRetrievalTaskConfig,
    FwpSequenceProblemsConfig,
    FwpSequenceProblemsTask,
)


def make(task, config, **flags):
    defaults = {option.name: option.default for option in fields(config)}
    return task.setup_task(Namespace(**{**defaults, "seed": 1, "update_freq": [1], **flags}))


def retrieval(**flags):
    return make(FwpAssociativeRetrievalTask, FwpAssociativeRetrievalTaskConfig, **flags)


def problems(**flags):
    return make(FwpSequenceProblemsTask, FwpSequenceProblemsConfig, **flags)


def loaded(task, split):
    task.load_dataset(split)
    return task.dataset(split)


def batches(task, split="train", epoch=1, **options):
    iterator = task.get_batch_iterator(loaded(task, split), max_sentences=4, epoch=epoch, **options)
    return list(iterator.next_epoch_itr())


# Sequences.


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


TASKS = {"retrieval": lambda **flags: retrieval(num_keys=12, updates_per_epoch=3, valid_sequences=12, **flags)}
LENGTHS = {"listops": 4, "code_execution": 8} | dict.fromkeys(["shuffle_2", "reset_dyck1"], 24)
TASKS |= {
    name: lambda name=name, **flags: problems(
        problem=name, length=LENGTHS.get(name, 40), train_sequences=3, valid_sequences=3, **flags
    )
    for name in PROBLEMS
    if not re.search("star|counter|^dyck", name)  # some of their strings of one length are the same
}


@looped("task", TASKS)
def test_sequences_follow_from_seed_split_and_epoch(task):
    """Nothing is repeated but evaluations of problems, and everything is reproducible."""
    found = {}
    for epoch, seed, split in itertools.product((1, 2), (1, 2), ("train", "valid", "test")):
        drawn = []
        for _ in range(2):
            data = loaded(TASKS[task](seed=seed), split)
            data.set_epoch(epoch)
            drawn.append([tuple(data[i]["keys" if task == "retrieval" else "source"].tolist()) for i in range(3)])
        assert drawn[0] == drawn[1]
        if task != "retrieval" and split != "train" and epoch == 2:
            assert drawn[0] == found[1, seed, split]
        else:
            found[epoch, seed, split] = drawn[0]
    assert len({sequence for drawn in found.values() for sequence in drawn}) == 3 * len(found)


def test_processes_and_evaluations_read_different_sequences():
    rows = []
    for shard in (0, 1):
        made = batches(retrieval(num_keys=8, updates_per_epoch=3), num_shards=2, shard_id=shard)
        assert len(made) == 3
        rows += [tuple(row) for batch in made for row in batch["net_input"]["keys"].tolist()]
    assert len(set(rows)) == 24
    task = retrieval(num_keys=8)
    before, train = (loaded(task, split)[0]["keys"].tolist() for split in ("valid", "train"))
    task.begin_valid_epoch(2, None)
    assert task.dataset("valid")[0]["keys"].tolist() != before
    assert task.dataset("train")[0]["keys"].tolist() == train


def test_workers_make_the_samples_of_each_epoch():
    """A process that reads ahead has a copy of the data set, and of its epoch."""
    epochs = []
    for workers in (0, 1):
        task = problems(train_sequences=2, rebuild_batches=False)
        iterator = task.get_batch_iterator(loaded(task, "train"), max_sentences=2, num_workers=workers)
        epochs.append([batch["target"].tolist() for _ in range(2) for batch in iterator.next_epoch_itr(shuffle=False)])
    assert epochs[0] == epochs[1] and epochs[0][0] != epochs[0][1]


def test_repeated_sequences_are_those_of_the_first_epoch():
    """They are drawn once, and lie in batches of about equal lengths, others in each epoch."""
    flags = {"problem": "listops", "length": 3, "train_sequences": 40}
    task = problems(**flags, repeat_sequences=True)
    data = loaded(task, "train")
    other = loaded(problems(**flags), "train")
    first, new = ([each[i]["source"].tolist() for i in range(40)] for each in (data, other))
    data.set_epoch(5)
    assert [data[i]["source"].tolist() for i in range(40)] == first == new
    assert data[3] is data[3] and data.sizes.tolist() == [len(symbols) for symbols in first]
    found = []
    for epoch in (1, 2):
        made = list(task.get_batch_iterator(data, max_sentences=4, epoch=epoch).next_epoch_itr())
        found.append({tuple(batch["id"].tolist()) for batch in made})
        rows = sorted(sorted(batch["net_input"]["src_lengths"].tolist()) for batch in made)
        assert [length for row in rows for length in row] == sorted(map(len, first))
    assert found[0] != found[1]


# Batches.


def test_shorter_sequences_end_in_padding():
    task = problems(problem="parity", length=9, valid_length=9, valid_shortest=4)
    dataset, pad = loaded(task, "valid"), task.target_dictionary.pad()
    samples = [dataset[i] for i in range(6)]
    batch, longest = dataset.collater(samples), max(len(sample["source"]) for sample in samples)
    tokens, lengths = batch["net_input"]["src_tokens"], batch["net_input"]["src_lengths"].tolist()
    assert lengths == [len(sample["source"]) for sample in samples] and tokens.shape == (6, longest)
    assert len(set(lengths)) > 1 and batch["ntokens"] == sum(lengths)
    for row, answers, sample in zip(tokens, batch["target"], samples, strict=True):
        rest = [pad] * (longest - len(sample["source"]))
        for found, part in ((row, "source"), (answers, "target")):
            assert found.tolist() == [*sample[part].tolist(), *rest]


def test_sequences_are_as_long_as_asked_and_never_longer_than_a_sample():
    assert len(loaded(problems(length=5), "train")[0]["source"]) == 5  # without pairs, whose number is above
    data = loaded(problems(problem="listops", length=3, tokens_per_sample=30), "train")
    drawn = [PROBLEMS["listops"].draw(np.random.default_rng(index), Setting(length=3)) for index in range(50)]
    assert max(len(symbols) for symbols, _ in drawn) > 30 >= max(len(data[i]["source"]) for i in range(50))


def test_lengths_and_queries_of_both_settings():
    for flags, lengths in [
        ({}, (6, 6)),
        ({"with_replacement": True}, (12, 12)),
        ({"with_replacement": True, "valid_length": 6}, (12, 6)),
        ({"length": 4}, (4, 4)),
    ]:
        task = retrieval(num_keys=6, updates_per_epoch=2, valid_sequences=5, **flags)
        for split, length, queries in zip(("train", "valid"), lengths, (1, 6), strict=True):
            made = batches(task, split)
            assert [batch["nsentences"] for batch in made] == ([4, 4] if split == "train" else [4, 1])
            for batch in made:
                assert batch["net_input"]["keys"].shape[1] == batch["net_input"]["values"].shape[1] == length
                assert batch["net_input"]["queries"].shape[1] == batch["target"].shape[1] == queries
    assert len(batches(retrieval(num_keys=4, updates_per_epoch=3, update_freq=[2]))) == 6  # of all updates


def test_a_batch_asks_where_there_is_an_answer_and_nowhere_else():
    task = problems(problem="mqar", length=12, pairs=3, symbols=4)
    dataset = loaded(task, "valid")
    batch = dataset.collater([dataset[0], dataset[1]])
    assert batch["ntokens"] == 2 * 6 and batch["net_input"]["src_tokens"].shape == (2, 12)
    assert (batch["target"] != task.target_dictionary.pad()).sum(1).tolist() == [6, 6]
    written = {task.target_dictionary.index(str(value)) for value in range(4, 8)}
    assert set(batch["target"][:, 6:].flatten().tolist()) <= written


@looped(
    "flags, split, expected",
    [
        ({"length": 24, "pairs": 6, "double_pairs_every": 2}, "train", [(8, 4)] * 2 + [(16, 8)] * 2 + [(24, 12)] * 2),
        ({"length": 24, "pairs": 6, "double_pairs_every": 2}, "valid", [(24, 12)] * 6),
        ({"length": 17, "pairs": 8, "double_pairs_every": 1}, "train", [(5, 1)]),
    ],
)
def test_pairs_double_in_training_alone(flags, split, expected):
    """Their first ones are asked for in the shortest sequences, too."""
    task, found = problems(problem="mqar", **flags), []
    dataset = loaded(task, split)
    for epoch in range(1, len(expected) + 1):
        dataset.set_epoch(epoch)
        asked = dataset[0]["target"] != task.target_dictionary.pad()
        found.append((len(asked), int(asked.sum())))
    assert found == expected


REFUSED = [
    (retrieval, {"num_keys": 0}, "--num-keys must be at least 1, got 0"),
    (retrieval, {"valid_length": 0}, "--valid-length must be at least 1, got 0"),
    (retrieval, {"stop_loss": math.nan}, "--stop-loss must be at least 0, got nan"),
    (retrieval, {"stop_updates": -1}, "--stop-updates must be at least 0, got -1"),
    *((retrieval, {name: 21}, f"--{name.replace('_', '-')} must be at most --num-keys = 20 without .*, got 21")
      for name in ("length", "valid_length")),
    (problems, {"length": 0}, "--length must be at least 1, got 0"),
    (problems, {"problem": "mqar", "pairs": 9, "symbols": 8}, "--pairs must be at most --symbols = 8, got 9"),
    (problems, {"problem": "mqar", "length": 40, "valid_length": 16},
     "--valid-length must be more than 2 x --pairs = 16"),
    (problems, {"problem": "mqar", "double_pairs_every": 0}, "--double-pairs-every must be at least 1, got 0"),
    (problems, {"double_pairs_every": 2}, "--problem must be mqar with --double-pairs-every, got parity"),
    (problems, {"published_labels": True}, "--problem must be code_execution with --published-labels, got parity"),
    (problems, {"problem": "mqar", "double_pairs_every": 2, "repeat_sequences": True}, "--repeat-sequences must be"),
    (problems, {"length": 1025}, "--length must be at most --tokens-per-sample = 1024 for parity, got 1025"),
    (problems, {"problem": "code_execution", "valid_length": 114}, "--valid-length must be .* = 1024 / 9, .*, got 114"),
    (problems, {"problem": "listops", "length": 21}, "--length must be at most 20 for listops: longer ones .*, got 21"),
    (problems, {"problem": "dyck1", "valid_length": 102}, "--valid-length must be at most 100 for dyck1: .*, got 102"),
    (problems, {"problem": "listops", "shortest": 2, "length": 5}, "--shortest must be left out for listops, .* got 2"),
    (problems, {"valid_length": 7, "valid_shortest": 8}, "--valid-length must be at least 8 for parity .* 8, got 7"),
    (problems, {"problem": "abab_star", "shortest": 6, "length": 7}, "--length must be at least 8 .* of at least 6"),
    (problems, {"problem": "code_execution", "variables": 6}, "--variables must be at most 5, got 6"),
    (lambda: retrieval().get_batch_iterator(loaded(retrieval(), "train"), max_tokens=100), {}, "--batch-size"),
]  # fmt: skip


@looped("attempt, flags, message", REFUSED)
def test_settings_without_a_sequence_are_refused(attempt, flags, message):
    with pytest.raises(ValueError, match=message):
        attempt(**flags)


# Training.


@looped(
    "evaluated, ended",
    [
        ([0.5, 0.002], False),
        ([0.5, 0.001], True),
        ([0.5, 0.4, 0.5, 0.4, 0.41], True),  # three evaluations without a better one
        ([0.5, 0.4, 0.5, 0.4, 0.39, 0.6, 0.6], False),
        ([math.nan, math.nan, math.nan], True),
    ],
)
def test_training_ends_when_solved_or_without_progress(evaluated, ended):
    """Then no epoch follows."""
    task = retrieval(num_keys=4, stop_updates=300, updates_per_epoch=100)
    iterator = task.get_batch_iterator(loaded(task, "train"), max_sentences=4)
    for _ in iterator.next_epoch_itr():
        pass
    for index, loss in enumerate(evaluated):
        assert not task.ended and iterator.next_epoch_idx <= math.inf
        task.post_validate(None, {"loss": loss, "num_updates": 100 * (index + 1)}, None)
        task.post_validate(None, {"loss": 0.0, "num_updates": 100 * (index + 1)}, None)  # of another subset
    assert task.ended == ended == (not iterator.next_epoch_idx <= math.inf)  # what fairseq asks


def train(save_dir, *flags):
    return run(
        "fairseq-train", "--task", "fwp_associative_retrieval", "--criterion", "fwp_squared_error", "--cpu",
        "--optimizer", "adam", "--lr", "1e-3", "--batch-size", 8, "--save-dir", save_dir, "--no-epoch-checkpoints",
        "--log-format", "simple", "--log-interval", 1, *flags,
    )  # fmt: skip


@pytest.mark.slow
def test_an_interrupted_run_goes_on_bit_for_bit_and_ends_where_the_whole_one_does(tmp_path):
    """Interrupted in mid-epoch, with random draws of FAVOR+, and an end without progress."""
    flags = ["--arch", "sum_favor64_retrieval", "--num-keys", 6, "--key-dim", 8, "--updates-per-epoch", 4]
    flags += ["--stop-updates", 8, "--lr", "1e-9"]
    whole = train(tmp_path / "whole", *flags)
    assert "arning" not in whole and "the training ends" in whole and "done training" in whole
    parts = [train(tmp_path / "parts", *flags, "--max-update", update) for update in (7, 100_000)]
    assert [loss for part in parts for loss in losses(part)] == losses(whole)
    assert "the training ends" in parts[1]
    first, *others = map(validations, (whole, *parts))
    assert first == others[0][:1] + others[1]  # without the evaluation at update 7
    check_same_bits(tmp_path / "whole", tmp_path / "parts")


def test_training_solves_a_small_task_and_ends(tmp_path):
    flags = ["--arch", "delta_dpfp1_retrieval", "--num-keys", 3, "--with-replacement", "--updates-per-epoch", 50]
    log = train(tmp_path, *flags, "--max-update", 3000, "--lr", "1e-2", "--stop-loss", 0.01)
    found = [*map(float, validations(log))]
    assert all(loss > 0.01 for loss in found[:-1]) and found[-1] <= 0.01
    assert all(later != earlier for earlier, later in itertools.pairwise(found))


def accuracies(*flags):
    """Return the right answers of parity at twice the training length, in %, for every evaluation."""
    output = run(
        "fairseq-train", "--task", "fwp_sequence_problems", "--length", "12", "--valid-length", "24",
        "--train-sequences", "6400", "--batch-size", "64", "--criterion", "label_smoothed_cross_entropy",
        "--report-accuracy", "--arch", "fwp_lm", "--decoder-layers", "1", "--decoder-embed-dim", "32",
        "--decoder-ffn-embed-dim", "64", "--decoder-attention-heads", "2", "--decoder-feature-map", "identity",
        "--l2-normalization", "--no-token-positional-embeddings", "--dropout", "0", "--optimizer", "adam", "--lr",
        "0.003", "--max-update", "600", "--no-save", "--log-format", "simple", "--num-workers", "0", "--cpu", *flags,
    )  # fmt: skip
    return [float(line.split("accuracy")[1].split()[0]) for line in output.splitlines() if "valid on" in line]


@pytest.mark.slow
def test_delta_tells_parity_with_rates_up_to_2_and_not_without():
    assert accuracies("--negative-eigenvalues")[-1] > 95
    assert max(accuracies()) < 85
