"""Recipes of fast weight layers: train each base, add a layer on top, and evaluate both."""

import shutil
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import evaluation
import language_models
from commands import RecipeError, run, whole
from data.prepare import preprocess
from evaluation import Perplexity, Ways
from flags import read_yaml
from log import read_json
from model import Model, Models
from recipe import STAGES, Recipe
from start import ModelStart
from tables import markdown, save, show

SPEED_LINES = 400  # of the test text, for measurements of speed
TITLES = {"local": "Local attention", "xl": "Transformer-XL"}


def compose(arguments: list[str]) -> Recipe:
    recipe = language_models.compose(arguments, STAGES, bases_first)
    request, data, start = recipe.request, recipe.data, recipe.start
    (perplexity,) = recipe.evaluations
    if data.lines:  # a trial
        perplexity = perplexity._replace(ways=few_statistics(perplexity.ways))
    speed = [] if request.test else [Speed(perplexity, data.lines or SPEED_LINES)]
    start = LayerStart(start, Models(request.recipe, request.out))
    table = LayerTable(request.recipe, request.out)
    return recipe._replace(start=start, evaluations=[perplexity, *speed], table=table, sample=None)


def bases_first(names: list[str]) -> list[str]:
    """Return the names of models of the paper's two bases, the bases before what is added to them."""
    of_paper = [name for name in names if not name.startswith("wt103/")]
    return sorted(of_paper, key=lambda name: not name.endswith("/base"))


def few_statistics(ways: Ways) -> Ways:
    """Return the ways with statistics of RMS from fewer batches."""
    return lambda name: [way._replace(flags=way.flags.replace("statistics 400", "statistics 4")) for way in ways(name)]


class LayerStart(NamedTuple):
    """The start of a model with a layer: its base with a new layer on top, which does not change the outputs yet."""

    of_base: ModelStart
    models: Models

    def check(self, model: Model) -> None:
        self.of_base.check(model)

    def flags(self, model: Model) -> list[str]:
        flags = self.of_base.flags(model)
        return flags if model.conf.stem == "base" else [*flags, "--finetune-from-model", str(self.add_layer(model))]

    def add_layer(self, model: Model) -> Path:
        base = self.models.of_file(model.conf.with_name("base.yaml"), model.seed)
        start = base.folder.parent / (base.folder.name.replace("base", "start") + ".pt")
        if not start.exists():
            if base.outcome is None or base.outcome.diverged:
                raise RecipeError(
                    f"{model.name} needs {base.folder}, which is not trained: name it earlier in --models."
                )
            data, checkpoint = self.of_base.data, base.folder / "checkpoint_best.pt"
            run("fwp-add-layer", data, "--path", checkpoint, "--out", start)
        return start


class Speed(NamedTuple):
    """The speed of each way of evaluation, on the first lines of the test text."""

    perplexity: Perplexity
    lines: int

    def check(self, models: Sequence[Model]) -> None:
        """Its flags are those of the perplexity."""

    def evaluate(self, model: Model) -> None:
        for way in self.perplexity.ways_of(model):
            value = evaluation.best(model.folder, way.label) if way.values else ""
            path = evaluation.result(model.folder, "speed", way.label)
            checkpoint, flags = model.folder / "checkpoint_best.pt", [*way.words(value), *self.perplexity.flags]
            evaluation.score(checkpoint, path, self.prepare(), "test", None, flags)

    def prepare(self) -> Path:
        """Write the first lines of the test text; the statistics of RMS come from a training text next to it."""
        data = self.perplexity.data
        folder = data.out / "speed"
        if not folder.is_dir():
            with whole(folder) as work:
                work.mkdir()
                with (data.words / "test.txt").open(encoding="utf-8") as lines:
                    first = "".join(islice(lines, self.lines))
                (work / "text").write_text(first, encoding="utf-8")
                words = ("--srcdict", data.bin / "dict.txt", "--testpref", work / "text")
                preprocess(work / "bin", "--only-source", *words)
                for ending in ("bin", "idx"):
                    shutil.copy(data.bin / f"train.{ending}", work / "bin")
        return folder / "bin"


class LayerTable(NamedTuple):
    """A table for each base, with the rows of rows.yaml."""

    recipe: Path
    out: Path

    def write(self, models: Sequence[Model]) -> None:
        rows = read_rows(read_yaml(self.recipe / "rows.yaml", plain=False), self.out)
        save(self.out, "rows", rows, table(rows))


def read_rows(lines: list[dict[str, Any]], out: Path) -> list[dict[str, object]]:
    """Return the numbers of each row of rows.yaml; empty: not run. All speeds are measured on the same text."""
    rows = []
    for base, line in product(TITLES, lines):
        name, label = line["run"], line["evaluated"]
        if base == "local" and "carried" in (name, label):  # blocks that are read separately carry no state
            continue
        folder = out / base / name
        valid = evaluation.results(folder, "valid", label)
        value = evaluation.best(folder, label) if valid else ""
        test = evaluation.results(folder, "test", label).get(value, {})
        timed = read_json(folder / f"speed {label}.json")
        cells = {"base": base, "row": line["row"], "conf": name, "step": value}
        cells |= {"valid": valid.get(value, {}).get("perplexity", ""), "test": test.get("perplexity", "")}
        cells["tokens_per_second"] = timed["tokens"] / timed["seconds"] if timed else ""
        rows.append({**cells, "paper_valid": line.get("paper", {}).get(base, "")})
    return rows


def table(rows: list[dict]) -> list[str]:
    """Return a table for each base."""
    lines = []
    for base, title in TITLES.items():
        heads = ["row of Table 2", f"conf/{base}/", "step", "valid", "test", "tokens/s", "paper valid"]
        cells = []
        for row in (row for row in rows if row["base"] == base):
            ours = [show(row[split], none="not run") for split in ("valid", "test")]
            speed, paper = show(row["tokens_per_second"], 0), str(row["paper_valid"] or "-")
            cells.append([row["row"], f"{row['conf']}.yaml", row["step"] or "-", *ours, speed, paper])
        lines += [f"**{title}**", "", *markdown(heads, cells, left=2), ""]
    return lines[:-1]
