"""Every operator on unusual inputs: any sizes, strides, dtypes and values.

Shapes: B batch, H heads, L tokens, Dk size of a key, Dv size of a value.
"""

import functools

import pytest
import torch
from fuzz_values import arrange, dtypes, equal, layouts, seeds, special, values
from hypothesis import assume, given
from hypothesis import strategies as st
from subjects import PER_KEY, RULES, check_errors, cotangents, fastest_backend, relative_error, results, sample_inputs

every_rule = pytest.mark.parametrize("rule", RULES)
# Below, at and beyond vectors, blocks of columns, groups of tokens, chunks and the sizes of quadratic forms.
SIZES = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 130)
LENGTHS = (0, 1, 2, 3, 4, 5, 31, 32, 33, 63, 65, 70)
shapes = st.tuples(st.integers(0, 3), st.integers(0, 3), *(st.sampled_from(sizes) for sizes in (LENGTHS, SIZES, SIZES)))
full_shapes = shapes.map(lambda shape: tuple(max(1, n) for n in shape))


def draw_inputs(rule, shape, dtype, state, seed):
    inputs = sample_inputs(rule, shape, dtype, state=state, seed=seed)
    return inputs, cotangents(inputs, seed=seed + 1)


def fastest(rule):
    return functools.partial(RULES[rule].function, backend=fastest_backend(rule))


@every_rule
@given(
    shape=shapes,
    dtype=dtypes,
    state=st.booleans(),
    seed=seeds,
    strides=st.lists(layouts, min_size=7, max_size=7),
    sprinkled=st.sampled_from(["nothing", "zero", "denormal"]),
    threads=st.integers(1, 3),
)
def test_what_the_loop_gives(rule, shape, dtype, state, seed, strides, sprinkled, threads):
    """With and without gradients, inputs are unchanged, and errors are those of the reference in that precision."""
    torch.manual_seed(seed)
    if rule == "fwm" and sprinkled == "denormal":
        sprinkled = "zero"  # a very small write gives a norm of one, where fwm's gradient jumps

    def draw(n):
        inputs, gradients = draw_inputs(rule, shape, dtype, state or shape[2] == 0, seed + 2 * n)
        if sprinkled != "nothing":
            for x in filter(lambda x: x is not None, inputs.values()):
                x.masked_fill_(torch.rand(x.shape) < 0.3, special(sprinkled, x.dtype))
        names = [name for name, x in inputs.items() if x is not None]
        strange = inputs | {name: arrange(inputs[name], layout) for name, layout in zip(names, strides, strict=False)}
        before = {name: strange[name].clone() for name in names}
        torch.set_num_threads(threads)
        found = results(fastest(rule), strange, tuple(arrange(x, strides[-1]) for x in gradients))
        with torch.no_grad():
            assert torch.equal(fastest(rule)(**strange)[0], found["out"])
        torch.set_num_threads(1)
        assert all(torch.equal(strange[name], x) for name, x in before.items())
        exact = {name: None if x is None else x.double() for name, x in inputs.items()}
        truth = results(RULES[rule].reference, exact, tuple(x.double() for x in gradients))
        return truth, results(RULES[rule].reference, inputs, gradients), found

    if dtype == torch.float64:  # the reference is the truth
        truth, _, found = draw(0)
        for name, x in truth.items():
            assert relative_error(found[name], x) <= 64 * torch.finfo(dtype).eps, name
    else:
        check_errors(f"{rule}, {shape}, {dtype}", draw, {})


@every_rule
@given(shape=full_shapes, dtype=dtypes, state=st.booleans(), seed=seeds, value=values, data=st.data())
def test_a_value_stays_where_the_rule_lets_it_go(rule, shape, dtype, state, seed, value, data):
    """Any values in one vector of one token: other sequences and heads do not change by a bit.

    Nor do the outputs before that token, nor the gradients of tokens after it from these outputs.
    """
    inputs, (d_out, d_state) = draw_inputs(rule, shape, dtype, state, seed)
    given = {name: x for name, x in inputs.items() if x is not None} | {"d_out": d_out, "d_state": d_state}
    where = data.draw(st.sampled_from(sorted(given)))
    batch, head, token = (data.draw(st.integers(0, n - 1)) for n in shape[:3])
    clean = results(fastest(rule), inputs, (d_out, d_state))
    at = (batch, head) if "state" in where else (batch, head, token)
    given[where][at] = special(value, given[where].dtype)
    spoilt = results(fastest(rule), inputs, (d_out, d_state))
    healthy = torch.ones(shape[:2], dtype=torch.bool)
    healthy[batch, head] = False
    for name, x in clean.items():
        assert equal(spoilt[name][healthy], x[healthy]), name
    if where in ("d_out", "d_state"):
        assert all(torch.equal(spoilt[name], clean[name]) for name in ("out", "state"))
    elif where != "state":
        assert equal(spoilt["out"][batch, head, :token], clean["out"][batch, head, :token])
    if where == "d_out":
        after = (batch, head, slice(token + 1, None))
        for name in inputs.keys() - {"state"}:
            assert equal(spoilt[f"d_{name}"][after], clean[f"d_{name}"][after]), name


@every_rule
@given(shape=full_shapes, dtype=dtypes, gradients=st.booleans(), reference=st.booleans(), data=st.data())
def test_what_does_not_fit_is_refused_in_one_sentence(rule, shape, dtype, gradients, reference, data):
    inputs = sample_inputs(rule, shape, dtype)
    name = data.draw(st.sampled_from(list(inputs)))
    inputs[name] = data.draw(st.sampled_from(list(unfit(inputs[name]))))
    x = inputs[name]  # which may be the other of two forms
    assume(name != "decay" or not isinstance(x, torch.Tensor) or x.shape not in (shape[:3], shape[:4]))
    function = functools.partial(RULES[rule].function, backend="reference") if reference else fastest(rule)
    # Other inputs must be on q's device, for which there are no kernels.
    sentence = (
        rf"^({RULES[rule].function.__name__}: [^\n]* must [^\n]*, got [^\n]*|no compiled kernel for meta: [^\n]*)$"
    )
    with (
        torch.set_grad_enabled(gradients),
        pytest.raises((ValueError, TypeError, RuntimeError), match=sentence),
    ):
        function(**inputs)


def unfit(x):
    """Wrong tensors, and other objects, replace a correct tensor."""
    yield x.unsqueeze(0)
    yield x[0]
    yield x.flatten()
    for dimension in range(x.dim()):
        yield torch.cat([x, x], dimension)
    yield x.to(torch.float64 if x.dtype != torch.float64 else torch.float32)
    yield x.to(torch.complex64)
    yield x.to(torch.int32)
    yield x.bool()
    yield x.to("meta")
    yield x.to_sparse()
    yield x.tolist()
    yield 1.0


@every_rule
@pytest.mark.parametrize("size", [2**40, 2**62])
def test_states_beyond_any_memory_are_refused(rule, size):
    """The keys are views of one number, which need no memory."""
    inputs = sample_inputs(rule, (1, 1, 1, 1, 4), torch.float32, state=False)
    sizes = {"q": PER_KEY, "k": RULES[rule].key, **RULES[rule].gates}
    by_key = [name for name, of in sizes.items() if of[-1] == "Dk"]
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"allocate|overflow"):
        inputs |= {name: inputs[name].expand(*inputs[name].shape[:-1], size) for name in by_key}
        fastest(rule)(**inputs)
