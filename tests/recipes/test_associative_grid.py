"""The grid of retrieval trainings: its points, what their logs say, and its pictures."""

import csv
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from fairseq import options

from fairseq_fwp.cli.plot_style import COLOURS, load_pyplot
from fairseq_fwp.models.fwp_associative_retrieval import FwpAssociativeRetrievalConfig
from fairseq_fwp.models.retrieval_presets import RETRIEVAL_PRESETS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

FOLDER = Path(__file__).parents[2] / "recipes/associative_retrieval"

sys.path.append(str(FOLDER))  # its files import each other

import retrieval_grid as grid  # noqa: E402
import retrieval_report as report  # noqa: E402

CONFS = sorted(path for path in FOLDER.glob("conf/*.yaml") if path.name != "common.yaml")
PUBLISHED = report.read_published()
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
    grid.finish(folder, grid.read_outcome(folder / "train.log"))


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


def test_a_point_goes_before_what_all_share(tmp_path):
    point = grid.Point({"arch": "a", "lr": "1", "cpu": "false", "with-replacement": "true", "num-keys": "3"}, 1)
    words = point.command({"lr": "2", "cpu": "true", "batch-size": "32"}, tmp_path)
    assert [words[words.index(flag) + 1] for flag in ("--lr", "--batch-size", "--num-keys")] == ["1", "32", "3"]
    assert words.count("--lr") == 1 and "--cpu" not in words and "false" not in words
    assert words[words.index("--with-replacement") + 1].startswith("--")


def test_a_points_folder_has_no_spaces_and_is_one_folder():
    point = grid.Point({"arch": "a", "adam-betas": "(0.9, 0.98)", "log-file": "/tmp/a b", "num-keys": "3"}, 1)
    assert point.name == "a,adam-betas=(0.9,_0.98),log-file=_tmp_a_b,num-keys=3"


def test_what_all_share_is_the_papers():
    assert {flag: COMMON[flag] for flag in ("optimizer", "lr", "batch-size")} == {
        "optimizer": "adam",
        "lr": "1e-3",
        "batch-size": "32",
    }


ENTRY = "- {arch: sum_retrieval, num-keys: 3, seconds-per-key: 1"


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "grid.yaml: expected a list of entries, as in conf/quick.yaml, got nothing"),
        ("arch: sum_retrieval", "expected a list of entries, as in conf/quick.yaml, got a mapping"),
        ("sum_retrieval", "expected a list of entries, as in conf/quick.yaml, got one value"),
        (ENTRY, "grid.yaml: expected YAML, got while parsing a flow mapping"),
        (f"{ENTRY}}}\n- delta", "grid.yaml, entry 2: expected flags and their values, got 'delta'"),
        ("- {arch: a, num-keys: 3}", "entry 1: expected seconds-per-key, got only arch, num-keys"),
        ("- {arch: a, seconds-per-key: 3}", "entry 1: expected num-keys, got only arch, seconds-per-key"),
        ("- {num-keys: 2, seconds-per-key: 3}", "entry 1: expected arch, got only num-keys, seconds-per-key"),
        ("- {arch: a, num-keys: [], seconds-per-key: 3}", "expected a value or a list of values of num-keys, got []"),
        (f"{ENTRY}, lr: {{a: 1}}}}", "expected a value or a list of values of lr, got {'a': '1'}"),
        (f"{ENTRY}, lr: }}", "expected a value or a list of values of lr, got ''"),
        ("- {arch: a, num-keys: [3, x], seconds-per-key: 3}", "expected a positive integer as num-keys, got 'x'"),
        ("- {arch: a, num-keys: 0, seconds-per-key: 3}", "expected a positive integer as num-keys, got '0'"),
        ("- {arch: a, num-keys: 3, seconds-per-key: inf}", "expected a positive number as seconds-per-key, got 'inf'"),
        ("- {arch: a, num-keys: 3, seconds-per-key: [1, 2]}", "expected one value of seconds-per-key, got ['1', '2']"),
    ],
)
def test_grids_without_a_meaning(tmp_path, text, said):
    conf = tmp_path / "grid.yaml"
    conf.write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        grid.read_points([conf])


