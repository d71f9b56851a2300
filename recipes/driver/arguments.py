"""The command line of a recipe: a stage, flags of the recipe, and flags for fairseq."""

import argparse
import itertools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Parser(argparse.ArgumentParser):
    """The parser of a kind of recipe; unknown flags are for fairseq."""

    def __init__(self, stages: dict[str, str], rest: str, own_data: str = "") -> None:
        """stages: what each does; rest: programs of unknown flags; own_data: how to use another text, for --help."""
        super().__init__(
            prog="run.sh", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
        )
        self.stages, self.own_data = stages, own_data
        self.rest = rest
        self.add_argument("-h", "--help", action="help", help="show this and exit")
        self.add_argument("--recipe", type=Path, required=True, help=argparse.SUPPRESS)
        self.add_argument(
            "--out", type=Path, metavar="FOLDER", help="folder of all output (default: runs/NAME_OF_RECIPE)"
        )

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Return the flags: the recipe's before `--`, its user's after it; `extra` has those for fairseq."""
        at = arguments.index("--") if "--" in arguments else 0
        settings, given = arguments[:at], arguments[at:][1 if at else 0 :]
        recipe = Path(arguments[arguments.index("--recipe") + 1]) if "--recipe" in arguments else ROOT
        script = recipe / "run.sh"
        shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script
        self.usage = f"bash {shown} [STAGE] [OPTION...]" + " [OTHER FLAG...]" * bool(self.rest)
        self.description = describe(script)
        self.epilog = self.further_help(default_models(settings))
        stage = "all"
        if given and not given[0].startswith("-"):
            stage, *given = given
        stage = {"eval": "evaluate"}.get(stage, stage)
        args, extra = self.parse_known_args([*settings, *given])
        if stage not in self.stages:
            self.error(f"the stage must be one of {', '.join(self.stages)}, got {stage}.")
        for flag in ("--save-dir",):
            if any(word.partition("=")[0] == flag for word in extra):
                self.error(f"{flag} is set by the recipe (--out): leave it out.")
        if extra and not extra[0].startswith("-"):
            self.error(f"flags must begin with --, got {extra[0]}.")
        args.stage, args.extra = stage, extra
        args.out = args.out and args.out.absolute()
        return args

    def further_help(self, models: str) -> str:
        """Return the help after the options: stages, other flags, how to resume, how to use another text."""
        lines = ["stages (default: all):"]
        lines += [f"  {stage:<9} {text}" for stage, text in self.stages.items()]
        lines += [f"            The default models are {models}."] if models else []
        if self.rest:
            lines += ["", "other flags:", f"  They are given to {self.rest}."]
            lines += ["  For example, --max-update 100 makes a training shorter, and --cpu does not use the GPU."]
        lines += ["", "resume:", "  Give the same command again. Finished steps are skipped."]
        lines += ["  An interrupted training continues from its last checkpoint, if it has saved one."]
        if self.own_data:
            lines += ["", "your own data:", *(f"  {line}" for line in self.own_data.splitlines())]
        return "\n".join(lines)


def default_models(settings: list[str]) -> str:
    """Return the models that a recipe's run.sh names, separated by commas; empty if it names none."""
    if "--models" not in settings:
        return ""
    given = settings[settings.index("--models") + 1 :]
    return ", ".join(itertools.takewhile(lambda word: not word.startswith("-"), given))


def describe(script: Path) -> str:
    """Return the comment at the top of a script."""
    if not script.is_file():
        return ""
    lines = []
    for line in script.read_text(encoding="utf-8").splitlines()[1:]:
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def names(words: list[str] | None) -> list[str]:
    """Return the names in a list of words; a word may hold several, separated by spaces."""
    return [name for word in words or [] for name in word.split()]


def whole_number(text: str) -> int:
    """Read a count from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)
