"""Training a model of today on a CPU in float32, with --bf16 and with --amp: `python precision.py --data DATA`.

DATA is what `recipes/quickstart/run.sh prepare` or fairseq-preprocess wrote. Four layers of `gated_deltanet_lm_340m`
see 2 x 512 tokens an update. Seconds are CPU time of one thread, of an update with Adam. Two trainings run at once.
What bounds the ratios are products of matrices, whose rates are measured too.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from inputs import FORWARD, TRAINING, products
from overhead import run_version
from record import HERE, Goal, Record, compare, fastest, make_parser, publish, say
from timing import KEEP, Contender, interleave

TOKENS, BLOCK, CLOCK = 2 * 512, 50, time.process_time  # tokens of an update; updates of a mean loss
FIRST = 3  # updates whose time is not counted
FLAGS = [
    *("--arch", "gated_deltanet_lm_340m", "--decoder-layers", "4", "--task", "fwp_language_modeling"),
    *("--tokens-per-sample", "512", "--batch-size", "2", "--required-batch-size-multiple", "1"),
    *("--criterion", "cross_entropy", "--optimizer", "adam", "--lr", "0.0003", "--clip-norm", "1.0", "--seed", "1"),
    *("--cpu", "--no-save", "--disable-validation", "--num-workers", "0", "--log-format", "none"),
]
PRECISIONS = {"float32": [], "--bf16": ["--bf16"], "--amp": ["--amp"]}
UPDATE, LOSS, PRODUCT = "an update", "bits a token", "products of matrices"

TRAIN = """
import json, time
import fairseq_cli.train
from fairseq.trainer import Trainer
seconds, losses, train_step = [], [], Trainer.train_step
def timed(*args, **kwargs):
    start = time.process_time()
    result = train_step(*args, **kwargs)
    seconds.append(time.process_time() - start)
    losses.append(float(result["loss"]))
    return result
Trainer.train_step = timed
fairseq_cli.train.cli_main()
print(json.dumps({"seconds": seconds, "losses": losses}))
"""


def train(folder, data, updates, name):
    """Return the seconds and losses of each update of a training by the version in a folder."""
    words = [str(data), "--user-dir", str(folder / "fairseq_fwp"), *FLAGS, *PRECISIONS[name]]
    numbers = json.loads(run_version(folder, TRAIN, *words, "--max-update", str(updates), **KEEP)[1])
    say(f"{folder.name}, {name}: {updates} updates, the fastest in {min(numbers['seconds']):.2f} s")
    return numbers


def measure_products(record):
    """Measure a product of the matrices' size in both dtypes; in float32 by two libraries."""
    torch.set_num_threads(1)
    half = torch.randn(1024, 1024).bfloat16()
    calls = products(len(half)) | {"--bf16": partial(torch.mm, half, half)}
    contenders = {name: Contender(call, clock=CLOCK) for name, call in calls.items()}
    for name, seconds in interleave(contenders, 5, PRODUCT).items():
        record.add(PRODUCT, FORWARD, name, seconds)


def measure(record, data, updates, before):
    measure_products(record)
    with ThreadPoolExecutor(2) as at_once:
        trained = at_once.map(partial(train, HERE.parents[1], data, updates), PRECISIONS)
        for name, numbers in zip(PRECISIONS, trained, strict=True):
            record.add(UPDATE, TRAINING, name, numbers["seconds"][FIRST:])
            record.add(UPDATE, TRAINING, name, numbers["losses"], LOSS)
    for name in PRECISIONS if before else ():
        for side, folder in (("before", before), ("now", HERE.parents[1])):
            seconds = train(folder, data, FIRST + 3, name)["seconds"][FIRST:]
            record.add(f"{UPDATE}, {name}", TRAINING, side, [min(seconds)])


def goals(record):
    fastest_product = fastest(record, PRODUCT, FORWARD, products(1))
    bound = [(PRODUCT, FORWARD, name) for name in (fastest_product, "--bf16")]
    rows = [compare(record, Goal("speed, bfloat16 over float32, of what bounds it", PRODUCT), *bound)]
    exact = record.values(UPDATE, TRAINING, "float32", LOSS)
    for name in list(PRECISIONS)[1:]:
        sides = [(UPDATE, TRAINING, side) for side in ("float32", name)]
        note = " -> ".join(f"{TOKENS / min(record.values(*side)):.0f} tokens/s" for side in sides)
        rows.append(compare(record, Goal(f"speed, {name} over float32", UPDATE, 2), *sides, note=note))
        losses = record.values(UPDATE, TRAINING, name, LOSS)
        means = [[mean(numbers[i : i + BLOCK]) for i in range(0, len(numbers), BLOCK)] for numbers in (exact, losses)]
        gap = max(abs(a / b - 1) for a, b in zip(*means, strict=True))
        goal = Goal(f"greatest gap of losses, {name} to float32, %", f"means of {BLOCK} updates", 1, at_most=True)
        rows.append(goal.row((100 * gap,), f"last {BLOCK}: {means[0][-1]:.4f}, {means[1][-1]:.4f} bits"))
    for name in PRECISIONS:
        sides = [(f"{UPDATE}, {name}", TRAINING, side) for side in ("before", "now")]
        rows.append(compare(record, Goal("seconds, before / now", sides[0][0]), *sides))
    return rows


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a text, binarised")
    parser.add_argument("--updates", type=int, default=200, help=f"updates of a training, a multiple of {BLOCK}")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="also compare a checkout of an earlier version")
    args = parser.parse_args()
    record = Record.begin()
    measure(record, args.data.resolve(), args.updates, args.before and args.before.resolve())
    publish("precision", record, goals(record))


if __name__ == "__main__":
    main()
