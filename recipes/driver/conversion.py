"""Recipes of conversion: a softmax model is converted to each row of rows.yaml, fine-tuned and measured."""

import argparse
import statistics
from pathlib import Path
from typing import Any

import training
from arguments import ROOT, names, whole_number
from commands import CommandError, RecipeError, run, write
from evaluation import score
from flags import read_flags, read_yaml, refusal
from language_models import LanguageModels
from log import read_json
from prepare import SPLITS, cut, preprocess_text, remove
from recipe import STAGES, Model
from tables import markdown, mean, read_run, save, show

# The model before conversion, and the same model after as much fine-tuning as the other rows.
SOURCE, SOFTMAX = "source", "softmax"
Row = dict[str, Any]
# The source model's kind for each corpus, as fwp-convert names it.
FORMATS = {"peps": "fairseq-lm", "wikitext103": "fairseq-lm", "gpt2": "gpt2"}


class Conversion(LanguageModels):
    stages = STAGES | {"prepare": "prepare the text, and train (peps) or convert the source model"}
    rest = "fairseq-train (fine-tuning), in the stage evaluate to fwp-eval-lm"
    own_data = (
        "--data FOLDER --out FOLDER trains on another text. The first folder contains\n"
        "train.txt, valid.txt and test.txt: raw text."
    )

    def __init__(self, arguments: list[str]) -> None:
        super().__init__(arguments)
        if self.args.source_updates and self.args.corpus != "peps":
            raise RecipeError(
                "--source-updates must be left out without --corpus peps: other sources are not trained here."
            )
        if self.args.corpus == "peps" and self.args.model:
            raise RecipeError("--model must be left out with --corpus peps, whose model is trained here.")
        self.source = self.out / SOFTMAX / "converted"
        self.plugin = ("--user-dir", str(self.recipe / "mao_ablations"))

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        self.add_text_flags(parser)
        parser.set_defaults(any_text=False, test=None, conf=None, models=None)
        parser.add_argument("--corpus", choices=FORMATS, default="peps", help="corpus and source model (default: peps)")
        model = "source model: wikitext103: fairseq's checkpoint; gpt2: a folder; see above"
        parser.add_argument("--model", type=Path, metavar="PATH", help=model)
        parser.add_argument("--rows", nargs="+", metavar="NAME", help="names of rows in rows.yaml (default: all)")
        updates = "peps: updates of the source model (default: 4000)"
        parser.add_argument("--source-updates", type=whole_number, metavar="N", help=updates)

    @property
    def default_out(self) -> Path:
        return super().default_out / self.args.corpus

    def read_models(self) -> list[Model]:
        self.corpus: dict[str, Any] = {"start": SOURCE, "checkpoint": "best"}
        self.corpus |= read_yaml(self.recipe / "rows.yaml", plain=False)[self.args.corpus]
        self.corpus["rows"] = self.corpus["rows"] + self.corpus.get("stages", [])
        self.rows = {row["run"]: row for row in self.corpus["rows"]}
        rows, start = names(self.args.rows) or list(self.rows), self.corpus["start"]
        for name in rows:
            if name not in self.rows:
                raise RecipeError(f"--rows must be among {', '.join(self.rows)}, got {name}.")
        if start == SOFTMAX:  # the others start from it
            rows = [SOFTMAX, *rows]
        models = [self.named(name, None if name == start else seed) for name in rows for seed in self.seeds]
        return list(dict.fromkeys(models))

    def named(self, name: str, seed: int | None) -> Model:
        """Return the training of a row. Its own `conf` and `from` are for rows that learn in stages."""
        row = self.rows.get(name, {})
        conf = self.recipe / "conf" / self.args.corpus / f"{row.get('conf', 'finetune')}.yaml"
        folder = self.out / name / ("" if seed is None else f"seed_{seed}")
        origin = SOURCE if name == SOFTMAX else row.get("from", self.corpus["start"])
        return Model(name, conf, folder, seed, origin, row.get("target", ""))

    def check_flags(self) -> None:
        if self.stage == "evaluate":
            if not (self.data.is_dir() and self.source.is_dir()):
                raise RecipeError(f"{self.out} must have a source, got none: run the stage prepare first.")
            super().check_flags()
        flags = ["--task", "language_modeling", "--arch", "fwp_lm", *self.extra]
        if self.stage in ("train", "all") and (reason := refusal([str(self.bin), *self.plugin, *flags])):
            raise RecipeError(f"fairseq-train refuses the flags: {reason}.")

    # The source as a softmax model of this plugin, and the text in its words.

    def prepare_once(self) -> None:
        if self.args.corpus == "peps":
            super().prepare_once()
            flags = read_flags(self.recipe / "conf" / "peps" / "source.yaml")
            if updates := self.args.source_updates:  # a tenth of them is warm-up, as in source.yaml
                flags += ["--max-update", str(updates), "--warmup-updates", str(updates // 10)]
            training.train(self.out / "source", self.bin, flags)
            self.convert_source(self.out / "source" / "checkpoint_best.pt", "--vocabulary", self.bin / "dict.txt")
        elif not self.args.model or not self.args.model.exists():
            raise RecipeError(f"--model must be the source of --corpus {self.args.corpus}, got none: see --help.")
        else:
            self.convert_source(self.args.model)
            super().prepare_once()

    def convert_source(self, model: Path, *flags: object) -> None:
        if not self.source.is_dir():
            run("fwp-convert", "--source", FORMATS[self.args.corpus], model, *flags, "--out", self.source)

    def settings(self) -> str:
        own = f"{self.lines or 'all'} lines of valid and test"
        return super().settings() if self.args.corpus == "peps" else own

    def prepare(self, work: Path) -> None:
        if self.args.corpus == "peps":
            super().prepare(work)
            return
        text, pieces = work / "text", work / "bpe"
        for folder in (text, pieces):
            folder.mkdir()
        for split in SPLITS:
            (text / f"{split}.txt").write_bytes(self.find(split).read_bytes())
        if self.lines:
            cut(text, self.lines)
        for name in (f"{split}.txt" for split in SPLITS):
            if self.args.corpus == "gpt2":
                from gpt2_bpe import encode  # imported here: --help must work without fairseq

                print(f"{name.removesuffix('.txt')}: {encode(self.args.model, text / name, pieces / name):,} tokens")
            else:
                (text / name).replace(pieces / name)
        remove(text)
        preprocess_text(pieces, work / "bin", "--srcdict", self.source / "dict.txt")
        remove(pieces / "train.txt")

    def find(self, split: str) -> Path:
        folder = self.args.data or ROOT / "data" / "peps"
        files = [folder / f"{split}.txt"] + [folder / f"wiki.{split}.tokens"] * (self.args.corpus == "wikitext103")
        if found := next(filter(Path.is_file, files), None):
            return found
        raise RecipeError(f"{files[-1]} is missing: give --data FOLDER, see --help.")

    # A row.

    def train(self, model: Model) -> None:
        super().train(model)
        if not model.has("checkpoint_best.pt") and not model.has("diverged"):
            write(model.folder / "diverged", "no validation perplexity was a number\n")

    def conversion_flags(self) -> list[object]:
        return [*self.plugin, *super().conversion_flags()]

    def converted(self, model: Model) -> Path:
        """Return the folder of the model that a row begins with; for softmax the source."""
        return self.source if model.name == SOFTMAX else super().converted(model)

    def checkpoint(self, name: str, seed: int | None) -> Path:
        return self.source / "checkpoint.pt" if name == SOURCE else super().checkpoint(name, seed)

    def evaluate(self, model: Model) -> None:
        """Evaluate the fine-tuned model of a row by every measure, the converted one only by the first."""
        self.measure_converted(model)
        for measure in self.corpus["measures"]:
            self.measure(model.folder / f"checkpoint_{self.corpus['checkpoint']}.pt", model.folder, measure)

    def measure_converted(self, model: Model) -> None:
        folder = self.converted(model)
        if folder.parent == model.folder:  # else an earlier stage has measured it
            for measure in self.corpus["measures"] if model.name == SOFTMAX else self.corpus["measures"][:1]:
                self.measure(folder / "checkpoint.pt", folder, measure)

    def measure(self, checkpoint: Path, folder: Path, measure: str) -> None:
        """Evaluate every token of a split by a measure, "SPLIT CONTEXT", unless the result exists."""
        split, context = measure.split()
        path = folder / f"{measure}.json"
        if path.exists():
            return
        reading = ["--tokens-per-sample", self.tokens, "--context-window", context]
        flags = [*self.plugin, *reading, *self.evaluation_flags]
        try:
            score(checkpoint, path, self.bin, split, self.words, flags)
        except CommandError:  # a converted model may give probabilities of zero
            if folder.name != "converted":
                raise
            write(path, '{"perplexity": Infinity}\n')

    @property
    def tokens(self) -> int:
        """The length of a sample: that of the corpus, or else of the source, which may have no more positions."""
        if "tokens" in self.corpus:
            return int(self.corpus["tokens"])
        flags = (self.source / "flags.txt").read_text(encoding="utf-8").split()
        return int(flags[flags.index("--tokens-per-sample") + 1])

    def report(self) -> None:
        for model in self.models:
            if model.has("diverged"):
                self.measure_converted(model)
        rows = read_results(self.corpus, self.out)
        save(self.out, "results", rows, table(self.corpus, rows))


def read_results(corpus: dict[str, Any], out: Path) -> list[Row]:
    """Return the results of the source, then of each row that has any; None: not measured."""
    found = [read_row(SOURCE, out / SOFTMAX / "converted", corpus["measures"])]
    for name in (row["run"] for row in corpus["rows"]):
        folders = [out / name, *sorted((out / name).glob("seed_*"))]
        found += [read_row(name, folder, corpus["measures"]) for folder in folders]
    return [row for row in found if any(row[name] is not None for name in row.keys() - {"run", "seed"})]


def read_row(run: str, folder: Path, measures: list[str]) -> Row:
    """Return the results of a training, by the columns of the CSV; None if nothing was measured."""
    training, seed = read_run(folder), folder.name.removeprefix("seed_")
    before, after = (read_json(at / f"{measures[0]}.json") for at in (folder / "converted", folder))
    row = {"run": run, "seed": int(seed) if seed != folder.name else None}
    row |= {"state": before.get("state_size") or after.get("state_size")}
    row |= {"updates": training.updates, "hours": training.hours}
    row |= {f"converted, {measures[0]}": before.get("perplexity")}
    for name in measures:
        row[name] = "diverged" if training.diverged else read_json(folder / f"{name}.json").get("perplexity")
    return row


def shown(value: float | str | None) -> str:
    """Return a perplexity as text for a table; words stay as they are."""
    return f"{value:.1e}" if isinstance(value, float) and value >= 1e5 else show(value, none="not run")


def table(corpus: dict[str, Any], found: list[Row]) -> list[str]:
    """Return the source, then a line for each row, with the shares of its source and of softmax that it recovers.

    A share is the source's perplexity / its own: Mao 2022, Sec. 4.1.4, has 99 % for 14.5 and 14.6.
    """
    seeds: dict[str, list[Row]] = {}
    for row in found:
        seeds.setdefault(row["run"], []).append(row)
    measures, first, rows = corpus["measures"], corpus["measures"][0], corpus["rows"]

    def numbers(run: str, name: str) -> list[float]:
        return [row[name] for row in seeds.get(run, ()) if isinstance(row[name], int | float)]

    def value(run: str, name: str) -> Any:
        """Return the mean of the seeds, or a word."""
        known = numbers(run, name)
        return statistics.mean(known) if known else seeds[run][0][name] if run in seeds else None

    def recovered(whole: Any, part: Any) -> str:
        both = isinstance(whole, int | float) and isinstance(part, int | float)
        return f"{whole / part:.1%}" if both else "-"

    compared = {"of the source": value(corpus["start"], first)}
    if corpus["start"] == SOURCE and any(row["run"] == SOFTMAX for row in rows):
        compared["of softmax, fine-tuned"] = value(SOFTMAX, first)
    # The paper's source, as a separate line or as the row that it fine-tuned.
    paper_source = corpus["source"] or next((row["paper"] for row in rows if row["run"] == SOFTMAX), {})
    papers = list(dict.fromkeys(measure for row in rows for measure in row["paper"]))

    def line(name: str, run: str, paper: dict[str, Any], shares: list[str], share: str) -> list[str]:
        several, ours = len(seeds.get(run, ())), []
        for measure in measures:
            known = numbers(run, measure)
            # An infinite perplexity has no deviation.
            ours.append(mean(known) if several > 1 and known and max(known) < 1e5 else shown(value(run, measure)))
        name += f", {several} seeds" if several > 1 else ""
        start = "-" if run == SOURCE else shown(value(run, f"converted, {first}"))
        theirs = [shown(paper.get(measure, "-")) for measure in papers]
        state, updates = (show(value(run, head), 0) for head in ("state", "updates"))
        return [name, state, start, *ours, *shares, *theirs, share, updates]

    before = "source" if corpus["start"] == SOURCE else "before fine-tuning"
    lines = [line(before, SOURCE, corpus["source"], ["-"] * len(compared), "-")]
    for row in rows:
        shares = [recovered(source, value(row["run"], first)) for source in compared.values()]
        measure = next(iter(row["paper"]), None)
        share = recovered(paper_source.get(measure), row["paper"].get(measure))
        lines.append(line(row["row"], row["run"], row["paper"], shares, share))
    heads = ["row", "state", f"converted, {first}", *measures, *compared]
    return markdown([*heads, *(f"paper {name}" for name in papers), "paper, of its source", "updates"], lines)
