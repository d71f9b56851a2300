"""Every rule as a case of the operator: its arguments, and the results of the reference."""

from collections.abc import Sequence

import torch
from emulator import NAMES, Given
from support.subjects import COMBINATIONS, RULES, cotangents, operands, sample_inputs
from torch import Tensor

from fairseq_fwp.ops.fast_weights import Inputs, reference_of

CASES = [name for name, rule in RULES.items() if rule.kernel and "delta_product" not in name]
# A rule for each form of the kernels: gated writes as gla does, and the others are removals, as dplr_by_key is.
ONE_OF_A_FORM = ("sum", "delta", "gla", "gla_by_key", "gated_delta", "gated_delta_by_key", "decay", "dplr_by_key")


def make_case(rule: str, shape: Sequence[int], dtype: torch.dtype, **options: object) -> tuple[Given, bool]:
    """Return the given arguments by name, and whether the rule erases."""
    *tensors, erases = operands(rule, sample_inputs(rule, shape, dtype, **options))
    return {name: x for name, x in zip(NAMES, tensors, strict=True) if x is not None}, erases


def make_combination(name: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[Given, bool]:
    """Return the same for cases that no rule here needs."""
    given = sample_inputs(name, shape, dtype)
    return {name: given[name] for name in NAMES if name in given}, COMBINATIONS[name].function.keywords["erases"]


def as_double(given: Given) -> Given:
    return {name: x if name == "first" else x.double() for name, x in given.items()}


def cotangents_of(given: Given, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return random gradients of out and of the new state."""
    return cotangents(given, seed)


def reference(given: Given, erases: bool, gradients: Sequence[Tensor]) -> Given:
    """Return outputs and all gradients, by name."""
    leaves = {name: x if name == "first" else x.detach().requires_grad_() for name, x in given.items()}
    inputs = Inputs(**leaves, erases=erases)
    out, state = reference_of(inputs)(*inputs.tokens, state=inputs.state, first=inputs.first)
    of = {name: x for name, x in leaves.items() if name != "first"}
    found = torch.autograd.grad((out, state), list(of.values()), gradients, materialize_grads=True)
    outputs = {"out": out.detach(), "state": state.detach()}
    return outputs | {f"d_{name}": x for name, x in zip(of, found, strict=True)}
