"""The grid of retrieval trainings: its points, what their logs say, and its pictures."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fairseq import options

FOLDER = Path(__file__).parents[2] / "recipes/associative_retrieval"

sys.path.append(str(FOLDER))  # its files import each other

import retrieval_grid as grid  # noqa: E402
import retrieval_report as report  # noqa: E402

CONFS = sorted(path for path in FOLDER.glob("conf/*.yaml") if path.name != "common.yaml")
COMMON = yaml.load((FOLDER / "conf/common.yaml").read_text(), Loader=yaml.BaseLoader)


def write_log(out, point, evaluations, dim=16, more=""):
    """What fairseq-train says of a finished point."""
    folder = out / point.name
    folder.mkdir(parents=True)
    lines = [f"+ fairseq-train\n(memory): FastWeightMemory(feature_dim={dim}, num_values=8)"]
    for update, loss in evaluations:
        values = {"epoch": 1, "valid_loss": str(loss), "valid_num_updates": str(update)}
        lines += [f"| INFO | valid | {json.dumps(values)}", '| INFO | train | {"epoch": 1, "train_wall": "3"}']
    (folder / "train.log").write_text("\n".join([*lines, more]))
    (folder / "finished").touch()


@pytest.fixture
def conf(tmp_path):
    rows = [
        {"arch": ["sum_retrieval", "sum_dpfp1_retrieval"], "num-keys": [8, 20], "seed": [1, 2], "seconds-per-key": 3},
        {"arch": "delta_retrieval", "num-keys": 20, "with-replacement": "true", "seconds-per-key": 3},
        {"arch": "sum_retrieval", "num-keys": 600, "seed": 1, "seconds-per-key": 0.1},
        {"arch": "fwp_associative_retrieval", "update-rule": "sum", "feature-map": ["elu", "tanh"],
         "num-keys": [8, 16, 20], "seconds-per-key": 1},
    ]  # fmt: skip
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(rows))
    return path


def test_lists_multiply(conf):
    points = grid.read_points([conf])
    names = [point.name for point in points]
    assert len(set(names)) == len(names) == 16
    assert names[:3] == [f"sum_retrieval,seed={seed},num-keys={size}" for seed, size in [(1, 8), (1, 20), (2, 8)]]
    assert sum(point.seconds for point in points) == 3 * (4 * 28 + 20) + 60 + 2 * 44
    assert grid.read_points([conf, conf]) == points  # what two grids have is trained once


@pytest.mark.parametrize("conf", CONFS, ids=lambda path: path.stem)
def test_every_point_is_a_valid_command(conf, tmp_path):
    """By fairseq's own parser, one of those that only differ in seed and size."""
    points = {re.sub(r",(seed|num-keys)=\d+", "", point.name): point for point in grid.read_points([conf])}
    for point in points.values():
        command = point.command(COMMON, tmp_path / point.name)
        args = options.parse_args_and_arch(options.get_training_parser(), command[1:])
        assert args.arch == point.flags["arch"] and args.num_keys == point.size
        assert args.save_dir == str(tmp_path / point.name)


