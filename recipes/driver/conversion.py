"""Recipes of conversion: a softmax model is converted to each row of rows.yaml, fine-tuned and measured."""

import argparse
from pathlib import Path
from typing import Any

import training
from arguments import ROOT, names, whole_number
from commands import RecipeError, run, whole, write
from evaluation import check_scored
from flags import read_flags, read_yaml, refusal
from language_models import LanguageModels
from prepare import SPLITS, cut, preprocess_text, remove
from recipe import STAGES, Model
from reports import conversion as tables
from reports.conversion import SOFTMAX, SOURCE
from tables import save

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
        self.plugin = ["--user-dir", str(self.recipe / "mao_ablations")]

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        self.add_text_flags(parser)
        parser.set_defaults(any_text=False, test=None, conf=None, models=None)
        parser.add_argument("--corpus", choices=FORMATS, default="peps", help="corpus and source model (default: peps)")
        parser.add_argument(
            "--model",
            type=Path,
            metavar="PATH",
            help="source model: wikitext103: fairseq's checkpoint; gpt2: a folder; see above",
        )
        parser.add_argument("--rows", nargs="+", metavar="NAME", help="names of rows in rows.yaml (default: all)")
        parser.add_argument("--seeds", type=whole_number, metavar="N", help="train each row with the seeds 1 to N")
        parser.add_argument(
            "--source-updates",
            type=whole_number,
            metavar="N",
            help="peps: updates of the source model (default: 4000)",
        )

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
        seeds = range(1, self.args.seeds + 1) if self.args.seeds else [None]
        models = [self.named(name, None if name == start else seed) for name in rows for seed in seeds]
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
        task, start = self.start(model)
        flags = [*task, *model.flags, *self.plugin, *start, *self.extra, *self.teacher(model)]
        training.train(model.folder, self.bin, flags)
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
        with whole(path) as work:
            try:
                run(
                    "fwp-eval-lm", self.bin, *self.plugin, "--path", checkpoint, "--gen-subset", split,
                    "--tokens-per-sample", self.tokens, "--context-window", context, "--no-progress-bar",
                    "--json", work, *self.evaluation_flags,
                )  # fmt: skip
            except RecipeError:  # a converted model may give probabilities of zero
                if folder.name != "converted":
                    raise
                work.write_text('{"perplexity": Infinity}\n', encoding="utf-8")
            else:
                check_scored(work, self.words / f"{split}.txt")

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
        rows = tables.read_results(self.corpus, self.out)
        save(self.out, "results", rows, tables.table(self.corpus, rows))


def main(arguments: list[str]) -> None:
    Conversion(arguments).main()