@pytest.mark.parametrize(
    "more, reason",
    [
        ("arch: summ_retrieval", "argument --arch/-a: invalid choice: 'summ_retrieval'"),
        ("seed: [1, one]", "argument --seed: invalid int value: 'one'"),
        ("with-replacement: False", "unrecognized arguments: False"),
    ],
)
def test_flags_that_fairseq_refuses_are_no_plan(tmp_path, more, reason):
    conf = tmp_path / "grid.yaml"
    conf.write_text(f"{ENTRY}, {more}}}" if "arch" not in more else f"{ENTRY.replace('arch: sum_retrieval', more)}}}")
    with pytest.raises(ValueError, match="fairseq-train refuses its flags: ") as error:
        grid.check(grid.read_points([conf]), COMMON, tmp_path)
    assert str(error.value).endswith(reason) and "\n" not in str(error.value)


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
    assert nothing.best == float("inf") and not nothing.diverged and not nothing.counts


def test_the_best_evaluation_counts_not_the_last(tmp_path):
    point = grid.Point({"arch": "a", "num-keys": "8"}, 1)
    write_log(tmp_path, point, [(100, 0.4), (200, 0.123456789), (300, 0.25)])
    outcome = grid.read_finished(tmp_path / point.name)
    assert outcome.best == 0.123456789 and outcome.updates == 300
    report.write_tables([report.Result(point, outcome)], tmp_path)
    assert (tmp_path / "points.csv").read_text().splitlines()[1] == '"a,num-keys=8",8,16,0.123,200,300,3,'
    curve = (tmp_path / "curves.csv").read_text().splitlines()[1:]
    assert [line.rsplit(",", 2)[1:] for line in curve] == [["100", "0.4"], ["200", "0.123457"], ["300", "0.25"]]


def test_damaged_points_are_named(tmp_path):
    point = grid.Point({"arch": "a", "num-keys": "8"}, 1)
    folder = tmp_path / point.name
    assert grid.read_finished(folder) is None
    write_log(tmp_path, point, [(100, 0.4), (200, 0.3), (300, 0.2)])
    whole = (folder / "train.log").read_text()
    damage = f"^{re.escape(str(folder))} is damaged: .*; remove the folder to train the point again.$"

    (folder / "train.log").write_text(whole[: whole.index('"300"')])
    with pytest.raises(ValueError, match=damage) as error:
        grid.read_finished(folder)
    assert "finished with best loss 0.2, 300 updates, its train.log has best loss 0.3, 200" in str(error.value)

    (folder / "train.log").write_text(whole + 'now | {"epoch": 4, | {"epoch": 5, "valid_loss": "0.1"}')
    with pytest.raises(ValueError, match=damage):
        grid.read_finished(folder)

    (folder / "finished").write_text("")  # as earlier versions left it
    (folder / "train.log").write_text(whole)
    assert grid.read_finished(folder).best == 0.2
    (folder / "train.log").unlink()
    with pytest.raises(ValueError, match=damage):
        grid.read_finished(folder)


def test_plan_counts_what_is_left(conf):
    points = grid.read_points([conf])
    said = grid.plan(points[1:], 1, workers=2)
    assert said.startswith("15 points to train (1 are finished): at most about 9 minutes of a core")
    assert "4 minutes with 2 at once, if seconds-per-key of the grid holds here" in said
    said = grid.plan([grid.Point({"arch": "a", "num-keys": "3"}, 0.5)], 0, workers=2)
    assert "at most about 2 s of a core" in said and " 1 s with 2 at once" in said


