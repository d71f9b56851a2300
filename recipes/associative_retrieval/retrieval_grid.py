"""Train a grid of points of the synthetic retrieval task, several at once, each by fairseq-train in its own process.

    python recipes/associative_retrieval/retrieval_grid.py CONF... [--out FOLDER] [--workers N] [--plan]

What is finished is not run again, and what was interrupted goes on from its last checkpoint. Each point has a folder
OUT/NAME with its `train.log`, and once it is finished `finished`, which says what the log does. --plan prints the
points and what they cost, and runs none.
"""

import argparse
import contextlib
import fcntl
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_flags import refusal

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# No result is worth more than this many updates since the last checkpoint.
SAVE_INTERVAL = ["--save-interval", "5", "--no-epoch-checkpoints"]
REMOVE = "remove the folder to train the point again."
# What fairseq says when a gradient is NaN or infinite.
NOT_FINITE = re.compile(r"^FloatingPointError: (gradients are Nan/Inf|Minimum loss scale)", re.MULTILINE)


class Point(NamedTuple):
    """One training: its flags, and the seconds that each of its keys takes on one core."""

    flags: dict[str, str]
    seconds_per_key: float

    @property
    def name(self) -> str:
        """A folder's name, without spaces and slashes."""
        others = (f"{flag}={value}" for flag, value in self.flags.items() if flag != "arch")
        return re.sub(r"[\s/]+", "_", ",".join([self.flags["arch"], *others]))

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
            if value != "false":
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

    @property
    def counts(self) -> bool:
        """Whether a finished point can have it."""
        return bool(self.evaluations) or self.diverged

    @property
    def summary(self) -> str:
        """What is written into `finished`."""
        return f"best loss {self.best}, {self.updates} updates"

    def __str__(self) -> str:
        return f"{self.best:.5f} after {self.updates:,} updates, {self.seconds:.0f} s"


def read_points(paths: list[Path]) -> list[Point]:
    """The points of grids, in the order in which they are trained: of an entry's lists every combination.

    Raises ValueError for a file or an entry that has none.
    """
    points: dict[str, Point] = {}  # by name, so that what two grids have is trained once
    for path in paths:
        for index, entry in enumerate(read_entries(path), 1):
            try:
                points.update((point.name, point) for point in combinations(entry))
            except ValueError as error:
                raise ValueError(f"{path}, entry {index}: {error}") from None
    return list(points.values())


def read_entries(path: Path) -> list[Any]:
    """The entries of a grid. Raises ValueError for a file that is no list."""
    try:
        # BaseLoader leaves every value the string it is in the file.
        entries = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected YAML, got {' '.join(str(error).split())}") from None
    if not isinstance(entries, list) or not entries:
        kind = "a mapping" if isinstance(entries, dict) else "one value" if entries else "nothing"
        raise ValueError(f"{path}: expected a list of entries, as in conf/quick.yaml, got {kind}")
    return entries


def combinations(entry: Any) -> list[Point]:
    """The points of an entry. Raises ValueError where it is not flags with a value or a list of values each."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected flags and their values, got {entry!r}")
    for flag in ("arch", "num-keys", "seconds-per-key"):
        if flag not in entry:
            raise ValueError(f"expected {flag}, got only {', '.join(entry)}")
    flags = {flag: value if isinstance(value, list) else [value] for flag, value in entry.items()}
    for flag, values in flags.items():
        if not values or not all(isinstance(value, str) and value for value in values):
            raise ValueError(f"expected a value or a list of values of {flag}, got {entry[flag]!r}")
    flags["num-keys"] = [str(number("num-keys", value, int)) for value in flags.pop("num-keys")]  # last: sizes follow
    (rate, *others) = flags.pop("seconds-per-key")
    if others:
        raise ValueError(f"expected one value of seconds-per-key, got {entry['seconds-per-key']!r}")
    seconds = number("seconds-per-key", rate, float)
    return [Point(dict(zip(flags, values, strict=True)), seconds) for values in itertools.product(*flags.values())]


def number(flag: str, value: str, kind: type[int] | type[float]) -> float:
    """Raises ValueError for what is not a positive one."""
    with contextlib.suppress(ValueError):
        if 0 < (found := kind(value)) < math.inf:
            return found
    raise ValueError(f"expected a positive {'integer' if kind is int else 'number'} as {flag}, got {value!r}")


def import_fairseq() -> None:
    """Once, before the processes part: it takes as long as many a point."""
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # advises a package that is not needed
    import fairseq_cli.train  # noqa: F401  (before all of fairseq: the format of the logs is its own)
    from fairseq.utils import import_user_module

    # By the path that every point names it by: fairseq refuses a second one, such as that in site-packages.
    import_user_module(argparse.Namespace(user_dir=str(ROOT / "fairseq_fwp")))


def check(points: list[Point], common: dict[str, str], out: Path) -> None:
    """Parses the commands as fairseq-train will, of those that only repeat others' flags one. Raises ValueError."""
    seen: set[tuple[str, str]] = set()
    for point in points:
        flags = {(flag, value) for flag, value in point.flags.items() if flag != "num-keys"}
        if flags <= seen:
            continue
        seen |= flags
        if reason := refusal(point.command(common, out / point.name)[1:]):
            raise ValueError(f"{point.name}: fairseq-train refuses its flags: {reason}")


