"""The rules under test, all of `ops.rules` in all forms, and the inputs and gradients for every law."""

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_fwp import ops
from fairseq_fwp.ops import rules
from fairseq_fwp.ops.fast_weights import Inputs, fast_weights, reference_of
from fairseq_fwp.ops.fla import FORMS

# The laws hold for any inputs: FWP_TEST_SEED=$RANDOM bash tests/run.sh uses others.
SEED = int(os.environ.get("FWP_TEST_SEED", "0"))
PER_TOKEN, PER_KEY, PER_VALUE = ("B", "H", "L"), ("B", "H", "L", "Dk"), ("B", "H", "L", "Dv")
STEPS = 2  # of delta_product, a token


@dataclass(frozen=True)
class Subject:
    function: Callable[..., tuple[Tensor, Tensor]]
    reference: Callable[..., tuple[Tensor, Tensor]]
    gates: dict[str, tuple[str, ...]] = field(default_factory=dict)  # arguments next to q, k, v, state; their sizes
    kernel: bool = True  # whether there is a compiled kernel to compare with the reference
    key: tuple[str, ...] = PER_KEY
    value: tuple[str, ...] = PER_VALUE


def every_form() -> dict[str, Subject]:
    """Return each rule in each form of its gates, by a name such as gla_by_key: a decay for each dimension of a key."""
    forms: dict[str, Subject] = {}
    for rule in rules.RULES:
        name, function = rule.name.removesuffix("_rule"), getattr(ops, rule.name)
        for shapes in itertools.product(*rule.gates.values()):
            gates = dict(zip(rule.gates, shapes, strict=True))
            by_key = "_by_key" if len(rule.gates.get("decay", ())) > 1 and gates["decay"] == PER_KEY else ""
            reference, kernel = functools.partial(function, backend="reference"), rule.has_kernel
            key = tuple("H" if size == "Hk" else size for size in rule.key)
            forms[name + by_key] = Subject(function, reference, gates, kernel, key, rule.value)
    return forms


RULES = every_form()
WITH_KERNEL = [name for name, rule in RULES.items() if rule.kernel]
IN_FLA = [
    name
    for name, rule in RULES.items()
    if rule.function.__name__ in FORMS and name != "gated_delta_product_by_key"  # which fla lacks
]


def combination(erases: bool = False, **gates: tuple[str, ...]) -> Subject:
    """Return a case of the family's operator and its step."""

    def reference(**given: Any) -> tuple[Tensor, Tensor]:
        made = Inputs(**given, erases=erases)
        return reference_of(made)(*made.tokens, state=made.state, first=made.first)

    return Subject(functools.partial(fast_weights, erases=erases), reference, gates)


REMOVAL = {"removal_key": PER_KEY, "removal": PER_KEY}
# Those that no rule here needs.
COMBINATIONS = {
    "erases without a rate": combination(erases=True),
    "erases without a rate, decay": combination(erases=True, decay=PER_TOKEN),
    "a rate alone": combination(rate=PER_TOKEN),
    "a rate, decay by key": combination(decay=PER_KEY, rate=PER_TOKEN),
    "value decay alone": combination(value_decay=PER_VALUE),
    "value decay and decay": combination(decay=PER_TOKEN, value_decay=PER_VALUE),
    "removal without decay": combination(**REMOVAL),
    "removal, rate and decay": combination(decay=PER_TOKEN, rate=PER_TOKEN, **REMOVAL),
}
# Gates with the share of the memory that is kept.
FADING = {"gate", "decay", "key_decay", "value_decay"}
# Sizes with states in registers, in chunks, with the quadratic form at the start, and token by token.
BIT_SHAPES = [(3, 2, 200, 16, 16), (2, 2, 150, 64, 64), (2, 1, 140, 256, 64), (2, 1, 150, 17, 33), (3, 1, 200, 40, 3)]
LAYOUTS = ("contiguous", "tokens_first", "sliced", "expanded", "odd")
# Of `check_errors`. Tensor cores truncate a sum after its last place, where the reference rounds it.
FLOOR = torch.finfo(torch.float32).eps
OF_TILES = {"state": 1e-5, "d_state": 1e-5}  # of bfloat16, by a processor with AMX
DRAWS, CLEAR = 8, 0.85


