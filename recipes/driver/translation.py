"""Recipes of translation: parallel text, models, and BLEU of valid, test and a test set of the user.

There are three kinds of BLEU, which cannot be compared with each other. *sacreBLEU* is of detokenised text with
sacrebleu's own tokens, with its signature (Post 2018). *tokenised* is of the recipe's tokens, as multi-bleu.perl
counts. *compound-split* is the same after both sides are split at hyphens, as Vaswani et al. 2017 and Ott et al. 2018
report WMT14 En-De.
"""

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from arguments import ROOT, Parser, add_flags_of_data, add_flags_of_models, positive, request_of
from commands import RecipeError, run, whole, write
from data.pairs import LANGUAGES, OF_LANGUAGES, PAIRS, TARGET, PairData, sides
from data.prepare import find, remove
from evaluation import Evaluation
from flags import label
from model import Model, Models
from recipe import STAGES, Recipe
from tables import by_model, read_run, row_of, save

# Columns of the table, by head.
SCORES = {
    "valid sacreBLEU": "valid_sacrebleu",
    "test sacreBLEU": "test_sacrebleu",
    "test tokenised": "test_tokenised",
    "test compound-split": "test_compound_split",
}
HYPOTHESIS = re.compile(r"^H-(\d+)\t[^\t]*\t(.*)$", re.MULTILINE)
# It may be missing: fairseq-generate logs it to standard error.
SUMMARY = re.compile(r"Translated [\d,]+ sentences \(([\d,]+) tokens\) in ([\d.]+)s")
# As in the scripts of the literature, without look-around: of "a-b-c" they split only the first hyphen.
COMPOUND = re.compile(r"(\S)-(\S)")
OTHER_FLAGS = "fairseq-train, in the stage evaluate to fairseq-generate"
OWN_TEXT = """\
--data FOLDER --any-text --out FOLDER trains on another text. The first folder contains train, valid and test,
each as .en and .de (or .gz): raw text.
evaluate --test PREFIX translates PREFIX.en and scores it with PREFIX.de. It prints the share of <unk> tokens."""


def compose(arguments: list[str]) -> Recipe:
    parser = Parser(STAGES, OTHER_FLAGS, OWN_TEXT)
    add_flags_of_models(parser)
    add_flags_of_data(parser)
    hidden = argparse.SUPPRESS
    parser.add_argument("--pairs", choices=PAIRS, required=True, help=hidden)
    parser.add_argument("--merges", type=int, required=True, help=hidden)
    parser.add_argument("--words", default="", help=hidden)  # flags of fairseq-preprocess
    parser.add_argument("--search", default="", metavar="FLAGS", help="flags of fairseq-generate, such as '--beam 5'")
    average = "evaluate the mean of the last N checkpoints, not the best checkpoint"
    parser.add_argument("--average", type=positive, metavar="N", help=average)
    args = parser.parse(arguments)
    request = request_of(args)
    data = PairData(request.out, args.pairs, args.data, args.merges, args.words, args.any_text)
    models = Models(request, data)
    chosen = models.chosen(args)
    for path in (Path(f"{args.test}.{language}") for language in LANGUAGES if args.test):
        if not find(path):
            raise RecipeError(
                f"--test PREFIX needs the files PREFIX.en and PREFIX.de (or .gz), and {path} does not exist."
            )
    bleu = Bleu(models, args.search, args.average)
    report = partial(write_table, request.out)
    return Recipe(models, chosen, [bleu], report, evaluator="fairseq-generate")