def test_tables_and_pictures(conf, tmp_path, capsys):
    """Of what is there: sum with tanh was not run at 20."""
    for point in grid.read_points([conf]):
        rule_map = point.flags.get("feature-map")
        if (rule_map, point.size) != ("tanh", 20):
            loss = 0.3 if (rule_map, point.size) == ("elu", 20) else 0.001
            write_log(tmp_path, point, [(100, 0.4), (200, loss)])
    results = report.read_results([conf], tmp_path)
    assert len(results) == 15
    cells = report.by_rule_and_map(results)
    losses = {name: {ratio: cell.loss for ratio, cell in row.items()} for name, row in cells.items()}
    assert losses == {
        ("sum", "elu", 16): {0.5: 0.001, 1: 0.001, 1.25: 0.3},
        ("sum", "tanh", 16): {0.5: 0.001, 1: 0.001},
    }
    assert [cells["sum", "elu", 16][ratio].held for ratio in (0.5, 1, 1.25)] == [8, 16, 8]
    report.write_tables(results, tmp_path)
    rows = (tmp_path / "points.csv").read_text().splitlines()
    assert len(rows) == 16 and rows[1] == '"sum_retrieval,seed=1,num-keys=8",8,16,0.001,200,200,3,'
    assert len((tmp_path / "curves.csv").read_text().splitlines()) == 1 + 2 * 15
    lines = report.markdown(results, PUBLISHED)
    assert lines[2] == "| 1 | sum | 8 | 0.001, 0.001 | 200, 200 | - |"
    assert lines[3] == "| 1 | sum | 20 | 0.001, 0.001 | 200, 200 | 0.000889 |"
    assert lines[-1] == "| 2 | delta | 20 | 0.001 | 200 | 0.000796 |"
    report.report([conf], tmp_path)
    said = capsys.readouterr().out.splitlines()
    names = [f"{name}.png" for name in ("figure2", "ratio", "figure3", "figure4", "figure5", "capacity")]
    assert said == [*(f"{tmp_path / name}" for name in names), NOT_FINISHED.format(1)]
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


NOT_FINISHED = "not drawn: {} points that are not finished; the stage plan names them."


def made(arch, size, loss, dim=16, curve=None, **flags):
    """A result as it is read."""
    point = grid.Point({"arch": arch, **{flag.replace("_", "-"): value for flag, value in flags.items()}}, 1)
    point.flags["num-keys"] = str(size)
    return report.Result(point, grid.Outcome(curve or [(100, 0.5), (200, loss)], 3.0, dim, False))


def test_a_cell_is_the_median_of_its_seeds_in_setting_1():
    arch = "fwp_associative_retrieval"
    results = [made(arch, 16, loss, seed=str(seed)) for seed, loss in enumerate([0.3, 0.25, 0.1])]
    results.append(made(arch, 16, 0.4, lr="1"))  # another model
    results.append(made(arch, 32, 0.4, dim=32, key_dim="32"))
    results.append(made(arch, 8, 0.2, update_rule="delta", feature_map="tanh", with_replacement="false"))
    cells = report.by_rule_and_map(results)
    assert cells.keys() == {("sum", "elu", 16), ("sum", "elu", 32), ("delta", "tanh", 16)}  # no flags: the defaults
    model = FwpAssociativeRetrievalConfig()
    assert {"update-rule": model.update_rule, "feature-map": model.feature_map} == report.DEFAULTS
    assert cells["sum", "elu", 16][1].loss == 0.25 and cells["sum", "elu", 16][1].held == 8
    assert cells["delta", "tanh", 16][0.5].loss == 0.2


