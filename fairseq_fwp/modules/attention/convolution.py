"""The short convolution of queries, keys and values, whose state is the inputs of the last tokens.

Shapes: B batch, L tokens, C channels, W tokens that the convolution sees.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.modules.attention.base import Alignment
from fairseq_fwp.modules.layers import at_least_float32, check
from fairseq_fwp.ops.convolution import causal_conv1d


class ShortConvolution(nn.Module):
    """A causal convolution of each channel, y_t = sum_w weight_w x_(t - W + 1 + w), without bias.

    It comes before the rule, as in DeltaNet (Yang et al. 2024, arXiv 2406.06484, Sec. 3.3). Padding is passed by.
    channels: C; size: W. Weights start as PyTorch's convolutions do, uniform within 1 / sqrt(W).
    Raises ValueError for a size below 1.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        check(size >= 1, f"`conv_size` must be at least 1 token, or 0 for no convolution, got {size}")
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.initialize()

    def initialize(self) -> None:
        """Draw the weights again."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self, x: Tensor, recent: Tensor | None = None, padding: Tensor | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return y (B, L, C) for x (B, L, C), and the inputs of the last W - 1 tokens (B, W - 1, C), float32 or wider.

        recent: those before the first token, None = zeros; padding (B, L): True at padding;
        first (B, L): True at tokens that begin a document, which see none before; None = nowhere.
        """
        length, past = x.shape[1], self.weight.shape[1] - 1
        wide = at_least_float32(x)
        seen = torch.cat([wide.new_zeros(x.shape[0], past, x.shape[2]) if recent is None else recent, wide], 1)
        document = None if first is None else F.pad(first.long().cumsum(1), (past, 0))
        alignment = None if padding is None else Alignment(F.pad(padding, (past, 0)), length)
        if alignment is not None:
            seen = alignment.align(seen)
            document = None if document is None else alignment.align(document.unsqueeze(2)).squeeze(2)
        y = causal_conv1d(seen, self.weight, sequence=document)[:, past:]
        recent = seen[:, length:].clone()  # a slice would keep all inputs in memory
        if first is not None and document is not None:
            others = document[:, length:] != first.sum(1, keepdim=True)
            recent = recent.masked_fill(others.unsqueeze(2), 0)
        return (y if alignment is None else alignment.restore(y)).to(x.dtype), recent
