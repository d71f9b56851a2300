"""Grids of small trainings: their points, finished ones, and retrieval and sequence problems."""

import re

import engine
import made_up
import pytest
from commands import RecipeError
from grids import problems, retrieval
from support import command_server
from support.pairwise import looped

FOLDER = made_up.RECIPES / "associative_retrieval"
ENTRY = "- {arch: sum_retrieval, num-keys: 3"
PROBLEMS = """
seeds: [1, 2]
common: {arch: fwp_lm}
problems: {parity: {flags: {length: 4}, chance: 50, models: [sum, "delta, beta to 2"]}}
models: {sum: {lr: 1}, "delta, beta to 2": {lr: 2, negative-eigenvalues: True}}
"""


@pytest.fixture
def read(tmp_path):
    """A function that returns the grid of a file with this text; of the file given several times."""

    def read(text, kind=retrieval, times=1, stage="train"):
        (tmp_path / "grid.yaml").write_text(text)
        confs = times * ["--conf", str(tmp_path / "grid.yaml")]
        return kind(["--recipe", str(FOLDER), "--", stage, *confs, "--out", str(tmp_path / "out")])

    return read


def test_lists_multiply(read):
    text = (
        "- {arch: [sum_retrieval, sum_dpfp1_retrieval], num-keys: [8, 20], seed: [1, 2]}\n"
        "- {arch: delta_retrieval, num-keys: 20, with-replacement: true}\n"
    )
    trainings = read(text).trainings
    names = [training.name for training in trainings]
    assert len(set(names)) == len(names) == 9
    assert names[:3] == [f"sum_retrieval,seed={seed},num-keys={size}" for seed, size in [(1, 8), (1, 20), (2, 8)]]
    assert read(text, times=2).trainings == trainings  # a point of two grids is trained once
    with pytest.raises(RecipeError, match="out must have a finished training, got none: run the stage train first"):
        read(text, stage="report").run()


def test_runs_of_problems(read):
    trainings = read(PROBLEMS, problems).trainings
    models = [f"parity/{model}_{seed}" for model in ("sum", "delta_beta_to_2") for seed in (1, 2)]
    assert [training.name for training in trainings] == models
    words = trainings[2].command
    assert words[words.index("--length") + 1] == "4" and words[words.index("--seed") + 1] == "1"
    assert "--negative-eigenvalues" in words and "--report-accuracy" in words


@looped(
    "kind, text, said",
    [
        (retrieval, "", "must be a list of entries, as in conf/quick.yaml, got nothing"),
        (retrieval, "arch: sum_retrieval", "must be a list of entries, as in conf/quick.yaml, got a mapping"),
        (retrieval, ENTRY, "cannot be read as YAML: while parsing a flow mapping"),
        (retrieval, f"{ENTRY}}}\n- delta", "grid.yaml, entry 2: it must have flags and their values, got 'delta'"),
        (retrieval, "- {arch: a, lr: 3}", "entry 1: it must have num-keys, got only arch, lr"),
        (retrieval, "- {arch: a, num-keys: []}", "num-keys must be a value or a list of values, got []"),
        (retrieval, f"{ENTRY}, lr: {{a: 1}}}}", "lr must be a value or a list of values, got {'a': '1'}"),
        (retrieval, "- {arch: a, num-keys: [3, x]}", "num-keys must be a positive integer, got 'x'"),
        (retrieval, f"{ENTRY}, seed: [1, one]}}", "refuses its flags: argument --seed: invalid int value: 'one'"),
        (problems, PROBLEMS.replace("[1, 2]", ""), "must be like conf/quick.yaml, got TypeError"),
        (problems, PROBLEMS.replace("models: {sum", "models: {other"), "must be like conf/quick.yaml, got KeyError"),
        (problems, PROBLEMS.replace("chance: 50, ", ""), "must be like conf/quick.yaml, got KeyError"),
    ],
)
def test_grids_without_a_meaning(read, tmp_path, kind, text, said):
    """Nothing is trained."""
    with pytest.raises(RecipeError, match=re.escape(said)):
        read(text, kind).run()
    assert not list(tmp_path.rglob("train.log"))


