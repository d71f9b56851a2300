"""nvcc's PTX of the kernels on the interpreter: no race, no fault, and the results of the reference."""

import contextlib
import csv
import re
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from emulator import KERNELS, Emulator, EmulatorError, build
from interpreter import Interpreter, translate
from nvcc import compiled_kernels, needs_nvcc
from operator_cases import CASES, cotangents_of, make_case
from support.subjects import relative_error
from test_kernels import (
    HOPPER,
    check_accuracy,
    check_equal,
    check_other_orders_and_gpus,
    of_gates,
    remember,
)
from test_maps import CASES as MAP_CASES
from test_maps import differentiate, run_all, sample
from test_maps import make_case as make_map
from test_recurrent_delta import run as run_recurrent
from test_recurrent_delta import sample as sample_recurrent
from test_recurrent_kernel import check as check_recurrent
from test_recurrent_kernel import use_kernel

from fairseq_fwp.ops.projection import Part

pytestmark = needs_nvcc
CHUNKS = [(1, 1, 70, 16, 24), (1, 2, 70, 24, 32), (1, 1, 66, 64, 48), (1, 1, 66, 128, 33), (1, 1, 2100, 16, 16)]
# Tall tiles, wide backward ones, medium ones, then several slabs, or wide forward tiles if there is one multiprocessor.
SCANS = [(1, 1, 3, 300, 300), (8, 16, 2, 64, 64), (2, 17, 3, 57, 62), (2, 2, 20, 17, 33)]
# Few and long enough for segments, with every size of keys.
SEGMENTS = [(1, 1, 2060, size, 16) for size in (32, 64, 128)]
MAP_LIMITS = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CEILINGS = Path(__file__).with_name("instructions.csv")  # PTX instructions of a warp for a chunk, at most
SYNCS = ("bar.sync", "bar.arrive", "bar.warp.sync", "cp.async.wait_group")


@pytest.fixture(scope="module")
def interpreter():
    return Interpreter(translate(compiled_kernels("90a").ptx))


