"""Flags of fairseq-train: read from a YAML file, checked before any work, and converted to labels.

    arch: delta_lm_wt103          ->  --arch delta_lm_wt103
    share-decoder-input-output-embed: true  ->  --share-decoder-input-output-embed
    include: common.yaml          ->  the flags of that file first (its path is relative to this one)

    from, convert: the model that the training begins with, see recipe.py

Values are passed on exactly as written, so 1e-3 stays 1e-3.
"""

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commands import RecipeError

# At fairseq's import it advises a package that is not needed.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
# Flags that do not change scores, and so are not in names of results: with a value, without one.
SILENT = {"--batch-size", "--log-format", "--log-interval"}, {"--cpu", "--no-progress-bar"}
# Lines that are not flags: the model that a training begins with, and the options of fwp-convert for it.
START = ("from", "convert")


def read_yaml(path: Path, plain: bool = True) -> Any:
    """Return the content of a YAML file, with `plain` every value as a string. Raises RecipeError."""
    import yaml  # imported here: --help must work without it

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader if plain else yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def shaped(path: Path, like: str) -> Iterator[None]:
    """Raise RecipeError if the content of a file is not of the shape that is read within; like: an example."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecipeError(f"{path} must be like {like}, got {type(error).__name__}: {error}.") from error


def read_conf(path: Path, within: tuple[Path, ...] = ()) -> list[tuple[str, str]]:
    """Return the lines of a YAML file and of those that it includes, in the order written. RecipeError if not flat.

    within: the files that include it.
    """
    if path.resolve() in within:
        raise RecipeError(f"{path} must not include itself, got an include of it in {within[-1]}.")
    settings = read_yaml(path)
    if not isinstance(settings, dict):
        raise RecipeError(f"{path} must be a flat list of `flag: value` lines.")
    lines = []
    for name, value in settings.items():
        if not isinstance(value, str) or value in ("", "false"):
            raise RecipeError(
                f"{path}: {name} must have one plain value, `true` for a switch; leave out a switch that is off."
            )
        included = name == "include"
        lines += read_conf(path.parent / value, (*within, path.resolve())) if included else [(name, value)]
    return lines


def read_flags(path: Path) -> list[str]:
    """Return the flags of a YAML file, without the model that the training begins with."""
    return [word for name, value in read_conf(path) if name not in START for word in as_flags({name: value})]


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Return flags for names and values; true is a switch, false leaves it out."""
    flags = []
    for name, value in settings.items():
        if str(value).lower() != "false":
            flags += [f"--{name}"] if str(value).lower() == "true" else [f"--{name}", str(value)]
    return flags


def value_of(flags: list[str], name: str, default: str = "") -> str:
    """Return the last value of a flag."""
    for flag, value in zip(reversed(flags), [None, *reversed(flags)], strict=False):
        if flag == name and value is not None:
            return value
        if flag.startswith(f"{name}="):
            return flag.partition("=")[2]
    return default


def without_silent(flags: list[str]) -> list[str]:
    """Return the flags that change the result of an evaluation, with their values."""
    kept, words = [], iter(flags)
    for flag in words:
        if flag in SILENT[0]:
            next(words, None)  # its value
        elif flag.partition("=")[0] not in SILENT[0] | SILENT[1]:
            kept.append(flag)
    return kept


def label(flags: list[str]) -> str:
    """Return a name for an evaluation with these flags, without slashes."""
    return " ".join(flag.removeprefix("--") for flag in without_silent(flags)).replace("/", "_")


def refusal(flags: list[str], program: str = "fairseq-train") -> str | None:
    """Return the error of a program for flags that it refuses, without its usage; None if it accepts them.

    The program is fairseq-train, fairseq-generate, fwp-eval-lm or fwp-linearize.
    """
    from fairseq import options

    from fairseq_fwp.cli import eval_lm, linearize

    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            if program == "fwp-eval-lm":
                eval_lm.parser().parse_args(flags)
            elif program == "fwp-linearize":
                linearize.read_attention("fwp_lm", command := linearize.parser(), command.parse_args(flags))
            else:
                training = program == "fairseq-train"
                parser = options.get_training_parser() if training else options.get_generation_parser()
                options.parse_args_and_arch(parser, flags)
        except SystemExit:
            return said.getvalue().splitlines()[-1].split("error: ")[-1].split(" (choose from")[0]
    return None
