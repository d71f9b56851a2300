"""The Transformer's layer: an attention and a feed-forward block."""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.modules.attention.base import NO_MARKS, AnyAttention, Marks, StateTree
from fairseq_fwp.modules.attention.convolution import TokenShift
from fairseq_fwp.modules.dropout import Dropout
from fairseq_fwp.modules.layer_norm import layer_norm
from fairseq_fwp.ops.rows import gated_silu


class LayerState(NamedTuple):
    """The state of a layer with a token shift: that of its attention, and the last input of the feed-forward block."""

    attention: StateTree
    recent: Tensor


class DecoderLayer(nn.Module):
    """Attention and feed-forward blocks with residual connections (Vaswani et al. 2017, Sec. 3.1).

    activation: between the two feed-forward projections; dropout: after each block;
    activation_dropout: after the activation;
    normalize_before: layer normalisation before each block (pre-norm) instead of after its residual (post-norm);
    rms_norm, norm_epsilon: see `layer_norm`;
    swiglu: feed-forward blocks W_2 (SiLU(W_1 x) * W_3 x) without biases, fc1 = [W_1; W_3] (Shazeer
        2020, arXiv 2002.05202);
    token_shift: a `TokenShift` S of one mixture; feed-forward blocks W_2 max(W_1 S x, 0)^2 without biases (Peng et al.
        2025, arXiv 2503.14456, Sec. 4.2).
    """

    def __init__(
        self,
        attention: AnyAttention,
        embed_dim: int,
        ffn_embed_dim: int,
        activation: Callable[[Tensor], Tensor],
        *,
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        normalize_before: bool = False,
        rms_norm: bool = False,
        norm_epsilon: float = 1e-5,
        swiglu: bool = False,
        token_shift: TokenShift | None = None,
    ) -> None:
        super().__init__()
        bias = not swiglu and token_shift is None
        self.self_attn = attention
        self.self_attn_layer_norm = layer_norm(embed_dim, rms_norm, norm_epsilon)
        self.fc1 = nn.Linear(embed_dim, (1 + swiglu) * ffn_embed_dim, bias=bias)
        self.fc2 = nn.Linear(ffn_embed_dim, embed_dim, bias=bias)
        self.final_layer_norm = layer_norm(embed_dim, rms_norm, norm_epsilon)
        self.token_shift = token_shift
        self.activation = squared_relu if token_shift is not None else gated_silu if swiglu else activation
        self.dropout = Dropout(dropout, self)
        self.activation_dropout = Dropout(activation_dropout, self)
        self.normalize_before = normalize_before

    def forward(
        self, x: Tensor, state: StateTree = None, marks: Marks = NO_MARKS, last: int | None = None
    ) -> tuple[Tensor, StateTree]:
        """Return y (B, L, embed_dim), or (B, last, embed_dim), for x (B, L, embed_dim), and the layer's new state."""
        before, recent = state if isinstance(state, LayerState) else (state, None)
        y = self.self_attn_layer_norm(x) if self.normalize_before else x
        if self.self_attn.reads_input:
            x, y = y, x
        y, after = self.self_attn(y, before, marks.padding, marks.first, marks.shared)
        if last is not None and self.token_shift is None:
            x, y = x[:, -last:], y[:, -last:]
        x = x + self.dropout(y)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        y = self.final_layer_norm(x) if self.normalize_before else x
        if self.token_shift is not None:
            mixed, recent = self.token_shift(y, recent, marks)
            y, after = mixed[0], LayerState(after, recent)
            if last is not None:
                x, y = x[:, -last:], y[:, -last:]
        y = self.fc2(self.activation_dropout(self.activation(self.fc1(y))))
        x = x + self.dropout(y)
        return (x if self.normalize_before else self.final_layer_norm(x)), after


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)^2."""
    return F.relu(x).square()