def test_a_log_of_two_starts_counts_each_evaluation_once(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("")
    entries = [(100, 0.4), (200, 0.3), (200, 0.2), (300, float("nan"))]  # an interruption in front of the third
    point = grid.Point({"arch": "a", "num-keys": "8"}, 1)
    write_log(tmp_path, point, entries, more="FloatingPointError: gradients are Nan/Inf\n")
    found = grid.read_outcome(tmp_path / point.name / "train.log")
    assert found.evaluations[:2] == [(100, 0.4), (200, 0.2)] and found.evaluations[2][0] == 300
    assert found.best == 0.2 and found.feature_dim == 16 and found.seconds == 3 and found.diverged
    nothing = grid.read_outcome(tmp_path / "missing.log")
    assert nothing.best == float("inf") and not nothing.diverged


def test_plan_counts_what_is_left(conf):
    points = grid.read_points([conf])
    said = grid.plan(points[1:], 1, workers=2)
    assert said.startswith("15 points to train (1 are finished): at most about 9 minutes of a core")
    assert said.endswith("4 minutes with 2 at once.")


def test_tables_and_pictures(conf, tmp_path):
    """Of what is there: sum with tanh was not run at 20."""
    for point in grid.read_points([conf]):
        rule_map = point.flags.get("feature-map")
        if (rule_map, point.size) != ("tanh", 20):
            loss = 0.3 if (rule_map, point.size) == ("elu", 20) else 0.001
            write_log(tmp_path, point, [(100, 0.4), (200, loss)])
    results = report.read_results([conf], tmp_path)
    assert len(results) == 15
    cells = report.by_rule_and_map(results)
    losses = {name: {ratio: found.outcome.best for ratio, found in row.items()} for name, row in cells.items()}
    assert losses == {
        ("sum", "elu"): {0.5: 0.001, 1: 0.001, 1.25: 0.3},
        ("sum", "tanh"): {0.5: 0.001, 1: 0.001},
    }
    assert [cells["sum", "elu"][ratio].held for ratio in (0.5, 1, 1.25)] == [8, 16, 8]
    report.write_tables(results, tmp_path)
    rows = (tmp_path / "points.csv").read_text().splitlines()
    assert len(rows) == 16 and rows[1] == '"sum_retrieval,seed=1,num-keys=8",8,16,0.001,200,200,3,'
    assert len((tmp_path / "curves.csv").read_text().splitlines()) == 1 + 2 * 15
    published = report.read_published()
    lines = report.markdown(results, published)
    assert lines[2] == "| 1 | sum | 8 | 0.001, 0.001 | 200, 200 | - |"
    assert lines[3] == "| 1 | sum | 20 | 0.001, 0.001 | 200, 200 | 0.0009 |"
    assert lines[-1] == "| 2 | delta | 20 | 0.001 | 200 | - |"
    names = ["figure2", "ratio", "figure3", "figure4", "figure5", "capacity"]
    assert [path.stem for path in report.draw(results, published, tmp_path)] == names
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_published_numbers_are_of_architectures_that_are_drawn():
    published = report.read_published()
    assert published["setting 1"].keys() == report.STYLES.keys()
    assert published["setting 2"].keys() <= report.RULE_STYLES.keys()


def run_grid(conf, out, *flags, script="retrieval_grid.py"):
    return subprocess.run(
        [sys.executable, FOLDER / script, conf, "--out", out, *flags],
        capture_output=True,
        text=True,
        check=False,
    )


def test_points_are_trained_once_and_failures_are_named(tmp_path):
    rows = [
        {"arch": "sum_retrieval", "key-dim": 4, "num-keys": [3, 4], "max-update": 2, "seconds-per-key": 1},
        {"arch": "sum_retrieval", "key-dim": 0, "num-keys": 3, "max-update": 2, "seconds-per-key": 1},
    ]
    conf = tmp_path / "grid.yaml"
    conf.write_text(yaml.safe_dump(rows))
    result = run_grid(conf, tmp_path / "out", "--workers", "2")
    assert result.returncode == 1 and "3 points to train (0 are finished)" in result.stdout
    assert "failed, see train.log" in result.stderr and "key-dim=0" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    finished = sorted(path.parent for path in (tmp_path / "out").glob("*/finished"))
    assert [folder.name for folder in finished] == [
        f"sum_retrieval,key-dim=4,max-update=2,num-keys={size}" for size in (3, 4)
    ]
    assert sorted(path.name for path in finished[0].iterdir()) == ["finished", "train.log"]
    before = (finished[0] / "train.log").read_text()
    assert before.startswith("+ fairseq-train --user-dir") and "--num-keys 3" in before
    conf.write_text(yaml.safe_dump(rows[:1]))
    again = run_grid(conf, tmp_path / "out")
    assert again.returncode == 0 and "0 points to train (2 are finished)" in again.stdout
    assert (finished[0] / "train.log").read_text() == before


def test_refusals(conf, tmp_path):
    result = run_grid(conf, tmp_path, script="retrieval_report.py")
    assert result.returncode == 1 and "train them first" in result.stderr and "Traceback" not in result.stderr
    result = run_grid(conf, tmp_path, "--workers", "0")
    assert result.returncode == 1 and "--workers must be at least 1" in result.stderr


@pytest.mark.parametrize(
    "arguments, status, said",
    [
        (["plan"], 0, "points to train (0 are finished)"),
        (["report"], 1, "train them first"),
        (["nonsense"], 1, "there is no stage nonsense: it is plan, train, report or all."),
        (["plan", "--conf", "missing.yaml"], 1, "there is no missing.yaml."),
        (["plan", "--size", "3"], 1, "there is no --size: it is --conf, --out or --workers."),
        (["plan", "--workers"], 1, "--workers needs a value."),
    ],
)
def test_run_sh(tmp_path, arguments, status, said):
    copy = tmp_path / "recipes"
    shutil.copytree(FOLDER, copy / FOLDER.name, ignore=shutil.ignore_patterns("results", "__pycache__"))
    (copy / "env.sh").write_text(f'root={str(tmp_path)!r}\nrun() {{ "$@"; }}\n')
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", copy / FOLDER.name / "run.sh", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (result.returncode == 0) == (status == 0) and said in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
