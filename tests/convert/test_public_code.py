"""Converted models have the losses of the public code for the same weights, token by token."""

import torch
from pairwise import looped

from tests.convert.conftest import VECTORS, build, read_vector, score

NAMES = sorted(str(path.relative_to(VECTORS).with_suffix("")) for path in VECTORS.glob("*/*.npz"))


@looped("name", NAMES)
def test_losses(name):
    vector = read_vector(name)
    model, dictionary, _ = build(vector)
    with_memory = vector.options.get("mem_len", 0) > 0
    losses = score(model, dictionary, vector.tokens, vector.segments, carry=with_memory)
    torch.testing.assert_close(losses, vector.losses, rtol=0, atol=1e-9)
    if vector.carried is not None:
        carried = score(model, dictionary, vector.tokens, vector.segments, carry=True)
        torch.testing.assert_close(carried, vector.carried, rtol=0, atol=1e-9)
        assert (carried - losses).abs().max() > 1e-3