def test_every_row_of_a_users_grid_is_drawn_or_named(tmp_path, capsys):
    """First the guide's own example, then rows of every kind."""
    guide = (FOLDER.parents[1] / "fairseq_fwp/README.md").read_text().split("## Synthetic retrieval")[1]
    conf, out = tmp_path / "grid.yaml", tmp_path / "out"
    conf.write_text(guide.split("```yaml\n")[1].split("```")[0])
    (picture, ratio) = report.plan_pictures([made_of(point) for point in grid.read_points([conf])], PUBLISHED)
    assert {result.model for result in picture.results} == {"sum_retrieval", "delta_retrieval"}
    assert picture.results == ratio.results and len(picture.results) == 8
    arch = {"arch": "fwp_associative_retrieval", "num-keys": 8, "seconds-per-key": 1}
    rows = [
        {"arch": list(RETRIEVAL_PRESETS), "num-keys": [20, 600], "with-replacement": switch, "seconds-per-key": 1}
        for switch in ("true", "false")
    ]
    rows += [{**arch, "update-rule": list(UPDATE_RULES), "lr": [1, 2]}, {**arch, "with-replacement": "true"}]
    rows += [{**arch, "valid-length": 4}, {**arch, "num-keys": 16}]
    conf.write_text(yaml.safe_dump(rows))
    points = grid.read_points([conf])
    assert len(points) == 4 * len(RETRIEVAL_PRESETS) + 2 * len(UPDATE_RULES) + 3
    for point in points[:-1]:
        write_log(out, point, [(100, 0.1)])
    report.report([conf], out)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not drawn: ")]
    named = {line.split(": ")[1] for line in said[:-1]}
    assert named == {point.name for point in points[:-1] if "lr=2" in point.name or "valid-length" in point.name}
    assert said[-1] == NOT_FINISHED.format(1)


def made_of(point, loss=0.1):
    """A result of a point."""
    return report.Result(point, grid.Outcome([(100, loss)], 3.0, 16, False))


def lines_of(axes):
    """What is drawn: (x, y) of each line of numbers, without those that only stand for an entry of the legend."""
    return [tuple(map(tuple, line.get_xydata().tolist())) for line in axes.get_lines() if len(line.get_xydata())]


def test_pictures_show_the_right_points():
    pyplot = load_pyplot()
    results = [made("sum_retrieval", 20, loss, seed=str(seed)) for seed, loss in enumerate([0.3, 0.01, 0.02])]
    results.append(made("sum_dpfp1_retrieval", 20, 0.05, curve=[(100, 0.05)]))
    replaced = {"with_replacement": "true"}
    results.append(made("sum_dpfp1_retrieval", 20, 0.06, curve=[(100, 0.06)], **replaced))
    results.append(made("sum_dpfp1_retrieval", 20, 0.07, curve=[(100, 0.07)], valid_length="20", **replaced))
    results.append(made("sum_retrieval", 600, 0.45, curve=[(100, 0.45)]))
    published = {
        "setting 1": {"sum_retrieval": {20: 0.001, 60: 0.1}},
        "setting 2": {"sum_dpfp1_retrieval": {20: 0.002}},
    }
    shown, labels = {}, {}
    for picture in report.plan_pictures(results, published):
        figure, axes = pyplot.subplots()
        picture.draw_on(axes, picture.results, *picture.given)
        shown[picture.name], labels[picture.name] = lines_of(axes), axes.get_legend_handles_labels()[1]
        pyplot.close(figure)
    assert list(shown) == ["figure2", "ratio", "figure3", "figure4", "figure5"]
    assert labels["figure2"] == ["sum, ELU+1", "sum, DPFP-1", "empty: the paper's released runs"]
    assert shown["figure2"] == [
        ((20, 0.02),),  # the median
        ((20, 0.3), (20, 0.01), (20, 0.02)),
        ((20, 0.001),),  # the paper's, up to our largest S
        ((20, 0.05),),
        ((20, 0.05),),
        ((16, 0), (16, 1)),  # the number of features
    ]
    *ours, one, bound = shown["ratio"]
    assert ours == [((1.25, 0.02),), ((1.25, 0.05),)] and one == ((1, 0), (1, 1))
    assert bound[0] == (1, 0) and bound[-1] == pytest.approx((1.25, 0.1))  # (1 - 1 / 1.25) / 2
    assert bound[10] == pytest.approx((1.1, (1 - 1 / 1.1) / 2))
    assert shown["figure3"] == [((100, 0.06),), ((100, 0.06),)]
    assert shown["figure4"] == [((100, 0.45),), ((100, 0.45),)]
    assert shown["figure5"] == [((20, 0.06),), ((20, 0.06),), ((20, 0.002),), ((16, 0), (16, 1))]


