"""The operator of the whole family: one equation; each rule uses the terms that it needs.

    W'  = (a_t^T z_t) * W_{t-1}                                     a decay, z value_decay (* element-wise)
    W_t = W' + k_t^T b_t (v_t - k_t W') - x_t^T (y_t W_{t-1})             out_t = q_t W_t

b is the rate; ``erases`` says whether the term k_t W' exists. What y, the removal_key, retrieves is subtracted under x,
the removal. An absent input is one everywhere; an absent removal is zero. At tokens where ``first`` is set, W_{t-1} is
zero. q and k may have fewer heads than v: each then serves H / Hk consecutive heads.

Schema, fake implementation, checks and autograd of all rules with kernels are here. B batch, H heads, L tokens, Dk size
of a key, Dv size of a value.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from . import reference
from .arguments import (
    PER_KEY,
    PER_TOKEN,
    PER_VALUE,
    SHARED_KEY,
    Results,
    Shape,
    check_arguments,
    outer,
    retrieve,
    state_dtype,
)
from .kernels.backend import kernel_ready
from .operator import define, needs_gradient, refuse_double_backward

# Tokens between two states that kernels keep for the backward pass of a forgetting rule: kKeptEvery of cuda_ext/rule.h.
KEPT_EVERY = 32
OPTIONAL = {
    "decay": (PER_TOKEN, PER_KEY),
    "value_decay": (PER_VALUE,),
    "rate": (PER_TOKEN,),
    "removal_key": (PER_KEY,),
    "removal": (PER_KEY,),
}
TOKENS = ("q", "k", "v", *OPTIONAL)  # the inputs that have an entry for each token
DIFFERENTIABLE = (*TOKENS, "state")
# A rule's gate for each optional input that it has, and whether it erases: {"rate": "beta", "erases": True}.
Terms: TypeAlias = Mapping[str, str | bool]
SCHEMA = ", ".join(f"Tensor? {name}" for name in (*OPTIONAL, "state", "first")) + ", bool erases"


class Inputs(NamedTuple):
    """The operator's arguments, in their order; shapes and dtypes are checked by :func:`_check`."""

    q: Tensor
    k: Tensor
    v: Any  # a tensor; None in the backward pass of a rule that erases, which only needs `retrieved`
    decay: Tensor | None = None  # the share that is kept
    value_decay: Tensor | None = None  # only for rules without rate, erasing and removal
    rate: Tensor | None = None
    removal_key: Tensor | None = None
    removal: Tensor | None = None
    state: Tensor | None = None
    first: Tensor | None = None
    erases: bool = False
    keeps: bool = True  # whether a backward pass may follow: without one, kernels keep nothing for it

    def parts(self, names: Iterable[str]) -> tuple[Any, ...]:
        """Return the inputs of these names, None for those that are absent."""
        return tuple(getattr(self, name) for name in names)

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        """The given tensors that have an entry for each token."""
        return tuple(x for x in self.parts(TOKENS) if x is not None)

    @property
    def keeps_states(self) -> bool:
        """Whether kernels keep states for the backward pass: keeps_states() of cuda_ext/rule.h."""
        forgets = self.decay is not None or self.value_decay is not None
        return self.keeps and (forgets or self.removal_key is not None or (self.rate is not None and not self.erases))


def fast_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    value_decay: Tensor | None = None,
    rate: Tensor | None = None,
    removal_key: Tensor | None = None,
    removal: Tensor | None = None,
    state: Tensor | None = None,
    first: Tensor | None = None,
    erases: bool = False,
) -> Results:
    """Return out (B, H, L, Dv) and the new state (B, H, Dk, Dv) for the inputs of :class:`Inputs`."""
    forgets = decay is not None or value_decay is not None or removal_key is not None
    if q.is_cuda and q.dtype == torch.bfloat16 and first is not None and not forgets:
        # On tensor cores only kernels with decays take several documents. Here, not in C++: they also keep states.
        decay = q.new_ones(()).expand(v.shape[:3])
    given = (q, k, v, decay, value_decay, rate, removal_key, removal, state, first)
    keeps = needs_gradient(*given) or q.is_cuda
    out, memory, *_ = _forward(*given, erases, keeps)  # kernels on a GPU read the states that they keep
    return out, memory


