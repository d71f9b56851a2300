"""An update rule, defined by the step of one token on the memory.

B batch, H heads, L tokens, Dk size of a key, Dv size of a value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import chunks, fla, self_check
from .arguments import PER_KEY, PER_VALUE, Shape, check_arguments, first_state, retrieve, state_dtype
from .dispatch import BACKENDS, is_transformed, require_kernel, too_large

Results = tuple[Tensor, Tensor]
REFERENCE = "use backend='reference', which layers take too"
SIZES = {"B", "H", "L", "N", "Dk", "Dv"}


@dataclass(frozen=True, eq=False)
class Rule:
    """An update rule as a function of tensors: state in, state out, no parameters.

    name: of the function, for errors.
    step: the definition of the rule: (memory, k_t, v_t, *gates_t) -> memory after token t, all in the state's dtype.
        Memory (B, H, Dk, Dv); a token's key (B, H, Dk), value (B, H, Dv), and gate of one number (B, H, 1).
    gates: names of the arguments between v and state, and the shapes that each may have.
    family: the rule as a case of ``fast_weights``, which has kernels: (q, k, v, *gates, state=, first=) -> results.
        None: the step itself runs, and the backward pass runs it again, for one chunk of tokens at a time.
    key, value: shapes of k and v.
    """

    name: str
    step: Callable[..., Tensor]
    gates: Mapping[str, tuple[Shape, ...]] = field(default_factory=dict)
    family: Callable[..., Results] | None = None
    key: Shape = PER_KEY
    value: Shape = PER_VALUE
    _compute: Callable[..., Results] = field(init=False)

    def __post_init__(self) -> None:
        self._check_form()
        object.__setattr__(self, "_compute", self.family or chunks.make_operator(self))
        object.__setattr__(self, "__doc__", self.step.__doc__)

    def __call__(self, *arguments: Any, first: Tensor | None = None, backend: str = "auto", **named: Any) -> Results:
        """Return out (B, H, L, Dv) and the new state. Arguments: q, k, v, gates and state, in this order or by name."""
        names = ("q", "k", "v", *self.gates, "state")
        given = dict(zip(names, arguments, strict=False)) | named
        if len(arguments) > len(names) or {*names[:-1]} - {*given} or {*given} - {*names}:
            by_name = f" and {', '.join(named)} by name" if named else ""
            raise TypeError(
                f"the arguments of {self.name} must be {', '.join(names[:-1])} and, if wanted, state, by position or "
                f"by name, and first and backend only by name, got {len(arguments)} by position{by_name}"
            )
        if twice := {*names[: len(arguments)]} & {*named}:
            raise TypeError(f"{self.name} must get arguments once, got two values of {', '.join(sorted(twice))}")
        state = given.pop("state", None)
        return self.run(*(given[name] for name in names[:-1]), state=state, first=first, backend=backend)

    def run(
        self, *tokens: Tensor, state: Tensor | None = None, first: Tensor | None = None, backend: str = "auto"
    ) -> Results:
        """Return the same for q, k, v and the gates in their order."""
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if backend == "fla":
            self.check(*tokens, state=state, first=first)
            return fla.run(self.name, dict(zip(("q", "k", "v", *self.gates), tokens, strict=True)), state, first)
        if backend == "kernel":
            self._require_kernel(tokens[0])
        if backend == "reference" or (
            backend == "auto" and (too_large(*tokens[:3:2]) or self._is_distrusted(tokens[0]))
        ):
            self.check(*tokens, state=state, first=first)
            return self.reference(*tokens, state=state, first=first)
        if torch.compiler.is_compiling():
            self.check(*tokens, state=state, first=first)
            return self._compute(*tokens, state=state, first=first)
        if forward_ad._current_level >= 0:
            self._refuse_tangents(*tokens, state)
        # On small inputs the checks cost several times as much as the kernel, which checks its arguments itself. So
        # they only run after it fails, to explain the error.
        try:
            return self._compute(*tokens, state=state, first=first)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            self.check(*tokens, state=state, first=first)
            if is_transformed():
                raise NotImplementedError(f"{self.name} has no derivative in torch.func: {REFERENCE}") from error
            raise

    def reference(self, *tokens: Tensor, state: Tensor | None = None, first: Tensor | None = None) -> Results:
        """Return the result of a loop over the step, which is differentiable any number of times."""
        q, _, v = tokens[:3]
        reads: list[Tensor] = []
        memory = like = first_state(q, v, state)
        with torch.autocast(q.device.type, enabled=False):
            for q_t, *token, is_first in self.unbind(*tokens, first=first):
                if is_first is not None:
                    memory = memory.masked_fill(is_first, 0)
                memory = self.step(memory, *token)
                if not reads:
                    self._check_step(memory, like)
                reads.append(retrieve(q_t, memory))
        out = torch.stack(reads, 2).to(v.dtype) if reads else v.flatten(2, -2).clone()
        return out, memory

    def unbind(self, *tokens: Tensor, first: Tensor | None = None) -> Any:
        """Iterate over the tokens: q_t, k_t, v_t, the gates (B, H, 1) or wider, and first (B, 1, 1, 1) or None."""
        dtype = state_dtype(tokens[0].dtype)
        # unbind, because the backward pass of indexing token by token is quadratic in L.
        parts = [(x.unsqueeze(-1) if x.dim() == 3 else x).to(dtype).unbind(2) for x in tokens]
        firsts = [None] * tokens[0].shape[2] if first is None else first[:, None, :, None, None].unbind(2)
        return zip(*parts, firsts, strict=True)

    def check(self, *tokens: Tensor, state: Tensor | None = None, first: Tensor | None = None) -> None:
        """Raise ValueError or TypeError, in one sentence, unless the arguments fit one another."""
        shapes = [(PER_KEY,), (self.key,), (self.value,), *self.gates.values()]
        named = zip(("q", "k", "v", *self.gates), zip(tokens, shapes, strict=True), strict=True)
        check_arguments(self.name, dict(named), state, first)

    def _check_form(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"the name of a rule must be an identifier such as my_rule, got {self.name!r}")
        if not isinstance(self.gates, Mapping):
            raise ValueError(f"{self.name}: gates must be a mapping of names to shapes, got {self.gates!r}")
        for gate, shapes in self.gates.items():
            if gate in ("q", "k", "v", "state", "first", "backend") or not gate.isidentifier():
                raise ValueError(f"{self.name}: the name of a gate must be an unused identifier, got {gate!r}")
            if not shapes or not all(isinstance(shape, tuple) and {*shape} <= SIZES for shape in shapes):
                raise ValueError(
                    f"{self.name}: the shapes of {gate} must be a tuple such as (ops.PER_TOKEN,), got {shapes!r}"
                )

    def _check_step(self, memory: Any, like: Tensor) -> None:
        """Check the shape of a step's result: a wrong one would be broadcast silently."""
        got = f"{tuple(memory.shape)} of {memory.dtype}" if isinstance(memory, Tensor) else type(memory).__name__
        expected = f"{tuple(like.shape)} of {like.dtype}"
        if got != expected:
            raise TypeError(f"{self.name}: the step must return the memory, {expected}, got {got}")

    def _require_kernel(self, q: Any) -> None:
        if self.family is None:
            raise RuntimeError(f"{self.name} has no compiled kernel: use backend='auto' or 'reference'")
        if isinstance(q, Tensor):
            require_kernel(q.device.type)
            self._is_distrusted(q, required=True)

    def _is_distrusted(self, q: Any, required: bool = False) -> bool:
        """Return whether the kernel has failed its check; raise RuntimeError if it failed and is required."""
        if self.family is None or not isinstance(q, Tensor) or q.device.type not in self_check.CHECKED:
            return False
        return self_check.distrusted(self.name, str(q.device), required)

    def _refuse_tangents(self, *arguments: Tensor | None) -> None:
        """Refuse forward-mode derivatives, which would silently be zero; loaded kernels refuse them themselves."""
        if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
            raise NotImplementedError(f"{self.name} has no derivative in forward mode: {REFERENCE}")
