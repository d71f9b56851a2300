"""The record of a run: its measurements, its goals, and its publication as a CSV, a table and a picture.

A measurement is of one contender, at one place (a shape, a length), in one stage (forward, decoding), of one kind.
"""

import csv
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
UNRELIABLE_LOAD = 0.5
# Kinds of measurements. A higher speed is better.
SECONDS, BYTES, SPEED, MISSED = "seconds", "bytes", "words per second", "not measured"
GOAL_HEADER = ["ratio", "where", "must reach", "median of rounds", "of minima", "met", "note"]


def say(text):
    print(text, file=sys.stderr, flush=True)


class Record:
    """Measurements in the order in which they were made: the rows of results/PART.csv.

    path: a file that gets each row as soon as it is measured, for a run that may be killed.
    """

    HEADER = ("where", "stage", "name", "what", "round", "value")

    def __init__(self, rows=(), path=None):
        self.rows, self.path = [list(row) for row in rows], path
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            self.write([self.HEADER, *self.rows])

    @classmethod
    def read(cls, part, folder=None):
        with open((folder or RESULTS) / f"{part}.csv", newline="", encoding="utf-8") as file:
            return cls(list(csv.reader(file))[1:])

    def write(self, rows):
        if self.path:
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(rows)

    def add(self, where, stage, name, values, what=SECONDS):
        """Add one value a round, after the earlier rounds."""
        key = [str(where), stage, name, what]
        done = sum(row[:4] == key for row in self.rows)
        new = [[*key, done + i, value] for i, value in enumerate(values)]
        self.rows += new
        self.write(new)

    def take(self, where, stage, name, found):
        """Add one round of several kinds, or {"stopped": the reason why there is none}."""
        for what, value in found.items():
            self.add(where, stage, name, [value], MISSED if what == "stopped" else what)

    def miss(self, where, stage, name, reason):
        self.add(where, stage, name, [reason], MISSED)

    def note(self, name, text):
        """Add a note about the whole run."""
        self.add("machine", "", name, [text], "text")

    def notes(self):
        return {row[2]: row[5] for row in self.rows if row[0] == "machine" and row[3] == "text"}

    def values(self, where, stage, name, what=SECONDS, inverse=False):
        """Return numbers by round, or the reason why there are none: a failed round, or not reached."""
        key = [str(where), stage, name]
        reasons = [row[5] for row in self.rows if row[:4] == [*key, MISSED]]
        found = [float(row[5]) for row in self.rows if row[:4] == [*key, what]]
        if reasons or not found:
            return f"{name} at {where}: {reasons[0] if reasons else 'not reached'}"
        return [1 / x for x in found] if inverse else found

    def names(self, where, stage):
        return list(dict.fromkeys(row[2] for row in self.rows if row[:2] == [str(where), stage]))

    def curve(self, where, stage, name, what=SECONDS):
        """Return {number: smallest value} of the places called `where` with a number for its {}."""
        before, after = map(re.escape, where.split("{}"))
        found = {}
        for row in self.rows:
            place = re.fullmatch(f"{before}([0-9,]+){after}", row[0])
            if place and row[1:4] == [stage, name, what]:
                number, value = int(place[1].replace(",", "")), float(row[5])
                found[number] = min(value, found.get(number, value))
        return found


class Goal(NamedTuple):
    """A ratio that must be at least (or, `at_most`, at most) `bound`; without a bound it is for information."""

    what: str
    where: str
    bound: float | None = None
    at_most: bool = False


def ratios(slower, faster):
    """Return (median over the rounds, ratio of the minima) of two lists; for one round only the ratio."""
    found = median(s / f for s, f in zip(slower, faster, strict=True)), min(slower) / min(faster)
    return found[: len(slower)]


def compare(record, goal, over, under, what=SECONDS, times=1.0, note=""):
    """Return a row of the ratio of two measurements, (where, stage, name) each, or of why one is missing.

    what: the kind; of several the first that both have. times: a factor of the ratio.
    """
    kinds = [what] if isinstance(what, str) else what
    for kind in kinds:
        # Speeds become times, so that less is better for all kinds.
        figures = [record.values(*key, kind, inverse=kind.endswith("per second")) for key in (over, under)]
        missing = [figure for figure in figures if isinstance(figure, str)]
        if not missing:
            reached = tuple(times * ratio for ratio in ratios(*figures))
            return goal_row(goal, reached, note if kind == kinds[0] else kind)
    return goal_row(goal, missing[0])


