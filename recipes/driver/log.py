"""The log of a training: its numbers for reports, and short lines while it grows."""

import json
import math
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from commands import RecipeError

from fairseq_fwp.cli.logs import TIME, read_line

START = re.compile(r"^\+ (?:.*[ /])?fairseq-train ", re.MULTILINE)
ENTRY = re.compile(r"\| (\{\".*\})\s*$")
PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")
TOTAL = re.compile(r"\bmax_update(?:': |=)(\d+)")
# fairseq's message for a gradient that is NaN or infinite (with --fp16: at every scale of the loss).
NOT_FINITE = re.compile(r"^FloatingPointError: (gradients are Nan/Inf|Minimum loss scale)", re.MULTILINE)


class Log(NamedTuple):
    """The contents of a log; of a resumed run, without updates that were repeated.

    hours: from the first to the last line, summed over starts; seconds: fairseq's own clock; validations: the numbers
    of each; not_finite: the last start ended at such a gradient.
    """

    parameters: int
    updates: int
    hours: float
    seconds: float
    validations: list[dict[str, float]]
    not_finite: bool

    def curve(self, name: str = "ppl") -> list[tuple[int, float]]:
        """Return (update, value) of each validation that has the number."""
        return [(int(found["num_updates"]), found[name]) for found in self.validations if name in found]

    def best(self, name: str = "ppl") -> float:
        """Return the lowest value of a validation; infinite without one."""
        return min((value for _, value in self.curve(name) if not math.isnan(value)), default=math.inf)

    @property
    def test(self) -> float | None:
        """The perplexity of the test text at the best validation; None without `--valid-subset valid,test`."""
        return next((found.get("test_ppl") for found in self.validations if found.get("ppl") == self.best()), None)

    @property
    def summary(self) -> str:
        """The best loss and the updates until the last validation, in words."""
        updates = int(self.validations[-1]["num_updates"]) if self.validations else 0
        return f"best loss {self.best('loss')}, {updates} updates"

    @property
    def divergence(self) -> str:
        """The reason why the training diverged, if it has ended, in words; empty if it did not."""
        kind = "perplexity" if (curve := self.curve()) else "loss"
        finite = [(update, value) for update, value in curve or self.curve("loss") if math.isfinite(value)]
        if self.not_finite:
            last = f"last finite validation {kind} {finite[-1][1]:.2f} at {finite[-1][0]:,}" if finite else ""
            return f"gradient not finite after update {self.updates:,}, {last or 'no validation yet'}"
        # fairseq has saved no best checkpoint then.
        return "no validation perplexity was a number" if curve and all(math.isnan(ppl) for _, ppl in curve) else ""


class Outcome(NamedTuple):
    """How a training ended: the name of the file that says it, `trained` or `diverged`, and its words."""

    mark: str
    words: str

    @property
    def diverged(self) -> bool:
        return self.mark == "diverged"


def read_outcome(folder: Path) -> Outcome | None:
    """Return how a training ended; None if it has not."""
    mark = next(filter(Path.exists, (folder / name for name in ("diverged", "trained"))), None)
    return mark and Outcome(mark.name, mark.read_text(encoding="utf-8").strip())


