"""Wrong arguments are refused with one sentence: the expected argument, and the given one."""

from itertools import product

import pytest
import torch
from pairwise import looped
from subjects import PER_KEY, RULES, WITH_KERNEL, operands, sample_inputs

from fairseq_fwp import ops
from fairseq_fwp.ops.fast_weights import fast_weights

SHAPE = (2, 3, 4, 5, 6)
KEY, VALUE = torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4, 6)
WRONG = {
    "q": (torch.zeros(2, 3, 4), ValueError, r"q must have shape \(B, H, L, Dk\), got \(2, 3, 4\)"),
    "k": (torch.zeros(2, 3, 4, 6), ValueError, r"k must have .*\(2, 3, 4, 5\), got \(2, 3, 4, 6\)"),
    "v": (torch.zeros(2, 3, 5, 6), ValueError, r"v must have .*\(2, 3, 4, 6\), got \(2, 3, 5, 6\)"),
    "v of another dtype": (torch.zeros(2, 3, 4, 6).bfloat16(), TypeError, "v must have .*float32, got .*bfloat16"),
    "k elsewhere": (torch.zeros(2, 3, 4, 5, device="meta"), ValueError, "k must be on .*cpu, got meta"),
    "v of integers": (torch.zeros(2, 3, 4, 6).long(), TypeError, "v must have .*float32, got .*int64"),
    "q none": (None, TypeError, "q must be a tensor, got NoneType"),
    "beta": (torch.zeros(2, 3, 4, 1), ValueError, r"beta must have .*\(2, 3, 4\), got \(2, 3, 4, 1\)"),
    "beta of another dtype": (torch.zeros(2, 3, 4).double(), TypeError, "beta must have .*float32, got .*float64"),
    "gate": (torch.zeros(2, 3, 5), ValueError, r"gate must have .*\(2, 3, 4\), got \(2, 3, 5\)"),
    "key_decay": (torch.zeros(2, 3, 4, 6), ValueError, r"key_decay .*\(2, 3, 4, 5\), got \(2, 3, 4, 6\)"),
    "key_decay of another dtype": (torch.zeros(2, 3, 4, 5).half(), TypeError, "key_decay .*float32, got .*float16"),
    "value_decay": (torch.zeros(2, 3, 4, 5), ValueError, r"value_decay .*\(2, 3, 4, 6\), got \(2, 3, 4, 5\)"),
    "value_decay elsewhere": (torch.zeros(2, 3, 4, 6, device="meta"), ValueError, "value_decay .*cpu, got meta"),
    "value_decay as a number": (0.9, TypeError, "value_decay must be a tensor, got float"),
    "state": (torch.zeros(2, 3, 6, 5), ValueError, r"state must have .*\(2, 3, 5, 6\), got \(2, 3, 6, 5\)"),
    "state of another dtype": (torch.zeros(2, 3, 5, 6).half(), TypeError, "state must have .*float32, got .*float16"),
    "state as a number": (1.0, TypeError, "state must be a tensor or None, got float"),
}


@pytest.mark.parametrize("rule", RULES)
def test_message(rule):
    """Every argument of every rule is checked, with every backend, with gradients and without."""
    of_rule, name = RULES[rule], RULES[rule].function.__name__
    backends = ("auto", "kernel", "reference") if of_rule.kernel else ("auto", "reference")
    for case, (value, error, message) in WRONG.items():
        argument = case.split()[0]
        of_all = of_rule.key == PER_KEY or argument in ("q", "state")  # the sizes in WRONG
        if argument not in ("q", "k", "v", "state", *of_rule.gates) or not of_all:
            continue
        inputs = sample_inputs(rule, SHAPE, torch.float32) | {argument: value}
        for backend, gradients in product(backends, (True, False)):
            with torch.set_grad_enabled(gradients), pytest.raises(error, match=f"^{name}: {message}"):
                of_rule.function(**inputs, backend=backend)


def test_the_list_of_arguments():
    """The error says which may be left out, and counts those without a name, which `first` is not one of."""
    q, k, v, decay = (torch.ones(2, 3, 4, 5) for _ in range(4))
    state, first = torch.zeros(2, 3, 5, 5), torch.zeros(2, 4, dtype=torch.bool)
    names = (
        "the arguments of gla_rule must be q, k, v, decay and, if wanted, state, by position or by name, and first and "
        "backend only by name, got "
    )
    for given, named, got in (
        ((q, k, v, decay, state, first), {}, "6 by position"),
        ((q, k), {"v": v, "gate": decay}, "2 by position and v, gate by name"),
        ((q, k, v), {"first": first}, "3 by position"),
    ):
        with pytest.raises(TypeError, match=f"^{names}{got}$"):
            ops.gla_rule(*given, **named)
    assert (
        ops.gla_rule(q, k, v, decay=decay, first=first)[0].shape
        == ops.gla_rule(q, k, v, decay, state, first=first)[0].shape
    )


