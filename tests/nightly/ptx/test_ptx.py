"""nvcc's PTX of the kernels on the interpreter: no race, no fault, and the results of the reference."""

import re

import pytest
import torch
from emulator import KERNELS, EmulatorError
from interpreter import Interpreter, translate
from nvcc import compiled_kernels, needs_nvcc
from operator_cases import CASES, as_double, cotangents_of, make_case, reference
from subjects import SEED, relative_error
from test_kernels import HOPPER, IN_CHUNKS, OF_GATE, UNIT, check_accuracy

pytestmark = needs_nvcc
CHUNKS = [(1, 1, 70, 16, 24), (1, 2, 70, 24, 32), (1, 1, 66, 64, 48), (1, 1, 66, 128, 33), (1, 1, 2100, 16, 16)]
# Tall tiles, wide backward ones, medium ones, then several slabs, or wide forward tiles if there is one multiprocessor.
SCANS = [(1, 1, 3, 300, 300), (8, 16, 2, 64, 64), (2, 17, 3, 57, 62), (2, 2, 20, 17, 33)]
# Several minutes for each rule: segments of 2,060 tokens with more than 16 features. The emulator has them.
NOT_EXECUTED = re.compile(r"segments_kernelILi(32|64|128)E|(Forward|Backward|KeyStates)ILi(32|64|128)E(Lb.E)*Lb1EE")
SYNCS = ("bar.sync", "bar.warp.sync", "cp.async.wait_group")
# By the next line of the source. Without decays, this function has nothing to store.
REDUNDANT = {"ChunkBackward bar.sync store_decay(find_memory(), this->begin());"}


@pytest.fixture(scope="module")
def interpreter():
    return Interpreter(translate(compiled_kernels("90a").ptx.read_text()))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rule", IN_CHUNKS)
def test_chunks(interpreter, rule, seed):
    for shape in CHUNKS:
        interpreter.seed(seed + 1000 * SEED)
        check_accuracy(interpreter, rule, shape, torch.bfloat16, floors=OF_GATE, layout="tokens_first", state=seed == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rule", CASES)
def test_scans(interpreter, rule, dtype):
    for seed, shape in enumerate(SCANS):
        given, erases = make_case(rule, shape, dtype)
        gradients = cotangents_of(given)
        truth = reference(as_double(given), erases, [x.double() for x in gradients])
        for multiprocessors in (1, 132):
            interpreter.seed(seed + 1000 * SEED)
            how = {"shared_kib": HOPPER, "multiprocessors": multiprocessors}
            for name, x in interpreter.results(given, erases, gradients, **how).items():
                assert relative_error(x, truth[name]) < UNIT[dtype], (name, shape)


def test_all_kernels_are_executed(interpreter):
    """By the tests above; here, launches only give their names."""
    interpreter.executes = False
    interpreter.launched.clear()
    cases = [(rule, shape, torch.bfloat16) for rule in IN_CHUNKS for shape in CHUNKS]
    cases += [(rule, shape, dtype) for rule in CASES for shape in SCANS for dtype in (torch.float32, torch.float64)]
    for rule, shape, dtype in cases:
        given, erases = make_case(rule, shape, dtype)
        for multiprocessors in (1, 132):
            interpreter.results(given, erases, cotangents_of(given), shared_kib=HOPPER, multiprocessors=multiprocessors)
    interpreter.executes = True
    assert {name for name in interpreter.kernels if not NOT_EXECUTED.search(name)} == interpreter.launched


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
    given, erases = make_case("delta", (1, 1, 70, 16, 16), torch.bfloat16)
    results = lambda: interpreter.results(given, erases, cotangents_of(given), shared_kib=HOPPER)  # noqa: E731
    interpreter.launched.clear()
    results()
    missed, count = set(), 0
    for kernel in sorted(interpreter.launched):
        for name, text in without_syncs(interpreter.kernels[kernel]):
            interpreter.load(text)
            for seed in range(3):
                interpreter.seed(seed + 1000 * SEED)
                count += 1
                try:
                    results()
                    missed.add(f"{re.search('Chunk[A-Z][a-z]+', kernel)[0]} {name}")
                except EmulatorError:  # a race, or an address that was read before it was written
                    pass
        interpreter.load(interpreter.kernels[kernel])
    assert count == 60 and missed == REDUNDANT


def test_an_unknown_opcode_is_named(interpreter):
    given, erases = make_case("sum", (1, 1, 70, 16, 16), torch.bfloat16)
    kernels = [name for name in interpreter.kernels if "ChunkForwardILi16ELb0ELb0ELb0" in name]
    interpreter.load(interpreter.kernels[kernels[0]].replace(" ret ", " exit "))
    with pytest.raises(EmulatorError, match=r"exit: .* unknown opcode"):
        interpreter.forward(given, erases, shared_kib=HOPPER)
    interpreter.load(interpreter.kernels[kernels[0]])
