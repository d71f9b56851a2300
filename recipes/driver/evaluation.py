"""The evaluation of a language model: labels, flags of fwp-eval-lm, and values, of which the best on valid counts."""

import fnmatch
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from commands import RecipeError, check_same, run, whole, write
from flags import read_yaml, shaped, without_silent
from log import read_json
from prepare import count

# Flags for how the text is read: on the command line they replace the recipe's ways.
READING = ("--stride", "--tokens-per-sample", "--context-window", "--carry-state", "--model-overrides")


class Way(NamedTuple):
    """One way of evaluation.

    values: each replaces @ in the flags; the best one on valid is used on test. test_all: use all values on test.
    """

    label: str = ""
    flags: str = "--context-window 0"  # blocks, as fairseq-eval-lm reads
    splits: tuple[str, ...] = ("valid", "test")
    values: tuple[str, ...] = ()
    test_all: bool = False

    def words(self, value: str) -> list[str]:
        """Return the flags with a value."""
        return self.flags.replace("@", value).split()


def read_ways(path: Path, name: str) -> list[Way]:
    """Return the ways of a model in a file of the recipe: those of the first pattern that matches its name.

    A pattern has labels. A label has flags, or a mapping with `flags` and other fields of Way. Without a file there is
    one way, blocks.
    """
    if not path.exists():
        return [Way()]
    with shaped(path, "recipes/peps/evaluation.yaml"):
        for pattern, ways in read_yaml(path).items():
            if fnmatch.fnmatch(name, pattern):
                return [read_way(path, label, asked) for label, asked in ways.items()]
    raise RecipeError(f"{path} has no pattern that fits {name}: add one, such as '*'.")


def read_way(path: Path, label: str, asked: Any) -> Way:
    asked = {"flags": asked} if isinstance(asked, str) else asked
    if unknown := asked.keys() - set(Way._fields):
        known = ", ".join(Way._fields[1:])
        raise RecipeError(f"{path}: the fields of an evaluation must be among {known}, got {', '.join(unknown)}.")
    lists = {field: tuple(asked[field].split()) for field in ("splits", "values") if field in asked}
    way = Way(label, asked["flags"], test_all=asked.get("test_all") == "true", **lists)
    if not {*way.splits} <= {"valid", "test"} or (way.values and "valid" not in way.splits):
        must = "valid or test, and with values also valid"
        raise RecipeError(f"{path}: the splits of {label!r} must be {must}, got {' '.join(way.splits)}.")
    return way


def result(folder: Path, *words: str) -> Path:
    """Return the file of a result: words are a split, a label and a value."""
    return folder / f"{' '.join(filter(None, words))}.json"


def evaluate(folder: Path, data: Path, text: Path, way: Way, flags: list[str]) -> None:
    """Evaluate the model of a folder in one way, on every token of each split."""
    for split in way.splits:
        values = way.values or ("",)
        if way.values and split == "test" and not way.test_all:
            values = (best(folder, way.label),)
        for value in values:
            path = result(folder, split, way.label, value)
            score(folder / "checkpoint_best.pt", path, data, split, text, [*way.words(value), *flags])


def score(checkpoint: Path, path: Path, data: Path, split: str, text: Path | None, flags: list[object]) -> None:
    """Run fwp-eval-lm, unless the result exists; with `text` check that it scored every token of text/SPLIT.txt."""
    settings, said = path.with_suffix(".flags"), shlex.join(without_silent(list(map(str, flags))))
    if path.exists():
        if settings.exists():
            check_same(settings, said)
        print(f"{path.parent.name} is evaluated already: {path}")
        return
    write(settings, said)
    with whole(path) as work:
        out = ["--no-progress-bar", "--json", work]
        run("fwp-eval-lm", data, "--path", checkpoint, "--gen-subset", split, *out, *flags)
        if text:
            check_scored(work, text / f"{split}.txt")
    print(f"The result is in {path}: perplexity {read_json(path)['perplexity']:.2f}", flush=True)


def check_scored(path: Path, text: Path) -> None:
    scored, there = read_json(path)["tokens"], count(text)
    if scored != there:
        raise RecipeError(f"{path}: {scored:,} tokens were scored, but {text} has {there:,}: nothing is reported.")


def results(folder: Path, split: str, label: str) -> dict[str, dict[str, Any]]:
    """Return the results of a split under a label, by the value that follows it in the file's name."""
    start = f"{split} {label}".strip()
    return {path.stem.removeprefix(start).strip(): read_json(path) for path in folder.glob(f"{start}*.json")}


def best(folder: Path, label: str) -> str:
    """Return the value with the lowest loss on the validation text."""
    found = results(folder, "valid", label)
    if not found:
        raise RecipeError(f"{folder} has no result on the validation text for {label}: run the stage evaluate first.")
    return min(found, key=lambda value: found[value]["loss"])
