"""Interleaved timing, memory, and measurements in separate processes."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from record import say
from torch.utils.benchmark import Timer

# Settings of the allocator. KEEP: freed memory stays with the process. Otherwise calls get new pages from the system,
# which takes up to half of the time at small shapes, in some calls and not in others. GIVE_BACK: freed memory goes back
# at once, so that resident memory is memory in use.
KEEP = {"MALLOC_TRIM_THRESHOLD_": "8589934592", "MALLOC_MMAP_MAX_": "0"}
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "65536"}


class Contender(NamedTuple):
    """A measured function: `call()` does the work once. On a busy machine, time.process_time counts its time only."""

    call: object
    threads: int = 1
    clock: object = time.perf_counter

    def seconds(self, calls):
        """Return the seconds of a call, after half as many calls: the contender before it has cleared the caches."""
        timer = Timer("call()", globals={"call": self.call}, num_threads=self.threads, timer=self.clock)
        if calls > 3:  # timeit begins with at least two calls
            timer.timeit(calls // 2)
        return timer.timeit(calls).mean


def interleave(contenders, rounds, title, at_least=0.02, seconds=0):
    """Return {name: seconds of each round}; a round has all contenders, so that a slow moment affects all of them.

    A measurement repeats its call for `at_least` seconds. Rounds go on for `seconds`, and there are at least `rounds`.
    """
    calls = {name: max(1, round(at_least / contender.seconds(1))) for name, contender in contenders.items()}
    times = {name: [] for name in contenders}
    taken, end = 0, time.perf_counter() + seconds
    while taken < rounds or (contenders and time.perf_counter() < end):
        taken += 1
        say(f"{title}: round {taken} of {rounds}" + (f" or more, for {seconds} s" if seconds else ""))
        for name, contender in contenders.items():
            times[name].append(contender.seconds(calls[name]))
    return times


def memory(field):
    """Return the bytes of this process: VmRSS now, VmHWM the peak. (getrusage's maximum includes the parent's.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: memory cannot be measured on this system.")


def alone(part, *arguments, **environment):
    """Return the result of a part's `measure_alone` in a separate process."""
    words = [Path(__file__).with_name("run.py"), "--alone", part, *arguments]
    return json.loads(run(f"{part}: measuring {' '.join(map(str, arguments))}", *words, **environment)[1])


def run(what, *words, folder=None, **environment):
    """Return the CPU seconds of a Python with one thread, and what it prints last; SystemExit if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    before, command = resource.getrusage(resource.RUSAGE_CHILDREN), [sys.executable, *map(str, words)]
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise SystemExit(f"{what} failed: {last}")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, answer.stdout.strip().rpartition("\n")[2]
