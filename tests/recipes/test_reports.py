"""The reports: tables, CSV and pictures of invented runs."""

import csv
import re

import made_up
import pytest
from flags import read_yaml
from recipe import Model
from reports import comparison, conversion, papers, retrieval
from retrieval import Point, read_points
from tables import read_csv

from fairseq_fwp.cli.plot_style import load_pyplot
from fairseq_fwp.synthetic.model import FwpAssociativeRetrievalConfig

RETRIEVAL = made_up.RECIPES / "associative_retrieval"
PUBLISHED = read_yaml(RETRIEVAL / "published.yaml", plain=False)


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_a_comparison_has_perplexities_per_token_and_per_word(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "test.txt").write_text("a b\n")  # 6 tokens of 2 bits make 12 bits for 3 words
    models = [Model("delta", tmp_path, tmp_path / f"delta/seed_{seed}", seed) for seed in (1, 2)]
    for model in models:
        made_up.trained(model.folder)
        made_up.result(model.folder, "test", 3.0 + model.seed)
    models.append(Model("sum", tmp_path, made_up.trained(tmp_path / "sum", diverged="at update 3\n")))
    comparison.write(tmp_path, models, "perplexity", tmp_path / "text")
    said = capsys.readouterr().out
    assert "sum is not in the table, it diverged: at update 3." in said
    head, *rows = made_up.cells(said.splitlines())
    assert head == ["model", "parameters", "test ppl", "test, per word", "updates", "hours"]
    assert rows == [["delta, 2 seeds", "1,234", "4.50 ± 0.71", "16.0 ± 0.0", "60", "0.02"]]
    assert [row["test ppl"] for row in read_csv(tmp_path / "results.csv")] == ["4.0", "5.0"]
    assert is_picture(tmp_path / "curves.png") and (tmp_path / "table.md").exists()
    comparison.write(tmp_path, models, "loss_base_2", None)
    assert "| delta, 2 seeds | 1,234 | 2.00 ± 0.00 | 60 | 0.02 |" in (tmp_path / "table.md").read_text()


def test_the_attention_length_is_the_shortest_of_the_best_validation_perplexity(tmp_path):
    """The shortest length is chosen to the two digits of the paper; the test set is read at it."""
    perplexities = {
        "valid": {"init": 27.02, "attention 120": 28.1, "attention 500": 26.7712, "attention 1000": 26.7698},
        "test": {"init": 28.02, "attention 120": 28.3, "attention 500": 27.9, "attention 1000": 27.1},
    }
    assert comparison.attention_lengths(tmp_path) == []
    for split, found in perplexities.items():
        for label, perplexity in found.items():
            made_up.result(tmp_path, f"{split} {label}", perplexity)
    assert comparison.attention_lengths(tmp_path)[2:] == [
        "| valid | 27.02 | 26.77 | 500 |",
        "| test | 28.02 | 27.90 | 500 |",
    ]


# The grid.

GRID = [
    {
        "table": "A",
        "rows": [
            {"run": "best", "row": "Best", "valid": 10.0, "test": 20.0},
            {"run": "worse", "row": "Worse", "valid": 9.0, "test": 30.0},
            {"run": "alike", "row": "Alike", "valid": 8.0, "test": 30.0},
            {"run": "none", "row": "None", "valid": 8.0, "test": 40.0},
        ],
    },
    {
        "table": "B",
        "rows": [{"run": "nan", "row": "Nan", "valid": 1.0}, {"run": "far", "row": "Far", "valid": "diverged"}],
    },
    {"table": "C", "rows": [{"run": "best", "row": "Extra"}]},
]


@pytest.fixture
def grid(tmp_path):
    """Make runs of every kind: finished with perplexity 8, 4 and 4, diverged, ended far above its best, none."""
    for name, last in (("best", 8), ("worse", 8), ("alike", 11.9), ("nan", 8), ("far", 12.1)):
        diverged = "at update 7\n" if name == "nan" else ""
        folder = made_up.trained(tmp_path / "grid" / name, (60, 8), (90, last), diverged=diverged)
        for split in ("valid", "test"):
            made_up.result(folder, split, 8.0 if (name, split) == ("best", "test") else 4.0)
    return tmp_path


