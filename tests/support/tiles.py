"""Checks of the kernels on tiles of bfloat16, for tests/ops/kernels and tests/nightly."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fairseq_fwp import ops

Named = dict[str, Tensor]
# Rules with a decay per head, and with one per key dimension.
RULES_ON_TILES = ("gated_delta", "gla", "gated_delta by key", "gla by key")
# Slow: what a state keeps for a thousand tokens, similar keys, and rates near one.
KINDS = ("usual", "slow")


def draw(rule: str, kind: str, shape: tuple[int, int, int, int, int], seed: int = 0) -> Named:
    """Return the arguments of a rule by name: vectors in bfloat16, gates and the state in float32."""
    B, H, L, Dk, Dv = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(B, H, *size, generator=generator)

    keys = normal(L, Dk) + (2 * normal(1, Dk) if kind == "slow" else 0)
    x = {name: normalize(y, dim=-1).bfloat16() for name, y in (("q", normal(L, Dk)), ("k", keys))}
    x["v"] = normal(L, Dv).bfloat16()
    decays = (L, Dk) if rule.endswith("by key") else (L,)
    x["decay"] = torch.full((B, H, *decays), 0.999) if kind == "slow" else (normal(*decays) + 4).sigmoid()
    if rule.startswith("gated_delta"):
        x["beta"] = (normal(L) + (4 if kind == "slow" else 0)).sigmoid()
    x["state"] = normal(Dk, Dv)
    return x


def call(rule: str, x: Named) -> tuple[Tensor, Tensor]:
    out, state = function_of(rule)(**x, backend="kernel")
    return out, state


def function_of(rule: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return getattr(ops, f"{rule.split()[0]}_rule")  # type: ignore[no-any-return]


def some(x: Named, first: int, end: int | None = None) -> Named:
    return {name: y if name == "state" else y[:, :, first:end] for name, y in x.items()}


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def with_gradients(rule: str, x: Named, backend: str = "kernel") -> Named:
    """Return out, the state and all gradients by name, for random gradients of both."""
    leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
    results = function_of(rule)(**leaves, backend=backend)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype) for y in results]
    found = torch.autograd.grad(results, list(leaves.values()), given)
    names = ("out", "end", *(f"d_{name}" for name in leaves))
    return dict(zip(names, (*(y.detach() for y in results), *found), strict=True))


def doubles(x: Named) -> Named:
    return {name: y.double() for name, y in x.items()}


def check_errors_of_tiles(rule: str, kind: str, shape: tuple[int, int, int, int, int]) -> None:
    """Of bfloat16: its own rounding; of states, 1e-5; of gates, whose gradients are sums of greater terms, 3e-5."""
    x = draw(rule, kind, shape)
    found = with_gradients(rule, x)
    for name, truth in with_gradients(rule, doubles(x)).items():
        bound = 1.05 * error(truth.bfloat16(), truth)
        if found[name].dtype == torch.float32:
            bound = 1e-5 if name in ("end", "d_state") else 3e-5
        assert error(found[name], truth) <= bound, (rule, kind, shape, name, error(found[name], truth), bound)


def check_prefixes(rule: str, shape: tuple[int, int, int, int, int], cuts: Iterable[int]) -> None:
    """Some first tokens alone, or with any others after them, and splits at multiples of 64 have the same bits."""
    x = draw(rule, "usual", shape)
    out, state = call(rule, x)
    for cut in cuts:
        before, carried = call(rule, some(x, 0, cut))
        assert torch.equal(before, out[:, :, :cut]), (rule, cut)
        if cut % 64 == 0:
            after, end = call(rule, some(x, cut) | {"state": carried})
            assert torch.equal(after, out[:, :, cut:]) and torch.equal(end, state), (rule, cut)
    without = {name: y for name, y in x.items() if name != "state"}
    found, zeros = call(rule, without), call(rule, x | {"state": torch.zeros_like(x["state"])})
    assert all(map(torch.equal, found, zeros)), rule


def check_spread(rule: str, name: str, number: float, tokens: Iterable[int]) -> None:
    """Earlier tokens keep their bits; what is finite in the reference is finite and close, gradients too."""
    for token in tokens:
        x = draw(rule, "usual", (1, 2, 40, 48, 80))
        clean = call(rule, x)[0]
        place = x[name][0, 1] if name == "state" else x[name][0, 1, token]
        place.view(-1)[7 % place.numel()] = number
        found, case = with_gradients(rule, x), (rule, name, number, token)
        assert torch.equal(found["out"][0, 0], clean[0, 0]), case
        if name != "state":
            assert torch.equal(found["out"][0, 1, :token], clean[0, 1, :token]), case
        for result, truth in with_gradients(rule, doubles(x), "reference").items():
            finite = truth.isfinite()
            y, z = found[result][finite].double(), truth[finite]
            assert y.isfinite().all() and (y - z).norm() <= 5e-3 * z.norm(), (result, *case)
