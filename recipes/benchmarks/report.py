"""What the benchmarks share: interleaved timing, ratios of rounds, and the files of results/."""

import csv
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
UNRELIABLE_LOAD = 0.5
# Of the last minute, before anything of ours ran: run.sh knows better than this process.
LOAD = float(os.environ.get("LOAD_BEFORE") or os.getloadavg()[0])


class Contender(NamedTuple):
    """`call()` does the work once; when it cannot run here, `call` is None and `reason` says why."""

    call: object
    threads: int = 1
    reason: str = ""


class Goal(NamedTuple):
    """A ratio that must be at least (or, `at_most`, at most) `bound`; without a bound it is for information."""

    what: str
    where: str
    bound: float | None = None
    at_most: bool = False


def say(text):
    print(text, file=sys.stderr, flush=True)


def seconds_per_call(contender, calls):
    torch.set_num_threads(contender.threads)
    start = time.perf_counter()
    for _ in range(calls):
        contender.call()
    return (time.perf_counter() - start) / calls


def interleave(contenders, rounds, title, at_least=0.02, seconds=0):
    """{name: seconds of each round}, all contenders once a round, so that a slow moment hits all of them alike.

    A measurement repeats its call for `at_least` seconds, after half as many calls that warm up. Rounds go on for
    `seconds`, and there are never fewer than `rounds`.
    """
    runnable = {name: c for name, c in contenders.items() if c.call}
    first = {name: min(seconds_per_call(c, 1) for _ in range(2)) for name, c in runnable.items()}
    calls = {name: max(1, round(at_least / first[name])) for name in runnable}
    times = {name: [] for name in runnable}
    taken, end = 0, time.perf_counter() + seconds
    while taken < rounds or (runnable and time.perf_counter() < end):
        taken += 1
        say(f"{title}: round {taken} of {rounds}" + (f" or more, for {seconds} s" if seconds else ""))
        for name, contender in runnable.items():
            # What ran before has cleared the caches, which takes some milliseconds, not one short call, to undo.
            seconds_per_call(contender, max(1, calls[name] // 2))
            times[name].append(seconds_per_call(contender, calls[name]))
    torch.set_num_threads(1)
    return times


def fastest(times, names):
    """The contender of `names` with the smallest minimum, or None when none of them ran."""
    ran = [name for name in names if name in times]
    return min(ran, key=lambda name: min(times[name])) if ran else None


def ratios(slower, faster):
    """(median over the rounds, ratio of the minima) of two lists of seconds."""
    return median(s / f for s, f in zip(slower, faster, strict=True)), min(slower) / min(faster)


def verdict(goal, reached):
    """Both the median and the minima must keep a goal."""
    if goal.bound is None:
        return "-"
    kept = all(value <= goal.bound if goal.at_most else value >= goal.bound for value in reached)
    return "yes" if kept else "**no**"


def goal_row(goal, reached, note=""):
    """`reached` is (median, of minima), one number alone, or a reason why there is none."""
    bound = "-" if goal.bound is None else f"{'<= ' if goal.at_most else '>= '}{goal.bound:g}"
    if isinstance(reached, str):
        return [goal.what, goal.where, bound, "not available", "not available", "not measured", reached]
    if isinstance(reached, float):
        return [goal.what, goal.where, bound, f"{reached:.2f}", "-", verdict(goal, [reached]), note]
    return [
        goal.what,
        goal.where,
        bound,
        *(f"{value:.2f}" for value in reached),
        verdict(goal, reached),
        note,
    ]


GOAL_HEADER = ["ratio", "where", "must reach", "median of rounds", "of minima", "met", "note"]


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def summary(rows):
    met, missed = (sum(row[5] == word for row in rows) for word in ("yes", "**no**"))
    return f"{met} of {met + missed} goals met; {sum(row[5] == 'not measured' for row in rows)} not measured.\n"


def memory(field):
    """Bytes of this process: VmRSS now, VmHWM at most so far. (getrusage's maximum would include the parent's.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: memory cannot be measured on this system.")


def processor():
    """Its name, and its family and model where they are told: virtual machines often hide all but the name's start."""
    first, *_ = Path("/proc/cpuinfo").read_text().split("\n\n")
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    if "model name" not in fields:
        return platform.machine()
    return f"{fields['model name']} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def git(*words):
    answer = subprocess.run(["git", "-C", HERE, *words], capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 else ""


def commit():
    changed = git("status", "--porcelain", "--", "fairseq_fwp", "cuda_ext", ":/fairseq_fwp", ":/cuda_ext")
    return (git("rev-parse", "--short", "HEAD") or "uncommitted") + (" with local changes" if changed else "")


def provenance():
    """One line to read the numbers by."""
    warning = f" **(above {UNRELIABLE_LOAD}: the machine was busy, do not trust the numbers)**"
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, commit {commit()}, {processor()}, {os.cpu_count()} cores, "
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"load before the run {LOAD:.2f}{warning if LOAD > UNRELIABLE_LOAD else ''}.\n"
    )


def write_csv(name, header, rows):
    """Path of results/NAME.csv, written."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def publish(name, header, raw, goals, *paragraphs, head=None, script="run.sh", picture=True):
    """Writes results/NAME.csv (raw), NAME_goals.csv and NAME.md, and the latter's text into RESULTS.md.

    `head` is the line to read the numbers by, where they are not of the CPU.
    """
    write_csv(name, header, raw)
    write_csv(f"{name}_goals", GOAL_HEADER, goals)
    text = "\n".join([head or provenance(), summary(goals), table(GOAL_HEADER, goals), *paragraphs])
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    ledger = HERE / "RESULTS.md"
    begin, end = f"<!-- {name}: written by {script} -->\n", f"<!-- {name}: end -->"
    before, rest = ledger.read_text(encoding="utf-8").split(begin)
    text += f"\n![{name}](results/{name}.png)\n" if picture else ""
    ledger.write_text(before + begin + text + end + rest.split(end)[1], encoding="utf-8")
    say(f"wrote {RESULTS / name}.md and its part of RESULTS.md")
