"""The laws as a check that is handed out: it passes what keeps them, and says of others which one they break."""

import pytest

from fairseq_fwp import ops
from fairseq_fwp.ops import fast_weights
from fairseq_fwp.testing import check_rule


def leaky(memory, k, v, keep):
    return keep.unsqueeze(-1) * memory + ops.outer(k, v)


def writes_nothing(memory, k, v, keep):
    return keep.unsqueeze(-1) * memory


def remembers_elsewhere(memory, k, v, keep, seen=[]):  # noqa: B006 - that is the mistake
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
