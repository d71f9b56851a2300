"""Recipes of fast weight layers: train each base, add a layer on top, and evaluate both."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import evaluation
import language_models
from commands import RecipeError, run, whole
from data.prepare import preprocess
from evaluation import Evaluation, Perplexity, Way
from flags import read_yaml
from log import read_json
from model import Model, Models
from recipe import STAGES, Recipe
from tables import markdown, save, show

SPEED_LINES = 400  # of the test text, for measurements of speed
TITLES = {"local": "Local attention", "xl": "Transformer-XL"}


def compose(arguments: list[str]) -> Recipe:
    recipe = language_models.compose(arguments, STAGES, bases_first)
    request, data = recipe.models.request, recipe.models.data
    models, report = LayerModels(request, data), partial(write_table, request.recipe, request.out)
    perplexity = TrialPerplexity(models) if data.lines else Perplexity(models)
    speed = [] if request.test else [Speed(models, perplexity, data.lines or SPEED_LINES)]
    return recipe._replace(models=models, evaluations=[perplexity, *speed], write_table=report, sample=None)


def bases_first(names: list[str]) -> list[str]:
    """Return the names of models of the paper's two bases, the bases before what is added to them."""
    of_paper = [name for name in names if not name.startswith("wt103/")]
    return sorted(of_paper, key=lambda name: not name.endswith("/base"))


class TrialPerplexity(Perplexity):
    """The perplexity of a trial, with statistics of RMS from fewer batches."""

    def ways(self, name: str) -> list[Way]:
        ways = super().ways(name)
        return [way._replace(flags=way.flags.replace("statistics 400", "statistics 4")) for way in ways]


class LayerModels(Models):
    """A model with a layer begins with its base and a new layer on top, which does not change the outputs yet."""

    def begin(self, model: Model) -> list[str]:
        flags = super().begin(model)
        return flags if model.conf.stem == "base" else [*flags, "--finetune-from-model", str(self.add_layer(model))]

    def add_layer(self, model: Model) -> Path:
        base = self.of_file(model.conf.with_name("base.yaml"), model.seed)
        start = base.folder.parent / (base.folder.name.replace("base", "start") + ".pt")
        if not start.exists():
            if base.outcome is None or base.outcome.diverged:
                raise RecipeError(
                    f"{model.name} needs {base.folder}, which is not trained: name it earlier in --models."
                )
            run("fwp-add-layer", self.data.bin, "--path", base.folder / "checkpoint_best.pt", "--out", start)
        return start


@dataclass(frozen=True)
class Speed(Evaluation):
    """The speed of each way of evaluation, on the first lines of the test text."""

    perplexity: Perplexity
    lines: int

    def evaluate(self, model: Model) -> None:
        for way in self.perplexity.ways_of(model):
            value = evaluation.best(model.folder, way.label) if way.values else ""
            path = evaluation.result(model.folder, "speed", way.label)
            checkpoint, flags = model.folder / "checkpoint_best.pt", [*way.words(value), *self.flags]
            evaluation.score(checkpoint, path, self.prepare(), "test", None, flags)

    def prepare(self) -> Path:
        """Write the first lines of the test text; the statistics of RMS come from a training text next to it."""
        data = self.models.data
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


def write_table(recipe: Path, out: Path, models: Sequence[Model]) -> None:
    """Write a table for each base, with the rows of rows.yaml."""
    rows = read_rows(read_yaml(recipe / "rows.yaml", plain=False), out)
    save(out, "rows", rows, table(rows))


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
