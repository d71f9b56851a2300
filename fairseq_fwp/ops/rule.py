"""An update rule, defined by the step of one token on the memory.

B batch, H heads, L tokens, Dk size of a key, Dv size of a value.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from itertools import pairwise, starmap
from operator import index
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..kernels import self_check
from ..kernels.backend import require_kernel, too_large
from . import fla
from .arguments import PER_VALUE, SHARED_KEY, Results, Shape, check_arguments
from .operator import define, refuse_double_backward
from .reference import allocate, backward, forward, loop

BACKENDS = ("auto", "kernel", "fla", "reference")
REFERENCE = "use backend='reference', which layers take too"
OPTIONS = {"first": None, "backend": "auto", "states_after": None}  # by name only, with their defaults
SIZES = {"B", "H", "Hk", "L", "N", "Dk", "Dv"}


def is_transformed() -> bool:
    """Return whether a transform of torch.func, or forward mode, is active."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


@dataclass(frozen=True, eq=False, repr=False)
class Rule:
    """An update rule as a function of tensors: state in, state out, no parameters.

    It has the name, the signature, the help text and the source of a function, and is pickled as one: by its name in
    the module of its step.

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
    key: Shape = SHARED_KEY
    value: Shape = PER_VALUE
    _compute: Callable[..., Results] = field(init=False)

    def __post_init__(self) -> None:
        self._check_form()
        object.__setattr__(self, "_compute", self.family or make_operator(self))
        names = [*("q", "k", "v", *self.gates)]
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        parameters.append(Parameter("state", Parameter.POSITIONAL_OR_KEYWORD, default=None))
        parameters += [Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in OPTIONS.items()]
        of_function: dict[str, object] = {
            "__name__": self.name,
            "__qualname__": self.name,
            "__module__": self.step.__module__,
        }
        of_function |= {"__doc__": self.step.__doc__, "__signature__": Signature(parameters), "__wrapped__": self.step}
        for attribute, value in of_function.items():
            object.__setattr__(self, attribute, value)

    def __repr__(self) -> str:
        return f"{self.name}{Signature.from_callable(self)}"

    def __reduce__(self) -> str:
        return self.name

    @overload
    def __call__(
        self,
        *arguments: Tensor | None,
        first: Tensor | None = None,
        backend: str = "auto",
        states_after: None = None,
        **named: Tensor | None,
    ) -> Results: ...

    @overload
    def __call__(
        self,
        *arguments: Tensor | None,
        first: Tensor | None = None,
        backend: str = "auto",
        states_after: Sequence[int],
        **named: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def __call__(
        self,
        *arguments: Any,
        first: Tensor | None = None,
        backend: str = "auto",
        states_after: Sequence[int] | None = None,
        **named: Any,
    ) -> tuple[Tensor, ...]:
        """Return out (B, H, L, Dv) and the new state. Arguments: q, k, v, gates and state, in this order or by name."""
        # The usual forms, without the microseconds that sorting the arguments needs.
        count = 3 + len(self.gates)
        if states_after is None and len(arguments) == count + 1 and not named:
            return self.run(*arguments[:-1], state=arguments[-1], first=first, backend=backend)
        if states_after is None and len(arguments) == count and named.keys() <= {"state"}:
            return self.run(*arguments, **named, first=first, backend=backend)
        names = ("q", "k", "v", *self.gates, "state")
        values = dict(zip(names, arguments, strict=False)) | named
        if len(arguments) > len(names) or {*names[:-1]} - {*values} or {*values} - {*names}:
            by_name = f" and {', '.join(named)} by name" if named else ""
            raise TypeError(
                f"the arguments of {self.name} must be {', '.join(names[:-1])} and, if wanted, state, by position or "
                f"by name, and first, backend and states_after only by name, got {len(arguments)} by position{by_name}"
            )
        if twice := {*names[: len(arguments)]} & {*named}:
            raise TypeError(f"{self.name} must get arguments once, got two values of {', '.join(sorted(twice))}")
        state = values.pop("state", None)
        tokens = [values[name] for name in names[:-1]]
        if states_after is None:
            return self.run(*tokens, state=state, first=first, backend=backend)
        try:
            ends = [*map(index, states_after)]
        except TypeError:
            raise TypeError(f"{self.name}: states_after must be a list of integers, got {states_after!r}") from None
        return self._run_pieces(tokens, state, first, backend, ends)

    def run(
        self, *tokens: Tensor, state: Tensor | None = None, first: Tensor | None = None, backend: str = "auto"
    ) -> Results:
        """Return the same for q, k, v and the gates in their order."""
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if any(x is None for x in tokens):  # which some rules would take for another rule
            self.check(*tokens, state=state, first=first)
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

    def _run_pieces(
        self, tokens: list[Tensor], state: Tensor | None, first: Tensor | None, backend: str, ends: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return out, the new state and the states after some numbers of tokens (B, H, n, Dk, Dv)."""
        self.check(*tokens, state=state, first=first)
        length = tokens[0].shape[2]
        if not all(before < after for before, after in pairwise((0, *ends, length + 1))):
            raise ValueError(f"{self.name}: states_after must be ascending numbers in [1, {length}], got {ends}")
        outs, states = [], []
        for piece in starmap(slice, pairwise((0, *ends, length))):
            some, some_first = [x[:, :, piece] for x in tokens], None if first is None else first[:, piece]
            out, state = self.run(*some, state=state, first=some_first, backend=backend)
            outs.append(out)
            states.append(state)
        return torch.cat(outs, 2), states[-1], torch.stack(states, 2)[:, :, :-1]

    def reference(self, *tokens: Tensor, state: Tensor | None = None, first: Tensor | None = None) -> Results:
        """Return the result of a loop over the step, which is differentiable any number of times."""
        return loop(self.name, self.step, tokens, state, first)

    def check(self, *tokens: Tensor, state: Tensor | None = None, first: Tensor | None = None) -> None:
        """Raise ValueError or TypeError, in one sentence, unless the arguments fit one another."""
        shapes = [(SHARED_KEY,), (self.key,), (self.value,), *self.gates.values()]
        named = zip(("q", "k", "v", *self.gates), zip(tokens, shapes, strict=True), strict=True)
        check_arguments(self.name, dict(named), state, first)

    def _check_form(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"the name of a rule must be an identifier such as my_rule, got {self.name!r}")
        if not callable(self.step):
            raise ValueError(f"{self.name}: step must be a function of the memory and a token, got {self.step!r}")
        if not isinstance(self.gates, Mapping):
            raise ValueError(f"{self.name}: gates must be a mapping of names to shapes, got {self.gates!r}")
        for gate, shapes in self.gates.items():
            if gate in ("q", "k", "v", "state", "first", "backend", "states_after") or not gate.isidentifier():
                raise ValueError(f"{self.name}: the name of a gate must be an unused identifier, got {gate!r}")
            if not shapes or not all(isinstance(shape, tuple) and {*shape} <= SIZES for shape in shapes):
                raise ValueError(
                    f"{self.name}: the shapes of {gate} must be a tuple such as (ops.PER_TOKEN,), got {shapes!r}"
                )

    def _require_kernel(self, q: object) -> None:
        if self.family is None:
            raise RuntimeError(f"{self.name} has no compiled kernel: use backend='auto' or 'reference'")
        if isinstance(q, Tensor):
            require_kernel(q.device.type)
            self._is_distrusted(q, required=True)

    def _is_distrusted(self, q: object, required: bool = False) -> bool:
        """Return whether the kernel has failed its check; raise RuntimeError if it failed and is required."""
        if self.family is None or not isinstance(q, Tensor) or q.device.type not in self_check.CHECKED:
            return False
        return self_check.distrusted(self.name, str(q.device), required)

    def _refuse_tangents(self, *arguments: Tensor | None) -> None:
        """Refuse forward-mode derivatives, which would silently be zero; loaded kernels refuse them themselves."""
        if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
            raise NotImplementedError(f"{self.name} has no derivative in forward mode: {REFERENCE}")


