"""The short convolution of queries, keys and values, and the token shift: their state is the last tokens' inputs.

Shapes: B batch, L tokens, C channels, W tokens that the convolution sees.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.modules.attention.base import NO_MARKS, Alignment, Marks
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.checks import check
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

    def forward(self, x: Tensor, recent: Tensor | None = None, marks: Marks = NO_MARKS) -> tuple[Tensor, Tensor]:
        """Return y (B, L, C) for x (B, L, C), and the inputs of the last tokens: see `convolve`."""
        return convolve(x, self.weight, recent, marks)


def convolve(x: Tensor, weight: Tensor, recent: Tensor | None, marks: Marks) -> tuple[Tensor, Tensor]:
    """Return y (B, L, C) for x (B, L, C), and the inputs of the last W - 1 tokens (B, W - 1, C), float32 or wider.

    weight: (C, W); recent: the inputs before the first token, None = zeros; marks: as of an `Attention`.
    """
    padding, first, _ = marks
    length, past = x.shape[1], weight.shape[1] - 1
    wide = at_least_float32(x)
    if recent is None and (padding is not None or length < past):
        recent = wide.new_zeros(x.shape[0], past, x.shape[2])
    seen = wide if recent is None else torch.cat([recent, wide], 1)
    before = seen.shape[1] - length  # the convolution itself takes what is not there as zeros
    document = None if first is None else F.pad(first.long().cumsum(1), (before, 0))
    alignment = None if padding is None else Alignment(F.pad(padding, (before, 0)), length)
    if alignment is not None:
        seen = alignment.align(seen)
        document = None if document is None else alignment.align(document.unsqueeze(2)).squeeze(2)
    y = causal_conv1d(seen, weight, sequence=document)[:, before:]
    end = length + before - past
    recent = seen[:, end:].clone()  # a slice would keep all inputs in memory
    if first is not None and document is not None:
        others = document[:, end:] != first.sum(1, keepdim=True)
        recent = recent.masked_fill(others.unsqueeze(2), 0)
    return (y if alignment is None else alignment.restore(y)).to(x.dtype), recent


class TokenShift(nn.Module):
    """Mixtures of each token's input with that of the token before, x_t + mix_n * (x_(t-1) - x_t), with x_0 = 0.

    Peng et al. 2025, "RWKV-7" (arXiv 2503.14456), Eq. 3. dim: D; powers: of N mixtures; channel i of mix_n starts at
    1 - (i / D)^powers_n, as in public code.
    """

    def __init__(self, dim: int, powers: Sequence[float]) -> None:
        super().__init__()
        self.powers = powers
        self.mix = nn.Parameter(torch.empty(len(powers), dim))
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Set the mixtures to their first values again."""
        share = torch.arange(self.mix.shape[1]) / self.mix.shape[1]
        self.mix.copy_(torch.stack([1 - share**power for power in self.powers]))

    def forward(self, x: Tensor, recent: Tensor | None = None, marks: Marks = NO_MARKS) -> tuple[Tensor, Tensor]:
        """Return the mixtures (N, B, L, D) of x (B, L, D), and the last token's input (B, 1, D): see `convolve`."""
        weight = torch.eye(1, 2, device=x.device).expand(x.shape[2], 2)  # of the token before, and of itself
        previous, recent = convolve(x, weight, recent, marks)
        return torch.addcmul(x, previous - x, self.mix[:, None, None]), recent
