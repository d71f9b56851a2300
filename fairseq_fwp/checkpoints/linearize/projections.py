"""The projections of softmax attention, written into a new attention.

D: embedding dimension, H: heads, d: size of a head, D / H in most models, m: features of a head.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fairseq_fwp.checkpoints.linearize.initialisation import WRITE_STRENGTH_BIAS, Initialisation, Projections
from fairseq_fwp.models.translation_layers import CausalAttention, SequenceAttention
from fairseq_fwp.modules.attention import FastWeightAttention, SoftmaxAttention

# Scale of scores of either sign; the paper does not give one.
SCORE_SCALE = 0.1


def separate_heads(attention: SoftmaxAttention, softmax: Mapping[str, Tensor], inputs: Tensor | None) -> Projections:
    """Return queries, keys and values of each head (H d, D + 1), of which several may have shared keys and values.

    attention: the layer of the weights `softmax`, whose rotation of queries and keys is left out; inputs: see
    `without_norm`.
    """
    q, k, v = with_bias(softmax, "in_proj").split(attention.sizes)
    if attention.query_norm is not None:
        q, k = (without_norm(rows, softmax[f"{name}_norm.weight"], inputs) for name, rows in (("query", q), ("key", k)))
    shared, size = len(q) // len(k), len(q) // attention.num_heads
    k, v = (rows.unflatten(0, (-1, size)).repeat_interleave(shared, 0).flatten(0, 1) for rows in (k, v))
    return q, k, v


def without_norm(rows: Tensor, gains: Tensor, inputs: Tensor | None) -> Tensor:
    """Return projections (H d, D + 1) that need no RMS normalisation of a head, whose gains (d,) they get.

    They are divided by the root mean square that vectors of a head have if the D inputs are independent of each other.
    inputs (D,): root mean squares of these; None = 1.
    """
    heads = rows.unflatten(0, (-1, len(gains))).double()
    weights, biases = heads[..., :-1], heads[..., -1]
    squares = (weights if inputs is None else weights * inputs).square().sum(-1) + biases.square()
    sizes = squares.mean(-1).sqrt().clamp(min=1e-6)  # a head of zeros stays one
    return (heads * gains.unsqueeze(-1) / sizes.view(-1, 1, 1)).flatten(0, 1).to(rows)


@torch.no_grad()
def convert_attention(
    attention: FastWeightAttention,
    projections: Projections,
    softmax: Mapping[str, Tensor],
    heads: int,
    initialisation: Initialisation,
) -> None:
    """Write the projections (D, D + 1) and the output of softmax attention, which has `heads`, into a new one."""
    q, k, v = projections
    attention.to(q.dtype)
    feature_map = attention.feature_map
    scores = (v.shape[0] // heads) ** -0.5 * (1 if feature_map.positive else SCORE_SCALE)
    q = q * (scores / feature_map.scale**2)
    # Spans follow singular values, even with as many features as dimensions.
    if attention.key_dim != attention.value_dim or initialisation.by_singular_values:
        q, k = fewer_features(q, k, attention.num_heads, attention.key_dim)
    q, k, v = initialisation.start(attention, q, k, v)
    if attention.rule.steps > 1:
        k, v = several_steps(attention, k, v)
    together = torch.cat([q, k, v])
    attention.in_proj.weight[: len(together)] = together[:, :-1]
    if attention.bias is not None:
        attention.bias.copy_(together[:, -1])
    fill_projection(attention.out_proj, with_bias(softmax, "out_proj"))


@torch.no_grad()
def fill_translation(
    module: CausalAttention | SequenceAttention, softmax: Mapping[str, Tensor], initialisation: Initialisation
) -> None:
    """Write the weights of fairseq's softmax attention into a new one of a translation model."""
    q, k, v = (with_bias(softmax, f"{name}_proj") for name in "qkv")
    if isinstance(module, CausalAttention):
        attention = module.attention
        convert_attention(attention, (q, k, v), softmax, attention.num_heads, initialisation)
        return
    module.to(q.dtype)
    fill_projection(module.q_proj, q * (module.head_dim**-0.5 / module.feature_map.scale**2))
    fill_projection(module.kv_proj, torch.cat([k, v]))
    fill_projection(module.out_proj, with_bias(softmax, "out_proj"))


def several_steps(attention: FastWeightAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of a rule of several steps a token; the last step has the pretrained ones.

    Earlier steps have random keys N(0, 0.02) and the same values, and write very little: `WRITE_STRENGTH_BIAS`.
    """
    before = attention.rule.steps - 1
    drawn = k.new_zeros(before, *k.shape)
    nn.init.normal_(drawn[..., :-1], std=0.02)
    attention.gate_biases["beta"].view(attention.num_heads, -1)[:, :before] = WRITE_STRENGTH_BIAS
    return torch.cat([*drawn, k]), torch.cat([v] * (before + 1))


def with_bias(softmax: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a projection (rows, D + 1) of vectors that end with a one; a missing bias is zero."""
    weight, bias = softmax[f"{name}.weight"], softmax.get(f"{name}.bias")
    return torch.cat([weight, weight.new_zeros(len(weight), 1) if bias is None else bias.unsqueeze(1)], dim=1)


def fill_projection(projection: nn.Linear, rows: Tensor) -> None:
    """Write a projection (rows, D + 1) into a layer, whose bias it may lack."""
    projection.weight.copy_(rows[:, :-1])
    if projection.bias is not None:
        projection.bias.copy_(rows[:, -1])


def fewer_features(q: Tensor, k: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
    """Return projections of `size` queries and keys a head (heads x size, D + 1), with scores near those of q and k.

    q, k (D, D + 1). With A = q^T k of a head, its scores are x A y. The nearest ones of rank `size`, in the Frobenius
    norm, have the largest singular values of A. Further features have keys N(0, 0.02) and queries of zero.
    """
    found_q, found_k = [], []
    for of_q, of_k in zip(q.double().chunk(heads), k.double().chunk(heads), strict=True):
        (basis_q, root_q), (basis_k, root_k) = (torch.linalg.qr(part.T) for part in (of_q, of_k))
        left, singular, right = torch.linalg.svd(root_q @ root_k.T)
        rank = min(size, len(singular))
        root = singular[:rank].sqrt()
        new_q, new_k = of_q.new_zeros(size, of_q.shape[1]), of_k.new_zeros(size, of_k.shape[1])
        nn.init.normal_(new_k[rank:, :-1], std=0.02)
        new_q[:rank] = (basis_q @ left[:, :rank] * root).T
        new_k[:rank] = (basis_k @ right[:rank].T * root).T
        found_q.append(new_q)
        found_k.append(new_k)
    return torch.cat(found_q).to(q), torch.cat(found_k).to(k)