def read_outcome(log: Path) -> Outcome:
    """What a training said, of several starts those evaluations that counted. Raises ValueError for a damaged log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    evaluations: list[tuple[int, float]] = []
    seconds = 0.0
    for found in re.finditer(r"\| (\{\".*\})$", text, re.MULTILINE):
        try:
            entry = json.loads(found[1])
        except json.JSONDecodeError:
            raise ValueError(f"{log.parent} is damaged: train.log has the line {found[0]!r}; {REMOVE}") from None
        if "valid_loss" in entry:
            update = int(entry["valid_num_updates"])
            evaluations = [known for known in evaluations if known[0] < update]
            evaluations.append((update, float(entry["valid_loss"])))
        seconds = float(entry.get("train_wall", seconds))
    dim = re.search(r"feature_dim=(\d+)", text)
    return Outcome(evaluations, seconds, int(dim[1]) if dim else None, NOT_FINITE.search(text) is not None)


def read_finished(folder: Path) -> Outcome | None:
    """What came of a point; none: it is not finished. Raises ValueError for a log that is not the one it ended with."""
    if not (folder / "finished").exists():
        return None
    outcome = read_outcome(folder / "train.log")
    told = (folder / "finished").read_text(encoding="utf-8").strip()
    if not outcome.counts or told not in ("", outcome.summary):  # empty: as earlier versions left it
        raise ValueError(
            f"{folder} is damaged: it was finished{' with ' * bool(told)}{told}, its train.log has {outcome.summary}; "
            f"{REMOVE}"
        )
    return outcome


def train(point: Point, common: dict[str, str], folder: Path) -> None:
    """Run by a process of its own, which fairseq leaves dirty: fairseq-train, what it says in train.log."""
    from fairseq_cli.train import cli_main

    for interruption in (signal.SIGINT, signal.SIGTERM):  # which need no traceback
        signal.signal(interruption, signal.SIG_DFL)
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "train.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = point.command(common, folder)
    print("+", *sys.argv, flush=True)
    cli_main()


def run(points: list[Point], common: dict[str, str], out: Path, workers: int) -> list[str]:
    """Trains all, `workers` at once; the names of those that failed."""
    waiting, running, failed = list(reversed(points)), {}, []
    try:
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
                    if outcome.counts and (not process.exitcode or outcome.diverged):
                        finish(out / point.name, outcome)
                        bar.write(f"{point.name}: {outcome}")
                    else:
                        failed.append(point.name)
    finally:
        children = multiprocessing.active_children()
        for child in children:
            child.terminate()
        for child in children:
            child.join()
    return failed


def finish(folder: Path, outcome: Outcome) -> None:
    """A point's log is all that is needed of it."""
    for checkpoint in folder.glob("*.pt"):
        checkpoint.unlink()
    (folder / "finished").write_text(outcome.summary + "\n", encoding="utf-8")


def lock(out: Path) -> None:
    """Keeps other grids out of a folder for as long as this process or a training of its lives.

    Raises ValueError where another grid runs.
    """
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another grid runs in {out}: wait for its end, or give another --out.") from None


def plan(points: list[Point], done: int, workers: int) -> str:
    """What is left to do and what it costs."""
    seconds = sum(point.seconds for point in points)
    return (
        f"{len(points)} points to train ({done} are finished): at most about {duration(seconds)} of a core, "
        f"{duration(seconds / workers)} with {workers} at once, if seconds-per-key of the grid holds here "
        "(conf/: on an AMD EPYC, Zen 4)."
    )


def duration(seconds: float) -> str:
    """In words."""
    return f"{seconds / 60:,.0f} minutes" if seconds >= 120 else f"{math.ceil(seconds)} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("conf", type=Path, nargs="+", metavar="CONF", help="grids, such as conf/quick.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/associative_retrieval", help="where everything goes")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="points at once (one a core)")
    parser.add_argument("--plan", action="store_true", help="print what would be run, and its cost")
    args = parser.parse_args()
    if args.workers < 1:
        sys.exit(f"retrieval_grid.py: --workers must be at least 1, got {args.workers}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = run_grid(args)
    except (OSError, ValueError) as error:
        sys.exit(f"retrieval_grid.py: {error}")
    except KeyboardInterrupt:
        sys.exit("\nretrieval_grid.py: stopped; the same command goes on.")
    if failed:
        sys.exit(
            f"retrieval_grid.py: failed, see train.log in {args.out} of: {'; '.join(failed)}. The same command tries "
            "them again; run.sh report draws the others."
        )


def run_grid(args: argparse.Namespace) -> list[str]:
    """Plans or trains; the names of the points that failed."""
    points = read_points(args.conf)
    common = yaml.load((HERE / "conf/common.yaml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    if not args.plan:
        lock(args.out)
    import_fairseq()
    check(points, common, args.out)
    left = [point for point in points if read_finished(args.out / point.name) is None]
    if args.plan:
        print(*(point.name for point in left), sep="\n")
    print(plan(left, len(points) - len(left), args.workers), flush=True)
    if args.plan:
        return []
    os.environ["OMP_NUM_THREADS"] = "1"  # a core each: threads of several processes would only wait for each other
    return run(left, common, args.out, args.workers)


if __name__ == "__main__":
    main()
