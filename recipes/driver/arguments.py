"""The command line of a recipe: a stage, flags of the recipe, and flags for fairseq."""

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Parser(argparse.ArgumentParser):
    """The parser of a kind of recipe; unknown flags are for fairseq."""

    def __init__(self, stages: tuple[str, ...], rest: str) -> None:
        super().__init__(
            prog="run.sh", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
        )
        self.stages = stages
        self.usage = f"bash run.sh [{'|'.join(stages)}] [flags below]" + f" [{rest}]" * bool(rest)
        self.add_argument("-h", "--help", action="help", help="show this and exit")
        self.add_argument("--recipe", type=Path, required=True, help=argparse.SUPPRESS)
        self.add_argument("--out", type=Path, metavar="FOLDER", help="folder for all results (runs/RECIPE)")

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Return the flags: the recipe's before `--`, its user's after it; `extra` has those for fairseq."""
        at = arguments.index("--") if "--" in arguments else 0
        settings, given = arguments[:at], arguments[at:][1 if at else 0 :]
        recipe = Path(arguments[arguments.index("--recipe") + 1]) if "--recipe" in arguments else ROOT
        self.description = describe(recipe / "run.sh")
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
