"""Train a grid of points of the synthetic retrieval task, several at once, each by fairseq-train in its own process.

    python recipes/associative_retrieval/retrieval_grid.py CONF... [--out FOLDER] [--workers N] [--plan]

What is finished is not run again, and what was interrupted goes on from its last checkpoint. Each point has a folder
OUT/NAME with its `train.log`, and `finished` once it is. --plan prints the points and what they cost, and runs none.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import yaml
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# No result is worth more than this many updates since the last checkpoint.
SAVE_INTERVAL = ["--save-interval", "5", "--no-epoch-checkpoints"]
# What fairseq says when a gradient is NaN or infinite.
NOT_FINITE = re.compile(r"^FloatingPointError: (gradients are Nan/Inf|Minimum loss scale)", re.MULTILINE)


class Point(NamedTuple):
    """One training: its flags, and the seconds that each of its keys takes on one core."""

    flags: dict[str, str]
    seconds_per_key: float

    @property
    def name(self) -> str:
        """A folder's name."""
        others = (f"{flag}={value}" for flag, value in self.flags.items() if flag != "arch")
        return ",".join([self.flags["arch"], *others])

    @property
    def size(self) -> int:
        """S, the number of keys."""
        return int(self.flags["num-keys"])

    @property
    def seconds(self) -> float:
        """What it takes on one core, at most about."""
        return self.seconds_per_key * self.size

    def command(self, common: dict[str, str], folder: Path) -> list[str]:
        """What trains it."""
        words = ["fairseq-train", "--user-dir", str(ROOT / "fairseq_fwp"), "--save-dir", str(folder), *SAVE_INTERVAL]
        for flag, value in {**common, **self.flags}.items():
            words += [f"--{flag}"] if value == "true" else [f"--{flag}", value]
        return [*words, "--log-format", "json", "--log-interval", "1000000"]


class Outcome(NamedTuple):
    """What a log says: evaluations are (update, loss)."""

    evaluations: list[tuple[int, float]]
    seconds: float
    feature_dim: int | None
    diverged: bool

    @property
    def best(self) -> float:
        """The paper's measure; infinite without an evaluation."""
        return min((loss for _, loss in self.evaluations if loss == loss), default=float("inf"))

    @property
    def updates(self) -> int:
        """The last update that was evaluated."""
        return self.evaluations[-1][0] if self.evaluations else 0

    def __str__(self) -> str:
        return f"{self.best:.5f} after {self.updates:,} updates, {self.seconds:.0f} s"


def read_points(paths: list[Path]) -> list[Point]:
    """The points of grids, in the order in which they are trained: of an entry's lists every combination."""
    points: dict[str, Point] = {}  # by name, so that what two grids have is trained once
    # BaseLoader leaves every value the string it is in the file.
    rows = [yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader) for path in paths]
    for row in itertools.chain(*rows):
        rate = float(row.pop("seconds-per-key"))
        row["num-keys"] = row.pop("num-keys")  # last: the sizes of a model follow each other
        lists = [value if isinstance(value, list) else [value] for value in row.values()]
        for values in itertools.product(*lists):
            point = Point(dict(zip(row, values, strict=True)), rate)
            points[point.name] = point
    return list(points.values())


def read_outcome(log: Path) -> Outcome:
    """What a training said, of several starts those evaluations that counted."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    evaluations: list[tuple[int, float]] = []
    seconds = 0.0
    for found in re.finditer(r"\| (\{\".*\})$", text, re.MULTILINE):
        entry = json.loads(found[1])
        if "valid_loss" in entry:
            update = int(entry["valid_num_updates"])
            evaluations = [known for known in evaluations if known[0] < update]
            evaluations.append((update, float(entry["valid_loss"])))
        seconds = float(entry.get("train_wall", seconds))
    dim = re.search(r"feature_dim=(\d+)", text)
    return Outcome(evaluations, seconds, int(dim[1]) if dim else None, NOT_FINITE.search(text) is not None)


def train(point: Point, common: dict[str, str], folder: Path) -> None:
    """Run by a process of its own, which fairseq leaves dirty: fairseq-train, what it says in train.log."""
    from fairseq_cli.train import cli_main

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interruption needs no traceback
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "train.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = point.command(common, folder)
    print("+", *sys.argv, flush=True)
    cli_main()


def run(points: list[Point], common: dict[str, str], out: Path, workers: int) -> list[str]:
    """Trains all, `workers` at once; the names of those that failed."""
    # Imported once, before the processes part: it takes as long as many a point.
    import fairseq_cli.train  # noqa: F401
    from fairseq.utils import import_user_module

    # By the path that every point names it by: fairseq refuses a second one, such as that in site-packages.
    import_user_module(argparse.Namespace(user_dir=str(ROOT / "fairseq_fwp")))

    waiting, running, failed = list(reversed(points)), {}, []
    with tqdm(total=len(points), unit="point", smoothing=0) as bar:
        while waiting or running:
            while waiting and len(running) < workers:
                point = waiting.pop()
                process = multiprocessing.Process(target=train, args=(point, common, out / point.name))
                process.start()
                running[process.sentinel] = (process, point)
            for sentinel in wait(list(running)):
                process, point = running.pop(sentinel)
                process.join()
                bar.update()
                outcome = read_outcome(out / point.name / "train.log")
                if process.exitcode and not outcome.diverged:
                    failed.append(point.name)
                else:
                    finish(out / point.name)
                    bar.write(f"{point.name}: {outcome}")
    return failed


def finish(folder: Path) -> None:
    """A point's log is all that is needed of it."""
    for checkpoint in folder.glob("*.pt"):
        checkpoint.unlink()
    (folder / "finished").touch()


def is_finished(point: Point, out: Path) -> bool:
    """Whether it needs no more training."""
    return (out / point.name / "finished").exists()


def plan(points: list[Point], done: int, workers: int) -> str:
    """What is left to do and what it costs."""
    minutes = sum(point.seconds for point in points) / 60
    return (
        f"{len(points)} points to train ({done} are finished): at most about {minutes:,.0f} minutes of a core "
        f"(AMD EPYC, Zen 4), {minutes / workers:,.0f} minutes with {workers} at once."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("conf", type=Path, nargs="+", metavar="CONF", help="grids, such as conf/quick.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/associative_retrieval", help="where everything goes")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="points at once (one a core)")
    parser.add_argument("--plan", action="store_true", help="print what would be run, and its cost")
    args = parser.parse_args()
    if args.workers < 1:
        sys.exit(f"retrieval_grid.py: --workers must be at least 1, got {args.workers}")
    points = read_points(args.conf)
    left = [point for point in points if not is_finished(point, args.out)]
    common = yaml.load((HERE / "conf/common.yaml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    if args.plan:
        print(*(point.name for point in left), sep="\n")
    print(plan(left, len(points) - len(left), args.workers), flush=True)
    if args.plan:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # a core each: threads of several processes would only wait for each other
    try:
        failed = run(left, common, args.out, args.workers)
    except KeyboardInterrupt:
        sys.exit("\nretrieval_grid.py: stopped; the same command goes on.")
    if failed:
        sys.exit(f"retrieval_grid.py: failed, see train.log in {args.out} of: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
