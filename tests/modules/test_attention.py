"""Laws of the attention layers, for every rule and map of the tables and for softmax."""

import itertools

import pytest
import torch

from fairseq_fwp.modules.fast_weight_attention import FastWeightAttention
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.softmax_attention import SoftmaxAttention
from fairseq_fwp.modules.update_rules import UPDATE_RULES

DIM, HEADS = 12, 3
KINDS = [
    (rule, feature_map, sum_norm, attention_norm)
    for rule, feature_map in itertools.product(UPDATE_RULES, FEATURE_MAPS)
    for sum_norm, attention_norm in itertools.product((False, True), repeat=2)
    if FEATURE_MAPS[feature_map].positive or not (sum_norm or attention_norm)
] + ["softmax"]


def build(kind, backend="reference"):
    if kind == "softmax":
        return SoftmaxAttention(DIM, HEADS).double().eval()
    rule, feature_map, sum_norm, attention_norm = kind
    return (
        FastWeightAttention(
            DIM,
            HEADS,
            FEATURE_MAPS[feature_map](DIM // HEADS),
            rule,
            sum_normalization=sum_norm,
            attention_normalization=attention_norm,
            backend=backend,
        )
        .double()
        .eval()
    )


@pytest.fixture(params=KINDS, ids=str)
def layer(request):
    return build(request.param)


def test_two_pieces_with_the_carried_state_equal_the_whole(layer):
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    whole, last = layer(x)
    state, pieces = None, []
    for piece in x.split([4, 1, 4], dim=1):
        y, state = layer(piece, state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    for ours, theirs in zip(state, last, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_past_does_not_depend_on_the_future(layer):
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    changed = x.clone()
    changed[:, 5:] += 1
    assert torch.equal(layer(x)[0][:, :5], layer(changed)[0][:, :5])
    assert not torch.allclose(layer(x)[0][:, 5:], layer(changed)[0][:, 5:])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(layer, side):
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    junk = 10 * torch.randn(2, 3, DIM, dtype=torch.float64)
    padded = torch.cat([junk, x] if side == "left" else [x, junk], dim=1)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    real = slice(3, None) if side == "left" else slice(None, 6)
    mask[:, : 3 if side == "left" else None] = side == "left"
    mask[:, 6:] |= side == "right"
    y, state = layer(padded, key_padding_mask=mask)
    expected, expected_state = layer(x)
    torch.testing.assert_close(y[:, real], expected)
    assert y.isfinite().all()
    # and what is read afterwards does not see the padding
    more = torch.randn(2, 1, DIM, dtype=torch.float64)
    torch.testing.assert_close(layer(more, state)[0], layer(more, expected_state)[0])


def test_reordering_selects_rows(layer):
    x, more = torch.randn(3, 5, DIM, dtype=torch.float64), torch.randn(3, 2, DIM, dtype=torch.float64)
    order = torch.tensor([2, 0, 2])
    _, state = layer(x)
    _, selected = layer(x[order])
    torch.testing.assert_close(layer(more, state.reorder(order))[0], layer(more, selected)[0])


def test_detaching_cuts_the_graph(layer):
    x = torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=True)
    _, state = layer(x)
    assert all(part is None or not part.requires_grad for part in state.detach())
    layer(torch.randn(2, 3, DIM, dtype=torch.float64), state)[0].sum().backward()
    assert x.grad.abs().sum() > 0


def test_fast_weights_read_back_what_was_written():
    """Identity map, delta rule with beta = 1 and orthonormal keys: the newest value of a key (Sec. 4.2)."""
    layer = FastWeightAttention(2, 1, FEATURE_MAPS["identity"](2), "delta", backend="reference").double()
    with torch.no_grad():
        layer.in_proj.weight.zero_()
        layer.in_proj.weight[:4] = torch.eye(2).repeat(2, 1)
        layer.in_proj.weight[4:6] = torch.tensor([[2.0, 3.0], [5.0, 7.0]])
        layer.in_proj.weight[6] = 100
        layer.out_proj.weight.copy_(torch.eye(2))
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]], dtype=torch.float64)
    expected = torch.tensor([[[2.0, 5.0], [3.0, 7.0], [2.0, 5.0]]], dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], expected)


def test_delta_has_one_gate_per_head_more_than_sum():
    count = {rule: sum(p.numel() for p in build((rule, "elu", True, False)).parameters()) for rule in ("sum", "delta")}
    assert count["delta"] - count["sum"] == DIM * HEADS


def test_refusals():
    with pytest.raises(ValueError, match="12 is not divisible by 5 attention heads"):
        FastWeightAttention(12, 5, FEATURE_MAPS["elu"](2), "sum")
    with pytest.raises(ValueError, match="12 is not divisible by 0 attention heads"):
        SoftmaxAttention(12, 0)
    with pytest.raises(ValueError, match="unknown update rule 'hebb': choose one of sum, delta"):
        FastWeightAttention(12, 3, FEATURE_MAPS["elu"](4), "hebb")
    for flag in ("sum_normalization", "attention_normalization"):
        with pytest.raises(ValueError, match="features of either sign"):
            FastWeightAttention(12, 3, FEATURE_MAPS["identity"](4), "sum", **{flag: True})
