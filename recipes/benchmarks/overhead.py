"""CPU time around the kernels, before and now: `python overhead.py FOLDER --data DATA`, an earlier checkout.

Measured are starts of commands, the first call of an operator, and a training with the quick start's settings, one
thread; DATA is what `recipes/quickstart/run.sh prepare` wrote, data/bin. Both versions run with the packages of this
Python, in turns, after a run that writes bytecode. Seconds are CPU time, of a process or of a part of it.
"""

import json
from pathlib import Path

import yaml
from record import HERE, Goal, Record, compare, make_parser, publish, say
from timing import KEEP, run

ROUNDS, UPDATES, FIRST = 3, 120, 20  # updates of a training, of which the first are not counted
WHOLE, OF_UPDATES, OUTSIDE = "whole process", "updates", "an update outside the model and Adam"
COMMANDS = ("add_layer", "convert", "eval_lm", "export", "harness", "info", "linearize", "plot")
QUICK_START = HERE.parent / "quickstart/conf/common.yaml"

HELP = "import runpy, sys; sys.argv = ['fwp', '--help']; runpy.run_module('fairseq_fwp.cli.{}', run_name='__main__')"
FIRST_CALL = """
import json, sys, time, torch
from fairseq_fwp import ops
x, gate, modules, start = torch.rand(1, 2, 8, 4), torch.rand(1, 2, 8), len(sys.modules), time.process_time()
ops.delta_rule(x, x, x, gate)
print(json.dumps({"first call": time.process_time() - start, "modules": len(sys.modules) - modules}))
"""
TRAIN = """
import json, statistics, sys, time
import fairseq_cli.train
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.optim import FairseqOptimizer
from fairseq.trainer import Trainer

def time_calls(owner, name):
    call, seconds = getattr(owner, name), []
    def timed(*args, **kwargs):
        start = time.process_time()
        result = call(*args, **kwargs)
        seconds.append(time.process_time() - start)
        return result
    setattr(owner, name, timed)
    return seconds

parts = [time_calls(CrossEntropyCriterion, "forward"), time_calls(FairseqOptimizer, "backward")]
parts.append(time_calls(FairseqOptimizer, "step"))
starts, train_step = [], Trainer.train_step
def started(*args, **kwargs):
    starts.append(time.process_time())
    return train_step(*args, **kwargs)
Trainer.train_step = started
fairseq_cli.train.cli_main()
first = FIRST
updates = [after - before for before, after in zip(starts, starts[1:])]
rest = [update - sum(of) for update, *of in zip(updates, *parts)]
print(json.dumps({"updates": (starts[-1] - starts[first]) / (len(starts) - 1 - first),
                  "outside": statistics.median(rest[first:])}))
""".replace("FIRST", str(FIRST))


def flags(data, folder):
    """Return the flags of the quick start, for few updates without validation and checkpoints."""
    settings = yaml.safe_load(QUICK_START.read_text(encoding="utf-8")) | {"max-update": UPDATES}
    settings |= {"arch": "delta_lm_wt103", "user-dir": folder / "fairseq_fwp", "log-format": "simple", "cpu": True}
    settings |= {"no-save": True, "disable-validation": True}
    words = [str(data)]
    for name, value in settings.items():
        words += [f"--{name}"] * (value is not False) + [str(value)] * (not isinstance(value, bool))
    return words


def run_version(folder, script, *words, **environment):
    """Return the CPU seconds of a Python that runs a script with the version in a folder, and what it prints last."""
    what = f"overhead.py: the version in {folder}"
    return run(what, "-c", script, *words, folder=folder, PYTHONDONTWRITEBYTECODE="", **environment)


def measure(record, side, folder, data):
    scripts = {script: script for script in ("import torch", "import fairseq_fwp, fairseq")}
    scripts |= {f"fwp-{command.replace('_', '-')} --help": HELP.format(command) for command in COMMANDS}
    for where, script in scripts.items():
        record.add(where, WHOLE, side, [run_version(folder, script)[0]])
    numbers = json.loads(run_version(folder, FIRST_CALL)[1])
    record.add("delta_rule", "first call", side, [numbers["first call"]])
    record.add("delta_rule", "modules that the first call imports", side, [numbers["modules"]], "modules")
    for where, environment in (("fairseq-train", {}), ("fairseq-train of a recipe", KEEP)):
        seconds, last = run_version(folder, TRAIN, *flags(data, folder), **environment)
        numbers = json.loads(last)
        record.add(where, WHOLE, side, [seconds])
        record.add(where, OF_UPDATES, side, [numbers["updates"]])
        record.add(where, OUTSIDE, side, [numbers["outside"]])


def goals(record):
    found = []
    for where, stage in dict.fromkeys((row[0], row[1]) for row in record.rows if row[3] == "seconds"):
        sides = [(where, stage, side) for side in ("before", "now")]
        note = " -> ".join(f"{1000 * min(record.values(*side)):.1f} ms" for side in sides)
        bound = 1.2 if stage == OF_UPDATES else None
        found.append(compare(record, Goal(f"{where}, {stage}", "before / now", bound), *sides, note=note))
    return found


def main():
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, help="checkout of the earlier version")
    parser.add_argument("--data", type=Path, required=True, help="the quick start's text, binarised")
    args = parser.parse_args()
    folders = {"before": args.folder.resolve(), "now": HERE.parents[1]}
    record = Record.begin()
    for i in range(ROUNDS + 1):
        say(f"round {i} of {ROUNDS}")
        for side in list(folders)[:: 1 if i % 2 else -1]:
            measure(record if i else Record(), side, folders[side], args.data.resolve())
    publish("overhead", record, goals(record), "CPU seconds before / now; one thread.\n")


if __name__ == "__main__":
    main()
