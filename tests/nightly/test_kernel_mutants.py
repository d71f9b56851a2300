"""The test of the emulator: it must find each mutant of the CUDA kernels in mutants.txt."""

import functools
import shutil
from itertools import product

import pytest
import torch
from emulator import KERNELS, Emulator, EmulatorError, build
from nightly.run import KERNELS as PATH
from nightly.run import insert, mutants
from operator_cases import CASES, as_double, cotangents_of, make_case, reference
from support.subjects import relative_error
from test_maps import differentiate, run_all, sample
from test_maps import make_case as make_map
from test_recurrent_kernel import check as check_recurrent
from test_recurrent_kernel import use_kernel
from test_sanitizer import run_watched

from fairseq_fwp.ops.projection import Part

# Ragged in every size, with several heads in a block, slabs, stages and chunks.
SHAPES = [(1, 3, 35, 5, 7), (2, 1, 38, 17, 20)]
# Numbers of 2 bytes, read 16 bytes at a time.
HALF_SHAPE = (1, 2, 38, 16, 24)
# On the tensor cores: bfloat16, except the states. Keys are copied 16 bytes at a time, values one by one.
CHUNK_SHAPE = (1, 2, 77, 24, 90)
FORGETFUL = ("gated_delta", "gla", "gla_by_key", "gated_delta_by_key", "decay", "dplr_by_key")
# Several warps and blocks for a head's columns; the second has sums over 32 blocks, in windows of 64 tokens.
SUM_SHAPES = [(1, 2, 38, 60, 64), (1, 4, 70, 300, 128)]
SEGMENT_SHAPE, IN_SEGMENTS = (1, 1, 2100, 20, 24), ("delta", "gated_delta", "gla_by_key", "gated_delta_by_key")
SEGMENTS_OF_SUM = (1, 1, 2060, 16, 140)  # whose columns take two blocks
LIMITS = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 3e-3}


def share(x, most):
    """Return decays from 1 - most to 1, so that the state before a chunk still matters after it."""
    return (1 - most * torch.rand(x.shape)).bfloat16()


def make(rule, shape, dtype):
    """Return a rule's name, arguments, gradients and results of the reference."""
    given, erases = make_case(rule, shape, dtype)
    token = torch.arange(shape[2]).expand(shape[0], -1)
    if shape == SHAPES[1]:
        given["first"] = token.remainder(11).eq(5)
    if shape == CHUNK_SHAPE and rule in FORGETFUL:
        given |= {"decay": share(given["decay"], 0.05), "first": token.eq(70).contiguous()}
    if shape == SEGMENT_SHAPE:
        given |= {"rate": (0.02 * torch.rand(shape[:3])).bfloat16()} if erases else {}
        given |= {"decay": share(given["decay"], 0.004)} if "decay" in given else {}
    gradients = cotangents_of(given)
    return rule, given, erases, gradients, reference(as_double(given), erases, [x.double() for x in gradients])


@functools.cache
def cases(kind):
    """Return what a kind of mutants is looked for in."""
    if kind == "sums":
        return [make("decay", shape, torch.float32) for shape in SUM_SHAPES]
    if kind == "segments":
        return [make(rule, SEGMENT_SHAPE, torch.bfloat16) for rule in IN_SEGMENTS]
    scans = [make(rule, shape, torch.float64) for rule in CASES for shape in SHAPES]
    chunks = [make(rule, CHUNK_SHAPE, torch.bfloat16) for rule in ("sum", "delta", *FORGETFUL)]
    chunks += [make("delta", CHUNK_SHAPE, torch.float32)]
    return [*scans, *chunks, make("gated", HALF_SHAPE, torch.bfloat16), make("sum", SEGMENTS_OF_SUM, torch.bfloat16)]


