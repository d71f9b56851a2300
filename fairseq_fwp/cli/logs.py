"""Read the log of `fairseq-train`: what it prints or writes with `--log-file`, in any `--log-format`."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) \| ")
JSON = re.compile(r"\{.*\}$")
PAIRS = re.compile(r"(\w+)[= ](-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf|nan)(?=[,\]\s]|$)")
# With `--log-format none` only this is logged of a validation, once for each checkpoint.
SAVED = re.compile(r"Saved checkpoint .*@ (\d+) updates, score (-?[\d.]+|inf|nan)\)")
# The settings as fairseq prints them, or as earlier versions of this package did.
SCORED_BY = re.compile(r"best_checkpoint_metric(?:': '|=)(\w+)")
# Criterions whose loss is the logarithm of the perplexity; label smoothing adds to it.
PLAIN_LOSS = re.compile(r"\bcriterion(?:': \{'_name': '|=)(adaptive_loss|cross_entropy)\b")


class Entry(NamedTuple):
    """A line with numbers. about: "inner" (of updates), "epoch", "valid", or "saved" (a checkpoint and its score).

    hours: of training so far; numbers: by name, without the prefixes of JSON.
    """

    about: str
    update: int
    hours: float
    numbers: dict[str, float]


@dataclass
class Run:
    """One training run: a metric in training and validation, and hours of training so far, by the number of updates."""

    label: str
    metric: str = "ppl"
    train: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)
    hours: dict[int, float] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """The update with the best validation: the highest BLEU, or the lowest value of another metric."""
        finite = [update for update, value in self.valid.items() if math.isfinite(value)]
        return (max if self.metric == "bleu" else min)(finite, key=lambda update: self.valid[update])


def read_line(line: str) -> tuple[str, dict[str, float]]:
    """Return what a line is about, see `Entry`, and its numbers; "" and other numbers for any other line."""
    if match := SAVED.search(line):
        return "saved", {"num_updates": float(match[1]), "score": float(match[2])}
    if match := JSON.search(line):
        try:
            entry = json.loads(match[0])
        except ValueError:
            return "", {}
        prefix = next((prefix for prefix in ("valid_", "train_") if f"{prefix}num_updates" in entry), "")
        about = {"valid_": "valid", "train_": "epoch", "": "inner"}[prefix]
        text = " ".join(f"{name.removeprefix(prefix)}={value}" for name, value in entry.items())
    elif " | valid on '" in line:
        about, text = "valid" if "| valid on 'valid' subset |" in line else "", line
    else:
        about, text = "epoch" if " | num_updates " in line else "inner", line
    return about, {name: float(number) for name, number in PAIRS.findall(text)}


def read_entries(log: str) -> Iterator[Entry]:
    """Yield the lines with numbers; other lines are passed over."""
    start, seconds, wall = None, 0.0, 0.0
    for line in log.splitlines():
        if time := TIME.match(line):
            now = datetime.fromisoformat(time[1])
            start = start or now
            seconds = (now - start).total_seconds()
        about, numbers = read_line(line)
        wall = numbers.get("wall", wall)
        if about and math.isfinite(numbers.get("num_updates", math.nan)):
            yield Entry(about, int(numbers["num_updates"]), (wall or seconds) / 3600, numbers)


def drop_repeated(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries without those that a resumed run did again, after its last checkpoint."""
    history: list[Entry] = []
    for entry in entries:
        while history and history[-1].update > entry.update:
            history.pop()
        history.append(entry)
    return history


def read_log(label: str, path: Path, metric: str = "ppl") -> Run:
    """Return the curves of a metric. Raises ValueError for a log without a validation of it."""
    try:
        log = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"the log {path} cannot be read: {error.strerror}.") from error
    named = SCORED_BY.search(log)
    scored_by = named[1] if named else "loss"
    entries = list(read_entries(log))
    for entry in (entry for entry in entries if entry.about == "saved"):
        entry.numbers[scored_by] = entry.numbers["score"]
        if scored_by == "loss" and PLAIN_LOSS.search(log):
            entry.numbers["ppl"] = 2 ** entry.numbers["score"]
    curves: dict[str, dict[int, float]] = {about: {} for about in ("inner", "epoch", "valid", "saved")}
    hours: dict[int, float] = {}
    for about, update, time, numbers in drop_repeated(entry for entry in entries if metric in entry.numbers):
        curves[about][update], hours[update] = numbers[metric], time
    # Means since the last line of training; a log with progress bars has only means of epochs.
    run = Run(label, metric, curves["inner"] or curves["epoch"], curves["valid"] or curves["saved"])
    if not any(map(math.isfinite, run.valid.values())):
        raise ValueError(
            f"the log {path} must hold a validation {metric} that is a number, got none. It must be the log of a "
            "fairseq-train run that reached its first validation. With --log-format none a --log-file has no numbers: "
            "train with --log-format simple or json."
        )
    run.hours = {update: hours[update] for update in hours if update in run.train or update in run.valid}
    return run


def find_log(path: Path) -> Path:
    """Return the log that a path names: a folder's train.log or only .log file; ValueError where there is none."""
    if not path.is_dir():
        return path
    logs = [path / "train.log"] if (path / "train.log").exists() else sorted(path.glob("*.log"))
    if len(logs) != 1:
        raise ValueError(
            f"the folder {path} must hold a train.log or one other .log file, got {len(logs)}: name the log."
        )
    return logs[0]