def read_training(log: Path) -> Log:
    """Read a log, each start after a line `+ ... fairseq-train ...`. Raises RecipeError for one without a model."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if not (parameters := PARAMETERS.search(text)):
        raise RecipeError(f"{log} must be a log of fairseq-train that reached the start of training.")
    updates, seconds = 0, 0.0
    validations: list[dict[str, float]] = []
    for line in text.splitlines():
        about, numbers = read_line(line)
        if not about and ENTRY.search(line):
            raise RecipeError(f"{log} is damaged: it has the line {line!r}; remove its folder to train again.")
        if about in ("inner", "valid"):
            updates = int(numbers.get("num_updates", updates))
        if about == "valid":
            validations = [known for known in validations if known["num_updates"] < updates] + [numbers]
        if "test_ppl" in numbers and validations:
            validations[-1]["test_ppl"] = numbers["test_ppl"]
        seconds = numbers.get("wall" if about == "epoch" else "train_wall", seconds)
    starts = START.split(text)
    not_finite = NOT_FINITE.search(starts[-1]) is not None
    hours = sum(map(hours_of, starts))
    return Log(int(parameters[1].replace(",", "")), updates, hours, seconds, validations, not_finite)


def find_log(folder: Path) -> Log | None:
    """Return the content of a train.log; None if it ends before its model. Raises RecipeError for a damaged one."""
    path = folder / "train.log"
    reached = path.exists() and PARAMETERS.search(path.read_text(encoding="utf-8", errors="replace"))
    return read_training(path) if reached else None


def check_unchanged(folder: Path) -> None:
    """Raise RecipeError unless train.log still has the summary that it got after the training."""
    outcome, log = read_outcome(folder), find_log(folder)
    if outcome is None or not outcome.words:
        return
    now = "no result" if log is None else log.divergence if outcome.diverged else log.summary
    if outcome.words != now:
        raise RecipeError(
            f"train.log in {folder} has changed since the training finished: the result was {outcome.words}, and now "
            f"it is {now or 'not diverged'}; remove the folder to train it again."
        )


def hours_of(start: str) -> float:
    """Return the hours from the first to the last line of one start; a resumed run stops fairseq's own clock."""
    times = [datetime.fromisoformat(time[1]) for line in start.splitlines() if (time := TIME.match(line))]
    return (times[-1] - times[0]).total_seconds() / 3600 if times else 0.0


def read_json(path: Path) -> dict[str, Any]:
    """Return the result of an evaluation; empty without one. Raises RecipeError for a damaged one."""
    if not path.exists():
        return {}
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found:
        raise RecipeError(f"{path} must have the result of an evaluation: remove it, and evaluate again.")
    return found


class Progress:
    """The progress of a training of that name. On a terminal one line changes, elsewhere a line comes every 10 s."""

    def __init__(self, label: str) -> None:
        self.label, self.total, self.shown, self.terminal = label, 0, 0.0, sys.stdout.isatty()
        self.start = "\r\x1b[K" if self.terminal else ""

    def read(self, line: str) -> None:
        """Take the next line of the log."""
        if found := TOTAL.search(line):
            self.total = int(found[1])
        if found := PARAMETERS.search(line):
            print(f"{self.label}: {found[1]} parameters", flush=True)
        about, numbers = read_line(line)
        if about == "valid" and "num_updates" in numbers:
            bleu = f"   BLEU {numbers['bleu']:5.2f}" if "bleu" in numbers else ""
            words = f"update {int(numbers['num_updates']):5,}   validation {said(numbers)}{bleu}"
            print(f"{self.start}{self.label:8} {words}", flush=True)
        elif about == "inner" and {"num_updates", "ups"} <= numbers.keys():
            self.show_update(numbers)

    def show_update(self, numbers: dict[str, float]) -> None:
        if time.time() - self.shown < (0 if self.terminal else 10):
            return
        self.shown = time.time()
        update, rate = int(numbers["num_updates"]), numbers["ups"]
        line = f"{self.start}{self.label:8} update {update:5,}"
        line += f" of {self.total:,} ({update / self.total:4.0%})" if self.total else ""
        line += f"   {said(numbers)}   {numbers.get('wps', 0):8,.0f} tokens/s"
        if self.total and rate:
            seconds = int((self.total - update) / rate)
            line += f"   {seconds // 60}m {seconds % 60:02d}s left"
        print(line, end="" if self.terminal else "\n", flush=True)


def said(numbers: dict[str, float]) -> str:
    """Return the perplexity, in at least three digits, or the loss, in four, if a criterion has none."""
    if "ppl" not in numbers and "loss" in numbers:
        return f"loss {numbers['loss']:#8.4g}"
    ppl = numbers.get("ppl", math.nan)
    return f"ppl {ppl:8.{2 if ppl < 10 else 1}f}"
