"""Wrong arguments are refused in one sentence that names the rule and the argument, what it must be and what it is."""

import re
from itertools import product

import pytest
import torch
from support.pairwise import looped
from support.subjects import RULES, WITH_KERNEL, operands, sample_inputs

from fairseq_fwp import ops
from fairseq_fwp.ops.fast_weights import fast_weights
from fairseq_fwp.ops.rules import RULES as DEFINED

SHAPE = (2, 3, 4, 5, 6)
KEY, VALUE = torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4, 6)
DTYPES = (torch.float64, torch.float16, torch.int32, torch.uint8, torch.bool, torch.complex64)
every_rule = pytest.mark.parametrize("rule", RULES)


def unfit(x, forms):
    """Yield wrong values in place of x, which has as many forms, and their errors."""
    shapes = [x.unsqueeze(0), x[0], x.flatten(), *(torch.cat([x, x], axis) for axis in range(x.dim()))]
    shapes += [x.transpose(axis, axis + 1) for axis in range(x.dim() - 1)]
    shapes += [x[..., 0], x.unsqueeze(-1)] if forms == 1 else []
    yield from ((wrong, ValueError) for wrong in (*shapes, x.to("meta")))
    others = [x.to(dtype) for dtype in DTYPES if dtype != x.dtype]
    yield from ((wrong, TypeError) for wrong in (*others, x.to_sparse(), x.tolist(), 1.0))


@every_rule
def test_what_does_not_fit_is_named(rule):
    """With every backend, with gradients and without. q and v give the sizes, so another argument may not fit them."""
    function = RULES[rule].function
    gates = {gate: forms for x in DEFINED if x.name == function.__name__ for gate, forms in x.gates.items()}
    backends = ("auto", "kernel", "reference") if RULES[rule].kernel else ("auto", "reference")
    for dtype, gradients in ((torch.float32, True), (torch.bfloat16, False)):
        inputs = sample_inputs(rule, SHAPE, dtype) | {"first": torch.zeros(2, 4, dtype=torch.bool)}
        for name, x in inputs.items():
            for (wrong, error), backend in product(unfit(x, len(gates.get(name, "1"))), backends):
                named = name if name not in "qv" else r"\w+"
                sentence = rf"{function.__name__}: {named} must [^\n]*, got [^\n]*"
                if backend == "kernel" and name == "q" and getattr(wrong, "is_meta", False):
                    error, sentence = RuntimeError, r"no compiled kernel for meta: [^\n]*"
                with torch.set_grad_enabled(gradients), pytest.raises(error) as refused:
                    function(**inputs | {name: wrong}, backend=backend)
                said = str(refused.value)
                assert re.fullmatch(sentence, said), f"{name} of {getattr(wrong, 'shape', wrong)}, {backend}: {said}"


@looped("rule", RULES)
def test_one_fault_of_all_arguments(rule):
    """Numbers without a kernel are refused even with loaded kernels, which would read them as float32."""
    of_rule, inputs = RULES[rule].function, sample_inputs(rule, SHAPE, torch.float32)
    of_rule(**inputs)
    with pytest.raises(ValueError, match="auto, kernel, fla, reference, got 'fast'"):
        of_rule(**inputs, backend="fast")
    for gradients, dtype in product((True, False), (torch.uint8, torch.int64, torch.bool, torch.complex64)):
        with torch.set_grad_enabled(gradients), pytest.raises(TypeError, match=f"q must be float32, .*got {dtype}"):
            of_rule(**{name: x.to(dtype) for name, x in inputs.items()})
    elsewhere = {name: x.to("meta") for name, x in inputs.items()}
    out, state = of_rule(**elsewhere)
    assert out.shape == (2, 3, 4, 6) and state.shape == (2, 3, 5, 6)
    said = "no compiled kernel for meta: .*; use the CPU" if RULES[rule].kernel else ".*has no compiled kernel: .*"
    with pytest.raises(RuntimeError, match=f"^{said}$"):
        of_rule(**elsewhere, backend="kernel")