@looped("backend", ["auto", "reference"])
def test_message_for_several_steps_and_either_decay(backend):
    """The error names sizes, and both allowed shapes of a decay."""
    inputs = sample_inputs("delta_product_with_decay", SHAPE, torch.float32)
    with pytest.raises(ValueError, match=r"k must have shape \(B, H, L, N, Dk\) = \(2, 3, 4, 2, 5\), got"):
        RULES["delta_product"].function(**inputs | {"k": torch.zeros(2, 3, 4, 3, 5)}, backend=backend)
    expected = r"decay must have shape \(B, H, L\) = \(2, 3, 4\) or \(B, H, L, Dk\) = \(2, 3, 4, 5\), got \(2, 3\)"
    with pytest.raises(ValueError, match=expected):
        RULES["delta_product"].function(**inputs | {"decay": torch.zeros(2, 3)}, backend=backend)


@pytest.mark.parametrize("rule", RULES)
def test_first_tokens_are_a_mask(rule):
    said = r"first must (have|be) .*(bool|\(2, 4\)|tensor or None), got"
    for first in (torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2, 4), 1):
        with pytest.raises((TypeError, ValueError), match=said):
            RULES[rule].function(**sample_inputs(rule, SHAPE, torch.float32), first=first)


@pytest.mark.parametrize("rule", RULES)
@looped("gradients", [True, False], ids=["grad", "no_grad"])
def test_other_numbers_and_backends_are_refused(rule, gradients):
    """They are refused even with loaded kernels, which would read them as float32."""
    inputs = sample_inputs(rule, SHAPE, torch.float32)
    RULES[rule].function(**inputs)
    with torch.set_grad_enabled(gradients):
        for dtype in (torch.uint8, torch.int64, torch.bool, torch.complex64):
            with pytest.raises(TypeError, match=f"q must be float32, .*got {dtype}"):
                RULES[rule].function(**{name: x.to(dtype) for name, x in inputs.items()})
        with pytest.raises(ValueError, match="auto, kernel, fla, reference, got 'fast'"):
            RULES[rule].function(**inputs, backend="fast")


@pytest.mark.parametrize("rule", sorted(set(RULES) - set(WITH_KERNEL)))
def test_a_rule_without_a_kernel(rule):
    with pytest.raises(RuntimeError, match=f"^{rule}_rule has no compiled kernel: use backend='auto'[^.]*$"):
        RULES[rule].function(**sample_inputs(rule, SHAPE, torch.float32), backend="kernel")


@pytest.mark.parametrize("rule", WITH_KERNEL)
def test_kernel_for_a_device_without_one(rule):
    inputs = {name: x.to("meta") for name, x in sample_inputs(rule, SHAPE, torch.float32).items()}
    with pytest.raises(RuntimeError, match=r"^no compiled kernel for meta: .*; use the CPU$"):
        RULES[rule].function(**inputs, backend="kernel")
    out, state = RULES[rule].function(**inputs)
    assert out.shape == (2, 3, 4, 6) and state.shape == (2, 3, 5, 6)


@pytest.mark.parametrize("rule", WITH_KERNEL)
def test_the_kernel_itself_refuses_what_it_would_read_beyond(rule):
    """The operator is called directly, without the checks in Python."""
    operator = torch.ops.fwp.fast_weights.default
    given = operands(rule, sample_inputs(rule, SHAPE, torch.float32))
    operator(*given)
    for i, x in enumerate(given):
        if not isinstance(x, torch.Tensor):
            continue
        shorter = x[:, :, :-1] if i in (0, 2) else x[..., :-1]  # the others are compared with q and v
        for wrong in (shorter, x.double()):
            with pytest.raises((RuntimeError, TypeError, ValueError)):
                operator(*given[:i], wrong, *given[i + 1 :])


# Of the operator in Python, and of the kernels (cuda_ext/bindings/arguments.h).
BOTH = "erases must be False with removal_key and removal_rate, got True"
FADES = "value_decay must be None with a rate, erasing or removal"


@looped(
    ("given", "message"),
    [
        ({"erases": True, "removal_key": KEY, "removal_rate": KEY}, BOTH),
        ({"removal_key": KEY}, "given together"),
        ({"value_decay": VALUE, "rate": torch.ones(2, 3, 4)}, FADES),
        ({"value_decay": VALUE, "erases": True}, FADES),
        ({"value_decay": VALUE, "removal_key": KEY, "removal_rate": KEY}, FADES),
    ],
)
def test_the_operator_refuses_what_no_kernel_computes(given, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        fast_weights(KEY, KEY, VALUE, **given)
