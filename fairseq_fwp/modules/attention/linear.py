"""Linear attention to a whole sequence, not only to its past: an encoder's to itself, a decoder's to the source.

Softmax attention keeps all keys and values of the sequence. Here one matrix and one vector per head replace them, for
any length of the sequence. The order of tokens does not matter: the update rule is the sum.

Shapes: B batch, L queries, S keys and values, H heads, D embed_dim, d = D / H, Dk feature_dim of the map, Dv = d.
"""

import torch
from torch import Tensor, nn

from fairseq_fwp.modules.attention.base import Heads, check_heads, scores_are_cheaper
from fairseq_fwp.modules.attention.memory import FastWeightState
from fairseq_fwp.modules.attention.normalization import Division
from fairseq_fwp.modules.feature_maps import FeatureMap
from fairseq_fwp.ops.arguments import at_least_float32


class LinearAttention(Heads):
    """Attention y_i = phi(q_i) W / (z . phi(q_i)) with W = sum_j phi(k_j)^T v_j and z = sum_j phi(k_j).

    Katharopoulos et al. 2020, arXiv 2006.16236, Eqs. 4 and 5; Schlag et al. 2021, arXiv 2102.11174, Eqs. 13 to 19,
    with the sums over the whole sequence. With features of either sign there is no division: the output is phi(q_i) W,
    as in Schlag 2021, Sec. 3.1. Projections have no bias, as in the paper's Eq. 4. With `bias` all have one, as in
    fairseq's attention, which starts at zero.

    embed_dim: D; num_heads: H; feature_map: a map built for d; source_dim: size of the source's vectors, None = D;
    division: by z . phi(q_i).

    Features, W and z are in float32 or wider, even under autocast. Raises ValueError for a head count that does not
    divide embed_dim.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feature_map: FeatureMap,
        *,
        source_dim: int | None = None,
        division: Division = Division(),  # noqa: B008  (it is immutable)
        bias: bool = False,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.feature_map = feature_map
        self.division = division.with_epsilon(feature_map.epsilon)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.kv_proj = nn.Linear(embed_dim if source_dim is None else source_dim, 2 * embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        for projection in (self.q_proj, self.kv_proj, self.out_proj) if bias else ():
            nn.init.zeros_(projection.bias)

    def forward(self, x: Tensor, source: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the output (B, L, D) of x (B, L, D) that attends to source (B, S, source_dim)."""
        queries, keys, sizes = x.shape[1], source.shape[1], (self.feature_map.feature_dim, self.head_dim)
        # A compiled graph takes one path for all lengths.
        if torch.compiler.is_compiling() or not scores_are_cheaper(queries * keys, queries + keys, sizes):
            return self.read(x, self.summarize(source, key_padding_mask))
        weights, v = self._weights_and_values(x, source, key_padding_mask)
        with torch.autocast(v.device.type, enabled=False):
            out = weights @ v.to(weights.dtype)
        return self.out_proj(self.merge_heads(out).to(x.dtype))

    def summarize(self, source: Tensor, key_padding_mask: Tensor | None = None) -> FastWeightState:
        """Summarize source (B, S, source_dim): W (B, H, Dk, Dv), and z (B, H, Dk) for a positive map.

        key_padding_mask (B, S): True at padding.
        """
        k, v = self._keys_and_values(source, key_padding_mask)
        with torch.autocast(k.device.type, enabled=False):
            weights = k.transpose(-1, -2) @ v.to(k.dtype)
        return FastWeightState(weights, k.sum(2) if self.feature_map.positive else None)

    def read(self, x: Tensor, state: FastWeightState) -> Tensor:
        """Return the output (B, L, D) for x (B, L, D), from a summary of B sequences."""
        q = at_least_float32(self.feature_map(self.split_heads(self.q_proj(x))))
        with torch.autocast(q.device.type, enabled=False):
            out = q @ state.weights.to(q.dtype)
            if state.normalizer is not None:
                divisor = q @ state.normalizer.to(q.dtype).unsqueeze(-1)
                out = out / self.division.bound(divisor)
        return self.out_proj(self.merge_heads(out).to(x.dtype))

    def weights(self, x: Tensor, source: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the attention weights a (B, H, L, S) of x (B, L, D): y_i = sum_j a_ij v_j.

        They are for inspection: the output does not need a number for every pair of tokens.
        """
        return self._weights_and_values(x, source, key_padding_mask)[0]

    def _weights_and_values(self, x: Tensor, source: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a (B, H, L, S), and values (B, H, S, Dv)."""
        q = at_least_float32(self.feature_map(self.split_heads(self.q_proj(x))))
        k, v = self._keys_and_values(source, key_padding_mask)
        with torch.autocast(q.device.type, enabled=False):
            products = q @ k.transpose(-1, -2)
            if not self.feature_map.positive:
                return products, v
            return products / self.division.bound(products.sum(-1, keepdim=True)), v

    def _keys_and_values(self, source: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mapped keys (B, H, S, Dk), zero at padding, and values (B, H, S, Dv)."""
        k, v = (self.split_heads(x) for x in self.kv_proj(source).chunk(2, dim=-1))
        k, v = at_least_float32(self.feature_map(k)), at_least_float32(v)
        return k if key_padding_mask is None else k.masked_fill(key_padding_mask[:, None, :, None], 0), v
