"""Put mutants into a copy of the checkout, one at a time, and check whether the tests find them.

    python tests/nightly/mutate.py --out mutants.csv [--suite OTHER/tests] [--only TEXT]

Tests of the mutant's subject run first, see TESTS. --suite takes the tests of another checkout for the
same code, so that two suites can be compared. A mutant that is in the CSV is not tried again. The exit status is 1
if one survives.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
# The folders of tests for the code below a path, in the order in which they run until one finds the mutant.
TESTS = {
    "cuda_ext": ["laws", "ops", "modules"],
    "fairseq_fwp/kernels": ["kernels", "ops"],
    "fairseq_fwp/ops": ["laws", "ops", "modules"],
    "fairseq_fwp/modules": ["modules", "models", "tasks"],
    "fairseq_fwp/models": ["models", "tasks", "evaluation", "convert", "modules"],
    "fairseq_fwp/evaluation": ["evaluation", "cli"],
    "fairseq_fwp/tasks": ["tasks", "models"],
    "fairseq_fwp/synthetic": ["synthetic", "models"],
    "fairseq_fwp/convert": ["convert"],
    "fairseq_fwp/patches": ["patches", "cli", "tasks", "nightly/faults"],
    "fairseq_fwp/cli": ["cli", "evaluation"],
}
SECONDS = 900  # for one mutant


def copy(folder: Path, suite: Path) -> None:
    """Copy the files of the checkout that git knows, with the tests of a suite."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    shutil.copytree(suite, folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))


def put(mutant: Mutant, folder: Path) -> str:
    """Put a mutant into the copy; return the original text. Raises ValueError unless the line occurs once."""
    path = folder / mutant.path
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.line) != 1:
        raise ValueError(f"{mutant.path} must have the line {mutant.line!r} once, got {text.count(mutant.line)} times.")
    path.write_text(text.replace(mutant.line, mutant.mistake), encoding="utf-8")
    return text


def run(arguments: list[str], folder: Path) -> tuple[bool, str]:
    """Run tests in the copy; return whether one failed, and the first failure."""
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "FWP_CACHE_DIR": str(folder / ".cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return True, "too long"
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode != 0, failed[0] if failed else done.stdout.strip()[-100:]


def find(mutant: Mutant, folder: Path) -> tuple[bool, str]:
    tests = next(folders for path, folders in TESTS.items() if mutant.path.startswith(path))
    for name in tests:
        if (folder / "tests" / name).is_dir():
            found, where = run([f"tests/{name}"], folder)
            if found:
                return True, where
    return False, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="CSV of what was found")
    parser.add_argument("--suite", type=Path, default=ROOT / "tests", help="tests of another checkout")
    parser.add_argument("--only", default="", help="mutants of which this is a part")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "mutants", help="where the copy lies")
    args = parser.parse_args()
    known = {}
    if args.out.exists():
        with args.out.open(encoding="utf-8", newline="") as file:
            known = {row["mutant"]: row for row in csv.DictReader(file)}
    shutil.rmtree(args.work, ignore_errors=True)
    copy(args.work, args.suite)
    mutants = [mutant for mutant in MUTANTS if args.only in mutant.name]
    with args.out.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["mutant", "found", "seconds", "by"], lineterminator="\n")
        if not known:
            writer.writeheader()
        for number, mutant in enumerate(mutants, 1):
            if mutant.name not in known:
                start, before = time.monotonic(), put(mutant, args.work)
                found, where = find(mutant, args.work)
                (args.work / mutant.path).write_text(before, encoding="utf-8")
                row = {"mutant": mutant.name, "found": "yes" if found else "no", "by": where}
                known[mutant.name] = row | {"seconds": round(time.monotonic() - start)}
                writer.writerow(known[mutant.name])
                file.flush()
            print(f"{number} of {len(mutants)}: {known[mutant.name]['found']:3} {mutant.name}", flush=True)
    alive = [mutant.name for mutant in mutants if known[mutant.name]["found"] == "no"]
    print(f"{len(mutants)} mutants, {len(alive)} survive", *alive, sep="\n  ")
    sys.exit(bool(alive))


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"mutate.py: {error}")