def fault_of_maps(emulator):
    """Return the fault, if any, that the checks of maps find."""
    several = (Part(2, 3, 5), Part(1, 3, 2, "sigmoid", 2.0))  # with two keys a token
    for name, norm in product(("elu", "dpfp", "favor"), ("sum", "small sums", "length")):
        for options in ({"width": 8, "query_factor": 0.5}, {"width": 5, "steps": 2, "parts": several}):
            case = make_map(name, norm, **options)
            x, gradients = sample(case.layout, torch.float64)
            truth = differentiate(case.define, x, gradients)
            for how in ({}, {"multiprocessors": 1, "reverse": 1}):
                try:
                    found = run_all(emulator, case, x, gradients, **how)
                except EmulatorError as error:
                    return str(error)
                for which, y in truth.items():
                    if not relative_error(found[which], y) < LIMITS[torch.float64]:
                        return f"{name}, {norm}: {which} is wrong"
    return ""


def fault(emulator, given_cases):
    """Return the fault, if any, that the checks of the kernels find."""
    for rule, given, erases, gradients, truth in given_cases:
        for multiprocessors in (132, 1):
            for reverse in (0, 1):
                try:
                    found = emulator.results(given, erases, gradients, multiprocessors=multiprocessors, reverse=reverse)
                except EmulatorError as error:
                    return str(error)
                for name, x in truth.items():
                    if not relative_error(found[name], x) < LIMITS[found[name].dtype]:
                        return f"{rule}: {name} is wrong"
    return ""


def fault_of_recurrent_delta(emulator):
    """Return the fault, if any, that the checks of the recurrent delta rule find."""
    for case in ((70, 5, "wzms"), (37, 17, "zms")):
        with pytest.MonkeyPatch.context() as patch:
            try:
                check_recurrent(functools.partial(use_kernel, patch, emulator), case, torch.float64)
            except (AssertionError, EmulatorError) as error:
                return str(error) or "wrong"
    return ""


@pytest.mark.parametrize("kind", ["rules", "sums", "segments"])
def test_no_mistake_no_fault(kind):
    assert fault(Emulator(build()), cases(kind)) == ""


ALONE = {
    "maps": ("-DEMULATOR_MAPS", fault_of_maps),
    "recurrent_delta": ("-DEMULATOR_RECURRENT", fault_of_recurrent_delta),
}


@pytest.mark.parametrize("how", ALONE)
def test_no_mistake_no_fault_of_what_is_built_alone(how):
    flag, find = ALONE[how]
    assert find(Emulator(build(flags=["-O0", flag]))) == ""


@pytest.mark.parametrize(
    "mutant", [mutant for mutant in mutants() if mutant.path.startswith(PATH)], ids=lambda mutant: mutant.name
)
def test_a_mutant_is_found(mutant, tmp_path):
    """Only sanitizers find reads of values that are multiplied by zero, and accesses that a GPU refuses."""
    kernels = tmp_path / PATH
    shutil.copytree(KERNELS, kernels)
    shutil.copy(KERNELS.parent / "rule.h", kernels.parent)
    insert(mutant, tmp_path)
    how, _, complaint = mutant.how.partition(": ")
    if how.startswith("watched"):
        watched = run_watched(kernels, (f"-DEMULATOR_{how.split()[1]}",), tmp_path)
        assert watched.returncode != 0 and complaint in watched.stderr
        return
    if how in ALONE:
        flag, find = ALONE[how]
        found = find(Emulator(build(kernels, flags=["-O0", flag], folder=tmp_path)))
        assert found and complaint in found
        return
    together = how in ("sums", "segments")
    part = {"sum": "SUM", "delta": "DELTA"}.get(how.split()[0], "FORGET")
    flags = ["-O1" if together else "-O0", f"-DEMULATOR_{part}"]
    looked_for = [case for case in cases(how if together else "rules") if together or case[0] in how.split()]
    found = fault(Emulator(build(kernels, flags=flags, folder=tmp_path)), looked_for)
    assert found and complaint in found