def report(write, out, rows, name):
    """Return the lines of a report of rows."""
    import yaml

    path = out / f"{name}.yaml"
    path.write_text(yaml.dump(rows))
    (out / name).mkdir(exist_ok=True)
    write(path, out, out / name)
    *lines, empty, where = (out / name / "table.md").read_text().splitlines()
    assert not empty and re.fullmatch(r"`bash .*run.sh.*` at \w+, \d{4}-\d\d-\d\d, .*, torch .*\.", where)
    return lines


def test_grid_has_ranks_beside_the_papers_and_hides_nothing(grid):
    lines = report(papers.write_grid, grid, GRID, "grid")
    rows = [row for row in made_up.cells(lines) if row[0] != "row"]
    assert [row[2:] for row in rows] == [
        ["4.0", "8.0", "3", "10.0", "20.0", "1"],
        ["4.0", "4.0", "1", "9.0", "30.0", "2"],
        ["4.0", "4.0", "1", "8.0", "30.0", "2"],
        ["not run", "not run", "not run", "8.0", "40.0", "4"],
        ["diverged", "diverged", "diverged", "1.0", "-", "1"],
        ["diverged", "diverged", "diverged", "diverged", "-", "diverged"],
        ["4.0", "8.0"],
    ]
    best = next(csv.DictReader((grid / "grid" / "grid.csv").open()))
    assert (best["run"], best["parameters"], best["updates"], best["hours"]) == ("best", "1234", "90", "0.01")
    titles = [line for line in lines if line.startswith("**")]
    assert titles == ["**A**, ranked by test", "**B**, ranked by valid", "**C**"]
    assert lines[-2:] == [
        "- nan diverged: at update 7",
        "- far diverged: ended at a validation perplexity of 12.1, its best was 8.0",
    ]


def test_the_ledger_of_the_grid_shows_the_numbers_of_its_file():
    folder = made_up.RECIPES / "peps"
    rows = read_csv(folder / "results" / "grid.csv")
    rows = [row | {name: float(row[name]) for name in ("valid", "test") if row[name]} for row in rows]
    lines = papers.grid_lines(read_yaml(folder / "grid.yaml", plain=False), rows)
    assert "\n".join(lines).strip() + "\n" == (folder / "results" / "grid.md").read_text()


# The size of the state.

ROWS = [
    {"run": "delta", "row": "Delta Network", "trained": "carried", "evaluated": "carried", "flags": "--carry-state",
     "state": 0.13, "valid": 27.8, "test": 29.4},
    {"run": "sum", "row": "Linear Transformer", "trained": "carried", "evaluated": "carried", "flags": "--carry-state",
     "state": 0.13, "valid": "> 260", "test": "> 260"},
    {"run": "xl", "row": "Transformer-XL", "trained": "carried", "evaluated": "memory 7 + 1", "flags": "--carry-state",
     "numbers": 8192, "state": 0.13, "valid": 65.7, "test": 65.5},
    {"run": "xl", "row": "Transformer-XL", "trained": "carried", "evaluated": "window", "flags": "--stride 8"},
]  # fmt: skip


def test_carried_state_hides_nothing(tmp_path):
    """Delta has diverged, sum is not run, and Transformer-XL is evaluated by one of two protocols."""
    made_up.trained(tmp_path / "carried" / "delta", diverged="gradient not finite after update 7\n")
    folder = made_up.trained(tmp_path / "carried" / "xl", (50, 8.0))
    for split, ppl in (("valid", 80.0), ("test", 81.25)):
        made_up.result(folder, f"{split} memory 7 + 1", ppl, state_size=73728)
    lines = report(papers.write_carried, tmp_path, ROWS, "carried")
    assert [row[3:9] for row in made_up.cells(lines)[1:]] == [
        ["-", "diverged", "diverged", "0.13", "27.8", "29.4"],
        ["-", "not run", "not run", "0.13", "> 260", "> 260"],
        ["8,192", "80.0", "81.2", "0.13", "65.7", "65.5"],
        ["-", "not run", "not run", "-", "-", "-"],
    ]
    assert lines[-2:] == [
        "- delta diverged: gradient not finite after update 7",
        "- xl: 1,234 parameters, 50 updates, 0.010 hours",
    ]


