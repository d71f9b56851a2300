"""Check that a rule, including one of your own, satisfies the laws of all update rules."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from fairseq_fwp.ops.arguments import Results, Shape
from fairseq_fwp.ops.rule import Rule

SIZES = {"B": 2, "H": 2, "Hk": 2, "L": 9, "Dk": 4, "Dv": 3, "N": 2}
CUT = 4


def check_rule(rule: Rule, seed: int = 0) -> None:
    """Raise AssertionError, with the broken law in words, unless the rule satisfies the laws of all rules.

    Inputs are random float64 numbers, with gates of each allowed shape in (0, 1). The laws:

    - Outputs and states have the right shapes and dtypes, and arguments are not changed.
    - A token reads its own and earlier writes, never later ones.
    - A sequence can be split anywhere if its state is carried.
    - Documents in one sequence, sequences and heads are independent of each other.
    - Every gate has an effect, and gradients equal finite differences.
    - As a case of ``fast_weights`` it gives the same results as the step.

    The rule's use in a layer, such as ``at_padding`` of its gates, is not checked.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"the rule must be an ops.Rule, got {type(rule).__name__}")
    for shapes in itertools.product(*rule.gates.values()):
        gates = dict(zip(rule.gates, shapes, strict=True))
        inputs = sample_inputs(rule, seed, gates=gates)
        try:
            _check_results(rule, inputs)
            _check_causality(rule, inputs, sample_inputs(rule, seed + 1, gates=gates))
            _check_splits(rule, inputs)
            _check_independence(rule, inputs)
            _check_gradients(rule, inputs)
        except AssertionError as error:
            raise AssertionError(f"{rule.name}: {error}") from None
        except RuntimeError as error:
            takes = "memory (B, H, Dk, Dv), k (B, H, Dk), v (B, H, Dv) and its gates"
            message = f"the step must take {takes}, and must not change them in place, got the error: {error}"
            raise AssertionError(f"{rule.name}: {message}") from error


def sample_inputs(
    rule: Rule, seed: int, dtype: torch.dtype = torch.float64, gates: dict[str, Shape] | None = None
) -> dict[str, Tensor]:
    """Return q, k, v, gates and a state for the sizes above: normal numbers; keys and gates in (0, 1).

    gates: their shapes, among those that the rule allows; None: the first allowed ones.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, Any] = {"q": ("B", "H", "L", "Dk"), "k": rule.key, "v": rule.value}
    shapes |= gates or {name: allowed[0] for name, allowed in rule.gates.items()}
    shapes["state"] = ("B", "H", "Dk", "Dv")
    inputs = {}
    for name, shape in shapes.items():
        draw = torch.randn if name in ("q", "v", "state") else torch.rand
        inputs[name] = draw([SIZES[size] for size in shape], generator=generator, dtype=torch.float64).to(dtype)
    inputs["k"] /= SIZES["Dk"] / 2
    return inputs


def _part(inputs: dict[str, Any], tokens: slice, state: Tensor | None) -> dict[str, Any]:
    return {name: x[:, :, tokens] for name, x in inputs.items() if name != "state"} | {"state": state}


def _expect(condition: object, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds, also with `python -O`."""
    if not condition:
        raise AssertionError(message)


def _check_results(rule: Rule, inputs: dict[str, Any]) -> None:
    copies = {name: x.clone() for name, x in inputs.items()}
    out, state = rule(**inputs)
    shape = (*inputs["q"].shape[:3], SIZES["Dv"])
    _expect(out.shape == shape and out.dtype == torch.float64, f"out must be float64 of {shape}")
    _expect(state.shape == inputs["state"].shape, f"the state must be {tuple(inputs['state'].shape)}")
    _expect(out.isfinite().all() and state.isfinite().all(), "out and state must be finite")
    _expect(all(torch.equal(x, copies[key]) for key, x in inputs.items()), "the rule must not change its arguments")
    half = {key: x.float() if key == "state" else x.bfloat16() for key, x in inputs.items()}
    out, state = rule(**half)
    _expect(out.dtype == torch.bfloat16, "out must have the dtype of v")
    _expect(state.dtype == torch.float32, "the state of bfloat16 inputs must be float32")
    out, state = rule(**_part(inputs, slice(0, 0), inputs["state"]))
    _expect(torch.equal(state, inputs["state"]), "the state after no token must be the one before it")


def _check_causality(rule: Rule, inputs: dict[str, Any], others: dict[str, Any]) -> None:
    changed: dict[str, Any] = {
        name: x if name == "state" else torch.cat([x[:, :, :CUT], others[name][:, :, CUT:]], 2)
        for name, x in inputs.items()
    }
    out, changed_out = rule(**inputs)[0], rule(**changed)[0]
    _expect(torch.equal(out[:, :, :CUT], changed_out[:, :, :CUT]), "a token must not read later tokens")
    changed = inputs | {"v": torch.cat([inputs["v"][:, :, :CUT], others["v"][:, :, CUT:]], 2)}
    changed_out = rule(**changed)[0]
    _expect(not torch.equal(out[:, :, CUT], changed_out[:, :, CUT]), "a token must read its own write")


def _check_splits(rule: Rule, inputs: dict[str, Any]) -> None:
    def split(carries: bool) -> Results:
        before, carried = rule(**_part(inputs, slice(0, CUT), inputs["state"]))
        after, final = rule(**_part(inputs, slice(CUT, None), carried if carries else None))
        return torch.cat([before, after], 2), final

    same = "a sequence split in two must give the same results as the whole one"
    assert_close(split(carries=True), rule(**inputs), msg=same)
    first = torch.zeros(SIZES["B"], SIZES["L"], dtype=torch.bool)
    first[:, CUT] = True
    assert_close(split(carries=False), rule(**inputs, first=first), msg="a document must begin with an empty memory")


def _check_independence(rule: Rule, inputs: dict[str, Any]) -> None:
    results = rule(**inputs)
    for axis, parts in enumerate(("sequences", "heads")):
        for index in range(SIZES["BH"[axis]]):
            one = {name: x.narrow(axis, index, 1) for name, x in inputs.items()}
            expected = tuple(x.narrow(axis, index, 1) for x in results)
            assert_close(rule(**one), expected, msg=f"{parts} must be independent of each other")
    same = "the case of fast_weights must give the same results as the step"
    assert_close(results, rule(**inputs, backend="reference"), msg=same)


def _check_gradients(rule: Rule, inputs: dict[str, Any]) -> None:
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}

    def function(*tensors: Tensor) -> Results:
        named: dict[str, Any] = dict(zip(leaves, tensors, strict=True))
        return rule(**named)

    gradients = torch.autograd.grad(function(*leaves.values())[0].square().sum(), list(leaves.values()))
    for gate, gradient in zip(leaves, gradients, strict=True):
        _expect(gradient.any(), f"out must depend on {gate}")
    right = torch.autograd.gradcheck(function, tuple(leaves.values()), raise_exception=False)
    _expect(right, "gradients must equal finite differences")