def _free_name(name: str) -> str:
    """Return the name, with a number if such an operator exists already, from this package or the same rule."""
    free, number = name, 1
    while any(hasattr(torch.ops.fwp, taken) for taken in (free, f"{free}_backward")):
        number += 1
        free = f"{name}_{number}"
    return free


def make_operator(rule: Rule) -> Callable[..., Results]:
    """Return the rule as an operator ``fwp::<name>`` of PyTorch, with its fake and its autograd."""
    name, names = _free_name(rule.name), ("q", "k", "v", *rule.gates)
    tensors = ", ".join(f"Tensor {tensor}" for tensor in names)
    schema = f"({tensors}, Tensor? state, Tensor? first) -> (Tensor, Tensor, Tensor)"

    @define(name, schema)
    def op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tokens, state, first = arguments
        rule.check(*tokens, state=state, first=first)
        return forward(rule.reference, tuple(tokens), state, first)

    @torch.library.register_fake(op)
    def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tokens, state, first = arguments
        rule.check(*tokens, state=state, first=first)
        return allocate(tokens[0], tokens[2])

    schema = f"({tensors}, Tensor? first, Tensor starts, Tensor? grad_out, Tensor? grad_state) -> Tensor[]"

    @define(f"{name}_backward", schema)
    def op_backward(*arguments: Any) -> list[Tensor]:
        *tokens, first, starts, grad_out, grad_state = arguments
        return backward(rule.reference, tuple(tokens), first, starts, grad_out, grad_state)

    @torch.library.register_fake(op_backward)
    def _(*arguments: Any) -> list[Tensor]:
        *tokens, _, _, _, _ = arguments
        return [*(x.new_empty(x.shape) for x in tokens), allocate(tokens[0], tokens[2])[1]]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tokens, state, first = inputs
        ctx.has_state = state is not None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*tokens, first, output[2])

    def differentiate(ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None, _: None) -> tuple[Any, ...]:
        *grads, of_state = op_backward(*ctx.saved_tensors, grad_out, grad_state)
        return *grads, of_state if ctx.has_state else None, None

    torch.library.register_autograd(op, differentiate, setup_context=setup_context)
    refuse_double_backward(op_backward)

    def run(*tokens: Tensor, state: Tensor | None, first: Tensor | None) -> Results:
        return op(*tokens, state, first)[:2]

    return run
