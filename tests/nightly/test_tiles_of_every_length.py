"""Tiles of bfloat16 by their emulation, over every length; and the processor's own, where it has AMX."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.operator_fixtures import one_thread, poisoned_memory  # noqa: F401
from support.tiles import (
    KINDS,
    RULES_ON_TILES,
    check_errors_of_tiles,
    check_prefixes,
    check_spread,
    draw,
    with_gradients,
)

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
every_rule = pytest.mark.parametrize("rule", RULES_ON_TILES)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv("FWP_CPU_TILES", "emulated")


@every_rule
@pytest.mark.parametrize("sizes", [(48, 48), (64, 64), (50, 71), (128, 128), (65, 129), (200, 48)])
def test_every_length(rule, sizes):
    check_prefixes(rule, (1, 1, 130, *sizes), range(1, 131))
    for kind in KINDS:
        check_errors_of_tiles(rule, kind, (1, 2, 512, *sizes))


@every_rule
def test_what_is_not_finite(rule):
    names, numbers = draw(rule, "usual", (1, 1, 2, 48, 48)), (float("nan"), float("inf"), -float("inf"))
    for name, number in itertools.product(names, numbers):
        check_spread(rule, name, number, range(0, 40, 3))


@pytest.mark.parametrize("choice", ["emulated", "off"])
def test_laws(choice):
    """Every law of the rules that have tiles."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "laws/test_operators.py"]
    environment = os.environ | {"FWP_CPU_TILES": choice}
    done = subprocess.run(
        [*command, "-k", "sum or delta or gla or gated"],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists() or "amx_bf16" not in Path("/proc/cpuinfo").read_text(errors="replace"),
    reason="this processor has no AMX",
)
@every_rule
@pytest.mark.parametrize("kind", KINDS)
def test_the_processor_has_the_bits_of_the_emulation(monkeypatch, rule, kind):
    for sizes in ((128, 128), (64, 64), (50, 71)):
        x = draw(rule, kind, (2, 2, 200, *sizes))
        found = {}
        for choice in ("emulated", "auto", "off"):
            monkeypatch.setenv("FWP_CPU_TILES", choice)
            found[choice] = with_gradients(rule, x)
        assert not torch.equal(found["off"]["end"], found["auto"]["end"])
        for name, y in found["emulated"].items():
            assert torch.equal(found["auto"][name], y), name
