"""Recipes of translation: parallel text, models, and BLEU of valid, test and a test set of the user."""

import argparse
import json
import os
import re
import shlex
from pathlib import Path

from arguments import ROOT, whole_number
from commands import RecipeError, run, whole, write
from flags import label
from pairs import LANGUAGES, PAIRS, copy, sides
from prepare import SPLITS, apply_bpe, find, learn_bpe, preprocess, remove
from recipe import Model, Recipe
from tables import by_model, read_run, row_of, save

SOURCE, TARGET = LANGUAGES
OF_LANGUAGES = ("--source-lang", SOURCE, "--target-lang", TARGET)
# Columns of the table, by head.
SCORES = {
    "valid sacreBLEU": "valid_sacrebleu",
    "test sacreBLEU": "test_sacrebleu",
    "test tokenised": "test_tokenised",
    "test compound-split": "test_compound_split",
}


class Translation(Recipe):
    rest = "fairseq-train, in the stage evaluate to fairseq-generate"
    own_data = """\
--data FOLDER --any-text --out FOLDER trains on another text. The first folder contains train, valid and test,
each as .en and .de (or .gz): raw text.
evaluate --test PREFIX translates PREFIX.en and scores it with PREFIX.de. It prints the share of <unk> tokens."""
    evaluator = "fairseq-generate"

    def __init__(self, arguments: list[str]) -> None:
        super().__init__(arguments)
        self.text = PAIRS[self.args.pairs]
        for path in (Path(f"{self.args.test}.{language}") for language in LANGUAGES if self.args.test):
            if not find(path):
                raise RecipeError(
                    f"--test PREFIX needs the files PREFIX.en and PREFIX.de (or .gz), and {path} does not exist."
                )

    def add_text_flags(self, parser: argparse.ArgumentParser) -> None:
        super().add_text_flags(parser)
        hidden = argparse.SUPPRESS
        parser.add_argument("--pairs", choices=PAIRS, required=True, help=hidden)
        parser.add_argument("--merges", type=int, required=True, help=hidden)
        parser.add_argument("--words", default="", help=hidden)  # flags of fairseq-preprocess
        parser.add_argument("--search", default="", help=hidden)  # flags of fairseq-generate
        average = "evaluate the mean of the last N checkpoints, not the best checkpoint"
        parser.add_argument("--average", type=whole_number, metavar="N", help=average)

    # Data.

    def settings(self) -> str:
        if not self.args.data and self.data.is_dir():
            return ""
        kind = " any text;" if self.args.any_text else ""
        return f"{self.args.merges} merges;{kind} {self.args.data.resolve() if self.args.data else 'downloaded'}"

    def prepare(self, work: Path) -> None:
        folder = self.args.data or self.out / "download"
        for archive in self.text.archives if not self.args.data else ():
            archive.fetch(folder)
        self.text.write(folder, work, self.args.any_text)
        if not (work / "bpe").is_dir():
            self.cut_into_pieces(work)
        prefixes = [word for split in SPLITS for word in (f"--{split}pref", work / "bpe" / split)]
        words = ("--joined-dictionary", *prefixes, "--workers", os.cpu_count(), *self.args.words.split())
        preprocess(work / "bin", *OF_LANGUAGES, *words)
        for split in ("valid", "test"):  # scores are of words: undo BPE
            text = (work / "bpe" / f"{split}.{TARGET}").read_text(encoding="utf-8")
            write(work / "tok" / f"{split}.{TARGET}", re.sub(r"@@( |$)", "", text, flags=re.MULTILINE))
        for folder in (work / "tok", work / "bpe"):
            for language in LANGUAGES:
                remove(folder / f"train.{language}")

    def cut_into_pieces(self, work: Path) -> None:
        """Split all texts into subwords: one vocabulary for both languages, learned only on the training text."""
        both, codes = work / "both", work / "bpe" / "codes"
        with both.open("wb") as file:
            for language in LANGUAGES:
                file.write((work / "tok" / f"train.{language}").read_bytes())
        learn_bpe(both, self.args.merges, codes)
        both.unlink()
        for name in (f"{split}.{language}" for split in SPLITS for language in LANGUAGES):
            apply_bpe(codes, work / "tok" / name, work / "bpe" / name)

    def prepare_test(self, work: Path) -> None:
        codes, test = self.data / "bpe" / "codes", self.args.test
        if not codes.exists():
            raise RecipeError(
                f"--test needs the BPE codes of the training, but {self.data} was made from text with BPE: prepare raw "
                "text in another --out."
            )
        copy(work / "tok" / "test", [test], tokenized=True)
        copy(work / "text" / "test", [test])
        for language in LANGUAGES:
            apply_bpe(codes, work / "tok" / f"test.{language}", work / "bpe" / f"test.{language}")
        words = ["--srcdict", self.bin / f"dict.{SOURCE}.txt", "--tgtdict", self.bin / f"dict.{TARGET}.txt"]
        preprocess(work / "bin", *OF_LANGUAGES, *words, "--testpref", work / "bpe" / "test")

    # Models.

    def conversion_flags(self) -> list[object]:
        return ["--source", "fairseq-mt", "--vocabulary", self.bin]

    def evaluate(self, model: Model) -> None:
        checkpoint, name = model.folder / "checkpoint_best.pt", label(self.evaluation_flags)
        if count := self.args.average:
            checkpoint = model.folder / f"average_{count}.pt"
            if not checkpoint.exists():
                write_mean(model.folder, count, checkpoint)
            name = f"average of {count} {name}".strip()
        if self.args.test:
            own = f"own_{self.args.test.name}"
            self.translate(model, own, self.own_test(own, sides(self.args.test)), "test", checkpoint, name)
            return
        for split in ("valid", "test"):
            self.translate(model, split, self.data, split, checkpoint, name)

    def translate(self, model: Model, name: str, data: Path, split: str, checkpoint: Path, said: str) -> None:
        """Translate and score a split into NAME[ SAID].json; scores of other flags (not the device's) are replaced."""
        path = model.folder / f"{name} {said}".strip()
        result, log, used = (path.with_name(path.name + ending) for ending in (".json", ".log", ".flags"))
        search = [*self.args.search.split(), *self.evaluation_flags]
        settings = shlex.join(flag for flag in search if flag != "--cpu")
        if result.exists() and used.exists() and used.read_text(encoding="utf-8").strip() == settings:
            print(f"{model.label} is evaluated already: {result}")
            return
        remove(result)
        run(
            "fairseq-generate", data / "bin", "--user-dir", ROOT / "fairseq_fwp", "--task", "translation",
            *OF_LANGUAGES, "--path", checkpoint, "--gen-subset", split, "--post-process", "subword_nmt",
            "--max-tokens", 4000, *search, log=log,
        )  # fmt: skip
        import bleu  # imported here: --help must work without sacrebleu

        raw = data / "text" / f"{split}.{TARGET}"
        scores = bleu.score(log, data / "tok" / f"{split}.{TARGET}", raw if raw.exists() else None, TARGET)
        write(used, settings + "\n")
        write(result, json.dumps(scores, indent=1) + "\n")
        print(", ".join(f"{key} {x:.2f}" if isinstance(x, float) else f"{key} {x}" for key, x in scores.items()))
        print(f"The result is in {result}", flush=True)

    # Report.

    def report(self) -> None:
        if rows := [row for model in self.models if (row := read_row(model))]:
            save(self.out, "table", rows, table(rows))


