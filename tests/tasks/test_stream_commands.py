"""fairseq's commands over streams: interruptions, several processes, evaluation."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_server import PLUGIN, run
from fairseq.data import Dictionary
from test_commands import ADAPTIVE, OPTIMIZATION, SIZE, losses

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
    """Return the log of the first of two processes."""
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
    """Parameters after the same updates are equal: one different bit of a loss would change them."""
    for name, parameter in last(one)["model"].items():
        assert torch.equal(parameter, last(other)["model"][name]), name


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Return the folder and log of an uninterrupted run that ends in its second epoch."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--batch-size", 3, "--update-freq", 2, "--save-interval-updates", 3]
    return folder, flags, run("fairseq-train", *arguments(data, folder, 14, *flags))


@pytest.mark.slow
def test_a_run_interrupted_in_mid_epoch_goes_on_bit_for_bit(data, trained, tmp_path):
    folder, flags, log = trained
    assert "end of epoch 1" in log and "arning" not in log
    parts = [
        run("fairseq-train", *arguments(data, tmp_path, updates, *flags, "--num-workers", workers))
        for updates, workers in ((2, 1), (14, 0))  # a process that reads ahead, and none
    ]
    assert [loss for part in parts for loss in losses(part)] == losses(log)
    assert_same_bits(folder, tmp_path)


@pytest.mark.slow
def test_two_processes_own_their_streams(data, tmp_path):
    """Interrupted or not, results are equal to the last bit, and close to one process with all streams."""
    flags = ["--batch-size", 2, "--dropout", 0, "--update-freq", 2]
    whole = train_together(data, tmp_path / "whole", 10, *flags)
    parts = [train_together(data, tmp_path / "parts", updates, *flags) for updates in (4, 10)]
    assert [loss for part in parts for loss in losses(part)] == losses(whole)
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    assert len(last(tmp_path / "whole")["extra_state"]["train_iterator"]["states"]) == 2
    alone = run("fairseq-train", *arguments(data, tmp_path / "alone", 10, *flags, "--batch-size", 4))
    expected = [float(loss) for loss, _ in losses(alone)]
    assert [float(loss) for loss, _ in losses(whole)] == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
def test_validation_carries_the_state(data, trained):
    """fairseq-validate takes the task's settings from the checkpoint and repeats the validation of the training run."""
    folder, _, log = trained
    text = run(
        "fairseq-validate", data, "--task", "fwp_language_modeling", "--path", folder / "checkpoint_last.pt",
        "--batch-size", 3, "--cpu", "--log-format", "simple",
    )  # fmt: skip
    found = re.search(r"valid .*\| loss ([\d.]+)", text)[1]
    assert found == re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", log)[-1]


def test_eval_lm_scores_every_token(data, trained):
    log = run(
        "fairseq-eval-lm", data, "--task", "fwp_language_modeling", "--path", trained[0] / "checkpoint_last.pt",
        "--gen-subset", "valid", "--cpu", "--tokens-per-sample", 8, "--batch-size", 3,
    )  # fmt: skip
    tokens = (data / "valid.bin").stat().st_size // 2  # a token takes two bytes for a vocabulary below 65,500
    assert f"Evaluated {tokens} tokens" in log
    assert 2 < float(re.search(r"Perplexity: ([\d.]+)", log)[1]) < 60
