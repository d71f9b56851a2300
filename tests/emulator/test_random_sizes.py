"""The CUDA kernels at random sizes, in all dtypes, on GPUs with more or less shared memory and multiprocessors."""

import random

import pytest
import torch
from operator_cases import CASES, as_double, cotangents_of, make_case, reference
from support.subjects import relative_error

PRODUCTS = 6_000_000  # of elements and tokens, at most: a second
LENGTHS = (0, 1, 2, 3, 4, 5, 8, 31, 32, 33, 36, 37, 63, 64, 65, 70, 97, 130)
HEADS = (1, 2, 3, 7, 20, 130, 300, 600)
LIMITS = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def draw_size(chance, greatest=512):
    drawn = (chance.randint(1, 20), chance.randint(1, 140), chance.choice((16, 32, 64, 128, 256, 257, 300, 511, 512)))
    return min(chance.choice(drawn), greatest)


def draw_gpu(chance):
    return {
        "multiprocessors": chance.choice((1, 16, 132)),
        "shared_kib": chance.choice((99, 163, 227)),
        "reverse": chance.randint(0, 1),
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_sizes_give_the_same_bits_and_small_errors(emulator, seed):
    """Two GPUs give the same bits, and results are as near to float64 as the dtype allows."""
    chance = random.Random(seed)
    for _ in range(60):
        rule, dtype = chance.choice(list(CASES)), chance.choice(list(LIMITS))
        # Larger states of float64 need not fit.
        sizes = draw_size(chance, 256 if dtype == torch.float64 else 512), draw_size(chance)
        length = chance.choice(LENGTHS)
        most = PRODUCTS // (max(length, 1) * sizes[0] * sizes[1])
        shape = (1, max(1, min(chance.choice(HEADS), most)), length, *sizes)
        torch.manual_seed(chance.randrange(2**31))
        given, erases = make_case(rule, shape, dtype, state=length == 0 or chance.random() < 0.6)
        if chance.random() < 0.5:
            given["first"] = torch.rand(1, length) < chance.choice((0.02, 0.2, 1.0))
        gradients, gpus = cotangents_of(given), (draw_gpu(chance), draw_gpu(chance))
        if dtype == torch.bfloat16:  # the shared memory decides whether a pass runs in chunks
            gpus[1]["shared_kib"] = gpus[0]["shared_kib"]
        case = f"{rule}, {shape}, {dtype}, {gpus}"
        found, other = (emulator.results(given, erases, gradients, **gpu) for gpu in gpus)
        truth = reference(as_double(given), erases, [x.double() for x in gradients])
        for name, x in truth.items():
            assert torch.equal(found[name], other[name]), f"{name}: {case}"
            # In chunks, the gradients of gates in float32 are as exact as bfloat16.
            in_chunks = rule == "gated" and dtype == torch.bfloat16 and name == "d_rate"
            limit = LIMITS[dtype if in_chunks else found[name].dtype]
            assert relative_error(found[name], x) < limit, f"{name}: {case}"
