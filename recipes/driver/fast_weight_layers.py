"""Recipes of fast weight layers: train each base, add a layer on top, and evaluate both."""

import shutil
from itertools import islice, product
from pathlib import Path

import evaluation
import training
from commands import RecipeError, run, whole
from evaluation import Way
from flags import read_yaml
from language_models import LanguageModels
from log import read_json
from prepare import preprocess
from recipe import STAGES, Model
from tables import markdown, save, show

SPEED_LINES = 400  # of the test text, for measurements of speed
TITLES = {"local": "Local attention", "xl": "Transformer-XL"}


class FastWeightLayers(LanguageModels):
    stages = STAGES

    def train(self, model: Model) -> None:
        flags = [*model.flags, *self.extra]
        if model.conf.stem != "base":
            flags += ["--finetune-from-model", str(self.add_layer(model))]
        training.train(model.folder, self.bin, flags)

    def add_layer(self, model: Model) -> Path:
        """Return the base's model with a new layer on top, which does not change the outputs yet."""
        base = self.model(model.conf.with_name("base.yaml"), model.seed).folder
        start = base.parent / (base.name.replace("base", "start") + ".pt")
        if not start.exists():
            if not (base / "trained").exists():
                raise RecipeError(f"{model.name} needs {base}, which is not trained: name it earlier in --models.")
            run("fwp-add-layer", self.bin, "--path", base / "checkpoint_best.pt", "--out", start)
        return start

    def expand(self, given: list[str]) -> list[str]:
        found = [name for name in super().expand(given) if not name.startswith("wt103/")]
        return sorted(found, key=lambda name: not name.endswith("/base"))

    def ways(self, model: Model) -> list[Way]:
        few = ("statistics 400", "statistics 4") if self.lines else ("", "")  # a trial
        return [way._replace(flags=way.flags.replace(*few)) for way in super().ways(model)]

    def evaluate(self, model: Model) -> None:
        """Evaluate, then measure the speed of each way on the first lines of the test text."""
        super().evaluate(model)
        for way in self.ways(model) if not self.args.test else ():
            value = evaluation.best(model.folder, way.label) if way.values else ""
            path, flags = evaluation.result(model.folder, "speed", way.label), way.words(value)
            checkpoint = model.folder / "checkpoint_best.pt"
            evaluation.score(checkpoint, path, self.prepare_speed(), "test", None, [*flags, *self.evaluation_flags])

    def prepare_speed(self) -> Path:
        """Write the first lines of the test text; the statistics of RMS come from a training text next to it."""
        folder = self.out / "speed"
        if not folder.is_dir():
            with whole(folder) as work:
                work.mkdir()
                with (self.words / "test.txt").open(encoding="utf-8") as lines:
                    kept = "".join(islice(lines, self.lines or SPEED_LINES))
                (work / "text").write_text(kept, encoding="utf-8")
                words = ("--srcdict", self.bin / "dict.txt", "--testpref", work / "text")
                preprocess(work / "bin", "--only-source", *words)
                for ending in ("bin", "idx"):
                    shutil.copy(self.bin / f"train.{ending}", work / "bin")
        return folder / "bin"

    def report(self) -> None:
        rows = read_rows(read_yaml(self.recipe / "rows.yaml", plain=False), self.out)
        save(self.out, "rows", rows, table(rows))


def read_rows(asked: list[dict], out: Path) -> list[dict[str, object]]:
    """Return the numbers of each row; empty: not run. All speeds are measured on the same text."""
    found = []
    for base, row in product(TITLES, asked):
        name, label = row["run"], row["evaluated"]
        if base == "local" and "carried" in (name, label):  # blocks that are read separately carry no state
            continue
        folder = out / base / name
        valid = evaluation.results(folder, "valid", label)
        value = evaluation.best(folder, label) if valid else ""
        test = evaluation.results(folder, "test", label).get(value, {})
        timed = read_json(folder / f"speed {label}.json")
        cells = {"base": base, "row": row["row"], "conf": name, "step": value}
        cells |= {"valid": valid.get(value, {}).get("perplexity", ""), "test": test.get("perplexity", "")}
        cells["tokens_per_second"] = timed["tokens"] / timed["seconds"] if timed else ""
        found.append({**cells, "paper_valid": row.get("paper", {}).get(base, "")})
    return found


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