@pytest.fixture
def training(tmp_path):
    return engine.Training("a", tmp_path / "a", ["--lr", "1"])


def finished(training, text):
    training.folder.mkdir(exist_ok=True)
    (training.folder / "train.log").write_text(text)
    (training.folder / "settings.txt").write_text("--lr 1\n")
    (training.folder / "checkpoint_last.pt").touch()
    assert training.end(succeeded=True)


STOPPED = "gradient not finite after update 100, last finite validation loss 0.40 at 100\n"


@pytest.mark.parametrize(
    "validations, more, mark, words",
    [
        ([(100, 0.4), (200, 0.1), (300, 0.25)], "", "trained", "best loss 0.1, 300 updates\n"),
        ([(100, 0.4)], "FloatingPointError: gradients are Nan/Inf\n", "diverged", STOPPED),
    ],
)
def test_what_has_ended_keeps_its_log_alone(training, validations, more, mark, words):
    assert not engine.has_ended(training)
    finished(training, made_up.log(*validations, name="loss", more=more))
    assert engine.has_ended(training) and not (training.folder / "checkpoint_last.pt").exists()
    assert (training.folder / mark).read_text() == words
    with pytest.raises(RecipeError, match="was made with other settings"):
        engine.has_ended(training._replace(flags=["--lr", "2"]))


def test_a_plug_in_that_has_changed_since_is_named(tmp_path, capsys):
    """Its rule may be another one, of which there is no training."""
    (code := tmp_path / "my_plugin.py").write_text("rule = 1")
    training = engine.Training("a", tmp_path / "a", ["--user-dir", str(tmp_path)])
    training.write_settings()
    (training.folder / "train.log").write_text(made_up.log((100, 0.4), name="loss"))
    assert training.end(succeeded=True) and engine.has_ended(training) and not capsys.readouterr().out
    (tmp_path / ".#my_plugin.py").symlink_to("an editor's lock, which is no file")
    (tmp_path / "folder.py").mkdir()
    assert engine.has_ended(training) and not capsys.readouterr().out
    code.write_text("rule = 2")
    assert engine.has_ended(training)
    assert "a: files of its --user-dir have changed: remove" in capsys.readouterr().out


def test_damaged_trainings_are_named(training):
    whole = made_up.log((100, 0.4), (200, 0.3), (300, 0.2), name="loss")
    finished(training, whole)
    path = training.folder / "train.log"
    path.write_text(whole[: whole.index('"300"')])
    was = "has changed since .* was best loss 0.2, 300 updates, and now it is"
    with pytest.raises(RecipeError, match=f"{was} best loss 0.3, 200 updates; remove"):
        engine.has_ended(training)
    path.unlink()
    with pytest.raises(RecipeError, match=f"{was} no result; remove the folder to train it again"):
        engine.has_ended(training)


def test_trainings_run_once_and_failures_are_named(tmp_path):
    """Run the program: one training finishes at once, one fails, and then the same again."""
    (tmp_path / "grid.yaml").write_text(
        "- {arch: sum_retrieval, num-keys: 4, stop-updates: 1, max-update: 2}\n"
        "- {arch: sum_retrieval, num-keys: 4, restore-file: /nonexistent/x.pt, max-update: 2, reset-optimizer: true,\n"
        "   finetune-from-model: /nonexistent/y.pt}\n"
    )
    words = ["--conf", tmp_path / "grid.yaml", "--out", tmp_path / "out", "--workers", 2]
    command = [made_up.RECIPES / "driver", "retrieval", "--recipe", FOLDER, "--", "train", *words]
    first, again = (command_server.run(*command, status=1) for _ in range(2))
    assert "run.sh: failed, see train.log in their folders in" in first and first.count("run.sh: ") == 1, first
    assert "Traceback" not in first
    assert "1 to train (1 finished)" in again
    (folder,) = (path.parent for path in (tmp_path / "out").rglob("trained"))
    assert (folder / "train.log").read_text().count("+ fairseq-train") == 1
