"""Recipes of language models: one text, several models, and a table of their perplexities."""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from arguments import Parser, Request, add_flags_of_data, add_flags_of_models, request_of, whole_number
from commands import RecipeError, run, write
from comparison import Comparison
from data.prepare import read_lines
from data.texts import TEXTS, TextData
from engine import PLUGIN
from evaluation import Perplexity, read_ways
from flags import value_of
from model import Choice, Model, Models
from recipe import STAGES, Recipe
from start import ModelStart

OTHER_FLAGS = "fairseq-train, in the stage evaluate to fwp-eval-lm"
OWN_TEXT = """\
--data FOLDER {any_text}--out FOLDER trains on another text. The first folder contains
{files}.
evaluate --test FILE scores one raw text with the trained models. It prints the share of <unk> tokens."""
STAGES_AND_SAMPLE = {stage: text for stage, text in STAGES.items() if stage != "all"} | {
    "sample": "print three texts that the first model writes",
    "all": STAGES["all"],
}


def compose(arguments: list[str], stages: Mapping[str, str] = STAGES_AND_SAMPLE, only: Choice = list) -> Recipe:
    """Return the recipe that a command line asks for; only: those of the named models that it trains, in order."""
    if "--prompt" in arguments:
        stages = {**stages, "all": "prepare, train, evaluate, report and sample"}
    parser = Parser(stages, OTHER_FLAGS, own_text(arguments))
    add_flags_of_models(parser)
    add_flags_of_text(parser)
    args = parser.parse(arguments)
    request = request_of(args)
    models = Models(request.recipe, request.out)
    chosen = models.chosen(args, request, only)
    check_own_test(args.test)
    data = data_of(args, request)
    evaluation = request.recipe / "evaluation.yaml"
    measure = "loss_base_2" if args.text == "enwik8" else "perplexity"
    return Recipe(
        request,
        chosen,
        data,
        ModelStart(models.named, data.bin, source_flags(data), request.extra),
        [Perplexity(partial(read_ways, evaluation), evaluation, data, request.evaluation_flags, request.test)],
        Comparison(request.recipe, request.out, measure, data.folder / "text" if args.per_word else None),
        evaluator="fwp-eval-lm",
        sample=partial(sample, data, args.prompt, args.next, request.extra),
        samples_in_all=bool(args.prompt),
    )


# Parts that other kinds of recipes of language models have, too.


def own_text(arguments: list[str]) -> str:
    """Return how to use another text, for --help."""
    raw = "train.txt, valid.txt and test.txt (or .txt.gz): raw text"
    files = "one file named enwik8" if "enwik8" in arguments else raw
    return OWN_TEXT.format(any_text="" if "--merges" in arguments else "--any-text ", files=files)


def add_flags_of_text(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the text, some of them hidden: only run.sh gives them."""
    add_flags_of_data(parser)
    hidden = argparse.SUPPRESS
    parser.add_argument("--text", choices=TEXTS, required=True, help=hidden)
    parser.add_argument("--merges", type=whole_number, default=0, help=hidden)  # of BPE; 0: whole words
    parser.add_argument("--prompt", help=hidden)
    parser.add_argument("--next", help=hidden)
    parser.add_argument("--per-word", action="store_true", help=hidden)
    lines = "use only the first N lines of valid and test, for a trial"
    parser.add_argument("--lines", type=whole_number, metavar="N", help=lines)


def check_own_test(file: Path | None) -> None:
    if file and not file.is_file():
        what = "a folder" if file.is_dir() else "which does not exist"
        raise RecipeError(f"--test must be the name of a text file, got {file}, {what}.")


def data_of(args: argparse.Namespace, request: Request) -> TextData:
    return TextData(request.out, args.text, args.data, args.merges, args.lines, args.any_text)


def source_flags(data: TextData) -> list[object]:
    """Return flags of fwp-convert for models of the recipe."""
    return ["--source", "fwp-lm", "--vocabulary", data.bin / "dict.txt"]


def sample(data: TextData, prompt: str | None, following: str | None, extra: list[str], model: Model) -> None:
    """Print three texts that a model writes after the prompt, and what a user may do next."""
    if data.source or not prompt:  # a text of the user is continued from the first words of its test set
        words = next(filter(None, read_lines(data.folder / "text" / "test.txt"))).split()
        prompt = " ".join(words[:4])
    pieces = ["--bpe", "subword_nmt", "--bpe-codes", data.codes] if data.merges else []
    log, out, written = data.out / "sample.log", data.out / "sample.txt", data.out / "prompt.txt"
    write(written, prompt + "\n")
    run(
        "fairseq-interactive", data.bin, "--user-dir", value_of(model.flags, "--user-dir", PLUGIN[1]),
        "--task", "language_modeling",
        "--path", model.folder / "checkpoint_best.pt", "--input", written, *pieces,
        "--sampling", "--sampling-topp", 0.9, "--temperature", 0.7, "--beam", 3, "--nbest", 3, "--max-len-b", 200,
        "--seed", 1, *(flag for flag in extra if flag == "--cpu"), log=log,
    )  # fmt: skip
    lines = (line.split("\t") for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("D-"))
    write(out, data.text.show("".join(line[2] + "\n" for line in lines)))
    print(f'Three texts that {model.name} wrote after "{prompt}" (also in {out}):')
    print(out.read_text(encoding="utf-8"), following or "", sep="\n")
