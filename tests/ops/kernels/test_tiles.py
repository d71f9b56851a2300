"""Tiles of bfloat16, which rules with a decay use on processors with AMX, by the emulation of their products.

Long sweeps are in tests/nightly/test_tiles_of_every_length.py.
"""

import pytest
import torch
from support.operator_fixtures import on_one_and_three_threads, one_thread, poisoned_memory  # noqa: F401
from support.pairwise import looped
from support.tiles import (
    KINDS,
    RULES_ON_TILES,
    call,
    check_errors_of_tiles,
    check_prefixes,
    check_spread,
    draw,
    with_gradients,
)

every_rule = looped("rule", RULES_ON_TILES)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv("FWP_CPU_TILES", "emulated")


@every_rule
@looped("kind", KINDS)
def test_errors(rule, kind):
    check_errors_of_tiles(rule, kind, (1, 2, 160, 128, 64))
    check_errors_of_tiles(rule, kind, (2, 1, 70, 50, 71))


@every_rule
def test_prefixes_and_splits(rule):
    check_prefixes(rule, (1, 2, 100, 50, 71), (1, 2, 17, 31, 32, 33, 34, 63, 64, 65, 66, 97, 99))


@every_rule
@looped("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_where_it_belongs(rule, number):
    for name in draw(rule, "usual", (1, 1, 2, 48, 48)):
        check_spread(rule, name, number, tokens=(20,))


@every_rule
def test_neither_batch_nor_heads_nor_threads_nor_a_gradient_change_a_bit(rule):
    x = draw(rule, "usual", (2, 3, 70, 64, 100))
    one, three = on_one_and_three_threads(lambda: call(rule, x))
    assert all(map(torch.equal, one, three))
    part = {name: y[1:, 2:] for name, y in x.items()}
    of_part, of_three = on_one_and_three_threads(lambda: call(rule, part))  # three threads share its columns
    assert all(torch.equal(y[1:, 2:], z) and torch.equal(z, u) for y, z, u in zip(one, of_part, of_three, strict=True))
    with_gradients_, of_three = on_one_and_three_threads(lambda: with_gradients(rule, x).values())
    assert all(map(torch.equal, with_gradients_, of_three)) and all(map(torch.equal, one, with_gradients_))


@every_rule
def test_the_smallest_numbers_are_zeros(rule):
    """A processor takes denormal factors as zeros, lower parts too: sums differ by some of the least normal numbers."""
    x = draw(rule, "usual", (1, 1, 40, 64, 64))
    x["v"], x["state"] = (x["v"].float() * 1e-36).bfloat16(), x["state"] * 1e-36
    for found, truth in zip(call(rule, x), call(rule, {name: y.double() for name, y in x.items()}), strict=True):
        assert (found - truth).abs().max() <= 10 * torch.finfo(torch.float32).tiny < truth.abs().max() / 10


@every_rule
def test_the_switch(rule, monkeypatch):
    """Off, the results are those of the other kernel, in both passes; a word that is unknown is refused."""
    x, found = draw(rule, "usual", (1, 1, 30, 64, 64)), {}
    for choice in ("emulated", "off"):
        monkeypatch.setenv("FWP_CPU_TILES", choice)
        found[choice] = with_gradients(rule, x)
    for name in ("end", "d_state"):  # in one chunk, the second does not depend on the forward pass
        assert not torch.equal(found["emulated"][name], found["off"][name])
        torch.testing.assert_close(found["emulated"][name], found["off"][name], rtol=1e-2, atol=1e-4)
    monkeypatch.setenv("FWP_CPU_TILES", "on")
    with pytest.raises(ValueError, match="FWP_CPU_TILES must be auto, off or emulated, got on"):
        call(rule, x)