def fastest_backend(rule: str) -> str:
    return "kernel" if RULES[rule].kernel else "auto"


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def generator_of(seed: int) -> torch.Generator:
    """Return a generator of the default device, which is the GPU in test_cuda.py."""
    return torch.Generator(torch.empty(0).device).manual_seed(seed + 1000 * SEED)


def sample_inputs(
    rule: str,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype = torch.float64,
    *,
    state: bool = True,
    layout: str = "contiguous",
    forgetful: bool = False,
    seed: int = 0,
) -> dict[str, Tensor | None]:
    """Return arguments of a rule, or of one of COMBINATIONS, by name.

    Keys are normalised as in a layer (their sum is one), rates are in (0, 1).

    ``forgetful``: keys of length one in all directions, with which the delta rule forgets within about Dk tokens, and
    rounding errors of the reference with them.
    """
    batch, heads, _, key_size, value_size = shape
    generator, of = generator_of(seed), (RULES | COMBINATIONS)[rule]

    def draw(*size: int, kind: Callable[..., Tensor] = torch.randn) -> Tensor:
        if layout == "expanded":
            return kind(size[0], 1, *size[2:], generator=generator, dtype=torch.float64).to(dtype).expand(size)
        if layout == "tokens_first":
            drawn = kind(size[0], size[2], size[1], *size[3:], generator=generator, dtype=torch.float64).to(dtype)
            return drawn.transpose(1, 2)
        if layout == "sliced":
            drawn = kind(*size[:2], 2 * size[2], *(3 * n for n in size[3:]), generator=generator, dtype=torch.float64)
            return drawn.to(dtype)[(..., slice(None, None, 2), *[slice(None, None, 3)] * (len(size) - 3))]
        drawn = kind(*size, generator=generator, dtype=torch.float64).to(dtype)
        return at_odd_offset(drawn) if layout == "odd" else drawn

    sizes = dict(zip(("B", "H", "L", "Dk", "Dv"), shape, strict=True)) | {"N": STEPS}

    def size(*names: str) -> list[int]:
        return [sizes[name] for name in names]

    inputs: dict[str, Tensor | None] = {}
    inputs["q"] = draw(*size(*PER_KEY))
    key_shape = size(*of.key)
    inputs["k"] = draw(*key_shape, kind=torch.rand) / (key_size / 2 or 1)
    if forgetful:
        directions = torch.randn(key_shape, generator=generator, dtype=torch.float64)
        inputs["k"] = torch.nn.functional.normalize(directions, dim=-1).to(dtype)
    inputs["v"] = draw(*size(*of.value))
    for gate, names in of.gates.items():
        inputs[gate] = draw(*size(*names), kind=torch.rand)
        if gate in ("removal_key", "removal"):  # of length one, as removal keys are
            inputs[gate] = inputs[gate] / (key_size / 2 or 1)
    initial = torch.randn(batch, heads, key_size, value_size, generator=generator, dtype=torch.float64)
    initial = initial.to(state_dtype(dtype))
    inputs["state"] = (at_odd_offset(initial) if layout == "odd" else initial) if state else None
    return inputs


def operands(rule: str, inputs: dict[str, Tensor | None]) -> tuple[Any, ...]:
    """Return the arguments that the rule passes to the operator of the family."""

    class Spy(TorchDispatchMode):
        seen: tuple[Any, ...] = ()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.fwp.fast_weights.default:
                self.seen = args[:11]  # whether states are kept is not the rule's choice
            return func(*args, **(kwargs or {}))

    with Spy() as spy, torch.no_grad():
        RULES[rule].function(**inputs)
    return spy.seen


