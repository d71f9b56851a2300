"""Recipes of language models: one text, several models, and a table of their perplexities."""

import argparse
from pathlib import Path

import comparison
import evaluation
from arguments import ROOT, whole_number
from commands import RecipeError, run, write
from evaluation import READING, Way
from flags import label, refusal
from prepare import SPLITS, apply_bpe, check_counts, cut, learn_bpe, preprocess, preprocess_text, read_lines, remove
from recipe import STAGES, Model, Recipe
from texts import TEXTS, checksum

OWN_TEXT = """\
--data FOLDER {any_text}--out FOLDER trains on another text. The first folder contains
{files}.
evaluate --test FILE scores one raw text with the trained models. It prints the share of <unk> tokens."""
# Group of models, conf/GROUP, with a table of its own: the function that reports the rows in GROUP.yaml.
GROUPS = {"grid": comparison.write_grid, "carried": comparison.write_carried}


class LanguageModels(Recipe):
    stages = {stage: text for stage, text in STAGES.items() if stage != "all"} | {
        "sample": "print three texts that the first model writes",
        "all": STAGES["all"],
    }
    rest = "fairseq-train, in the stage evaluate to fwp-eval-lm"
    evaluator = "fwp-eval-lm"

    def __init__(self, arguments: list[str]) -> None:
        raw = "train.txt, valid.txt and test.txt (or .txt.gz): raw text"
        files = "one file named enwik8" if "enwik8" in arguments else raw
        any_text = "" if "--merges" in arguments else "--any-text "
        self.own_data = self.own_data or OWN_TEXT.format(any_text=any_text, files=files)
        if "--prompt" in arguments and "sample" in self.stages:
            self.stages = self.stages | {"all": "prepare, train, evaluate, report and sample"}
        super().__init__(arguments)
        self.text, self.merges, self.lines = TEXTS[self.args.text], self.args.merges, self.args.lines
        if (file := self.args.test) and not file.is_file():
            what = "a folder" if file.is_dir() else "which does not exist"
            raise RecipeError(f"--test must be the name of a text file, got {file}, {what}.")

    def add_text_flags(self, parser: argparse.ArgumentParser) -> None:
        super().add_text_flags(parser)
        hidden = argparse.SUPPRESS
        parser.add_argument("--text", choices=TEXTS, required=True, help=hidden)
        parser.add_argument("--merges", type=whole_number, default=0, help=hidden)  # of BPE; 0: whole words
        parser.add_argument("--prompt", help=hidden)
        parser.add_argument("--per-word", action="store_true", help=hidden)
        lines = "use only the first N lines of valid and test, for a trial"
        parser.add_argument("--lines", type=whole_number, metavar="N", help=lines)

    # Data.

    @property
    def words(self) -> Path:
        """The folder of the files that fairseq-preprocess has read."""
        return self.data / ("bpe" if self.merges else "text")

    @property
    def folder(self) -> Path | None:
        """The folder that the text is read from: the given one, or the one of its name in data/."""
        here = ROOT / "data" / self.args.text
        return self.args.data.absolute() if self.args.data else here if here.is_dir() else None

    def settings(self) -> str:
        given = self.folder if self.merges else self.args.data
        if self.data.is_dir() and not given and self.text.archives:
            return ""
        if not self.merges:
            return f"any text of {self.args.data.absolute()}" if self.args.any_text else "the corpus"
        if not given and self.text.archives:
            return f"{self.merges} merges; downloaded"
        said = f"{self.merges} merges; {self.folder or 'own text'}"
        said += f"; {self.lines} lines of valid and test" if self.lines else ""
        return said + (f" {checksum(self.folder)}" if self.folder else "")

    def prepare(self, work: Path) -> None:
        text = work / "text"
        text.mkdir()
        expected = self.write_text(text)
        if self.lines:
            cut(text, self.lines)
        if self.merges:
            learn_bpe(text / "train.txt", self.merges, work / "bpe" / "codes")
            for split in SPLITS:
                apply_bpe(work / "bpe" / "codes", text / f"{split}.txt", work / "bpe" / f"{split}.txt")
            text = work / "bpe"
        preprocess_text(text, work / "bin")
        check_counts(work / "bin", expected)
        if not self.merges:
            remove(text / "train.txt")

    def write_text(self, out: Path) -> dict[str, int]:
        """Write SPLIT.txt; return the expected counts."""
        if self.folder:
            return self.text.write(self.folder, out, self.args.any_text)
        for archive in self.text.archives:
            archive.fetch(self.out / "download")
        if self.text.make:
            self.text.make(self.out / "download", out)
            return {}
        return self.text.write(self.out / "download", out, False)

    def conversion_flags(self) -> list[object]:
        return ["--source", "fwp-lm", "--vocabulary", self.bin / "dict.txt"]

    # Evaluation.

    def check_flags(self) -> None:
        super().check_flags()
        path = self.recipe / "evaluation.yaml"
        models = self.models if self.stage in ("train", "evaluate", "all") else []
        for way in dict.fromkeys(way for model in models for way in evaluation.read_ways(path, model.name)):
            words = way.words(next(iter(way.values), ""))
            if reason := refusal([str(self.bin), "--path", "checkpoint_best.pt", *words], self.evaluator):
                raise RecipeError(f"{path}: {self.evaluator} refuses the flags of {way.label!r}: {reason}.")

    def ways(self, model: Model) -> list[Way]:
        """Return the ways of evaluation: the recipe's, unless flags of the command line replace them."""
        own = label(self.evaluation_flags)
        ways = evaluation.read_ways(self.recipe / "evaluation.yaml", model.name)
        if replaced := [flag for flag in self.evaluation_flags if flag.partition("=")[0] in READING]:
            print(f"{replaced[0]} replaces the recipe's way of reading: {'; '.join(way.flags for way in ways)}")
            ways = [Way("", "")]
        return [way._replace(label=f"{way.label} {own}".strip()) for way in ways]

    def evaluate(self, model: Model) -> None:
        """Evaluate by all ways; on a text of the user only with the value that is the best on valid."""
        for way in self.ways(model):
            if self.args.test:
                name = f"own_{self.args.test.stem}"
                data = self.own_test(name, [self.args.test])
                value = evaluation.best(model.folder, way.label) if way.values else ""
                path = evaluation.result(model.folder, name, way.label, value)
                flags = [*way.words(value), *self.evaluation_flags]
                evaluation.score(model.folder / "checkpoint_best.pt", path, data / "bin", "test", data, flags)
            else:
                evaluation.evaluate(model.folder, self.bin, self.words, way, self.evaluation_flags)

    def prepare_test(self, work: Path) -> None:
        self.text.copy(self.args.test, work / "test.txt")
        if self.merges:
            raw = (work / "test.txt").replace(work / "raw.txt")
            apply_bpe(self.data / "bpe" / "codes", raw, work / "test.txt")
        words = ("--srcdict", self.bin / "dict.txt", "--testpref", work / "test.txt")
        preprocess(work / "bin", "--only-source", *words)

    # Reports and samples.

    def report(self) -> None:
        """Report each group with its own tables, of all its rows, since others may have trained some; then the rest."""
        models = self.models
        for group, write_group in GROUPS.items():
            rows, inside = self.recipe / f"{group}.yaml", f"{group}/"
            if rows.exists() and any(model.name.startswith(inside) for model in models):
                write_group(rows, self.out, self.out / group)
                models = [model for model in models if not model.name.startswith(inside)]
        if models:
            measure = "loss_base_2" if self.args.text == "enwik8" else "perplexity"
            comparison.write(self.out, models, measure, self.data / "text" if self.args.per_word else None)

    def main(self) -> None:
        super().main()
        if self.stage == "sample" or (self.stage == "all" and self.args.prompt):
            self.sample(self.models[0])

    def sample(self, model: Model) -> None:
        self.check_trained(model)
        prompt = self.args.prompt
        if self.folder or not prompt:  # a text of the user is continued from the first words of its test set
            words = next(filter(None, read_lines(self.data / "text" / "test.txt"))).split()
            prompt = " ".join(words[:4])
        pieces = ["--bpe", "subword_nmt", "--bpe-codes", self.data / "bpe" / "codes"] if self.merges else []
        log, out = self.out / "sample.log", self.out / "sample.txt"
        write(self.out / "prompt.txt", prompt + "\n")
        run(
            "fairseq-interactive", self.bin, "--user-dir", ROOT / "fairseq_fwp", "--task", "language_modeling",
            "--path", model.folder / "checkpoint_best.pt", "--input", self.out / "prompt.txt", *pieces,
            "--sampling", "--sampling-topp", 0.9, "--temperature", 0.7, "--beam", 3, "--nbest", 3, "--max-len-b", 200,
            "--seed", 1, *(flag for flag in self.extra if flag == "--cpu"), log=log,
        )  # fmt: skip
        lines = (line.split("\t") for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("D-"))
        write(out, self.text.show("".join(line[2] + "\n" for line in lines)))
        print(f'Three texts that {model.name} wrote after "{prompt}" (also in {out}):')
        print(out.read_text(encoding="utf-8"))
