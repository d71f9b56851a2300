"""The CUDA kernels at random sizes, in all dtypes, on GPUs with more or less shared memory and multiprocessors."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from operator_cases import CASES, as_double, cotangents_of, make_case, reference
from subjects import relative_error

PRODUCTS = 6_000_000  # of elements and tokens, at most: seconds
SIZES = st.one_of(st.integers(1, 20), st.integers(1, 140), st.sampled_from((16, 32, 64, 128, 256, 257, 300, 511, 512)))
LENGTHS = st.sampled_from((0, 1, 2, 3, 4, 5, 8, 31, 32, 33, 36, 37, 63, 64, 65, 70, 97, 130))
HEADS = st.sampled_from((1, 2, 3, 7, 20, 130, 300, 600))
GPUS = st.fixed_dictionaries(
    {
        "multiprocessors": st.sampled_from((1, 16, 132)),
        "shared_kib": st.sampled_from((99, 163, 227)),
        "reverse": st.integers(0, 1),
    }
)
LIMITS = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.slow
@pytest.mark.parametrize("rule", CASES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.tuples(SIZES, SIZES),
    length=LENGTHS,
    heads=HEADS,
    dtype=st.sampled_from(list(LIMITS)),
    state=st.booleans(),
    documents=st.sampled_from((None, 0.02, 0.2, 1.0)),
    gpus=st.tuples(GPUS, GPUS),
)
def test_random_sizes(emulator, rule, sizes, length, heads, dtype, state, documents, gpus):
    """Two GPUs give the same bits, and results are as near to float64 as the dtype allows."""
    assume(dtype != torch.float64 or sizes[0] <= 256)  # larger ones need not fit
    heads = max(1, min(heads, PRODUCTS // (max(length, 1) * sizes[0] * sizes[1])))
    inputs, erases = make_case(rule, (1, heads, length, *sizes), dtype, state=state or length == 0)
    if documents:
        inputs["first"] = torch.rand(1, length) < documents
    gradients = cotangents_of(inputs)
    found, other = (emulator.results(inputs, erases, gradients, **gpu) for gpu in gpus)
    truth = reference(as_double(inputs), erases, [x.double() for x in gradients])
    for name, x in truth.items():
        assert torch.equal(found[name], other[name]), name
        assert relative_error(found[name], x) < LIMITS[found[name].dtype], name