def check_terms(rule: str, terms: Terms, gates: Mapping[str, tuple[Shape, ...]]) -> None:
    """Raise ValueError for terms that are not in the equation, or not of such gates. gates: as of `Rule`."""
    if not isinstance(terms, Mapping):
        raise ValueError(f"{rule}: as_fast_weights must be a function or the gate of each term, got {terms!r}")
    for term, gate in terms.items():
        if term == "erases" and isinstance(gate, bool):
            continue
        if term not in OPTIONAL or str(gate) not in gates or not {*gates[str(gate)]} <= {*OPTIONAL[term]}:
            known = ", ".join(f"{name} {' or '.join(map(str, shapes))}" for name, shapes in OPTIONAL.items())
            known += ", erases True or False"
            got = f"{term!r}: {gate!r} of {gates.get(str(gate), 'no shape')}"
            raise ValueError(f"{rule}: as_fast_weights must give gates of these shapes: {known}; got {got}")
    _check_combination(f"{rule}: as_fast_weights", terms, bool(terms.get("erases")))


def _check_combination(where: str, terms: Collection[str], erases: bool) -> None:
    """Raise ValueError for optional inputs that do not go together."""
    removes = "removal_key" in terms
    if removes != ("removal" in terms):
        raise ValueError(f"{where}: removal_key and removal must be given together, got only one")
    if erases and removes:
        raise ValueError(f"{where}: erases must be False with removal_key and removal, got True")
    if "value_decay" in terms and ("rate" in terms or erases or removes):
        raise ValueError(f"{where}: value_decay must be None with a rate, erasing or removal, got a tensor")


