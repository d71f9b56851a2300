"""Generated sequences of state tracking and recall against separate definitions."""

from argparse import Namespace
from dataclasses import fields
from itertools import permutations

import numpy as np
import pytest
import torch
from command_server import run
from pairwise import looped

from fairseq_fwp.synthetic.data import NOT_ASKED, PROBLEMS, Setting
from fairseq_fwp.synthetic.tasks import FwpSequenceProblemsConfig, FwpSequenceProblemsTask


def make_task(**flags):
    defaults = {option.name: option.default for option in fields(FwpSequenceProblemsConfig)}
    return FwpSequenceProblemsTask.setup_task(Namespace(**{**defaults, "seed": 1, "update_freq": [1], **flags}))


def draw(problem, **setting):
    """Return twenty sequences as lists of symbols and of answers."""
    generator = np.random.default_rng(1)
    setting = Setting(**{"length": 30, "pairs": 5, "symbols": 7, **setting})
    return [[part.tolist() for part in PROBLEMS[problem](generator, setting)] for _ in range(20)]


def test_parity_is_the_exclusive_or_so_far():
    for bits, answers in draw("parity"):
        odd = False
        for bit, answer in zip(bits, answers, strict=True):
            odd ^= bool(bit)
            assert answer == odd


def test_s3_is_the_product_of_permutation_matrices_so_far():
    matrices = [np.eye(3, dtype=int)[list(permutation)] for permutation in permutations(range(3))]
    seen = set()
    for symbols, answers in draw("s3"):
        product = np.eye(3, dtype=int)
        for symbol, answer in zip(symbols, answers, strict=True):
            product = product @ matrices[symbol]
            assert (matrices[answer] == product).all()
            seen.add((symbol, answer))
    assert len(seen) == 36


def test_mqar_asks_for_the_value_that_stands_after_the_key():
    places = set()
    for sequence, answers in draw("mqar"):
        keys, values = sequence[0:10:2], sequence[1:10:2]
        assert len(set(keys)) == 5 and set(keys) <= set(range(7)) and set(values) <= set(range(7, 14))
        assert answers[:10] == [NOT_ASKED] * 10
        for query, answer in zip(sequence[10:], answers[10:], strict=True):
            places.add(keys.index(query))
            assert answer == values[keys.index(query)]
    assert places == set(range(5))


@looped("problem", PROBLEMS)
def test_sequences_follow_from_seed_split_and_epoch(problem):
    seen = set()
    for epoch, seed, split in [(1, 1, "train"), (2, 1, "train"), (1, 2, "train"), (1, 1, "valid"), (1, 1, "test")]:
        drawn = []
        for _ in range(2):
            task = make_task(problem=problem, seed=seed, train_sequences=3, valid_sequences=3)
            task.load_dataset(split)
            task.dataset(split).set_epoch(epoch)
            drawn.append(torch.stack([torch.from_numpy(task.dataset(split)[i]["symbols"]) for i in range(3)]))
        assert torch.equal(*drawn)
        seen |= {tuple(sequence) for sequence in drawn[0].tolist()}
    assert len(seen) == 15


def test_workers_make_the_samples_of_each_epoch():
    """A process that reads ahead has a copy of the data set, and of its epoch."""
    epochs = []
    for workers in (0, 1):
        task = make_task(train_sequences=2, rebuild_batches=False)
        task.load_dataset("train")
        iterator = task.get_batch_iterator(task.dataset("train"), max_sentences=2, num_workers=workers)
        epochs.append([batch["target"].tolist() for _ in range(2) for batch in iterator.next_epoch_itr(shuffle=False)])
    assert epochs[0] == epochs[1] and epochs[0][0] != epochs[0][1]


def test_a_batch_asks_where_there_is_an_answer_and_nowhere_else():
    task = make_task(problem="mqar", length=12, pairs=3, symbols=4)
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    batch = dataset.collater([dataset[0], dataset[1]])
    assert batch["ntokens"] == 2 * 6 and batch["net_input"]["src_tokens"].shape == (2, 12)
    assert (batch["target"] != task.target_dictionary.pad()).sum(1).tolist() == [6, 6]
    written = {task.target_dictionary.index(str(value)) for value in range(4, 8)}
    assert set(batch["target"][:, 6:].flatten().tolist()) <= written


def test_pairs_double_in_training_alone():
    task = make_task(problem="mqar", length=24, pairs=6, double_pairs_every=2)
    lengths = {}
    for split in ("train", "valid"):
        task.load_dataset(split)
        dataset = task.dataset(split)
        for epoch in range(1, 7):
            dataset.set_epoch(epoch)
            item = dataset[0]
            asked = item["target"] != task.target_dictionary.pad()
            lengths.setdefault(split, []).append((len(asked), int(asked.sum())))
    assert lengths["train"] == [(8, 4)] * 2 + [(16, 8)] * 2 + [(24, 12)] * 2
    assert lengths["valid"] == [(24, 12)] * 6


@looped(
    ("flags", "message"),
    [
        ({"length": 0}, "--length must be at least 1, got 0"),
        ({"problem": "mqar", "pairs": 9, "symbols": 8}, "--pairs must be at most --symbols = 8, got 9"),
        ({"problem": "mqar", "length": 40, "valid_length": 16}, "--valid-length must be more than 2 x --pairs = 16"),
        ({"problem": "mqar", "double_pairs_every": 0}, "--double-pairs-every must be at least 1, got 0"),
        ({"double_pairs_every": 2}, "--problem must be mqar with --double-pairs-every, got parity"),
    ],
)
def test_settings_without_a_sequence_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        make_task(**flags)


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


def test_the_first_pairs_are_asked_for_in_the_shortest_sequences():
    task = make_task(problem="mqar", length=17, pairs=8, double_pairs_every=1)
    task.load_dataset("train")
    item = task.dataset("train")[0]
    assert len(item["target"]) == 5 and int((item["target"] != task.target_dictionary.pad()).sum()) == 1
