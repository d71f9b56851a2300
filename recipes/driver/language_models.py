"""Recipes of language models: one text, several models, and a table of their perplexities."""

import argparse
from collections.abc import Mapping
from functools import partial

from arguments import Parser, add_flags_of_data, add_flags_of_models, positive, request_of
from commands import RecipeError, run, write
from comparison import write_tables
from data.prepare import read_lines
from data.texts import TEXTS, TextData
from engine import PLUGIN
from evaluation import Perplexity
from flags import value_of
from model import Choice, Model, Models
from recipe import STAGES, Recipe

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
    data = TextData(request.out, args.text, args.data, args.merges, args.lines, args.any_text)
    models = Models(request, data)
    chosen = models.chosen(args, only)
    if args.test and not args.test.is_file():
        what = "a folder" if args.test.is_dir() else "which does not exist"
        raise RecipeError(f"--test must be the name of a text file, got {args.test}, {what}.")
    measure = "loss_base_2" if args.text == "enwik8" else "perplexity"
    text = data.folder / "text" if args.per_word else None
    report = partial(write_tables, request.recipe, request.out, measure, text)
    written = partial(sample, models, args.prompt, args.next)
    return Recipe(
        models, chosen, [Perplexity(models)], report, "fwp-eval-lm", written, samples_in_all=bool(args.prompt)
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
    parser.add_argument("--merges", type=positive, default=0, help=hidden)  # of BPE; 0: whole words
    parser.add_argument("--prompt", help=hidden)
    parser.add_argument("--next", help=hidden)
    parser.add_argument("--per-word", action="store_true", help=hidden)
    lines = "use only the first N lines of valid and test, for a trial"
    parser.add_argument("--lines", type=positive, metavar="N", help=lines)


def sample(models: Models, prompt: str | None, following: str | None, model: Model) -> None:
    """Print three texts that a model writes after the prompt, and what a user may do next, with the folder for OUT."""
    data = models.data
    if data.source or not prompt:  # a text of the user is continued from the first words of its test set
        words = next(filter(None, read_lines(data.folder / "text" / "test.txt"))).split()
        prompt = " ".join(words[:4])
    pieces = ["--bpe", "subword_nmt", "--bpe-codes", data.codes] if data.merges else []
    search = ["--sampling-topp", 0.9, "--temperature", 0.7, "--beam", 3, "--nbest", 3, "--max-len-b", 200]
    texts = interact(models, model, [prompt], "D", ["--task", "language_modeling", *pieces, *search])
    out = data.out / "sample.txt"
    write(out, data.text.show("".join(text + "\n" for text in texts)))
    print(f'Three texts that {model.name} wrote after "{prompt}" (also in {out}):')
    print(out.read_text(encoding="utf-8"), (following or "").replace("OUT", str(data.out)), sep="\n")


def interact(models: Models, model: Model, prompts: list[str], kind: str, flags: list[object]) -> list[str]:
    """Return texts that fairseq-interactive samples after prompts, from its lines of a kind, H (tokens) or D (text)."""
    data, log, written = models.data, models.out / "sample.log", models.out / "prompt.txt"
    write(written, "".join(prompt + "\n" for prompt in prompts))
    run(
        "fairseq-interactive", data.bin, "--user-dir", value_of(model.flags, "--user-dir", PLUGIN[1]), "--path",
        model.folder / "checkpoint_best.pt", "--input", written, "--sampling", "--seed", 1, *flags,
        *(flag for flag in models.extra if flag == "--cpu"), log=log,
    )  # fmt: skip
    lines = log.read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[2] for line in lines if line.startswith(f"{kind}-")]
