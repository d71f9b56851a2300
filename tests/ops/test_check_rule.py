"""The public check of the laws: correct rules pass, and for others it names the broken law."""

import copy
import inspect
import pickle
import pydoc
from functools import partial

import pytest
import torch
from support.pairwise import looped

from fairseq_fwp import ops
from fairseq_fwp.ops.fast_weights import fast_weights
from fairseq_fwp.testing import check_rule, sample_inputs

KEEP = {"keep": (ops.PER_TOKEN,)}


def leaky(memory, k, v, keep):
    return keep.unsqueeze(-1) * memory + ops.outer(k, v)


def case(q, k, v, keep, decay=lambda keep: keep, **rest):
    return fast_weights(q, k, v, decay=decay(keep), **rest)


def test_a_rule_of_ones_own_passes():
    check_rule(ops.Rule("leaky_rule", leaky, KEEP))
    check_rule(ops.Rule("leaky_rule_with_kernel", leaky, KEEP, {"decay": "keep"}))


def remembers_elsewhere(memory, k, v, keep, seen=[]):  # noqa: B006 - the mistake under test
    seen.append(v.detach().sum())
    return leaky(memory, k, v, keep) + sum(seen)


def mixes_by_key(memory, k, v, keep):
    kept = leaky(memory, k, v, keep)
    return kept if keep.shape[-1] == 1 else kept.mean(0, keepdim=True).expand_as(memory)


TAKES = r"the step must take memory \(B, H, Dk, Dv\), .* in place, got"
SAME = "must give the same results as the step"
# Mistakes in a step, or in the case of fast_weights, and the law that each breaks.
BROKEN = {
    "writes nothing": ((lambda m, k, v, keep: keep.unsqueeze(-1) * m,), "own write"),
    "remembers elsewhere": ((remembers_elsewhere,), "must"),
    "a wrong shape": ((lambda m, k, v, keep: keep * m + ops.outer(v, k),), TAKES),
    "in place": ((lambda m, k, v, keep: m.mul_(keep.unsqueeze(-1)).add_(ops.outer(k, v)),), TAKES),
    "no decay": ((leaky, KEEP, partial(case, decay=lambda keep: None)), SAME),
    "another decay": ((leaky, KEEP, partial(case, decay=torch.square)), SAME),
    "mixes": ((lambda m, k, v, keep: leaky(m, k, v, keep).mean(0, keepdim=True).expand_as(m),), "sequences"),
    "mixes heads": ((lambda m, k, v, keep: leaky(m, k, v, keep).mean(1, keepdim=True).expand_as(m),), "heads"),
    "first row": ((lambda m, k, v, keep: leaky(m, k, v[:1], keep),), "sequences"),
    "first head": ((lambda m, k, v, keep: leaky(m, k, v[:, :1], keep),), "heads"),
    "unused": ((lambda m, k, v, keep: m + ops.outer(k, v) + 0 * keep.unsqueeze(-1),), "depend on keep"),
    "mixes by key": ((mixes_by_key, {"keep": (ops.PER_TOKEN, ops.PER_KEY)}), "sequences must be independent"),
}  # fmt: skip


@looped("name", BROKEN)
def test_what_breaks_a_law_is_told_which(name):
    (step, *more), law = BROKEN[name]
    rule = ops.Rule(name.replace(" ", "_"), step, *(more or [KEEP]))
    with pytest.raises(AssertionError, match=f"{rule.name}.*{law}"):
        check_rule(rule)


def test_a_step_returns_a_memory():
    for change, got in (
        (lambda memory: memory[..., :1], r"\(2, 2, 4, 1\)"),
        (lambda memory: memory.mT, r"\(2, 2, 3, 4\)"),
        (lambda memory: memory.float(), "float32"),
        (lambda memory: None, "NoneType"),
    ):
        rule = ops.Rule("wrong_step", lambda *given, change=change: change(leaky(*given)), KEEP)
        with pytest.raises(TypeError, match=f"the step must return the memory, .*got .*{got}"):
            check_rule(rule)


