"""The command line of a recipe: a stage, flags of the recipe, and flags for fairseq."""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from commands import RecipeError

from fairseq_fwp import cli
from fairseq_fwp.cli.arguments import positive

ROOT = Path(__file__).resolve().parents[2]


class Parser(cli.Parser):
    """The parser of a kind of recipe; unknown flags are for fairseq."""

    def __init__(self, stages: dict[str, str], rest: str, own_data: str = "") -> None:
        """stages: what each does; rest: programs of unknown flags; own_data: how to use another text, for --help."""
        super().__init__(
            prog="run.sh", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
        )
        self.stages, self.rest, self.own_data = stages, rest, own_data
        self.set_defaults(any_text=False, test=None)
        self.add_argument("-h", "--help", action="help", help="show this and exit")
        self.add_argument("--recipe", type=Path, required=True, help=argparse.SUPPRESS)
        self.add_argument(
            "--out", type=Path, metavar="FOLDER", help="folder of all output (default: runs/NAME_OF_RECIPE)"
        )

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Return the flags: the recipe's before `--`, its user's after it; `extra` has those for fairseq."""
        at = arguments.index("--") if "--" in arguments else 0
        settings, given = arguments[:at], arguments[at + bool(at) :]
        script = Path(arguments[arguments.index("--recipe") + 1] if "--recipe" in arguments else ROOT, "run.sh")
        shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script
        self.usage = f"bash {shown} [STAGE] [OPTION...]" + " [OTHER FLAG...]" * bool(self.rest)
        lines = script.read_text(encoding="utf-8").splitlines()[1:] if script.is_file() else []
        comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
        self.description = "\n".join(line.removeprefix("#").removeprefix(" ") for line in comment)
        self.epilog = self.further_help(settings)
        stage = given.pop(0) if given and not given[0].startswith("-") else "all"
        stage = {"eval": "evaluate"}.get(stage, stage)
        args, extra = self.parse_known_args([*settings, *given])
        if stage not in self.stages:
            self.error(f"the stage must be one of {', '.join(self.stages)}, got {stage}.")
        if any(word.partition("=")[0] == "--save-dir" for word in extra):
            self.error("--save-dir is set by the recipe (--out): leave it out.")
        if extra and not extra[0].startswith("-"):
            self.error(f"flags must begin with --, got {extra[0]}.")
        if file := next(filter(Path.is_file, [args.out, *args.out.parents] if args.out else []), None):
            self.error(f"--out must be a folder, got {args.out}: {file} is a file.")
        args.stage, args.extra = stage, extra
        args.out = args.out and args.out.absolute()
        return args

    def further_help(self, settings: list[str]) -> str:
        """Return the help after the options: stages, other flags, how to resume, how to use another text."""
        lines = ["stages (default: all):", *(f"  {stage:<9} {text}" for stage, text in self.stages.items())]
        if "--models" in settings:
            models = itertools.takewhile(lambda word: word[0] != "-", settings[settings.index("--models") + 1 :])
            lines += [f"            The default models are {', '.join(models)}."]
        if self.rest:
            lines += ["", "other flags:", f"  They are given to {self.rest}."]
            lines += ["  For example, --max-update 100 makes a training shorter, and --cpu does not use the GPU."]
        lines += ["", "resume:", "  Give the same command again. Finished steps are skipped."]
        lines += ["  An interrupted training continues from its last checkpoint, if it has saved one."]
        if self.own_data:
            lines += ["", "your own data:", *(f"  {line}" for line in self.own_data.splitlines())]
        return "\n".join(lines)


class Request(NamedTuple):
    """What is asked of a recipe. extra: flags for fairseq; test: a text of the user that is only evaluated."""

    recipe: Path
    stage: str
    out: Path
    extra: list[str]
    seeds: Sequence[int | None]
    test: Path | None

    @property
    def trains(self) -> bool:
        return self.stage in ("train", "all")

    @property
    def evaluates(self) -> bool:
        return self.stage in ("evaluate", "all")


# Recipes that train models.


def add_flags_of_models(parser: argparse.ArgumentParser) -> None:
    models = "names of files in conf/, without .yaml, of folders, or FOLDER/TABLE (default: see the stages)"
    parser.add_argument("--models", nargs="+", metavar="NAME", help=models)
    parser.add_argument("--conf", metavar="YAML", help="one model, by its file; instead of --models")
    any_text = "with --data: accept another text than the recipe's"
    parser.add_argument("--any-text", action="store_true", help=any_text)
    parser.add_argument("--test", type=Path, metavar="FILE", help="with evaluate: score this raw text, see below")


def add_flags_of_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=positive, metavar="N", help="train each model with the seeds 1 to N")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder with the text, see below")


def request_of(args: argparse.Namespace, out: Path | None = None) -> Request:
    """Return what is asked; out: the folder of output unless --out gives one.

    Raises RecipeError for flags of the text that do not go together.
    """
    if args.any_text and not args.data:
        raise RecipeError("--data FOLDER must be given with --any-text, which accepts another text there.")
    if args.test and args.stage != "evaluate":
        raise RecipeError(f"--test needs the stage evaluate, got the stage {args.stage}.")
    if args.data and not args.data.is_dir():
        raise RecipeError(f"--data must be a folder, got {args.data}.")
    seeds = range(1, args.seeds + 1) if args.seeds else [None]
    out = args.out or out or ROOT / "runs" / args.recipe.name
    return Request(args.recipe, args.stage, out, args.extra, seeds, args.test)


def names(words: list[str] | None) -> list[str]:
    """Return the names in a list of words; a word may hold several, separated by spaces."""
    return [name for word in words or [] for name in word.split()]
