"""A killed training resumes to the same bits as an uninterrupted run, and saved files are never lost."""

import contextlib
import itertools
import os
import random
import re
import signal
import time

import pytest
import torch
from support.command_server import shared
from support.small_text import TASKS, training, write_text

KILLS = 20
# Three epochs, with checkpoints in the middle and at the end of each.
SAVING = ["--save-interval-updates", 2, "--keep-interval-updates", 1, "--keep-last-epochs", 1]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def train(data, save_dir, task, *limit, log="log", start=False, **how):
    """Run a training of three epochs, or with another limit, and return its exit status; or start it only."""
    flags = ["--arch", "delta_favor_lm_wt103", *SAVING, "--log-format", "simple", "--log-interval", 1]
    flags += limit or ["--max-epoch", 3]
    save_dir.mkdir(exist_ok=True)
    run = shared().start if start else shared().run
    return run("fairseq-train", *training(data, save_dir, task, *flags), log=save_dir / log, **how)


@pytest.fixture(scope="module", params=TASKS)
def whole(request, data, tmp_path_factory):
    """Return the task, the folder of an uninterrupted run, and its seconds."""
    folder, start = tmp_path_factory.mktemp("whole"), time.monotonic()
    assert train(data, folder, request.param) == 0
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


def test_killed_at_twenty_random_moments(whole, data, tmp_path):
    """Most kills happen at the start, in an update, a save or a validation; a finished run starts again."""
    task, expected, seconds = whole
    chooser = random.Random(int(os.environ.get("FWP_TEST_SEED", "0")))
    # On a busy machine the whole run may have taken longer than these, which then often end before they are killed.
    folders = (tmp_path / f"run{number}" for number in itertools.count())
    killed, folder = 0, next(folders)
    while killed < KILLS:
        process = train(data, folder, task, start=True)
        time.sleep(chooser.uniform(0, seconds))
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        status = shared().wait()
        assert status in (0, -signal.SIGKILL)
        assert_every_checkpoint_is_whole(folder)
        killed += status != 0
        if status == 0:
            assert_same_run(folder, expected)
            folder = next(folders)
    assert train(data, folder, task) == 0
    assert_same_run(folder, expected)


PLACES = [*(f"event {number}" for number in range(1, 12)), "save 1", "save 3", "copy 1", "copy 2", "copy 4"]


@pytest.mark.parametrize("place", PLACES)
def test_killed_in_the_midst_of_saving(whole, data, tmp_path, place):
    task, expected, _ = whole
    folder = tmp_path / "save"
    assert train(data, folder, task, die_at=place) == -signal.SIGKILL
    assert_every_checkpoint_is_whole(folder)
    assert train(data, folder, task) == 0
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


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("task", TASKS)
def test_a_finished_training_changes_nothing(data, tmp_path, task, end):
    """It says so in one line; with a higher limit it goes on as if it had never ended."""
    folder, whole = tmp_path / "run", tmp_path / "whole"

    def run(folder, limit, log="log"):
        falling = FALLING if end == "learning rate" else []
        assert train(data, folder, task, *falling, *limit, log=log) == 0
        return (folder / log).read_text()

    run(folder, ENDS[end])
    saved = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    log = run(folder, ENDS[end], "again")
    line = "stopping training because" if end == "learning rate" else f"training is finished with {ENDS[end][0]} "
    assert log.count(line) == 1 and "train_inner" not in log
    (folder / "again").unlink()
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == saved
    if end in LONGER:
        run(folder, LONGER[end])
        run(whole, LONGER[end])
        one, other = (load(path / "checkpoint_last.pt")["model"] for path in (folder, whole))
        assert all(torch.equal(one[name], other[name]) for name in one)
