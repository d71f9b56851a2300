"""The evaluation of language models by fwp-eval-lm: ways with labels, and values, of which the best on valid counts."""

import fnmatch
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from commands import CommandError, RecipeError, check_same, run, whole, write
from data.prepare import Data, count
from flags import label, read_yaml, refusal, shaped, value_of, without_silent
from log import read_json
from model import SOURCE, Model, Models

# Flags for how the text is read: on the command line they replace the recipe's ways.
READING = (
    "--stride", "--tokens-per-sample", "--context-window", "--carry-state", "--warm-up", "--streams",
    "--model-overrides",
)  # fmt: skip


class Way(NamedTuple):
    """One way of evaluation.

    values: each replaces @ in the flags; the best one on valid is used on test. test_all: use all values on test.
    scores: also write the score of every token.
    """

    label: str = ""
    flags: str = "--context-window 0"  # blocks, as fairseq-eval-lm reads
    splits: tuple[str, ...] = ("valid", "test")
    values: tuple[str, ...] = ()
    test_all: bool = False
    scores: bool = False

    def words(self, value: str) -> list[str]:
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
                return [read_way(path, name_of_way, fields) for name_of_way, fields in ways.items()]
    raise RecipeError(f"{path} has no pattern that fits {name}: add one, such as '*'.")


def read_way(path: Path, label: str, asked: Any) -> Way:
    asked = {"flags": asked} if isinstance(asked, str) else asked
    if unknown := asked.keys() - {*Way._fields[:-1]}:
        known = ", ".join(Way._fields[1:-1])
        raise RecipeError(f"{path}: the fields of an evaluation must be among {known}, got {', '.join(unknown)}.")
    lists = {field: tuple(asked[field].split()) for field in ("splits", "values") if field in asked}
    way = Way(label, asked["flags"], test_all=asked.get("test_all") == "true", **lists)
    if not {*way.splits} <= {"valid", "test"} or (way.values and "valid" not in way.splits):
        must = "valid or test, and with values also valid"
        raise RecipeError(f"{path}: the splits of {label!r} must be {must}, got {' '.join(way.splits)}.")
    return way


@dataclass(frozen=True)
class Evaluation:
    """A kind of evaluation of a recipe's trained models."""

    models: Models

    @property
    def flags(self) -> list[str]:
        """Flags of the command line: all in the stage evaluate, otherwise only that of the device."""
        request = self.models.request
        return request.extra if request.stage == "evaluate" else [flag for flag in request.extra if flag == "--cpu"]

    def check(self, models: Sequence[Model]) -> None:
        """Raise RecipeError, before any work, if it cannot evaluate the models."""

    def evaluate(self, model: Model) -> None:
        """Write the results of a model, unless they are there."""
        raise NotImplementedError


@dataclass(frozen=True)
class Perplexity(Evaluation):
    """The evaluation of every model in the recipe's ways. Flags of the command line may replace how text is read.

    With a text of the user, only the value that is the best on valid is used.
    """

    @property
    def path(self) -> Path:
        return self.models.recipe / "evaluation.yaml"

    def ways(self, name: str) -> list[Way]:
        return read_ways(self.path, name)

    def check(self, models: Sequence[Model]) -> None:
        """Raise RecipeError if fwp-eval-lm refuses the flags of a way."""
        for way in dict.fromkeys(way for model in models for way in self.ways(model.name)):
            words = way.words(next(iter(way.values), ""))
            if reason := refusal([str(self.models.data.bin), "--path", "checkpoint_best.pt", *words], "fwp-eval-lm"):
                raise RecipeError(f"{self.path}: fwp-eval-lm refuses the flags of {way.label!r}: {reason}.")

    def ways_of(self, model: Model) -> list[Way]:
        """Return the recipe's ways, unless flags of the command line replace them; labels name these flags."""
        own, ways = label(self.flags), self.ways(model.name)
        if replacing := [flag for flag in self.flags if flag.partition("=")[0] in READING]:
            print(f"{replacing[0]} replaces the recipe's way of reading: {'; '.join(way.flags for way in ways)}")
            ways = [Way("", "")]
        return [way._replace(label=f"{way.label} {own}".strip()) for way in ways]

    def evaluate(self, model: Model) -> None:
        checkpoint, plugin = model.folder / "checkpoint_best.pt", value_of(model.flags, "--user-dir")
        flags = [*self.flags, *(["--user-dir", plugin] if plugin else [])]
        for way in self.ways_of(model):
            if test := self.models.request.test:
                name = f"own_{test.stem}"
                folder = self.models.data.own_test(name, test, [test])
                value = best(model.folder, way.label) if way.values else ""
                path = result(model.folder, name, way.label, value)
                score(checkpoint, path, folder / "bin", "test", folder, [*way.words(value), *flags])
            else:
                evaluate(model.folder, checkpoint, self.models.data, way, flags)