# Conversion.


def measured(folder, measure, perplexity, state=8):
    made_up.result(folder, measure, perplexity, state_size=state)


def test_table(tmp_path):
    corpus = {
        "measures": ["valid 0", "test 0"],
        "source": {},
        "rows": [
            {"run": "softmax", "row": "softmax", "paper": {"valid 0": 14.5}},
            {"run": "decay", "row": "decay", "target": "x", "paper": {"valid 0": 14.6}},
            {"run": "delta", "row": "delta", "target": "y", "paper": {"valid 0": "diverged"}},
            {"run": "sum", "row": "sum", "target": "z", "paper": {"valid 0": 20}},
            {"run": "ours", "row": "ours", "target": "y", "paper": {}},
        ],
    }
    for measure, perplexity in (("valid 0", 10.0), ("test 0", 11.0)):
        measured(tmp_path / "softmax" / "converted", measure, perplexity, 1000)
        measured(tmp_path / "softmax", measure, perplexity - 1)
        measured(tmp_path / "decay", measure, perplexity * 1.25 + (0.012345 if measure == "valid 0" else 0))
    measured(tmp_path / "decay" / "converted", "valid 0", 4e9)
    (tmp_path / "decay" / "trained").touch()
    (tmp_path / "decay" / "train.log").write_text('num. shared model params: 9\n | {"num_updates": "4000"}\n')
    measured(tmp_path / "delta" / "converted", "valid 0", float("inf"))
    (tmp_path / "delta" / "diverged").write_text("at update 3\n")
    (tmp_path / "delta" / "train.log").write_text('num. shared model params: 9\n | {"num_updates": "3"}\n')
    (tmp_path / "sum").mkdir()
    (tmp_path / "sum" / "train.log").write_text("+ fairseq-train that has just begun\n")
    corpus["start"] = "source"
    results = conversion.read_results(corpus, tmp_path)
    assert list(results[0]) == ["run", "seed", "state", "updates", "hours", "converted, valid 0", "valid 0", "test 0"]
    assert results[2]["converted, valid 0"] == 4e9 and results[3]["valid 0"] == "diverged"
    lines = [line.strip("| ").split(" | ") for line in conversion.table(corpus, results)]
    assert lines[0][:6] == ["row", "state", "converted, valid 0", "valid 0", "test 0", "of the source"]
    assert lines[2:] == [
        ["source", "1,000", "-", "10.00", "11.00", "-", "-", "-", "-", "-"],
        ["softmax", "1,000", "10.00", "9.00", "10.00", "111.1%", "100.0%", "14.50", "100.0%", "-"],
        ["decay", "8", "4.0e+09", "12.51", "13.75", "79.9%", "71.9%", "14.60", "99.3%", "4,000"],
        ["delta", "8", "inf", "diverged", "diverged", "-", "-", "diverged", "-", "3"],
        ["sum", "-", "not run", "not run", "not run", "-", "-", "20.00", "72.5%", "-"],
        ["ours", "-", "not run", "not run", "not run", "-", "-", "-", "-", "-"],
    ]
    # Rows that are converted from fine-tuned softmax are compared with it, as in the paper.
    corpus["start"] = "softmax"
    lines = [line.strip("| ").split(" | ") for line in conversion.table(corpus, results)]
    assert lines[0][5:7] == ["of the source", "paper valid 0"] and lines[2][0] == "before fine-tuning"
    assert lines[4][5:8] == ["71.9%", "14.60", "99.3%"]


