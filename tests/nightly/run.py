"""Run what takes too long for every commit, and append each result to results.csv.

    bash tests/run.sh nightly [--minutes 60] [--only TEXT]

A part is a file of tests/nightly, the slow tests of a folder, or a mutant: a mistake that the tests must find, in a
copy of the checkout. Parts that never ran come first, then those whose last result is oldest, until the time is over.
The test that found a mutant last time is tried first. The exit status is 1 if a part fails, or a mutant survives.
"""

import argparse
import csv
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.csv"
FIELDS = ("name", "commit", "date", "seconds", "outcome")
PYTEST = ["-q", "--no-header", "-p", "no:cacheprovider", "--hypothesis-profile=night"]
SPREAD = ["--numprocesses", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
FORK = multiprocessing.get_context("fork")  # with what main() has imported, which must not be this package
COMPILED = "from fairseq_fwp.ops import kernels; print(kernels.load_kernels('cpu').path, end='')"
CHANGE = re.compile("«(.*?)→(.*?)»", re.DOTALL)
KERNELS = "cuda_ext/cuda/"  # mutants that the emulator runs, in test_kernel_mutants.py
ON_CUDA = ("cuda.cpp", "cuda_map.cpp", "cuda_recurrent_delta.cpp", "cuda_tensors.h")
# The folders of tests for the code below a path, in the order in which they run until one finds the mutant.
TESTS = {
    **dict.fromkeys((f"cuda_ext/bindings/{name}" for name in ON_CUDA), "emulator/test_binding.py"),
    **dict.fromkeys(("cuda_ext/cpu/amx.h", "cuda_ext/cpu/forget_tiles.h"), "ops/kernels/test_tiles.py"),
    "cuda_ext": "laws/test_operators.py ops laws modules",
    "fairseq_fwp/checkpoints/export": "cli",
    "fairseq_fwp/checkpoints": "checkpoints",
    "fairseq_fwp/cli": "cli evaluation test_commands.py",
    "fairseq_fwp/distillation.py": "test_distillation.py",
    "fairseq_fwp/evaluation": "evaluation cli",
    "fairseq_fwp/interop": "interop cli",
    "fairseq_fwp/models/fast_weight_layer": "models cli",
    "fairseq_fwp/models": "models tasks evaluation checkpoints laws modules",
    "fairseq_fwp/modules": "laws/test_attentions.py modules laws models tasks checkpoints",
    "fairseq_fwp/ops/kernels": "ops/kernels ops",
    "fairseq_fwp/ops": "laws/test_operators.py ops laws modules",
    "fairseq_fwp/patches": "patches cli tasks nightly/test_kill_and_resume.py",
    "fairseq_fwp/tasks": "tasks models",
    "fairseq_fwp/testing.py": "ops",
    "fairseq_fwp": "test_registration.py models",
}


class Mutant(NamedTuple):
    """Text that a file must have once, its replacement, and how it is found if not by the tests of the file."""

    path: str
    text: str
    mistake: str
    how: str
    name: str


def mutants() -> Iterator[Mutant]:
    """Read mutants.txt: a path and how, then lines with «what is there→what replaces it»."""
    heading = ""
    for line in (HERE / "mutants.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            text, (path, _, how) = line[4:].replace("\\n", "\n"), heading.partition(" ")
            yield Mutant(path, CHANGE.sub(r"\1", text), CHANGE.sub(r"\2", text), how, f"{heading}: {line.strip()}")
        elif line and not line.startswith("#"):
            heading = line


def insert(mutant: Mutant, folder: Path) -> str:
    """Put a mutant into a copy of the checkout; return the original text. Raises ValueError unless it occurs once."""
    path = folder / mutant.path
    whole = path.read_text(encoding="utf-8")
    if mutant.text == mutant.mistake or whole.count(mutant.text) != 1:
        raise ValueError(f"{mutant.path} must have {mutant.text!r} once, got {whole.count(mutant.text)} times")
    path.write_text(whole.replace(mutant.text, mutant.mistake), encoding="utf-8")
    return whole


def folders_of(path: str) -> list[str]:
    """Return the tests of a file of the package."""
    return next(tests.split() for folder, tests in TESTS.items() if f"{path}/".startswith(f"{folder}/"))


def copy_checkout(folder: Path) -> None:
    """Copy the files that git knows, and the compiled kernels."""
    compiled = Path(subprocess.run([sys.executable, "-c", COMPILED], cwd=ROOT, capture_output=True, text=True).stdout)
    shutil.copytree(compiled.parent, folder / ".cache" / compiled.parent.name)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(lambda name: (ROOT / name).is_file(), listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def pytest(arguments: list[str], folder: Path, output: Path) -> None:
    """Run pytest in a folder and exit with its status; what it says is written to a file."""
    own = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "FWP_CACHE_DIR": str(folder / ".cache")}
    os.environ.update(own if folder != ROOT else {})
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # a mutant can have the size and the second of the file before it
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest  # after the folder is known

    sys.exit(int(pytest.main([*PYTEST, *arguments])))


def run(arguments: list[str], folder: Path = ROOT, limit: float | None = None) -> tuple[bool, str]:
    """Run pytest; return whether all passed, and its first failure or last line."""
    with tempfile.NamedTemporaryFile() as file:
        process = FORK.Process(target=pytest, args=(arguments, folder, Path(file.name)))
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
            return False, "took too long"
        lines = Path(file.name).read_text(encoding="utf-8").strip().splitlines() or ["nothing said"]
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return process.exitcode in (0, 5), (failed or lines)[0 if failed else -1]  # 5: there are no such tests


def look_for(mutant: Mutant, folder: Path, last: str) -> str:
    """Return what finds a mutant, or "survives". The test that found it last comes first, then the file of its name."""
    if not (folder / "tests").exists():
        copy_checkout(folder)
    known = last.removeprefix("found: FAILED ") if last.startswith("found: FAILED ") else ""
    name, of_folders = f"test_{Path(mutant.path).stem}.py", [f"tests/{tests}" for tests in folders_of(mutant.path)]
    likely = [str(path.relative_to(folder)) for tests in of_folders for path in (folder / tests).rglob(name)]
    before = insert(mutant, folder)
    try:
        for tests in [[known], likely, *([tests, *SPREAD] for tests in of_folders)]:
            passed, said = run([*tests, "-x"], folder, limit=900) if any(tests) else (True, "")
            if not passed and not said.startswith("ERROR: not found"):  # a test that has another name today
                break
        else:
            return "survives"
    finally:
        (folder / mutant.path).write_text(before, encoding="utf-8")
    failed, _, test = said.partition(" ")
    again = [test] if failed in ("FAILED", "ERROR") else tests  # without a test: pytest itself stopped
    if again != [known] and said != "took too long" and not run(again, folder)[0]:
        return f"fails without it, too: {said}"
    return f"found: {said}"


def run_file(path: str, *options: str) -> str:
    """Return "passed" or the first failure of a file of tests."""
    passed, said = run([path, *options, *SPREAD])
    return "passed" if passed else said


def parts(folder: Path, last: dict[str, dict[str, str]]) -> dict[str, Callable[[], str]]:
    """Return the parts by name, as functions that return the outcome; mutants are put into the folder."""
    found: dict[str, Callable[[], str]] = {}
    for mutant in mutants():
        if mutant.path.startswith(KERNELS):
            of_file = partial(run_file, "tests/nightly/test_kernel_mutants.py", "-k", Path(mutant.path).name)
            found[f"{mutant.path}: its mutants on the emulator"] = of_file
        elif not mutant.how:  # the others are for the sanitizers, in test_sanitizers.py
            outcome = last[mutant.name]["outcome"] if mutant.name in last else ""
            found[mutant.name] = partial(look_for, mutant, folder, outcome)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name, nightly = str(path.relative_to(ROOT)), HERE in path.parents
        if path.name != "test_kernel_mutants.py" and (nightly or "mark.slow" in path.read_text(encoding="utf-8")):
            found[name] = partial(run_file, name, "-m", "slow or not slow" if nightly else "slow")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="after which no other part begins")
    parser.add_argument("--only", nargs="+", default=[""], help="texts of which the name of a part has one")
    args = parser.parse_args()
    import fairseq  # noqa: F401  (takes longer than most tests, which then need not import it)

    last: dict[str, dict[str, str]] = {}
    if RESULTS.exists():
        with RESULTS.open(encoding="utf-8", newline="") as file:
            last = {row["name"]: row for row in csv.DictReader(file)}
    end, failed = time.monotonic() + 60 * args.minutes, 0
    commit = subprocess.run(["git", "describe", "--always"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    changed = ["git", "diff", "--quiet", "HEAD", "--", ".", f":!{RESULTS.relative_to(ROOT)}"]
    commit += "-dirty" * subprocess.run(changed, cwd=ROOT).returncode
    with tempfile.TemporaryDirectory() as folder, RESULTS.open("a", encoding="utf-8", newline="") as file:
        every = parts(Path(folder), last).items()
        found = {name: part for name, part in every if any(text in name for text in args.only)}
        writer = csv.writer(file, lineterminator="\n")
        if not last:
            writer.writerow(FIELDS)
        for number, name in enumerate(sorted(found, key=lambda name: last[name]["date"] if name in last else ""), 1):
            if time.monotonic() > end:
                print(f"{len(found) - number + 1} parts are left for the next night")
                break
            start, date = time.monotonic(), time.strftime("%Y-%m-%d %H:%M")
            outcome = found[name]()
            failed += not outcome.startswith(("passed", "found"))
            writer.writerow([name, commit, date, round(time.monotonic() - start), outcome])
            file.flush()
            print(f"{number} of {len(found)}: {name}: {outcome}", flush=True)
    sys.exit(f"{failed} parts failed" if failed else 0)


if __name__ == "__main__":
    main()
