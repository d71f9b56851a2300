"""Measure the named parts, or all, each in a separate process (run.sh calls this)."""

import importlib
import json
import os
import subprocess
import sys

from pictures import draw
from record import HERE, RESULTS, Record, publish, say
from timing import KEEP

ROOT = HERE.parents[1]
# Every part and its environment. fast-transformers has its own OpenMP runtime, which torch.set_num_threads does not
# change.
PARTS = {"operators": KEEP | {"OMP_NUM_THREADS": "1"}, "family": KEEP, "rules": {}, "training": {}, "generation": {}}


def run(*command, **environment):
    say(f"+ {' '.join(map(str, command))}")
    return subprocess.run(command, env=os.environ | environment).returncode


def measure_all(parts):
    """Run the tests, then measure the parts; nothing is measured after a failed test."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise SystemExit(f"run.sh: the part must be one of {' '.join(PARTS)}, got '{unknown[0]}'.")
    tests = [f"{ROOT}/tests/laws/test_operators.py", f"{ROOT}/tests/ops"]
    options = ["-q", "--numprocesses", "auto", "--maxprocesses", "4"]
    if run(sys.executable, "-m", "pytest", *tests, *options, OMP_NUM_THREADS="1"):
        raise SystemExit("run.sh: the tests of the operators failed, so nothing is measured.")
    for part in parts or PARTS:
        if part == "operators" and run("bash", f"{ROOT}/recipes/setup.sh", "peers"):
            say("run.sh: pytorch-fast-transformers was not set up; unless it is there already, its rows will say so")
        if run(sys.executable, __file__, "--measure", part, **PARTS[part]):
            raise SystemExit(f"run.sh: {part} could not be measured.")


def measure(part):
    module, record = importlib.import_module(part), Record.begin()
    try:
        module.measure(record)
    except (RuntimeError, ValueError) as error:  # such as: no kernel could be built
        raise SystemExit(f"{part} cannot be measured: {error}") from error
    goals = module.goals(record)
    draw(RESULTS / f"{part}.png", record, goals, module.PANELS)
    publish(part, record, goals)


def main(arguments):
    if arguments[:1] == ["--alone"]:
        part, *rest = arguments[1:]
        print(json.dumps(importlib.import_module(part).measure_alone(*rest)))
    elif arguments[:1] == ["--measure"]:
        measure(*arguments[1:])
    else:
        measure_all(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