def fastest(record, where, stage, names):
    """Return the contender with the smallest minimum of seconds; the first of `names` if none ran."""
    ran = {name: record.values(where, stage, name) for name in names}
    ran = {name: min(seconds) for name, seconds in ran.items() if not isinstance(seconds, str)}
    return min(ran, key=ran.get) if ran else next(iter(names))


def verdict(goal, reached):
    """Say whether a goal is met, by the median and by the minima."""
    if goal.bound is None:
        return "-"
    kept = all(value <= goal.bound if goal.at_most else value >= goal.bound for value in reached)
    return "yes" if kept else "**no**"


def goal_row(goal, reached, note=""):
    """Return the row of a goal; reached: (median, of minima), (one number,), or a reason why there is none."""
    bound = "-" if goal.bound is None else f"{'<= ' if goal.at_most else '>= '}{goal.bound:g}"
    if isinstance(reached, str):
        return [goal.what, goal.where, bound, "not available", "not available", MISSED, reached]
    shown = [*(f"{ratio:.2f}" for ratio in reached), "-"][:2]
    return [goal.what, goal.where, bound, *shown, verdict(goal, reached), note]


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def summary(rows):
    met, missed = (sum(row[5] == word for row in rows) for word in ("yes", "**no**"))
    return f"{met} of {met + missed} goals met; {sum(row[5] == MISSED for row in rows)} not measured.\n"


def processor():
    """Return the name of the processor, with family and model if known: virtual machines often hide the full name."""
    first, *_ = Path("/proc/cpuinfo").read_text().split("\n\n")
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    if "model name" not in fields:
        return platform.machine()
    return f"{fields['model name']} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def git(*words):
    try:
        return subprocess.run(["git", "-C", HERE, *words], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or a copy of only the files
        return ""


def commit():
    changed = git("status", "--porcelain", "--", ":/fairseq_fwp", ":/cuda_ext")
    return (git("rev-parse", "--short", "HEAD") or "uncommitted") + (" with local changes" if changed else "")


def provenance():
    """Return one line about the machine, versions and date."""
    import torch

    # Of the minute before our first process: run.sh knows it better than this process.
    load = float(os.environ.get("LOAD_BEFORE") or os.getloadavg()[0])
    warning = f" **(above {UNRELIABLE_LOAD}: the machine was busy, do not trust the numbers)**"
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, commit {commit()}, {processor()}, {os.cpu_count()} cores, "
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"load before the run {load:.2f}{warning if load > UNRELIABLE_LOAD else ''}."
    )


def write_csv(name, header, rows):
    """Write results/NAME.csv and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def publish(part, record, goals, *paragraphs, head="", script="run.sh", panels=()):
    """Write results/PART.csv, PART_goals.csv, PART.md, whose text is also put into RESULTS.md, and the picture."""
    write_csv(part, Record.HEADER, record.rows)
    write_csv(f"{part}_goals", GOAL_HEADER, goals)
    head = head or record.notes()["provenance"]
    text = "\n".join([f"{head}\n", summary(goals), table(GOAL_HEADER, goals), *paragraphs])
    (RESULTS / f"{part}.md").write_text(text, encoding="utf-8")
    ledger = HERE / "RESULTS.md"
    begin, end = f"<!-- {part}: written by {script} -->\n", f"<!-- {part}: end -->"
    before, rest = ledger.read_text(encoding="utf-8").split(begin)
    text += f"\n![{part}](results/{part}.png)\n" if panels else ""
    ledger.write_text(before + begin + text + end + rest.split(end)[1], encoding="utf-8")
    if panels:
        from pictures import draw

        draw(RESULTS / f"{part}.png", record, goals, panels)
    say(f"wrote {RESULTS / part}.md and its part of RESULTS.md")
