"""The reports: tables, CSV and pictures of invented runs, and the ledgers of real ones."""

import csv
import json
import re

import comparison
import conversion
import fast_weight_layers
import figures
import language_models
import made_up
import pictures
import pytest
import translation
import yaml
from flags import read_yaml
from grids import problems, retrieval

from fairseq_fwp.cli.plot_style import load_pyplot
from fairseq_fwp.tasks.synthetic.model import FwpAssociativeRetrievalConfig

PEPS, RETRIEVAL = made_up.RECIPES / "peps", made_up.RECIPES / "associative_retrieval"
PUBLISHED = read_yaml(RETRIEVAL / "published.yaml", plain=False)
CONF = "arch: fwp_lm\ntask: language_modeling\n"
RECIPE = """
grid:
  - table: A
    rows:
      - {run: best, row: Best, valid: 10.0, test: 20.0}
      - {run: worse, row: Worse, valid: 9.0, test: 30.0}
      - {run: alike, row: Alike, valid: 8.0, test: 30.0}
      - {run: none, row: None, valid: 8.0, test: 40.0}
  - {table: B, rows: [{run: nan, row: Nan, valid: 1.0}, {run: far, row: Far, valid: diverged}]}
  - {table: C, rows: [{run: best, row: Extra}]}
carried:
  - {run: delta, row: Delta Network, trained: carried, state: 0.13, valid: 27.8, test: 29.4}
  - {run: sum, row: Linear Transformer, trained: carried, state: 0.13, valid: "> 260"}
  - {run: unit, row: Linear Transformer, trained: segments}
  - {run: xl, row: Transformer-XL, trained: carried, evaluated: memory 7 + 1, numbers: 8192, state: 0.13, valid: 65.7}
rows:
  peps: &corpus
    measures: [valid 0, test 0]
    source: {}
    rows:
      - {run: softmax, row: softmax, paper: {valid 0: 14.5}}
      - {run: decay, row: decay, target: x, paper: {valid 0: 14.6}}
      - {run: delta, row: delta, target: y, paper: {valid 0: diverged}}
      - {run: sum, row: sum, target: z, paper: {valid 0: 20}}
      - {run: ours, row: ours, target: y, paper: {}}
  gpt2: {<<: *corpus, start: softmax}
problems:
  seeds: [1, 2]
  common: {arch: fwp_lm}
  problems: {parity: {flags: {length: 4}, chance: 50, models: [sum, "delta, beta to 2"]}}
  models: {sum: {lr: 1}, "delta, beta to 2": {lr: 2, negative-eigenvalues: True}}
layers/rows:
  - {row: No FWLs, run: base, evaluated: plain, paper: {local: 25.1, xl: 17.3}}
  - {row: "Test-time only, gradients at carried weights", run: slow, evaluated: carried}
  - {row: "Dynamic evaluation, RMS", run: base, evaluated: rms, paper: {local: 22.4, xl: 15.8}}
points:
  - {arch: sum_retrieval, num-keys: [8, 20], seed: [1, 2]}
"""


@pytest.fixture
def recipe(tmp_path):
    """A recipe with a group of every kind, and the files of grids."""
    folder = tmp_path / "recipe"
    names = ["delta", "sum", "long", *(f"grid/{name}" for name in ("best", "worse", "alike", "none", "nan", "far"))]
    for name in [*names, "carried/delta", "carried/sum", "carried/unit", "carried/xl"]:
        (folder / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "conf" / f"{name}.yaml").write_text(CONF)
    for name, rows in yaml.safe_load(RECIPE).items():
        (folder / f"{name}.yaml").parent.mkdir(exist_ok=True)
        (folder / f"{name}.yaml").write_text(yaml.dump(rows, sort_keys=False))
    return folder


