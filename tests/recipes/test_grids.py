"""Grids of small trainings: their points, finished ones, and retrieval and sequence problems."""

import fcntl
import re

import command_server
import grid
import made_up
import problems
import pytest
import retrieval
import training as engine
import yaml
from commands import RecipeError
from flags import read_yaml
from pairwise import looped

FOLDER = made_up.RECIPES / "associative_retrieval"
COMMON = read_yaml(FOLDER / "conf" / "common.yaml")
ENTRY = "- {arch: sum_retrieval, num-keys: 3"


@pytest.fixture
def conf(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text(
        "- {arch: [sum_retrieval, sum_dpfp1_retrieval], num-keys: [8, 20], seed: [1, 2]}\n"
        "- {arch: delta_retrieval, num-keys: 20, with-replacement: true}\n"
    )
    return path


def test_lists_multiply(conf):
    points = retrieval.read_points([conf])
    names = [point.name for point in points]
    assert len(set(names)) == len(names) == 9
    assert names[:3] == [f"sum_retrieval,seed={seed},num-keys={size}" for seed, size in [(1, 8), (1, 20), (2, 8)]]
    assert retrieval.read_points([conf, conf]) == points  # a point of two grids is trained once


@looped(
    "text, said",
    [
        ("", "must be a list of entries, as in conf/quick.yaml, got nothing"),
        ("arch: sum_retrieval", "must be a list of entries, as in conf/quick.yaml, got a mapping"),
        (ENTRY, "cannot be read as YAML: while parsing a flow mapping"),
        (f"{ENTRY}}}\n- delta", "grid.yaml, entry 2: it must have flags and their values, got 'delta'"),
        ("- {arch: a, lr: 3}", "entry 1: it must have num-keys, got only arch, lr"),
        ("- {arch: a, num-keys: []}", "num-keys must be a value or a list of values, got []"),
        (f"{ENTRY}, lr: {{a: 1}}}}", "lr must be a value or a list of values, got {'a': '1'}"),
        ("- {arch: a, num-keys: [3, x]}", "num-keys must be a positive integer, got 'x'"),
    ],
)
def test_grids_without_a_meaning(tmp_path, text, said):
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(RecipeError, match=re.escape(said)):
        retrieval.read_points([tmp_path / "grid.yaml"])


def test_flags_that_fairseq_refuses_are_no_plan(tmp_path):
    engine.import_fairseq()
    (tmp_path / "grid.yaml").write_text(f"{ENTRY}, seed: [1, one]}}")
    with pytest.raises(RecipeError, match="fairseq-train refuses its flags: argument --seed: invalid int value: 'one'"):
        grid.check([point.training(COMMON, tmp_path) for point in retrieval.read_points([tmp_path / "grid.yaml"])])


@pytest.fixture
def training(tmp_path):
    return engine.Training("a", tmp_path / "a", ["--lr", "1"])


def finished(training, text):
    training.folder.mkdir(exist_ok=True)
    (training.folder / "train.log").write_text(text)
    (training.folder / "settings.txt").write_text("--lr 1\n")
    (training.folder / "checkpoint_last.pt").touch()
    assert training.finish()


def test_what_is_finished_keeps_its_log_alone(training):
    assert not training.is_finished()
    finished(training, made_up.log((100, 0.4), (200, 0.1), (300, 0.25), name="loss"))
    assert training.is_finished() and not (training.folder / "checkpoint_last.pt").exists()
    assert (training.folder / "finished").read_text() == "best loss 0.1, 300 updates\n"
    with pytest.raises(RecipeError, match="was made with other settings"):
        training._replace(flags=["--lr", "2"]).is_finished()


def test_damaged_trainings_are_named(training):
    whole = made_up.log((100, 0.4), (200, 0.3), (300, 0.2), name="loss")
    finished(training, whole)
    path = training.folder / "train.log"
    path.write_text(whole[: whole.index('"300"')])
    with pytest.raises(
        RecipeError,
        match=r"the result was best loss 0.2, 300 updates, and now it is best loss 0.3, 200 updates; remove",
    ):
        training.is_finished()
    path.unlink()
    with pytest.raises(
        RecipeError,
        match=r"train.log in .* has changed since .*, and now it is no result; remove the folder to train it again",
    ):
        training.is_finished()
    path.write_text(whole)
    (training.folder / "finished").write_text("")  # as earlier versions left it
    assert training.is_finished()
    (training.folder / "finished").write_text("fairseq-train --other")
    assert not training.is_finished()


def test_a_folder_has_one_grid(tmp_path):
    with (tmp_path / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RecipeError, match=r"another grid runs in .*: wait for its end, or give another --out"):
            grid.lock(tmp_path)


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
    (folder,) = (path.parent for path in (tmp_path / "out").rglob("finished"))
    assert (folder / "train.log").read_text().count("+ fairseq-train") == 1


# Sequence problems.

CONF = {
    "seeds": [1, 2],
    "common": {"arch": "fwp_lm"},
    "problems": {"parity": {"flags": {"length": 4}, "chance": 50, "models": ["sum", "delta, beta to 2"]}},
    "models": {"sum": {"lr": 1}, "delta, beta to 2": {"lr": 2, "negative-eigenvalues": True}},
}


def test_runs_of_problems(tmp_path):
    (tmp_path / "conf.yaml").write_text(yaml.dump(CONF))
    runs = problems.read_runs(tmp_path / "conf.yaml", tmp_path)
    assert [run.training.name for run in runs] == [
        "parity/sum_1", "parity/sum_2", "parity/delta_beta_to_2_1", "parity/delta_beta_to_2_2",
    ]  # fmt: skip
    words = runs[2].training.command
    assert words[words.index("--length") + 1] == "4" and words[words.index("--seed") + 1] == "1"
    assert "--negative-eigenvalues" in words and "--report-accuracy" in words
    for damage in ({"seeds": None}, {"models": {}}, {"problems": {"parity": {}}}):
        (tmp_path / "conf.yaml").write_text(yaml.dump(CONF | damage))
        with pytest.raises(RecipeError, match=r"must be like conf/quick.yaml, got (TypeError|KeyError)"):
            problems.read_runs(tmp_path / "conf.yaml", tmp_path)


def test_the_report_has_every_evaluation_and_the_mean_of_the_last_ones(tmp_path, capsys):
    (tmp_path / "conf.yaml").write_text(yaml.dump(CONF))
    runs = problems.read_runs(tmp_path / "conf.yaml", tmp_path)
    with pytest.raises(RecipeError, match="must have a finished run, got none"):
        problems.report(runs, tmp_path)
    for run, accuracy in zip(runs[:3], (60.0, 70.0, 100.0), strict=True):
        run.training.folder.mkdir(parents=True)
        text = made_up.log((10, 50.0), (20, accuracy), name="accuracy")
        (run.training.folder / "train.log").write_text(text)
        assert run.training.finish()
    problems.report(runs, tmp_path)
    assert made_up.cells(capsys.readouterr().out.splitlines()) == [
        ["model", "parity"], ["a guess", "50.0"], ["sum", "65.0"], ["delta, beta to 2", "100.0"],
    ]  # fmt: skip
    rows = (tmp_path / "accuracy.csv").read_text().splitlines()
    assert rows[:3] == ["problem,model,seed,updates,accuracy", "parity,sum,1,10,50.0", "parity,sum,1,20,60.0"]
    assert len(rows) == 7