@looped("backend", ["auto", "reference"])
def test_a_sentence_has_the_names_of_sizes_and_each_form(backend):
    inputs = sample_inputs("gated_delta_product", SHAPE, torch.float32)
    for name, wrong, said in (
        ("q", KEY[0], "q must have shape (B, Hk, L, Dk), got (3, 4, 5)"),
        ("k", torch.zeros(2, 3, 4, 3, 5), "k must have shape (B, Hk, L, N, Dk) = (2, 3, 4, 2, 5), got (2, 3, 4, 3, 5)"),
        ("decay", KEY[0, 0], "decay must have shape (B, H, L) = (2, 3, 4) or (B, H, L, Dk) = (2, 3, 4, 5), got (4, 5)"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            ops.gated_delta_product_rule(**inputs | {name: wrong}, backend=backend)


def test_the_list_of_arguments():
    """The error says which may be left out, and counts those without a name, which `first` is not one of."""
    q, k, v, decay = (torch.ones(2, 3, 4, 5) for _ in range(4))
    state, first = torch.zeros(2, 3, 5, 5), torch.zeros(2, 4, dtype=torch.bool)
    names = "gla_rule must be q, k, v, decay and, if wanted, state, by position or by name, and first and backend only"
    for given, named, got in (
        ((q, k, v, decay, state, first), {}, "6 by position"),
        ((q, k), {"v": v, "gate": decay}, "2 by position and v, gate by name"),
        ((q, k, v, decay), {"k": k}, "4 by position and k by name"),
        ((q, k, v), {"first": first}, "3 by position"),
    ):
        with pytest.raises(TypeError, match=f"^the arguments of {names} by name, got {got}$"):
            ops.gla_rule(*given, **named)
    by_name, by_position = (ops.gla_rule(q, k, v, decay=decay, state=state), ops.gla_rule(q, k, v, decay, state))
    assert all(torch.equal(x, y) for x, y in zip(by_name, by_position, strict=True))


@looped("ends", [[0], [5], [3, 5], [3, 3], [3, 2], [True, 9]])
def test_states_after_numbers_of_tokens_that_are_not_there(ends):
    said = re.escape(f"delta_rule: the ends must be ascending numbers in [1, 4], got {[*map(int, ends)]}")
    with pytest.raises(ValueError, match=f"^{said}$"):
        ops.states_after(ops.delta_rule, ends, **sample_inputs("delta", SHAPE))


@looped("rule", WITH_KERNEL)
def test_the_kernel_itself_refuses_what_it_would_read_beyond(rule):
    """The operator is called directly, without the checks in Python."""
    operator = torch.ops.fwp.fast_weights.default
    given = operands(rule, sample_inputs(rule, SHAPE, torch.float32))
    operator(*given)
    for i, x in ((i, x) for i, x in enumerate(given) if isinstance(x, torch.Tensor)):
        shorter = x[:, :, :-1] if i in (0, 2) else x[..., :-1]  # the others are compared with q and v
        for wrong in (shorter, x.double()):
            with pytest.raises((RuntimeError, TypeError, ValueError)):
                operator(*given[:i], wrong, *given[i + 1 :])


# Of the operator in Python, and of the kernels (cuda_ext/bindings/arguments.h).
FADES = "value_decay must be None with a rate, erasing or removal"


REFUSED = [
    ({"erases": True, "removal_key": KEY, "removal": KEY}, "erases must be False with removal_key and removal"),
    ({"removal_key": KEY}, "given together"),
    ({"value_decay": VALUE, "rate": VALUE[..., 0]}, FADES),
    ({"value_decay": VALUE, "erases": True}, FADES),
    ({"value_decay": VALUE, "removal_key": KEY, "removal": KEY}, FADES),
]


@looped("given, message", REFUSED)
def test_the_operator_refuses_what_no_kernel_computes(given, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        fast_weights(KEY, KEY, VALUE, **given)