def make_runs(out):
    """Make runs of every kind: finished, with seeds, diverged, ended far above its best, without a result, none."""
    (out / "data" / "text").mkdir(parents=True)
    for split in ("valid", "test"):
        (out / "data" / "text" / f"{split}.txt").write_text("a b\n")  # 6 tokens of 2 bits are 12 bits for 3 words
    for seed in (1, 2):
        made_up.result(made_up.trained(out / f"delta/seed_{seed}"), "test", 3.0 + seed)
        made_up.trained(out / f"sum/seed_{seed}", diverged="at update 3\n")
    # The shortest length is chosen to the two digits of the paper, on valid.
    labels = ("init", "attention 120", "attention 500", "attention 1000")
    for split, found in {"valid": (27.02, 28.1, 26.7712, 26.7698), "test": (28.02, 28.3, 27.9, 27.1)}.items():
        for label, ppl in zip(labels, found, strict=True):
            made_up.result(made_up.trained(out / "long"), f"{split} {label}", ppl)
    for name, last in (("best", 8), ("worse", 8), ("alike", 11.9), ("nan", 8), ("far", 12.1)):
        diverged = "at update 7\n" if name == "nan" else ""
        folder = made_up.trained(out / "grid" / name, (60, 8), (90, last), diverged=diverged)
        for split in ("valid", "test"):
            made_up.result(folder, split, 8.0 if (name, split) == ("best", "test") else 4.0)
    made_up.trained(out / "carried" / "delta", diverged="gradient not finite after update 7\n")
    for seed in (1, 2):
        of_test = json.dumps({"test_ppl": str(8.5 + seed), "test_num_updates": "50"})
        more = f"2026-11-21 07:00:36 | INFO | test | {of_test}\n"
        folder = made_up.trained(out / "carried" / "unit" / f"seed_{seed}", (50, 8.0), more=more)
        for label in ("blocks", "window", "carried"):
            made_up.result(folder, f"test {label}", 70.0 + seed, state_size=512)
    folder = made_up.trained(out / "carried" / "xl", (50, 8.0))
    for split, ppl in (("valid", 80.0), ("test", 81.25)):
        made_up.result(folder, f"{split} memory 7 + 1", ppl, state_size=73728)


def make_conversions(out):
    (out / "data").mkdir(parents=True)
    made_up.trained(out / "decay", (4000, 8.0))
    made_up.trained(out / "delta", (3, 8.0), diverged="at update 3\n")
    (out / "sum").mkdir()
    (out / "sum" / "train.log").write_text("+ fairseq-train that has just begun\n")
    for measure, ppl in (("valid 0", 10.0), ("test 0", 11.0)):
        made_up.result(out / "softmax" / "converted", measure, ppl, state_size=1000)
        made_up.result(out / "softmax", measure, ppl - 1, state_size=1000)
        more = 0.012345 if measure == "valid 0" else 0
        made_up.result(out / "decay", measure, ppl * 1.25 + more, state_size=8)
    (out / "softmax" / "converted" / "flags.txt").write_text("--arch fwp_lm --tokens-per-sample 128\n")
    made_up.result(out / "decay" / "converted", "valid 0", 4e9, state_size=8)
    made_up.result(out / "delta" / "converted", "valid 0", float("inf"), state_size=8)


def make_layers(out):
    (out / "data").mkdir(parents=True)
    for name, ppl in (("valid plain", 30), ("test plain", 31), ("valid rms 1e-4", 25), ("valid rms 3e-4", 24)):
        made_up.result(out / "xl" / "base", name, ppl, tokens=100)
    made_up.result(out / "xl" / "base", "speed plain", 31, tokens=100)


def make_translations(out):
    (out / "data").mkdir(parents=True)
    for name in ("sum", "dpfp"):  # dpfp has no raw text
        for seed in (1, 2):
            folder = made_up.trained(out / name / f"seed_{seed}", (2600, 8.0), seconds=36 * 60)
            scores = {"sacrebleu": 31.0 + seed / 4, "signature": "nrefs:1"} if name == "sum" else {}
            for split in ("valid", "test"):
                made_up.result(folder, split, 1, tokenised=30.5, compound_split=30.125, **scores)


def finish(grid, logs):
    """Finish the first trainings of a grid with these logs."""
    for training, log in zip(grid.trainings, logs, strict=False):
        training.folder.mkdir(parents=True)
        (training.folder / "train.log").write_text(log)
        (training.folder / "settings.txt").write_text(" ".join(training.flags))
        assert training.end(succeeded=True)


PROVENANCE = r"^`bash .*run.sh.*` at \w+, \d{4}-\d\d-\d\d, .*, torch .*\.$"