# Retrieval.


def made(arch, size, loss, dim=16, curve=None, **flags):
    """Return a result as it is read."""
    point = Point({"arch": arch, **{flag.replace("_", "-"): value for flag, value in flags.items()}})
    point.flags["num-keys"] = str(size)
    return retrieval.Result(point, curve or [(100, 0.5), (200, loss)], 3.0, dim, False)


def test_a_cell_is_the_median_of_its_seeds_in_setting_1():
    arch = "fwp_associative_retrieval"
    results = [made(arch, 16, loss, seed=str(seed)) for seed, loss in enumerate([0.3, 0.25, 0.1])]
    results.append(made(arch, 16, 0.4, lr="1"))  # another model
    results.append(made(arch, 32, 0.4, dim=32, key_dim="32"))
    results.append(made(arch, 8, 0.2, update_rule="delta", feature_map="tanh", with_replacement="false"))
    cells = retrieval.capacity(results)
    assert cells.keys() == {("sum", "elu", 16), ("sum", "elu", 32), ("delta", "tanh", 16)}  # no flags: the defaults
    model = FwpAssociativeRetrievalConfig()
    assert {"update-rule": model.update_rule, "feature-map": model.feature_map} == retrieval.DEFAULTS
    assert [result.best for result in cells["sum", "elu", 16][1]] == [0.3, 0.25, 0.1]  # not those of another model
    assert retrieval.held(16, 0.25) == 8 and [result.best for result in cells["delta", "tanh", 16][0.5]] == [0.2]


def lines_of(axes):
    """Return the points (x, y) of each line, without lines that only make an entry of the legend."""
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
    for picture in retrieval.plan_pictures(results, published):
        figure, axes = pyplot.subplots()
        picture.draw_on(axes, picture.results, *picture.given)
        shown[picture.name], labels[picture.name] = lines_of(axes), axes.get_legend_handles_labels()[1]
        pyplot.close(figure)
    assert list(shown) == ["figure2", "figure3", "figure4", "figure5"]
    assert labels["figure2"] == ["sum", "sum_dpfp1", "empty: the paper's released runs"]
    assert shown["figure2"] == [
        ((20, 0.02),),  # the median
        ((20, 0.3), (20, 0.01), (20, 0.02)),
        ((20, 0.001),),  # the paper's, up to our largest S
        ((20, 0.05),),
        ((20, 0.05),),
        ((16, 0), (16, 1)),  # the number of features
    ]
    assert shown["figure3"] == [((100, 0.06),), ((100, 0.06),)]
    assert shown["figure4"] == [((100, 0.45),), ((100, 0.45),)]
    assert shown["figure5"] == [((20, 0.06),), ((20, 0.06),), ((20, 0.002),), ((16, 0), (16, 1))]


def test_the_ledger_has_the_numbers_of_its_curves():
    """The table of RESULTS.md is that of results/points.csv, curves.csv and published.yaml."""
    curves = {}
    with (RETRIEVAL / "results/curves.csv").open() as file:
        for row in csv.DictReader(file):
            curves.setdefault(row["point"], []).append((int(row["update"]), float(row["loss"])))
    results = []
    with (RETRIEVAL / "results/points.csv").open() as file:
        for row in csv.DictReader(file):
            arch, *flags = row["point"].split(",")
            point = Point({"arch": arch, **dict(flag.split("=") for flag in flags)})
            results.append(retrieval.Result(point, curves.get(point.name, []), 0, 1, bool(row["diverged"])))
    grids = read_points([RETRIEVAL / f"conf/{name}.yaml" for name in ("quick", "slow", "capacity")])
    assert [result.point.name for result in results] == [point.name for point in grids]
    assert "\n\n" + "\n".join(retrieval.lines_of(results, PUBLISHED)) + "\n\n" in (RETRIEVAL / "RESULTS.md").read_text()