def test_a_rule_has_its_colour_and_its_models_differ():
    made_up = [made(arch, 20, 0.1) for arch in ("delta_dpfp1_retrieval", "sum_retrieval", "delta_retrieval")]
    made_up.append(made("sum_retrieval", 20, 0.1, update_rule="decay"))
    styles = report.model_styles(made_up)
    assert len({(style.colour, style.marker) for style in styles.values()}) == len(styles) == 4
    firsts = {"delta": "delta_dpfp1_retrieval", "sum": "sum_retrieval", "decay": "sum_retrieval,update-rule=decay"}
    for rule, model in firsts.items():
        assert styles[model].colour == COLOURS[rule].lower()


def test_the_papers_released_runs():
    """Every size of its grids, but where FAVOR+ with delta was never a number; the longer log at 100 keys."""
    first, second = PUBLISHED["setting 1"], PUBLISHED["setting 2"]
    assert all(list(losses) == list(range(20, 601, 20)) for losses in first.values()) and len(first) == 8
    ends = {model: max(losses) for model, losses in second.items()}
    assert {ends.pop(f"delta_favor{features}_retrieval") for features in (64, 128)} == {120}
    assert set(ends.values()) == {200} and len(ends) == 6
    assert second["delta_dpfp2_retrieval"][100] == 0.00357
    assert [size for size, loss in first["softmax_retrieval"].items() if loss > 0.001][:3] == [360, 460, 500]
    assert {model.split(",")[0] for model in {**first, **second}} <= RETRIEVAL_PRESETS.keys()


def test_the_ledger_has_the_numbers_of_its_curves():
    """The table of RESULTS.md is that of results/points.csv, curves.csv and published.yaml."""
    curves = {}
    with (FOLDER / "results/curves.csv").open() as file:
        for row in csv.DictReader(file):
            curves.setdefault(row["point"], []).append((int(row["update"]), float(row["loss"])))
    results = []
    with (FOLDER / "results/points.csv").open() as file:
        for row in csv.DictReader(file):
            arch, *flags = row["point"].split(",")
            point = grid.Point({"arch": arch, **dict(flag.split("=") for flag in flags)}, 1)
            results.append(report.Result(point, grid.Outcome(curves.get(point.name, []), 0, 1, bool(row["diverged"]))))
    grids = grid.read_points([FOLDER / f"conf/{name}.yaml" for name in ("quick", "slow", "capacity")])
    assert [result.point.name for result in results] == [point.name for point in grids]
    assert "\n\n" + "\n".join(report.markdown(results, PUBLISHED)) + "\n\n" in (FOLDER / "RESULTS.md").read_text()


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
        {"arch": "sum_dpfp1_retrieval", "lr": "1e30", "num-keys": 3, "max-update": 5, "seconds-per-key": 1},
        {"arch": "sum_retrieval", "key-dim": 0, "num-keys": 3, "max-update": 2, "seconds-per-key": 1},
    ]
    conf = tmp_path / "grid.yaml"
    conf.write_text(yaml.safe_dump(rows))
    result = run_grid(conf, tmp_path / "out", "--workers", "2")
    assert result.returncode == 1 and "4 points to train (0 are finished)" in result.stdout
    said = result.stderr.splitlines()[-1]
    assert said.count("max-update") == 1 and "key-dim=0" in said and said.endswith("run.sh report draws the others.")
    assert "failed, see train.log" in said and "Traceback" not in result.stderr
    diverged, *finished = sorted(path.parent for path in (tmp_path / "out").glob("*/finished"))
    assert grid.read_finished(diverged).diverged
    assert diverged.name.startswith("sum_dpfp1") and [folder.name for folder in finished] == [
        f"sum_retrieval,key-dim=4,max-update=2,num-keys={size}" for size in (3, 4)
    ]
    assert sorted(path.name for path in finished[0].iterdir()) == ["finished", "train.log"]
    before = (finished[0] / "train.log").read_text()
    assert before.startswith("+ fairseq-train --user-dir") and "--num-keys 3" in before
    conf.write_text(yaml.safe_dump(rows[:1]))
    again = run_grid(conf, tmp_path / "out")
    assert again.returncode == 0 and "0 points to train (2 are finished)" in again.stdout
    assert (finished[0] / "train.log").read_text() == before