@pytest.mark.parametrize("state", [True, False], ids=["state", "no_state"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rule", CASES)
def test_chunks(interpreter, rule, dtype, state):
    options = {"floors": of_gates(dtype), "layout": "tokens_first", "state": state}
    for shape in CHUNKS:
        drawn = check_accuracy(interpreter, rule, shape, dtype, **options)
        check_other_orders_and_gpus(interpreter, *drawn)


@pytest.mark.parametrize("shape", SEGMENTS, ids=str)
@pytest.mark.parametrize("rule", CASES)
def test_segments(interpreter, rule, shape):
    """They give the emulator's results, except for rounding: nvcc makes one operation of a product and a sum."""
    given, erases = make_case(rule, shape, torch.bfloat16)
    remember(rule, given)
    gradients, emulator = cotangents_of(given), Emulator(build())
    found = interpreter.results(given, erases, gradients, shared_kib=HOPPER)
    for name, x in emulator.results(given, erases, gradients, shared_kib=HOPPER).items():
        assert relative_error(found[name], x) < (1e-3 if x.dtype == torch.bfloat16 else 1e-4), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rule", CASES)
def test_scans(interpreter, rule, dtype):
    for shape in SCANS:
        check_equal(interpreter, rule, shape, dtype, state=True)


def instructions_of_chunks(interpreter, rule, size):
    """Return the PTX instructions of a warp for a chunk, by kernel, where one block has all columns of a head.

    Those of `ChunkForward` without decays include its second run, which rebuilds the states for the backward pass.
    """
    totals = []
    for chunks in (4, 8):
        given, erases = make_case(rule, (1, 1, 32 * chunks, size, size), torch.bfloat16)
        interpreter.launched()
        interpreter.results(given, erases, cotangents_of(given), shared_kib=HOPPER, multiprocessors=1)
        totals.append(interpreter.launched())
    warps = size // 16
    return {name: (count - totals[0][name]) / (4 * 32 * warps) for name, count in totals[1].items()}


def name_of(kernel):
    """Return the name of a pass on tensor cores, which `ChunkKeyStates` is in both directions."""
    name = re.search(r"\d(Chunk[A-Za-z]+)I", kernel)[1]
    return name + " in reverse" * (name == "ChunkKeyStates" and "Lb1EEE" in kernel)


@pytest.mark.parametrize(("rule", "size"), list(product(CASES, (16, 64, 128))))
def test_instructions_of_a_chunk(interpreter, rule, size):
    """They bound the time of a pass from chunk to chunk. A number far below its ceiling deserves a lower one."""
    found = {name_of(kernel): count for kernel, count in instructions_of_chunks(interpreter, rule, size).items()}
    with open(CEILINGS, newline="", encoding="utf-8") as file:
        ceilings = {
            row["pass"]: float(row["instructions"])
            for row in csv.DictReader(file)
            if (row["rule"], row["size"]) == (rule, str(size))
        }
    assert found.keys() == ceilings.keys()
    for name, count in found.items():
        assert 0.9 * ceilings[name] < count <= ceilings[name], (name, count)


def check_map(operator, name, norm, dtype, width=10):
    """Check a map whose vectors are copied in pieces if they have a multiple of four numbers."""
    case = make_map(
        name, norm, width=width, parts=(Part(1, 3, width), Part(1, 3, 1, "sigmoid", 2.0), Part(1, 3, 4, "silu"))
    )
    x, gradients = sample(case.layout, dtype)
    found = run_all(operator, case, x, gradients, reverse=1)
    for which, y in run_all(operator, case, x, gradients, multiprocessors=1).items():
        assert torch.equal(found[which], y), which
    for which, y in differentiate(case.define, x.double(), [y.double() for y in gradients]).items():
        assert relative_error(found[which], y) < MAP_LIMITS[dtype], which


@pytest.mark.parametrize(("name", "norm"), MAP_CASES)
def test_maps(interpreter, name, norm):
    for dtype in MAP_LIMITS:
        if dtype != torch.float16 or norm != "small sums":  # its gradients are too small
            check_map(interpreter, name, norm, dtype)
            check_map(interpreter, name, norm, dtype, width=8)


# A state before the first token, documents and padding, for each size of a kernel.
RECURRENT = [(70, 5, "wzms"), (35, 16, "zms"), (9, 17, "wms"), (37, 40, "wzms")]


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_recurrent_delta_rule(interpreter, monkeypatch, case):
    for dtype in (torch.float64, torch.float32):
        check_recurrent(partial(use_kernel, monkeypatch, interpreter), case, dtype)


def launch_all(interpreter, operator):
    """Return the names of the kernels that an operator launches for the cases above, without executing them."""
    interpreter.launched(execute=False)
    cases = [(rule, shape, torch.bfloat16) for rule in CASES for shape in CHUNKS + SEGMENTS]
    cases += [(rule, shape, torch.float32) for rule in CASES for shape in CHUNKS]
    cases += [(rule, shape, dtype) for rule in CASES for shape in SCANS for dtype in (torch.float32, torch.float64)]
    for rule, shape, dtype in cases:
        given, erases = make_case(rule, shape, dtype)
        for multiprocessors in (1, 132):
            operator.results(given, erases, cotangents_of(given), shared_kib=HOPPER, multiprocessors=multiprocessors)
    for dtype in MAP_LIMITS:
        case = make_map("elu", "sum")
        run_all(operator, case, *sample(case.layout, dtype))
    with pytest.MonkeyPatch.context() as patch:
        use_kernel(patch, operator)
        for case, dtype in product(RECURRENT, (torch.float32, torch.float64)):
            run_recurrent(sample_recurrent(*case, dtype))
    return interpreter.launched()


def test_all_kernels_are_executed(interpreter):
    """By the tests above."""
    assert launch_all(interpreter, interpreter).keys() == interpreter.kernels.keys()


def without_syncs(text):
    """Yield (name, text without it) for each of a kernel's barriers and waits."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        place, opcode, *rest = line.split()
        if opcode in SYNCS:
            file, number = place.split(":")
            following = (KERNELS / file).read_text().splitlines()[int(number)].strip()
            yield f"{opcode} {following}", "\n".join([*lines[:at], " ".join([place, "nop", *rest]), *lines[at + 1 :]])


def test_each_missing_barrier_or_wait_is_found(interpreter):
    """In passes of several teams with two warps each."""
    given, erases = make_case("delta", (1, 1, 70, 16, 32), torch.bfloat16)
    results = lambda reverse=0: interpreter.results(given, erases, cotangents_of(given), reverse=reverse)  # noqa: E731
    interpreter.launched()
    results()
    missed, count = set(), 0
    for kernel in sorted(interpreter.launched()):
        for name, text in without_syncs(interpreter.kernels[kernel]):
            interpreter.load(text)
            for reverse in (0, 1):
                count += 1
                with contextlib.suppress(EmulatorError):  # a race, or an address that was read before it was written
                    results(reverse)
                    missed.add(f"{re.search('Chunk[A-Z][a-z]+', kernel)[0]} {name}")
        interpreter.load(interpreter.kernels[kernel])
    assert missed == set() and count == 54


def test_each_missing_barrier_of_the_recurrent_delta_rule_is_found(interpreter, monkeypatch):
    count = 0
    for kernel in sorted(name for name in interpreter.kernels if "PassIfLi16E" in name and "recurrent" in name):
        for name, text in without_syncs(interpreter.kernels[kernel]):
            interpreter.load(text)
            count += 1
            with pytest.raises(EmulatorError, match="races"):
                check_recurrent(partial(use_kernel, monkeypatch, interpreter), RECURRENT[0], torch.float32)
                pytest.fail(f"{kernel}: {name} is not missed")
        interpreter.load(interpreter.kernels[kernel])
    assert count == 9


def test_each_missing_barrier_of_a_map_is_found(interpreter):
    """With more vectors than teams, several tokens for each block, and copies of several numbers, or of one."""
    count = 0
    for kernel in sorted(name for name in interpreter.kernels if "MapPassIf" in name):
        for name, text in without_syncs(interpreter.kernels[kernel]):
            interpreter.load(text)
            count += 1
            with pytest.raises(EmulatorError, match="races"):
                for width, map_name in product((8, 7), ("elu", "dpfp", "favor")):
                    case = make_map(map_name, "sum", heads=40, width=width)
                    given = sample(case.layout, torch.float32, tokens=(1, 3))
                    run_all(interpreter, case, *given, multiprocessors=1)
                pytest.fail(f"{kernel}: {name} is not missed")
        interpreter.load(interpreter.kernels[kernel])
    assert count == 10