def test_every_report_is_the_stored_one(recipe, tmp_path, capsys):
    """reports.txt has what each recipe prints, and its CSVs."""
    out, found = tmp_path / "out", []

    def report(kind, name, settings, *words, folder=recipe, logs=None):
        words = ["--recipe", str(folder), *settings.split(), "--", "report", *words, "--out", str(out / name)]
        made = kind(words)
        if logs:
            finish(made, logs)
        capsys.readouterr()
        made.run()
        said, count = re.subn(PROVENANCE, "", capsys.readouterr().out.replace(str(tmp_path), "TMP"), flags=re.M)
        assert count or kind is retrieval
        found.extend([f"== {name}", *filter(None, re.sub("The same is in .*", "", said).splitlines())])
        for path in sorted((out / name).rglob("*.csv")):
            if (kind, path.name) != (language_models.compose, "curves.csv"):  # which fwp-plot writes
                found.extend([f"-- {path.name}", *path.read_text().splitlines()])

    make_runs(out / "runs")
    for words in (["--models", "delta", "sum", "--seeds", "2"], ["--models", "grid", "carried", "long"]):
        report(language_models.compose, "runs", "--text peps --merges 9 --per-word", *words)
    for corpus in ("peps", "gpt2"):
        make_conversions(out / corpus)
        report(conversion.compose, corpus, "--text peps", "--corpus", corpus)
    make_layers(out / "fwl")
    (recipe / "layers/conf/xl").mkdir(parents=True)
    (recipe / "layers/conf/xl/base.yaml").write_text(CONF)
    report(fast_weight_layers.compose, "fwl", "--text peps --models xl", folder=recipe / "layers")
    make_translations(out / "mt")
    settings = "--pairs multi30k --merges 9 --models sum dpfp softmax"
    report(translation.compose, "mt", settings, "--seeds", "2", folder=made_up.RECIPES / "multi30k")
    logs = [made_up.log((10, 50.0), (20, accuracy), name="accuracy") for accuracy in (60.0, 70.0, 100.0)]
    report(problems, "problems", "", "--conf", str(recipe / "problems.yaml"), logs=logs)
    logs = [made_up.log((100, 0.5), (200, loss), name="loss", more="feature_dim=16\n") for loss in (0.3, 0.01, 0.02)]
    report(retrieval, "points", "", "--conf", str(recipe / "points.yaml"), folder=RETRIEVAL, logs=logs)
    pictures = [path for path in out.rglob("*.png") if path.read_bytes().startswith(b"\x89PNG")]
    assert sorted(path.name for path in pictures) == [
        "accuracy.png",
        "carried.png",
        "curves.png",
        "figure2.png",
        "grid.png",
    ]
    assert found == (made_up.ROOT / "tests/recipes/reports.txt").read_text().splitlines()


def test_the_ledger_of_the_grid_shows_the_numbers_of_its_file():
    with (PEPS / "results" / "grid.csv").open() as file:
        rows = list(csv.DictReader(file))
    rows = [row | {name: float(row[name]) for name in ("valid", "test") if row[name]} for row in rows]
    lines = comparison.grid_lines(read_yaml(PEPS / "grid.yaml", plain=False), rows)
    assert "\n".join(lines).strip() + "\n" == (PEPS / "results" / "grid.md").read_text()


def test_pictures_next_to_the_papers_tables_show_both(monkeypatch, tmp_path):
    """Multiples of the best row of a table, and perplexities by state; nothing where a word stands."""
    figures_drawn, asked = [], yaml.safe_load(RECIPE)
    monkeypatch.setattr(pictures, "save", lambda figure, path: figures_drawn.append(figure))
    found = {"best": 8.0, "worse": 4.0, "alike": 6.0, "far": "diverged"}
    pictures.draw_grid(asked["grid"], [{"run": run, "test": ppl, "valid": ppl} for run, ppl in found.items()], tmp_path)
    ours = [{"state": 9000, "test": 81.25}, {"state": 8000, "test": ""}, {"state": 900, "test": 50.0}]
    ours.append({"state": 73728, "test": 90.0})
    ways = ["carried", "carried", "window", "memory 7 + 1"]
    rows = [row | {"evaluated": way} for row, way in zip(asked["carried"], ways, strict=True)]
    pictures.draw_carried([*zip(rows, ours, strict=True), (rows[2] | {"evaluated": "blocks"}, ours[0])], tmp_path)
    grid, here, paper = (axes for figure in figures_drawn for axes in figure.axes)
    circles = [point for line in lines_of(grid) for point in line if len(line) == 1]
    # Best, worse, alike by the paper, which are 20, 30, 30 there and 2, 1, 1.5 times our best; none: only the paper's.
    assert circles[:7] == [(2, -1), (1, -1), (1, -2), (1.5, -2), (1.5, -3), (1.5, -3), (2, -4)]
    assert lines_of(here) == [((73.728, 90.0),), ((9.0, 81.25),), ((0.9, 50.0),), ((73.728, 90.0),)]
    assert lines_of(paper) == [((130.0, 29.4),)]  # sum and Transformer-XL have no test perplexity


# Retrieval.


def made(arch, size, loss, dim=16, curve=None, **flags):
    """Return a result as it is read."""
    point = {"arch": arch, **{flag.replace("_", "-"): value for flag, value in flags.items()}, "num-keys": str(size)}
    return figures.Result("", point, curve or [(100, 0.5), (200, loss)], 3.0, dim, False)