@dataclass(frozen=True)
class Measures(Evaluation):
    """The evaluation of a source and of its trainings in the same ways, and of a model just converted in the first one.

    checkpoint: which one of a training is measured, best or last.
    """

    ways: Callable[[], Sequence[Way]]
    checkpoint: str = "best"

    def check(self, models: Sequence[Model]) -> None:
        """Raise RecipeError in the stage evaluate without a source."""
        there = self.models.data.folder.is_dir() and self.models.data.converted.is_dir()
        if self.models.request.stage == "evaluate" and not there:
            raise RecipeError(f"{self.models.out} must have a {SOURCE}, got none: run the stage prepare first.")

    def evaluate(self, model: Model) -> None:
        self.evaluate_converted(model)
        for way in self.ways():
            self.measure(self.models.data.results, self.models.data.converted / "checkpoint.pt", way)
            self.measure(model.folder, model.folder / f"checkpoint_{self.checkpoint}.pt", way)

    def evaluate_converted(self, model: Model) -> None:
        """Evaluate the model that a training begins with, unless it is that of an earlier one."""
        folder = self.models.convert(model)
        if folder and folder.parent == model.folder:
            self.measure(folder, folder / "checkpoint.pt", next(iter(self.ways())))

    def measure(self, folder: Path, checkpoint: Path, way: Way) -> None:
        """Evaluate a model in a way without values, unless it is."""
        if not all(result(folder, split, way.label).exists() for split in way.splits):
            evaluate(folder, checkpoint, self.models.data, way, [*self.models.plugin, *self.flags])


def result(folder: Path, *words: str) -> Path:
    """Return the file of a result: words are a split, a label and a value."""
    return folder / f"{' '.join(filter(None, words))}.json"


def evaluate(folder: Path, checkpoint: Path, data: Data, way: Way, flags: Sequence[object]) -> None:
    """Evaluate a model in one way, on every token of each split; its folder gets the results."""
    for split in way.splits:
        values = way.values or ("",)
        if way.values and split == "test" and not way.test_all:
            values = (best(folder, way.label),)
        for value in values:
            path = result(folder, split, way.label, value)
            scores = ["--scores", path.with_suffix(".tsv")] if way.scores else []
            score(checkpoint, path, data.bin, split, data.words, [*way.words(value), *flags, *scores])


def score(checkpoint: Path, path: Path, data: Path, split: str, text: Path | None, flags: Sequence[object]) -> None:
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
        try:
            run("fwp-eval-lm", data, "--path", checkpoint, "--gen-subset", split, *out, *flags)
        except CommandError:
            if checkpoint.parent.name != "converted":
                raise
            # A model that is not trained yet may give probabilities of zero.
            work.write_text('{"perplexity": Infinity, "loss": Infinity}\n', encoding="utf-8")
            return
        if text and (scored := read_json(work)["tokens"]) != (there := count(text / f"{split}.txt")):
            raise RecipeError(
                f"{scored:,} tokens were scored, but {text}/{split}.txt has {there:,}: nothing is reported."
            )
    print(f"The result is in {path}: perplexity {read_json(path)['perplexity']:.2f}", flush=True)


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
