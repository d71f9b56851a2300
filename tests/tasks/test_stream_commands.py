"""fairseq's commands over streams: interruptions, several processes, evaluation."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary
from test_commands import ADAPTIVE, OPTIMIZATION, PLUGIN, SIZE, losses, run

from .conftest import WORDS, random_lines, write_text

CARRY = ["--task", "fwp_language_modeling", "--carry-state", "--reset-state-after", "w3", "--tokens-per-sample", 8]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, dictionary = tmp_path_factory.mktemp("streams"), Dictionary()
    for word in range(WORDS - len(dictionary)):
        dictionary.add_symbol(f"w{word}")
    dictionary.save(str(folder / "dict.txt"))
    torch.manual_seed(1)
    for split, lines in (("train", 80), ("valid", 30)):
        write_text(folder, split, random_lines(lines))
    return folder


def arguments(data, save_dir, updates, *flags):
    return [
        data, "--arch", "delta_lm_wt103", *SIZE, *OPTIMIZATION, *ADAPTIVE, *CARRY, "--cpu", "--save-dir", save_dir,
        "--max-update", updates, *flags,
    ]  # fmt: skip


def train_together(data, save_dir, updates, *flags):
    """The log of the first of two processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [
        Path(sys.executable).with_name("fairseq-train"), *arguments(data, save_dir, updates, *flags), "--user-dir",
        PLUGIN, "--distributed-world-size", "2", "--distributed-backend", "gloo", "--distributed-no-spawn",
        "--distributed-init-method", f"tcp://localhost:{port}", "--device-id", "0", "--distributed-rank",
    ]  # fmt: skip
    ranks = [
        subprocess.Popen(
            [str(part) for part in [*command, rank]],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    logs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], logs
    return logs[0]


def last(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)


def assert_same_bits(one, other):
    """Parameters after the same updates: a loss that differed in one bit would show in them."""
    for name, parameter in last(one)["model"].items():
        assert torch.equal(parameter, last(other)["model"][name]), name


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder and log of an uninterrupted run that ends in its second epoch."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--batch-size", 3, "--update-freq", 2, "--save-interval-updates", 3]
    return folder, flags, run("fairseq-train", *arguments(data, folder, 14, *flags))


def test_a_run_interrupted_in_mid_epoch_goes_on_bit_for_bit(data, trained, tmp_path):
    """Twice, once with a process that reads ahead."""
    folder, flags, log = trained
    assert "end of epoch 1" in log and "arning" not in log
    parts = [
        run("fairseq-train", *arguments(data, tmp_path, updates, *flags, "--num-workers", workers))
        for updates, workers in ((2, 0), (7, 1), (14, 0))
    ]
    assert [loss for part in parts for loss in losses(part)] == losses(log)
    assert_same_bits(folder, tmp_path)


def test_two_processes_own_their_streams(data, tmp_path):
    """Interrupted or not they end in the same bits, and learn what one process with all streams learns."""
    flags = ["--batch-size", 2, "--dropout", 0, "--update-freq", 2]
    whole = train_together(data, tmp_path / "whole", 10, *flags)
    parts = [train_together(data, tmp_path / "parts", updates, *flags) for updates in (4, 10)]
    assert [loss for part in parts for loss in losses(part)] == losses(whole)
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    assert len(last(tmp_path / "whole")["extra_state"]["train_iterator"]["states"]) == 2
    alone = run("fairseq-train", *arguments(data, tmp_path / "alone", 10, *flags, "--batch-size", 4))
    expected = [float(loss) for loss, _ in losses(alone)]
    assert [float(loss) for loss, _ in losses(whole)] == pytest.approx(expected, abs=2e-3)
    log = run("fairseq-train", *arguments(data, tmp_path / "whole", 12, *flags), status=1)
    assert re.search(r"in the middle of an epoch with processes 2 \(now 1\), where .*--reset-dataloader", log)


def test_validation_carries_the_state(data, trained):
    """fairseq-validate repeats the validation of the training run; other streams, other states."""
    folder, _, log = trained
    found = [
        run(
            "fairseq-validate", data, "--task", "fwp_language_modeling", "--path", folder / "checkpoint_last.pt",
            "--batch-size", count, "--cpu", "--log-format", "simple",
        )
        for count in (3, 1)
    ]  # fmt: skip
    three, one = (re.search(r"valid .*\| loss ([\d.]+)", text)[1] for text in found)
    assert re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", log)[-1] == three != one


def test_eval_lm(data, trained):
    """Over streams without a state it scores what it scores over fairseq's blocks; with one it refuses."""
    common = [data, "--path", trained[0] / "checkpoint_last.pt", "--gen-subset", "valid", "--cpu"]
    common += ["--tokens-per-sample", 8, "--batch-size", 3]
    streams, blocks = (
        run("fairseq-eval-lm", *common, "--task", task) for task in ("fwp_language_modeling", "language_modeling")
    )
    scores = [
        re.search(r"Evaluated ([\d,]+) tokens.*Loss \(base 2\): ([\d.]+)", log, re.S) for log in (streams, blocks)
    ]
    assert scores[0].groups() == scores[1].groups()
    log = run("fairseq-eval-lm", *common, *CARRY, status=1)
    assert log.splitlines()[-1].startswith("ValueError: fairseq-eval-lm carries no state")