def interrupt(conf, out, how):
    """Ends a grid, and its process alone, at its first checkpoint."""
    (point,) = grid.read_points([conf])
    log = out / point.name / "train.log"
    before = log.stat().st_size if log.exists() else 0
    command = [sys.executable, FOLDER / "retrieval_grid.py", conf, "--out", out, "--workers", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (log.exists() and b"Saved checkpoint" in log.read_bytes()[before:]):
            time.sleep(0.01)
        process.send_signal(how)
        said = process.communicate()[1]
    assert process.returncode == 1 and said.endswith("stopped; the same command goes on.\n")
    # A training that went on would have the lock still.
    with (out / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
def test_an_interrupted_grid_leaves_no_training_and_goes_on(tmp_path):
    flags = {"key-dim": 4, "updates-per-epoch": 20, "stop-loss": 0, "stop-updates": 0, "max-update": 600}
    conf, out = tmp_path / "grid.yaml", tmp_path / "out"
    conf.write_text(yaml.safe_dump([{"arch": "sum_retrieval", **flags, "num-keys": 3, "seconds-per-key": 1}]))
    interrupt(conf, out, signal.SIGINT)
    interrupt(conf, out, signal.SIGTERM)
    result = run_grid(conf, out)
    assert result.returncode == 0, result.stderr
    (point,) = grid.read_points([conf])
    updates = [update for update, _ in grid.read_finished(out / point.name).evaluations]
    assert updates == list(range(20, 601, 20))
    log = (out / point.name / "train.log").read_text()
    assert log.count("+ fairseq-train") == 3 and log.count("Loaded checkpoint") == 2


def test_a_folder_has_one_grid(conf, tmp_path):
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = run_grid(conf, tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith(f"retrieval_grid.py: another grid runs in {tmp_path}: ")
    assert result.stderr.count("\n") == 1


def test_refusals(conf, tmp_path):
    result = run_grid(conf, tmp_path, script="retrieval_report.py")
    assert result.returncode == 1 and "train them first" in result.stderr and "Traceback" not in result.stderr
    (tmp_path / "empty.yaml").touch()
    for script in ("retrieval_grid.py", "retrieval_report.py"):
        result = run_grid(tmp_path / "empty.yaml", tmp_path, script=script)
        assert result.returncode == 1 and result.stderr.startswith(f"{script}: {tmp_path}/empty.yaml: expected a list")
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
        (["--conf", "missing.yaml", "plan"], 1, "there is no missing.yaml."),
        (["plan", "report"], 1, "there are two stages, plan and report: name one."),
    ],
)
def test_run_sh(tmp_path, arguments, status, said):
    copy = tmp_path / "recipes"
    shutil.copytree(FOLDER, copy / FOLDER.name, ignore=shutil.ignore_patterns("results", "__pycache__"))
    shutil.copy(FOLDER.parent / "train_flags.py", copy)
    (tmp_path / "fairseq_fwp").symlink_to(FOLDER.parents[1] / "fairseq_fwp")
    (copy / "env.sh").write_text(f'root={str(tmp_path)!r}\nrun() {{ "$@"; }}\n')
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", copy / FOLDER.name / "run.sh", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (result.returncode == 0) == (status == 0) and said in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
