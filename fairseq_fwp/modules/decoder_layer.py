"""A Transformer decoder layer around any causal attention that takes and returns its state."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fairseq_fwp.modules.dropout import Dropout


class DecoderLayer(nn.Module):
    """Attention and feed-forward blocks with residual connections (Vaswani et al. 2017, Sec. 3.1).

    attention: (x, state, key_padding_mask) -> (y, state), with x and y (B, L, embed_dim); it takes `first` too if it
    supports several documents;
    activation: between the two feed-forward projections; dropout: after each block; activation_dropout: after the
    activation;
    normalize_before: layer normalisation before each block (pre-norm) instead of after its residual (post-norm).
    """

    def __init__(
        self,
        attention: nn.Module,
        embed_dim: int,
        ffn_embed_dim: int,
        activation: Callable[[Tensor], Tensor],
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        normalize_before: bool = False,
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, ffn_embed_dim)
        self.fc2 = nn.Linear(ffn_embed_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)
        self.activation = activation
        self.dropout = Dropout(dropout, self)
        self.activation_dropout = Dropout(activation_dropout, self)
        self.normalize_before = normalize_before

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        key_padding_mask: Tensor | None = None,
        last: int | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Return y (B, L, embed_dim), or (B, last, embed_dim), for x (B, L, embed_dim), and the attention's new state.

        first (B, L): True at tokens that begin a document, for an attention that supports it.
        """
        y = self.self_attn_layer_norm(x) if self.normalize_before else x
        y, state = self.self_attn(y, state, key_padding_mask, *(() if first is None else (first,)))
        if last is not None:
            x, y = x[:, -last:], y[:, -last:]
        x = x + self.dropout(y)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        y = self.final_layer_norm(x) if self.normalize_before else x
        y = self.fc2(self.activation_dropout(self.activation(self.fc1(y))))
        x = x + self.dropout(y)
        return (x if self.normalize_before else self.final_layer_norm(x)), state
