"""First values of RWKV-7's attention; its equations are in convert/test_fla.py, other laws in test_attention.py."""

import torch
from pairwise import looped

from fairseq_fwp.modules.attention.time_mix import TimeMix


@looped("depth", [0.0, 0.5])
def test_first_values(depth):
    """Powers of the channels' places for mixtures and decays, as in public code; ranks from the size."""
    layer = TimeMix(1024, 16, depth=depth)
    share = torch.arange(1024) / 1024
    for mix, power in zip(layer.token_shift.mix, (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
        torch.testing.assert_close(mix, 1 - share ** (power * (1 - depth)))
    decays = -0.5 + 6 * (torch.arange(1024) / 1023) ** (1 + depth**0.3) - 5
    torch.testing.assert_close(layer.decay[2].bias, decays)
    parts = (layer.decay, layer.rate, layer.output_gate, *([layer.value] if depth else []))
    assert [len(part[0].weight) for part in parts] == [64, 64, 160, 64][: len(parts)]
    assert (layer.value is None) == (depth == 0) and layer.output_gate[2].bias is None
    for parameter in (layer.removal_scale, layer.rate_scale, layer.bonus):
        assert parameter.unique().numel() == 1


def test_the_size_of_the_state():
    layer = TimeMix(12, 3)
    _, state = layer(torch.randn(1, 5, 12))
    assert layer.state_size(5) == sum(part.numel() for part in state if part is not None)
