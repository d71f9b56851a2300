"""A killed training resumes to the same bits as an uninterrupted run, and saved files are never lost."""

import contextlib
import os
import random
import re
import signal
import time

import pytest
import torch
from small_text import write_text
from test_commands import ADAPTIVE, BATCH, OPTIMIZATION, SIZE

KILLS = 20
TASKS = {
    "samples": ["--task", "language_modeling", *BATCH],
    "streams": ["--task", "fwp_language_modeling", "--carry-state", "--tokens-per-sample", 8, "--batch-size", 6],
}
# Three epochs, with checkpoints in the middle and at the end of each.
SAVING = ["--save-interval-updates", 2, "--keep-interval-updates", 1, "--keep-last-epochs", 1]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def arguments(data, save_dir, task, *flags):
    return [
        data, "--arch", "delta_favor_lm_wt103", *SIZE, *TASKS[task], *OPTIMIZATION, *ADAPTIVE, *SAVING, "--cpu",
        "--save-dir", save_dir, "--max-epoch", 3, *flags,
    ]  # fmt: skip


@pytest.fixture(scope="module", params=TASKS)
def whole(request, data, commands, tmp_path_factory):
    """Return the task, the folder of an uninterrupted run, and its seconds."""
    folder, start = tmp_path_factory.mktemp("whole"), time.monotonic()
    assert commands.run("fairseq-train", *arguments(data, folder, request.param), log=folder / "log") == 0
    return request.param, folder, time.monotonic() - start


def losses(folder):
    """Return every loss in the log, by update."""
    found = re.findall(r"train_inner .* loss=([\d.]+).* num_updates=(\d+)", (folder / "log").read_text())
    return {(int(update), loss) for loss, update in found}


def load(path):
    return torch.load(path, weights_only=True)


def assert_every_checkpoint_is_whole(folder):
    for path in folder.glob("*.pt"):
        load(path)


def assert_same_run(folder, expected):
    assert losses(folder) == losses(expected)
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in folder.iterdir()} == names
    for name in names - {"log"}:
        found, saved = load(folder / name), load(expected / name)
        for parameter, value in saved["model"].items():
            assert torch.equal(found["model"][parameter], value), (name, parameter)
        assert found["extra_state"]["best"] == saved["extra_state"]["best"]


@pytest.mark.slow
def test_killed_at_twenty_random_moments(whole, data, commands, tmp_path):
    """Most kills happen at the start, in an update, a save or a validation; a finished run starts again."""
    task, expected, seconds = whole
    chooser = random.Random(int(os.environ.get("FWP_TEST_SEED", "0")))
    folders = (tmp_path / f"run{number}" for number in range(KILLS + 1))
    killed, folder = 0, next(folders)
    while killed < KILLS:
        folder.mkdir(exist_ok=True)
        process = commands.start("fairseq-train", *arguments(data, folder, task), log=folder / "log")
        time.sleep(chooser.uniform(0, seconds))
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        status = commands.wait()
        assert status in (0, -signal.SIGKILL)
        assert_every_checkpoint_is_whole(folder)
        killed += status != 0
        if status == 0:
            assert_same_run(folder, expected)
            folder = next(folders)
    folder.mkdir(exist_ok=True)
    assert commands.run("fairseq-train", *arguments(data, folder, task), log=folder / "log") == 0
    assert_same_run(folder, expected)


PLACES = [*(f"event {number}" for number in range(1, 12)), "save 1", "save 3", "copy 1", "copy 2", "copy 4"]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_killed_in_the_midst_of_saving(whole, data, commands, tmp_path, place):
    task, expected, _ = whole
    folder = tmp_path / "save"
    folder.mkdir()
    command = ["fairseq-train", *arguments(data, folder, task)]
    assert commands.run(*command, log=folder / "log", die_at=place) == -signal.SIGKILL
    assert_every_checkpoint_is_whole(folder)
    assert commands.run(*command, log=folder / "log") == 0
    assert_same_run(folder, expected)


ENDS = {
    "updates": ["--max-update", 4],
    "epochs": ["--max-epoch", 2],
    "time": ["--stop-time-hours", 1e-9],
    "learning rate": ["--stop-min-lr", 4e-4],
}
LONGER = {"updates": ["--max-update", 7], "epochs": ["--max-epoch", 3], "learning rate": ["--stop-min-lr", 4e-5]}
# The rate falls to a tenth after each epoch, because no loss is so much better than the last one.
FALLING = ["--lr-scheduler", "reduce_lr_on_plateau", "--lr-shrink", 0.1, "--lr-threshold", 10]


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("task", TASKS)
def test_a_finished_training_changes_nothing(data, commands, tmp_path, task, end):
    """It says so in one line; with a higher limit it goes on as if it had never ended."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    for made in (folder, whole):
        made.mkdir()

    def train(folder, limit, name):
        flags = [*arguments(data, folder, task)[:-2], *(FALLING if end == "learning rate" else ()), *limit]
        assert commands.run("fairseq-train", *flags, log=folder / name) == 0
        return (folder / name).read_text()

    train(folder, ENDS[end], "log")
    saved = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    log = train(folder, ENDS[end], "again")
    line = "stopping training because" if end == "learning rate" else f"training is finished with {ENDS[end][0]} "
    assert log.count(line) == 1 and "train_inner" not in log
    (folder / "again").unlink()
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == saved
    if end in LONGER:
        train(folder, LONGER[end], "log")
        train(whole, LONGER[end], "log")
        one, other = (load(path / "checkpoint_last.pt")["model"] for path in (folder, whole))
        assert all(torch.equal(one[name], other[name]) for name in one)
