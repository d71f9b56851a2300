"""Wrong arguments are refused with one sentence that names what was expected and what came."""

import pytest
import torch
from rule_cases import RULES, WITH_KERNEL, sample_inputs

SHAPE = (2, 3, 4, 5, 6)
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
@pytest.mark.parametrize("backend", ["auto", "kernel", "reference"])
@pytest.mark.parametrize("gradients", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("case", WRONG)
def test_message(rule, backend, gradients, case):
    if backend == "kernel" and not RULES[rule].kernel:
        pytest.skip(f"the {rule} rule has no kernel, and says so whatever it is given")
    value, error, message = WRONG[case]
    inputs = sample_inputs(rule, SHAPE, torch.float32)
    name = case.split()[0]
    if name not in inputs:
        pytest.skip(f"the {rule} rule has no {name}")
    with torch.set_grad_enabled(gradients), pytest.raises(error, match=f"^{rule}_rule: {message}"):
        RULES[rule].function(**{**inputs, name: value}, backend=backend)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gradients", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.complex64], ids=str)
def test_other_numbers_are_refused(rule, gradients, dtype):
    """Also once the kernels are there, which would read them as float32."""
    inputs = sample_inputs(rule, SHAPE, torch.float32)
    RULES[rule].function(**inputs)
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    with torch.set_grad_enabled(gradients), pytest.raises(TypeError, match=f"q must be float32, .*got {dtype}"):
        RULES[rule].function(**inputs)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gradients", [True, False], ids=["grad", "no_grad"])
def test_unknown_backend(rule, gradients):
    with torch.set_grad_enabled(gradients), pytest.raises(ValueError, match="auto, kernel, reference, got 'fast'"):
        RULES[rule].function(**sample_inputs(rule, SHAPE, torch.float32), backend="fast")


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
    """Called as a bare operator, past the checks in Python."""
    operator = getattr(torch.ops.fwp, RULES[rule].operator).default
    inputs = sample_inputs(rule, SHAPE, torch.float32)
    operator(*inputs.values())
    for name, x in inputs.items():
        wrong = {**inputs, name: x[..., :-1]}
        if name in ("q", "v"):  # the others are measured against these
            wrong[name] = x[:, :, :-1]
        with pytest.raises((RuntimeError, ValueError)):
            operator(*wrong.values())
        with pytest.raises((RuntimeError, TypeError)):
            operator(*{**inputs, name: x.double()}.values())
