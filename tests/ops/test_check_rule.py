"""The public check of the laws: correct rules pass, and for others it names the broken law."""

import pytest
import torch
from pairwise import looped

from fairseq_fwp import ops
from fairseq_fwp.ops import fast_weights
from fairseq_fwp.testing import check_rule, sample_inputs


def leaky(memory, k, v, keep):
    return keep.unsqueeze(-1) * memory + ops.outer(k, v)


def writes_nothing(memory, k, v, keep):
    return keep.unsqueeze(-1) * memory


def remembers_elsewhere(memory, k, v, keep, seen=[]):  # noqa: B006 - the mistake under test
    seen.append(v.detach().sum())
    return leaky(memory, k, v, keep) + sum(seen)


def test_a_rule_of_ones_own_passes():
    check_rule(ops.Rule("leaky_rule", leaky, {"keep": (ops.PER_TOKEN,)}))
    check_rule(
        ops.Rule(
            "leaky_rule_with_kernel",
            leaky,
            {"keep": (ops.PER_TOKEN,)},
            lambda q, k, v, keep, **rest: fast_weights.fast_weights(q, k, v, decay=keep, **rest),
        )
    )


@pytest.mark.parametrize("step", [writes_nothing, remembers_elsewhere], ids=lambda step: step.__name__)
def test_what_breaks_a_law_is_told_which(step):
    with pytest.raises(AssertionError, match=step.__name__):
        check_rule(ops.Rule(step.__name__, step, {"keep": (ops.PER_TOKEN,)}))


def with_a_wrong_shape(memory, k, v, keep):
    return keep * memory + ops.outer(v, k)


def in_place(memory, k, v, keep):
    return memory.mul_(keep.unsqueeze(-1)).add_(ops.outer(k, v))


@pytest.mark.parametrize("step", [with_a_wrong_shape, in_place], ids=lambda step: step.__name__)
def test_pytorchs_errors_say_what_a_step_takes(step):
    with pytest.raises(
        AssertionError, match=rf"{step.__name__}: the step must take memory \(B, H, Dk, Dv\), .* in place, got"
    ):
        check_rule(ops.Rule(step.__name__, step, {"keep": (ops.PER_TOKEN,)}))


KEEP = {"keep": (ops.PER_TOKEN,)}


def family(**given):
    return lambda q, k, v, keep, **rest: fast_weights.fast_weights(
        q, k, v, **{name: of(keep) for name, of in given.items()}, **rest
    )


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (ops.Rule("f1", leaky, KEEP, family()), "must give the same results as the step"),
        (ops.Rule("f2", leaky, KEEP, family(decay=lambda keep: keep**2)), "must give the same results as the step"),
        (
            ops.Rule("mixes", lambda m, k, v, keep: leaky(m, k, v, keep).mean(0, keepdim=True).expand_as(m), KEEP),
            "sequences",
        ),
        (
            ops.Rule("heads", lambda m, k, v, keep: leaky(m, k, v, keep).mean(1, keepdim=True).expand_as(m), KEEP),
            "heads",
        ),
        (ops.Rule("first_row", lambda m, k, v, keep: leaky(m, k, v[:1], keep), KEEP), "sequences"),
        (ops.Rule("first_head", lambda m, k, v, keep: leaky(m, k, v[:, :1], keep), KEEP), "heads"),
        (
            ops.Rule("unused", lambda m, k, v, keep: m + ops.outer(k, v) + 0 * keep.unsqueeze(-1), KEEP),
            "depend on keep",
        ),
    ],
    ids=lambda x: x.name if isinstance(x, ops.Rule) else None,
)
def test_it_compares_families_rows_heads_and_gates(rule, law):
    with pytest.raises(AssertionError, match=law):
        check_rule(rule)


def test_every_shape_of_a_gate_is_looked_at():
    def mixes_by_key(memory, k, v, keep):
        kept = leaky(memory, k, v, keep)
        return kept if keep.shape[-1] == 1 else kept.mean(0, keepdim=True).expand_as(memory)

    with pytest.raises(AssertionError, match="sequences must be independent of each other"):
        check_rule(ops.Rule("mixes_by_key", mixes_by_key, {"keep": (ops.PER_TOKEN, ops.PER_KEY)}))


@looped(
    ("step", "got"),
    [
        (lambda m, k, v, keep: leaky(m, k, v, keep)[..., :1], r"\(2, 2, 4, 1\)"),
        (lambda m, k, v, keep: leaky(m, k, v, keep).mT, r"\(2, 2, 3, 4\)"),
        (lambda m, k, v, keep: leaky(m, k, v, keep).float(), "float32"),
        (lambda m, k, v, keep: None, "NoneType"),
    ],
)
def test_a_step_returns_a_memory(step, got):
    with pytest.raises(TypeError, match=f"the step must return the memory, .*got {got}|got .*{got}"):
        check_rule(ops.Rule("wrong_step", step, KEEP))


@looped(
    ("name", "gates", "message"),
    [
        ("leaky-rule", KEEP, "must be an identifier such as my_rule, got 'leaky-rule'"),
        ("leaky", {"keep": ops.PER_TOKEN}, "shapes of keep must be a tuple such as"),
        ("leaky", {"keep": ()}, "shapes of keep must be a tuple such as"),
        ("leaky", {"keep": (("B", "H", "L", "X"),)}, "shapes of keep must be a tuple such as"),
        ("leaky", {"keep": (ops.PER_TOKEN, ("B", "H", "L", "X"))}, "shapes of keep must be a tuple such as"),
        ("leaky", ["keep"], "gates must be a mapping of names to shapes"),
        ("leaky", {"q": (ops.PER_KEY,)}, "the name of a gate must be an unused identifier, got 'q'"),
        ("leaky", {"state": (ops.PER_KEY,)}, "the name of a gate must be an unused identifier, got 'state'"),
    ],
)
def test_a_rule_says_what_is_wrong_with_its_form(name, gates, message):
    with pytest.raises(ValueError, match=message):
        ops.Rule(name, leaky, gates)


def test_rules_of_one_name_stay_what_they_are():
    one = ops.Rule("same", leaky, KEEP)
    inputs = sample_inputs(one, 0)
    before = one(**inputs)[0]
    other = ops.Rule("same", lambda m, k, v, keep: leaky(m, k, 2 * v, keep), KEEP)
    assert torch.equal(one(**inputs)[0], before) and not torch.equal(other(**inputs)[0], before)
    for taken in ("fast_weights", "fast_weights_backward"):  # operators of the package
        check_rule(ops.Rule(taken, leaky, KEEP))
    check_rule(ops.delta_rule.rule)


def test_an_argument_is_given_once():
    rule = ops.Rule("leaky", leaky, KEEP)
    inputs = sample_inputs(rule, 0)
    with pytest.raises(TypeError, match="got two values of keep"):
        rule(*inputs.values(), keep=inputs["keep"])
    with pytest.raises(TypeError, match=r"must be an ops.Rule, got function"):
        check_rule(leaky)