def test_a_rule_says_what_is_wrong_with_its_form():
    shapes, other = "shapes of keep must be a tuple such as", ("B", "H", "L", "X")
    unused = "the name of a gate must be an unused identifier, got "
    for name, gates, message in (
        ("leaky-rule", KEEP, "must be an identifier such as my_rule, got 'leaky-rule'"),
        *(("leaky", {"keep": wrong}, shapes) for wrong in (ops.PER_TOKEN, (), (other,), (ops.PER_TOKEN, other))),
        ("leaky", ["keep"], "gates must be a mapping of names to shapes"),
        *(("leaky", {taken: (ops.PER_KEY,)}, unused + repr(taken)) for taken in ("q", "state")),
    ):
        with pytest.raises(ValueError, match=message):
            ops.Rule(name, leaky, gates)
    for step in (None, 3, "leaky"):
        with pytest.raises(ValueError, match="leaky: step must be a function of the memory and a token, got "):
            ops.Rule("leaky", step, KEEP)
    for term, gate in (("fade", "keep"), ("decay", "kept"), ("value_decay", "keep")):
        with pytest.raises(ValueError, match=f"as_fast_weights must give gates .*; got '{term}': '{gate}'"):
            ops.Rule("leaky", leaky, KEEP, {term: gate})
    with pytest.raises(ValueError, match="leaky: as_fast_weights must be a function or the gate of each term, got 3"):
        ops.Rule("leaky", leaky, KEEP, 3)
    fades = {"z": (ops.PER_VALUE,), "b": (ops.PER_TOKEN,)}
    with pytest.raises(ValueError, match=r"^leaky: as_fast_weights: value_decay must be None with a rate"):
        ops.Rule("leaky", leaky, fades, {"value_decay": "z", "rate": "b"})
    with pytest.raises(ValueError, match="must be an identifier such as my_rule, got None"):
        ops.Rule(None, leaky, KEEP)


def test_rules_of_one_name_stay_what_they_are():
    one = ops.Rule("same", leaky, KEEP)
    inputs = sample_inputs(one, 0)
    before = one(**inputs)[0]
    other = ops.Rule("same", lambda m, k, v, keep: leaky(m, k, 2 * v, keep), KEEP)
    assert torch.equal(one(**inputs)[0], before) and not torch.equal(other(**inputs)[0], before)
    for taken in ("fast_weights", "fast_weights_backward"):  # operators of the package
        assert torch.equal(ops.Rule(taken, leaky, KEEP)(**inputs)[0], before)
    check_rule(ops.delta_rule)


def test_an_argument_is_given_once_and_a_rule_is_a_rule():
    rule = ops.Rule("leaky", leaky, KEEP)
    inputs = sample_inputs(rule, 0)
    with pytest.raises(TypeError, match="got 5 by position and keep by name"):
        rule(*inputs.values(), keep=inputs["keep"])
    with pytest.raises(TypeError, match=r"must be an ops.Rule, got function"):
        check_rule(leaky)


def test_a_rule_looks_like_a_function_and_is_pickled_as_one():
    arguments = "(q, k, v, beta, state=None, *, first=None, backend='auto')"
    assert repr(ops.delta_rule) == f"delta_rule{inspect.signature(ops.delta_rule)}" == f"delta_rule{arguments}"
    assert repr(ops.delta_rule) in pydoc.render_doc(ops.delta_rule) and "Widrow" in pydoc.render_doc(ops.delta_rule)
    assert ops.delta_rule.__name__ == ops.delta_rule.__qualname__ == "delta_rule"
    assert inspect.getsource(ops.delta_rule) == inspect.getsource(ops.delta_rule.step)
    for rule in (ops.delta_rule, ops.delta_product_rule, ops.gated_delta_product_rule):
        assert pickle.loads(pickle.dumps(rule)) is copy.deepcopy(rule) is rule
