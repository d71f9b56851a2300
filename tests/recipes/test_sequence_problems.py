"""The recipe of small problems: what it would run, what it runs again, and what it reports."""

import csv
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from fairseq import options

FOLDER = Path(__file__).parents[2] / "recipes/sequence_problems"
sys.path.append(str(FOLDER))

import problems  # noqa: E402

CONF = {
    "seeds": [1, 2],
    "common": {"arch": "fwp_lm", "lr": 0.01},
    "problems": {
        "parity": {"flags": {"length": 8}, "chance": 50, "models": ["sum", "delta, beta to 2"]},
        "s3": {"flags": {"length": 9}, "chance": 16.7, "models": ["sum"]},
    },
    "models": {"sum": {}, "delta, beta to 2": {"negative-eigenvalues": True}},
}
# In the place of fairseq-train: counts its calls, and says what a run of seed N comes to.
PROGRAM = """
import sys
flags = dict(zip(sys.argv, sys.argv[1:]))
with open({calls!r}, "a") as calls:
    print(flags["--save-dir"], file=calls)
if flags["--lr"] == "-1":
    sys.exit("ValueError: --lr must be positive")
for update in (1, 2):
    right = update * 20 + int(flags["--seed"])
    print('2026 | INFO | valid | {{"valid_accuracy": "%d", "valid_num_updates": "%d"}}' % (right, update))
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """call(*arguments, **common) runs the recipe on CONF with that program, and returns the folders of its calls."""

    def call(*arguments, **common):
        path = tmp_path / "conf.yaml"
        path.write_text(yaml.safe_dump({**CONF, "common": {**CONF["common"], **common}}))
        monkeypatch.setattr(
            sys, "argv", ["problems.py", *arguments, "--conf", str(path), "--out", str(tmp_path / "out")]
        )
        problems.main()
        return (tmp_path / "calls").read_text().split() if (tmp_path / "calls").exists() else []

    program = tmp_path / "bin/fairseq-train"
    program.parent.mkdir()
    source = program.with_suffix(".py")
    source.write_text(PROGRAM.format(calls=str(tmp_path / "calls")))
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(source))} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return call


def test_the_plan_that_is_shipped_is_of_flags_that_fairseq_takes(tmp_path):
    runs = problems.read_runs(FOLDER / "conf/quick.yaml", tmp_path)
    assert {run.problem for run in runs} == {"parity", "s3", "mqar"}
    assert len({run.folder for run in runs}) == len(runs)
    for run in runs:
        assert run.flags["problem"] == run.problem
        args = options.parse_args_and_arch(options.get_training_parser(), run.command[1:])
        assert getattr(args, "negative_eigenvalues", False) == run.model.endswith("beta to 2")
        assert args.decoder_update_rule == run.model.partition(",")[0]


def test_what_is_finished_with_the_same_flags_is_not_run_again(recipe, tmp_path, capsys):
    assert recipe("plan") == []
    assert capsys.readouterr().out.count("fairseq-train") == 6
    assert len(recipe("train", "--workers", "1")) == 6
    (tmp_path / "out/s3/sum_2/finished").unlink()  # as after an interruption
    again = recipe("train")
    assert again[6:] == [str(tmp_path / "out/s3/sum_2")]
    assert len(recipe("train", lr=0.02)) == 7 + 6


def test_a_run_that_fails_is_named_and_not_finished(recipe, tmp_path):
    with pytest.raises(SystemExit, match=r"parity, sum: fairseq-train failed, see .*train.log: .*lr must be positive"):
        recipe("train", lr=-1)
    assert not list(tmp_path.glob("out/*/*/finished"))


def test_the_report_has_every_evaluation_and_the_mean_of_the_last_ones(recipe, tmp_path, capsys):
    recipe("all")
    with (tmp_path / "out/accuracy.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["problem", "model", "seed", "updates", "accuracy"]
    assert ["s3", "sum", "2", "1", "22.0"] in rows and ["parity", "delta, beta to 2", "1", "2", "41.0"] in rows
    assert len(rows) == 1 + 6 * 2
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| model | parity | s3 |"
    assert table[2:] == ["| a guess | 50.0 | 16.7 |", "| sum | 41.5 | 41.5 |", "| delta, beta to 2 | 41.5 | - |"]
    assert (tmp_path / "out/accuracy.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report"], "no run has finished"),
        (["--workers", "0"], "--workers must be at least 1, got 0"),
        (["--conf", "none.yaml"], "none.yaml must be like .*quick.yaml, got FileNotFoundError"),
        (["--conf", "list.yaml"], "list.yaml must be like .*quick.yaml"),
        (["--conf", "model.yaml"], "model.yaml must be like .*quick.yaml, got KeyError"),
        (["test"], "invalid choice: 'test'"),
    ],
)
def test_refusals(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("list.yaml").write_text("[1, 2]")
    Path("model.yaml").write_text(json.dumps({**CONF, "models": {}}))
    monkeypatch.setattr(sys, "argv", ["problems.py", *arguments, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stopped:
        problems.main()
    said = str(stopped.value.code) + capsys.readouterr().err  # argparse writes, and exits with 2
    assert re.search(message, said)
