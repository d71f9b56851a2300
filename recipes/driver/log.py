"""Read the output of `fairseq-train --log-format json`."""

import contextlib
import json
import math
import re
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from commands import RecipeError

START = re.compile(r"^\+ (?:.*[ /])?fairseq-train ", re.MULTILINE)
TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) \| ", re.MULTILINE)
ENTRY = re.compile(r"\| (\{\".*\})\s*$")
PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")
# fairseq's message for a gradient that is NaN or infinite (with --fp16: at every scale of the loss).
NOT_FINITE = re.compile(r"^FloatingPointError: (gradients are Nan/Inf|Minimum loss scale)", re.MULTILINE)


def read_entry(line: str) -> dict[str, float]:
    """Return the numbers of a line by name; empty for another line. Raises ValueError for a damaged one."""
    if not (found := ENTRY.search(line)):
        return {}
    numbers: dict[str, float] = {}
    for name, value in json.loads(found[1]).items():
        with contextlib.suppress(TypeError, ValueError):
            numbers[name] = float(value)
    return numbers


class Training(NamedTuple):
    """The contents of a log; of a resumed run, without updates that were repeated.

    hours: from the first to the last line, summed over starts; seconds: fairseq's own clock of training steps;
    validations: the numbers of each, without the prefix valid_; not_finite: the last start ended at such a gradient.
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
    def divergence(self) -> str:
        """The place where a non-finite gradient ended training, in words; empty if none did."""
        if not self.not_finite:
            return ""
        finite = [(update, ppl) for update, ppl in self.curve() if math.isfinite(ppl)]
        before = (
            "last finite validation perplexity {1:.2f} at {0:,}".format(*finite[-1]) if finite else "no validation yet"
        )
        return f"gradient not finite after update {self.updates:,}, {before}"


def read_training(log: Path) -> Training:
    """Read a log, each start after a line `+ ... fairseq-train ...`. Raises RecipeError for one without a model."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if not (parameters := PARAMETERS.search(text)):
        raise RecipeError(f"{log} must be a log of fairseq-train that reached the start of training.")
    updates, seconds = 0, 0.0
    validations: list[dict[str, float]] = []
    for line in text.splitlines():
        try:
            entry = read_entry(line)
        except ValueError:
            raise RecipeError(
                f"{log} is damaged: it has the line {line!r}; remove its folder to train again."
            ) from None
        if "valid_num_updates" in entry:
            found = {name.removeprefix("valid_"): value for name, value in entry.items()}
            updates = int(found["num_updates"])
            validations = [known for known in validations if known["num_updates"] < updates]
            validations.append(found)
        elif "num_updates" in entry:
            updates = int(entry["num_updates"])
        seconds = entry.get("train_wall", seconds)
    starts = START.split(text)
    not_finite = NOT_FINITE.search(starts[-1]) is not None
    hours = sum(map(hours_of, starts))
    return Training(int(parameters[1].replace(",", "")), updates, hours, seconds, validations, not_finite)


def hours_of(start: str) -> float:
    """Return the hours from the first to the last line of one start; a resumed run stops fairseq's own clock."""
    times = [datetime.fromisoformat(time) for time in TIME.findall(start)]
    return (times[-1] - times[0]).total_seconds() / 3600 if times else 0.0


def read_json(path: Path) -> dict[str, Any]:
    """Return the result of an evaluation; empty without one."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found