@dataclass(frozen=True)
class Bleu(Evaluation):
    """The translation of valid and test, or of the user's test set, and its scores.

    search: flags of fairseq-generate; average: the number of averaged checkpoints, None: the best checkpoint.
    """

    search: str = ""
    average: int | None = None

    def evaluate(self, model: Model) -> None:
        checkpoint, name = model.folder / "checkpoint_best.pt", label(self.flags)
        if self.average:
            checkpoint = model.folder / f"average_{self.average}.pt"
            if not checkpoint.exists():
                write_mean(model.folder, self.average, checkpoint)
            name = f"average of {self.average} {name}".strip()
        if test := self.models.request.test:
            own = f"own_{test.name}"
            self.translate(model, own, self.models.data.own_test(own, test, sides(test)), "test", checkpoint, name)
            return
        for split in ("valid", "test"):
            self.translate(model, split, self.models.data.folder, split, checkpoint, name)

    def translate(self, model: Model, name: str, data: Path, split: str, checkpoint: Path, used: str) -> None:
        """Translate and score a split into NAME[ USED].json; scores of other flags (not the device's) are replaced."""
        path = model.folder / f"{name} {used}".strip()
        result, log, flags = (path.with_name(path.name + ending) for ending in (".json", ".log", ".flags"))
        search = [*self.search.split(), *self.flags]
        settings = shlex.join(flag for flag in search if flag != "--cpu")
        if result.exists() and flags.exists() and flags.read_text(encoding="utf-8").strip() == settings:
            print(f"{model.label} is evaluated already: {result}")
            return
        remove(result)
        run(
            "fairseq-generate", data / "bin", "--user-dir", ROOT / "fairseq_fwp", "--task", "translation",
            *OF_LANGUAGES, "--path", checkpoint, "--gen-subset", split, "--post-process", "subword_nmt",
            "--max-tokens", 4000, *search, log=log,
        )  # fmt: skip
        raw = data / "text" / f"{split}.{TARGET}"
        scores = score(log, data / "tok" / f"{split}.{TARGET}", raw if raw.exists() else None, TARGET)
        write(flags, settings + "\n")
        write(result, json.dumps(scores, indent=1) + "\n")
        print(", ".join(f"{key} {x:.2f}" if isinstance(x, float) else f"{key} {x}" for key, x in scores.items()))
        print(f"The result is in {result}", flush=True)


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


# Scores.


def read_hypotheses(log: Path) -> list[str]:
    """Return the best hypothesis of each sentence, in order. Raises RecipeError if one is repeated."""
    found: dict[int, str] = {}
    for number, text in HYPOTHESIS.findall(log.read_text(encoding="utf-8")):
        if int(number) in found:
            raise RecipeError(f"{log} has several hypotheses of sentence {number}: generate with --nbest 1.")
        found[int(number)] = text
    return [found[number] for number in sorted(found)]


def read_references(path: Path, count: int) -> list[str]:
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if len(lines) != count:
        raise RecipeError(f"{count:,} sentences were translated, but {path} has {len(lines):,}: evaluate again.")
    return lines


def split_compounds(line: str) -> str:
    return COMPOUND.sub(r"\1 ##AT##-##AT## \2", line)


def score(log: Path, tokenized: Path, raw: Path | None, language: str) -> dict[str, object]:
    """Return the scores of one log of fairseq-generate, with the speed.

    raw: the untokenised reference, if any. Raises RecipeError unless every sentence is there once.
    """
    from sacrebleu.metrics import BLEU  # imported here: --help must work without it
    from sacremoses import MosesDetokenizer

    hypotheses = read_hypotheses(log)
    references = read_references(tokenized, len(hypotheses))
    result: dict[str, object] = {"sentences": len(hypotheses)}
    if summary := SUMMARY.search(log.read_text(encoding="utf-8")):
        result |= {"tokens": float(summary[1].replace(",", "")), "seconds": float(summary[2])}
    # As multi-bleu.perl: tokens as they stand, no smoothing.
    plain = BLEU(tokenize="none", smooth_method="none", force=True)
    result["tokenised"] = plain.corpus_score(hypotheses, [references]).score
    split = [[split_compounds(line) for line in side] for side in (hypotheses, references)]
    result["compound_split"] = plain.corpus_score(split[0], split[1:]).score
    if raw is not None:
        detokenizer, metric = MosesDetokenizer(language), BLEU()
        detokenized = [detokenizer.detokenize(line.split()) for line in hypotheses]
        result["sacrebleu"] = metric.corpus_score(detokenized, [read_references(raw, len(hypotheses))]).score
        result["signature"] = str(metric.get_signature())
    return result


# The table.


def write_table(out: Path, models: Sequence[Model]) -> None:
    """Write a line for each model that is scored, the mean of its seeds."""
    if rows := [row for model in models if (row := read_row(model))]:
        save(out, "table", rows, table(rows))


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
    signatures = sorted({row["signature"] for row in rows} - {""})
    return [*by_model(rows, SCORES, "no raw text"), "", "sacreBLEU: " + ", ".join(signatures)]