def test_a_cell_is_the_median_of_its_seeds_in_setting_1():
    arch = "fwp_associative_retrieval"
    results = [made(arch, 16, loss, seed=str(seed)) for seed, loss in enumerate([0.3, 0.25, 0.1])]
    results.append(made(arch, 16, 0.4, lr="1"))  # another model
    results.append(made(arch, 32, 0.4, dim=32, key_dim="32"))
    results.append(made(arch, 8, 0.2, update_rule="delta", feature_map="tanh", with_replacement="false"))
    cells = figures.capacity(results)
    assert cells.keys() == {("sum", "elu", 16), ("sum", "elu", 32), ("delta", "tanh", 16)}  # no flags: the defaults
    model = FwpAssociativeRetrievalConfig()
    assert {"update-rule": model.update_rule, "feature-map": model.feature_map} == figures.DEFAULTS
    assert [result.best for result in cells["sum", "elu", 16][1]] == [0.3, 0.25, 0.1]  # not those of another model
    assert [result.best for result in cells["delta", "tanh", 16][0.5]] == [0.2]
    _, axes = load_pyplot().subplots()
    figures.draw_capacity(axes, results)
    # Of 16, 32 and 8 keys, from the medians 0.25, 0.4 and 0.2.
    assert sorted(text.get_text() for text in axes.texts) == ["5", "6", "8"]


def lines_of(axes):
    """Return the points (x, y) of each line, without lines that only make an entry of the legend."""
    return [tuple(map(tuple, line.get_xydata().tolist())) for line in axes.get_lines() if len(line.get_xydata())]


def test_pictures_show_the_right_points():
    results = [made("sum_retrieval", 20, loss, seed=str(seed)) for seed, loss in enumerate([0.3, 0.01, 0.02])]
    replaced, dpfp = {"with_replacement": "true"}, "sum_dpfp1_retrieval"
    results.append(made(dpfp, 20, 0.05, curve=[(100, 0.05)]))
    results.append(made(dpfp, 20, 0.06, curve=[(100, 0.06)], **replaced))
    results.append(made(dpfp, 20, 0.07, curve=[(100, 0.07)], valid_length="20", **replaced))
    results.append(made("sum_retrieval", 600, 0.45, curve=[(100, 0.45)]))
    published = {"setting 1": {"sum_retrieval": {20: 0.001, 60: 0.1}}, "setting 2": {dpfp: {20: 0.002}}}
    shown, labels = {}, {}
    for picture in figures.plan_pictures(results, published):
        figure, axes = load_pyplot().subplots()
        picture.draw_on(axes, picture.results, *picture.given)
        shown[picture.name], labels[picture.name] = lines_of(axes), axes.get_legend_handles_labels()[1]
        load_pyplot().close(figure)
    assert labels["figure2"] == ["sum", "sum_dpfp1", "empty: the paper's released runs"]
    features = ((16, 0), (16, 1))
    seeds, theirs = ((20, 0.3), (20, 0.01), (20, 0.02)), ((20, 0.001),)  # the paper's, up to our largest S
    assert shown == {
        "figure2": [((20, 0.02),), seeds, theirs, ((20, 0.05),), ((20, 0.05),), features],
        "figure3": [((100, 0.06),), ((100, 0.06),)],
        "figure4": [((100, 0.45),), ((100, 0.45),)],
        "figure5": [((20, 0.06),), ((20, 0.06),), ((20, 0.002),), features],
    }


def test_the_ledger_has_the_numbers_of_its_curves(tmp_path):
    """The table of RESULTS.md is that of results/points.csv, curves.csv and published.yaml."""
    curves, results = {}, []
    with (RETRIEVAL / "results/curves.csv").open() as file:
        for row in csv.DictReader(file):
            curves.setdefault(row["point"], []).append((int(row["update"]), float(row["loss"])))
    with (RETRIEVAL / "results/points.csv").open() as file:
        for row in csv.DictReader(file):
            arch, *flags = row["point"].split(",")
            point = {"arch": arch, **dict(flag.split("=") for flag in flags)}
            results.append(
                figures.Result(row["point"], point, curves.get(row["point"], []), 0, 1, bool(row["diverged"]))
            )
    confs = [word for name in ("quick", "slow", "capacity") for word in ("--conf", f"{RETRIEVAL}/conf/{name}.yaml")]
    grid = retrieval(["--recipe", str(RETRIEVAL), "--", "plan", *confs, "--out", str(tmp_path)])
    assert [result.name for result in results] == [training.name for training in grid.trainings]
    assert "\n\n" + "\n".join(figures.lines_of(results, PUBLISHED)) + "\n\n" in (RETRIEVAL / "RESULTS.md").read_text()
