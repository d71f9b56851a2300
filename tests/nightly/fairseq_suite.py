"""Run fairseq's own tests on the installed fairseq, without and with the patches, and name failures.

    git clone --branch v0.12.2 https://github.com/facebookresearch/fairseq
    python tests/nightly/fairseq_suite.py fairseq

Only the tests, and examples and scripts that they import, are taken from the checkout. Prints the numbers of both
runs and every failure with the beginning of its error; ends with status 1 if a test passes without the patches only.
fairseq_suite.md has the numbers of the last run, and the reason of each failure.
"""

import argparse
import collections
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

LIMIT = 900  # seconds a test
LENGTH = 160  # characters of an error
RUNS = {"as shipped": [], "with the patches": ["-p", "fairseq_fwp"]}
FAILED = ("failed", "errors")
COUNTED = ("passed", *FAILED, "skipped")
OUTCOMES = {"failure": "failed", "skipped": "skipped", "error": "errors"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Any:
    """Fail a test that takes longer than the limit: this file is also a plugin of the pytest that it starts."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {LIMIT} s")

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs do not have
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def run(folder: Path, plugins: list[str]) -> dict[str, tuple[str, str]]:
    """Return the outcome of each test, and the beginning of its error."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "tests", "-q", "--tb=short", "--junitxml", str(report)]
    options = ["--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", Path(__file__).stem, *plugins]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *options], cwd=folder, env=environment, check=False)
    return dict(map(outcome, ElementTree.parse(report).iter("testcase")))


def outcome(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    """Return the name and the outcome of a test in pytest's report."""
    name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
    for kind, called in OUTCOMES.items():
        if (found := case.find(kind)) is not None:
            return name, (called, reason(found))
    return name, ("passed", "")


def reason(found: ElementTree.Element) -> str:
    """Return the beginning of an error; for one at collection, whose message is not specific, its last line."""
    if found.get("message") == "collection failure":
        return (found.text or "").strip().splitlines()[-1].removeprefix("E").strip()
    return " ".join((found.get("message") or "").split())[:LENGTH]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="checkout of fairseq")
    source = parser.parse_args().source
    results = {}
    for name, plugins in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            for part in ("tests", "examples", "scripts"):
                shutil.copytree(source / part, Path(folder, part))
            results[name] = run(Path(folder), plugins)
    print(f"\n| run | {' | '.join(COUNTED)} |\n| --- |{' ---: |' * len(COUNTED)}")
    for name, tests in results.items():
        counts = collections.Counter(outcome for outcome, _ in tests.values())
        print(f"| {name} | {' | '.join(str(counts[outcome]) for outcome in COUNTED)} |")
    for name, tests in results.items():
        print(f"\nFailures {name}:\n")
        failures = ((test.partition("[")[0], error) for test, (found, error) in tests.items() if found in FAILED)
        for (test, error), cases in collections.Counter(failures).items():
            print(f"- `{test}`{f' ({cases} cases)' * (cases > 1)}: {error}")
    shipped, patched = results.values()
    broken = [test for test in shipped if shipped[test][0] == "passed" and patched[test][0] != "passed"]
    print("\nPassed without the patches only:", ", ".join(broken) or "none")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