def reference_of(inputs: Inputs) -> Callable[..., Results]:
    """Return the definition for these inputs: (*inputs.tokens, state=, first=) -> out and the new state."""
    names = [name for name in OPTIONAL if getattr(inputs, name) is not None]

    def step(memory: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        gate = dict(zip(names, gates, strict=True))
        faded = gate["decay"].unsqueeze(-1) * memory if "decay" in gate else memory
        faded = faded * gate["value_decay"].unsqueeze(-2) if "value_decay" in gate else faded
        write = v - retrieve(k, faded) if inputs.erases else v
        after = faded + outer(k, gate["rate"] * write if "rate" in gate else write)
        return after - outer(gate["removal"], retrieve(gate["removal_key"], memory)) if "removal" in gate else after

    return lambda *tokens, state, first: reference.loop("fast_weights", step, tokens, state, first)


def _check(inputs: Inputs) -> None:
    _check_combination("fast_weights", [x for x in OPTIONAL if getattr(inputs, x) is not None], inputs.erases)
    shapes = {"q": (SHARED_KEY,), "k": (SHARED_KEY,), "v": (PER_VALUE,), **OPTIONAL}
    tensors = {name: (getattr(inputs, name), shapes[name]) for name in shapes if getattr(inputs, name) is not None}
    check_arguments("fast_weights", tensors, inputs.state, inputs.first)


@define("fast_weights", f"(Tensor q, Tensor k, Tensor v, {SCHEMA}, bool keeps=True) -> ({', '.join(['Tensor'] * 5)})")
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return out, the new state, and three tensors for the backward pass, empty if they are not needed.

    retrieved: (B, H, L, Dv) in the state's dtype. From kernels: the errors v_t - k_t W' of a rule that erases, or the
        y_t W_{t-1} of a rule that removes. Here: v of a rule that erases, otherwise uninitialised.
    kept: (B, H, L // KEPT_EVERY, Dk, Dv), states from kernels, unless the rule only adds or only corrects, or `keeps`
        is False. Here: uninitialised.
    segments: (B, H, segments, Dk + Dv, Dk), from kernels on a GPU's tensor cores, which compute segments of a sequence
        side by side: the state before each, and its transition. Here: uninitialised.
    """
    inputs = Inputs(*arguments)
    _check(inputs)
    if kernel_ready(inputs.q.device.type):  # the library is loaded: its operator replaces this one
        return torch.ops.fwp.fast_weights(*inputs)
    out, _, retrieved, kept, segments = _allocate(inputs)
    computed, state, _ = reference.forward(reference_of(inputs), inputs.tokens, inputs.state, inputs.first)
    if inputs.erases and inputs.keeps:
        retrieved.copy_(inputs.v)
    return out.copy_(computed), state, retrieved, kept, segments


def segments_of(heads: int, length: int) -> int:
    """Return the greatest number of a sequence's segments on tensor cores, 4 or more, or 0: as cuda_ext/rule.h."""
    segments = torch.sym_min(length // 256, 128) // torch.sym_max(heads, 2)
    return segments * torch.sym_min(segments // 4, 1)  # without a branch: the length may be symbolic


def _allocate(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return uninitialised memory for the results."""
    q, v, dtype = inputs.q, inputs.v, state_dtype(inputs.q.dtype)
    sizes = (q.shape[3], v.shape[3])
    retrieves = inputs.keeps and (inputs.erases or inputs.removal_key is not None)
    retrieved = q.new_empty(v.shape if retrieves else (0,), dtype=dtype)
    segments = segments_of(*v.shape[1:3]) if q.is_cuda and q.dtype == torch.bfloat16 else 0
    shape_of_kept = (*v.shape[:2], v.shape[2] // KEPT_EVERY, *sizes) if inputs.keeps_states else (0,)
    heads, length = v.shape[1:3]
    # On a GPU the heads of a token lie side by side: a layer merges them without a copy.
    out = v.new_empty((v.shape[0], length, heads, v.shape[3])).transpose(1, 2) if q.is_cuda else v.new_empty(v.shape)
    return (
        out,
        q.new_empty((*v.shape[:2], *sizes), dtype=dtype),
        retrieved,
        q.new_empty(shape_of_kept, dtype=dtype),
        q.new_empty((*v.shape[:2], segments, sum(sizes), sizes[0]), dtype=dtype),
    )


@torch.library.register_fake(_forward)
def _(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = Inputs(*arguments)
    _check(inputs)
    return _allocate(inputs)


@define(
    "fast_weights_backward",
    f"(Tensor q, Tensor k, Tensor? v, {SCHEMA}, Tensor retrieved, Tensor kept, Tensor segments,"
    f" Tensor? grad_out, Tensor? grad_state) -> ({', '.join(['Tensor'] * 9)})",
)
def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, the optional tokens and the first state; (0,) for what is absent."""
    *of_forward, retrieved, _, _, grad_out, grad_state = arguments
    inputs = Inputs(*of_forward)
    if kernel_ready(inputs.q.device.type):
        return torch.ops.fwp.fast_weights_backward(*arguments)
    if inputs.erases:
        inputs = inputs._replace(v=retrieved.to(inputs.q.dtype))
    run, tokens = reference_of(inputs), inputs.tokens
    starts = reference.forward(run, tokens, inputs.state, inputs.first)[2]
    computed = iter(reference.backward(run, tokens, inputs.first, starts, grad_out, grad_state))
    grads = _allocate_gradients(inputs, retrieved)
    given = zip(inputs.parts(DIFFERENTIABLE), grads, strict=True)
    return tuple(empty if x is None else next(computed) for x, empty in given)


def _allocate_gradients(inputs: Inputs, retrieved: Tensor) -> tuple[Tensor, ...]:
    like = inputs._replace(v=retrieved.to(inputs.q.dtype) if inputs.v is None else inputs.v)
    return tuple(inputs.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in like.parts(DIFFERENTIABLE))


@torch.library.register_fake(_backward)
def _(*arguments: Any) -> tuple[Tensor, ...]:
    *of_forward, retrieved, _, _, _, _ = arguments
    return _allocate_gradients(Inputs(*of_forward), retrieved)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    named = Inputs(*inputs)
    ctx.erases = named.erases
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    saved = named._replace(v=None if named.erases else named.v).parts((*DIFFERENTIABLE, "first"))
    ctx.save_for_backward(*saved, *output[2:])


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None, *_: None) -> tuple[Any, ...]:
    *tensors, retrieved, kept, segments = ctx.saved_tensors
    grads = _backward(*tensors, ctx.erases, retrieved, kept, segments, grad_out, grad_state)
    needed = zip(grads, ctx.needs_input_grad, strict=False)  # which also has first, erases and keeps
    return *(grad if wanted else None for grad, wanted in needed), None, None, None


torch.library.register_autograd(_forward, _differentiate, setup_context=_setup_context)
refuse_double_backward(_backward)