def write_mean(folder: Path, count: int, out: Path) -> None:
    """Write the last checkpoint with the mean of the last `count` as its model. Raises RecipeError if there are fewer.

    They are those of --save-interval-updates. Parameters are averaged in float64; whole numbers, such as the counts of
    FAVOR+'s draws, are those of the last one.
    """
    import fairseq  # noqa: F401  (imported here: --help must work without torch)
    import torch

    import fairseq_fwp.cli  # noqa: F401  (with fairseq before it, the package lets torch load what fairseq saves)

    named = ((path, re.fullmatch(r"checkpoint_\d+_(\d+)\.pt", path.name)) for path in folder.glob("*.pt"))
    found = {int(name[1]): path for path, name in named if name}
    if count > len(found):
        raise RecipeError(
            f"the number of averaged checkpoints must be from 1 to {len(found)}, those of {folder}, got {count}."
        )
    paths, sums = [found[update] for update in sorted(found)[-count:]], {}
    for path in paths:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        for name, value in checkpoint["model"].items():
            sums[name] = value.double() + sums.get(name, 0)
    for name, value in checkpoint["model"].items():
        if value.is_floating_point():
            checkpoint["model"][name] = (sums[name] / count).to(value.dtype)
    with whole(out) as work:
        torch.save(checkpoint, work)
    print(f"{out} is the mean of {', '.join(path.name for path in paths)}")


def read_row(model: Model) -> dict[str, object]:
    """Return the numbers of a model; empty unless both were scored. Without raw text sacreBLEU is missing."""
    found = read_run(model.folder)
    results = {split: found.result(split) for split in ("valid", "test")}
    if not all(results.values()):
        return {}
    scores = {}
    for column in SCORES.values():
        split, _, kind = column.partition("_")
        scores[column] = results[split].get(kind, "")
    signature = results["test"].get("signature") or results["valid"].get("signature") or ""
    return row_of(model, found, scores) | {"signature": signature}


def table(rows: list[dict]) -> list[str]:
    """Return a line for each model, mean and deviation of its seeds."""
    signatures = sorted({row["signature"] for row in rows} - {""})
    return [*by_model(rows, SCORES, "no raw text"), "", "sacreBLEU: " + ", ".join(signatures)]
