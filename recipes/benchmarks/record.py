"""The record of a run: its measurements, its goals, and their files: a CSV of each, a table and a picture.

A measurement is of one contender, at one place (a shape, a length), in one stage (forward, decoding), of one kind.
"""

import argparse
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


def write_csv(path, header, rows, mode="w"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode, newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows] if header else rows)


class Record:
    """Measurements in the order in which they were made.

    path: a file that gets each row as soon as it is measured, for a run that may be killed.
    """

    HEADER = ("where", "stage", "name", "what", "round", "value")

    def __init__(self, rows=(), path=None):
        self.rows, self.path = [list(row) for row in rows], path
        if path:
            write_csv(path, self.HEADER, self.rows)

    @classmethod
    def read(cls, path):
        with open(path, newline="", encoding="utf-8") as file:
            return cls(list(csv.reader(file))[1:])

    @classmethod
    def resume(cls, path):
        """Return the record of a file, to which other processes may have written, if it is there."""
        return cls(cls.read(path).rows if path.exists() else (), path)

    @classmethod
    def begin(cls):
        record = cls()
        record.note("provenance", provenance())
        return record

    def add(self, where, stage, name, values, what=SECONDS):
        """Add one value a round, after the earlier rounds."""
        key = [str(where), stage, name, what]
        done = sum(row[:4] == key for row in self.rows)
        new = [[*key, done + i, value] for i, value in enumerate(values)]
        self.rows += new
        if self.path:
            write_csv(self.path, None, new, "a")

    def miss(self, where, stage, name, reason):
        self.add(where, stage, name, [reason], MISSED)

    def note(self, name, text):
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

    def smallest(self):
        """Return the rows with the smallest of all rounds (of speeds the largest), which the pictures show."""
        found = {}
        for row in self.rows:
            key, least = tuple(row[:4]), min
            if row[3] in (MISSED, "text"):
                found[key] = row
            else:
                least = max if row[3].endswith("per second") else min
                found[key] = least(row, found.get(key, row), key=lambda row: float(row[5]))
        return list(found.values())


class Goal(NamedTuple):
    """A ratio that must be at least (or, `at_most`, at most) `bound`; without a bound it is for information."""

    what: str
    where: str
    bound: float | None = None
    at_most: bool = False

    def row(self, reached, note=""):
        """Return its row; reached: (median of rounds, of minima), (one number,), or why there is none.

        Both numbers must keep the bound.
        """
        bound = "-" if self.bound is None else f"{'<= ' if self.at_most else '>= '}{self.bound:g}"
        if isinstance(reached, str):
            return [self.what, self.where, bound, "not available", "not available", MISSED, reached]
        met = "-"
        if self.bound is not None:
            kept = all(value <= self.bound if self.at_most else value >= self.bound for value in reached)
            met = "yes" if kept else "**no**"
        shown = [*(f"{ratio:.2f}" for ratio in reached), "-"][:2]
        return [self.what, self.where, bound, *shown, met, note]


def compare(record, goal, over, under, what=SECONDS, times=1.0, note=""):
    """Return the row of a goal: the ratio of two measurements, (where, stage, name) each, or why one is missing.

    what: the kind; of several the first that both have. times: a factor of the ratio.
    """
    kinds = [what] if isinstance(what, str) else what
    for kind in kinds:
        # Speeds become times, so that less is better for all kinds.
        figures = [record.values(*key, kind, inverse=kind.endswith("per second")) for key in (over, under)]
        missing = [figure for figure in figures if isinstance(figure, str)]
        if not missing:
            slower, faster = figures
            rounds = [s / f for s, f in zip(slower, faster, strict=True)]
            ratios = (median(rounds), min(slower) / min(faster))[: len(rounds)]
            return goal.row([times * ratio for ratio in ratios], note if kind == kinds[0] else kind)
    return goal.row(missing[0])


def fastest(record, where, stage, names):
    """Return the contender with the smallest minimum of seconds; the first of `names` if none ran."""
    ran = {name: record.values(where, stage, name) for name in names}
    ran = {name: min(seconds) for name, seconds in ran.items() if not isinstance(seconds, str)}
    return min(ran, key=ran.get) if ran else next(iter(names))


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def git(*words, folder=HERE):
    try:
        return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or a copy of only the files
        return ""


def commit():
    changed = git("status", "--porcelain", "--", ":/fairseq_fwp", ":/cuda_ext")
    return (git("rev-parse", "--short", "HEAD") or "uncommitted") + (" with local changes" if changed else "")


def provenance():
    """Return one line about the machine, versions and date."""
    import torch

    first, *_ = Path("/proc/cpuinfo").read_text().split("\n\n")
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    # Virtual machines often hide the full name.
    family = f"(family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"
    processor = f"{fields['model name']} {family}" if "model name" in fields else platform.machine()
    # Of the minute before our first process: run.sh knows it better than this process.
    load = float(os.environ.get("LOAD_BEFORE") or os.getloadavg()[0])
    warning = f" **(above {UNRELIABLE_LOAD}: the machine was busy, do not trust the numbers)**"
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, commit {commit()}, {processor}, {os.cpu_count()} cores, "
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"load before the run {load:.2f}{warning if load > UNRELIABLE_LOAD else ''}."
    )


def make_parser(description):
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def publish(part, record, goals, *paragraphs, head=""):
    """Write results/PART.csv and PART_goals.csv, and print the table: RESULTS.md has what it shows."""
    write_csv(RESULTS / f"{part}.csv", Record.HEADER, record.smallest())
    write_csv(RESULTS / f"{part}_goals.csv", GOAL_HEADER, goals)
    met, missed, unmeasured = (sum(row[5] == word for row in goals) for word in ("yes", "**no**", MISSED))
    summary = f"{met} of {met + missed} goals met; {unmeasured} not measured.\n"
    print("\n".join([f"{head or record.notes()['provenance']}\n", summary, table(GOAL_HEADER, goals), *paragraphs]))
    say(f"wrote {RESULTS / part}*: put what it shows into RESULTS.md")