def cotangents(inputs: dict[str, Tensor | None], seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return random gradients of out and of the final state."""
    q, v = inputs["q"], inputs["v"]
    assert q is not None and v is not None
    generator = generator_of(seed)
    of_out = torch.randn((*q.shape[:3], v.shape[-1]), generator=generator, dtype=torch.float64).to(v.dtype)
    of_state = torch.randn((*q.shape[:2], q.shape[3], v.shape[-1]), generator=generator, dtype=torch.float64)
    return of_out, of_state.to(state_dtype(v.dtype))


def results(
    function: Callable[..., tuple[Tensor, Tensor]],
    inputs: dict[str, Tensor | None],
    gradients: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """Return outputs and all gradients, by name."""
    leaves = {name: None if x is None else x.detach().requires_grad_() for name, x in inputs.items()}
    out, state = function(**leaves)
    given = {name: x for name, x in leaves.items() if x is not None}
    found = torch.autograd.grad((out, state), list(given.values()), gradients, materialize_grads=True)
    return {"out": out.detach(), "state": state.detach()} | {
        f"d_{name}": x for name, x in zip(given, found, strict=True)
    }


def on_tiles(rule: str) -> bool:
    """Return whether the CPU multiplies tiles of bfloat16 in long heads: rules without removal or value decays."""
    choice = os.environ.get("FWP_CPU_TILES", "auto")
    info = Path("/proc/cpuinfo")
    has_amx = info.exists() and "amx_bf16" in info.read_text(errors="replace")
    has_tiles = {"removal_key", "erase", "value_decay"}.isdisjoint(RULES[rule].gates)
    return has_tiles and (choice == "emulated" or (choice == "auto" and has_amx))


def at_odd_offset(x: Tensor) -> Tensor:
    """Return the same numbers in a storage in which they begin one number later, so not at a multiple of 16 bytes."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Return the root mean square of the error, divided by that of the truth."""
    if truth.numel() == 0:
        return 0.0
    return ((found.double() - truth).norm() / truth.norm().clamp_min(1e-300)).item()


def kernel_or_auto(rule: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the implementation of "auto": the kernel, if the rule has one."""
    return functools.partial(RULES[rule].function, backend=fastest_backend(rule))


def check_errors(case: str, draw: Callable[[int], Sequence[dict[str, Tensor]]], floors: dict[str, float]) -> None:
    """Check that errors against float64 are at most twice those of the reference in the same precision, or FLOOR.

    Squared errors are summed over draws, because in one draw a single number may make up most of them. Draws are added
    until all errors are CLEAR of the bound, at most DRAWS.

    Args:
        draw: returns the results of the reference in float64, of the reference, and of the kernel, for draw n.
        floors: other floors for some results, if they are in float32.
    """
    norms: dict[str, Tensor] = {}
    for n in range(DRAWS):
        truth, loop, found = draw(n)
        clear = True
        for name, x in truth.items():
            y, z = found[name], loop[name]
            what = f"{name} {tuple(x.shape)} in {z.dtype} of {case}"
            assert y.shape == x.shape and y.dtype == z.dtype and y.isfinite().all(), f"{what}, draw {n}"
            of_draw = torch.stack([(y.double() - x).norm(), (z.double() - x).norm(), x.norm()])
            norms[name] = torch.hypot(norms.get(name, torch.zeros_like(of_draw)), of_draw)
            error, of_reference, _ = (norms[name] / norms[name][2].clamp_min(1e-300)).tolist()
            allowed = max(2 * of_reference, floors.get(name, FLOOR) if z.dtype == torch.float32 else FLOOR)
            said = f"error {error:.3g}, of the reference {of_reference:.3g}, allowed {allowed:.3g}, in {n + 1} draws"
            assert n + 1 < DRAWS or error <= allowed, f"{what}: {said}"
            clear = clear and error <= CLEAR * allowed
        if clear:
            return


def check_accuracy(
    rule: str,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    change: Callable[[dict[str, Tensor | None]], object] = lambda inputs: None,
    **options: Any,
) -> None:
    """Check the errors of a rule's kernel; arguments as for `sample_inputs`, and a function that changes its inputs."""

    def draw(n: int) -> list[dict[str, Tensor]]:
        inputs = sample_inputs(rule, shape, dtype, seed=2 * n, **options)
        change(inputs)
        gradients = cotangents(inputs, seed=2 * n + 1)
        exact = {name: None if x is None else x.double() for name, x in inputs.items()}
        return [
            results(RULES[rule].reference, exact, (gradients[0].double(), gradients[1].double())),
            results(RULES[rule].reference, inputs, gradients),
            results(kernel_or_auto(rule), inputs, gradients),
        ]

    floors = OF_TILES if dtype == torch.bfloat16 and min(shape[3:]) >= 48 and on_tiles(rule) else {}
    check_errors(f"{rule}, {shape}, {dtype}, {options}", draw, floors)
