"""An update rule, defined by the step of one token on the memory.

B batch, H heads, L tokens, Dk size of a key, Dv size of a value.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from inspect import Parameter, Signature
from itertools import pairwise, starmap
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad

from . import fla
from .arguments import PER_VALUE, SHARED_KEY, Results, Shape, check_arguments
from .fast_weights import Terms, check_terms, fast_weights
from .kernels import self_check
from .kernels.backend import check_backend, require_kernel, warn_of_size
from .operator import define, is_transformed, refuse_double_backward
from .reference import allocate, backward, forward, loop

REFERENCE = "use backend='reference', which layers take too"
OPTIONS = {"first": None, "backend": "auto"}  # by name only, with their defaults
SIZES = {"B", "H", "Hk", "L", "N", "Dk", "Dv"}


class Rule:
    """An update rule as a function of tensors: state in, state out, no parameters.

    It has the name, the signature, the help text and the source of a function, and is pickled as one: by its name in
    the module of its step. It is immutable by convention.

    name: of the function, for errors.
    step: the definition of the rule: (memory, k_t, v_t, *gates_t) -> memory after token t, all in the state's dtype.
        Memory (B, H, Dk, Dv); a token's key (B, H, Dk), value (B, H, Dv), and gate of one number (B, H, 1).
    gates: names of the arguments between v and state, and the shapes that each may have.
    as_fast_weights: the rule as a case of ``fast_weights``, which has kernels. It names the gate of each term, such as
        {"rate": "beta", "erases": True}; or it is a function (q, k, v, *gates, state=, first=) -> results. None: the
        step itself runs, and the backward pass runs it again, for one chunk of tokens at a time.
    key, value: shapes of k and v.

    It has also `names`, of the tensors with an entry for each token.
    """

    def __init__(
        self,
        name: str,
        step: Callable[..., Tensor],
        gates: Mapping[str, tuple[Shape, ...]] = {},
        as_fast_weights: Terms | Callable[..., Results] | None = None,
        key: Shape = SHARED_KEY,
        value: Shape = PER_VALUE,
    ) -> None:
        _check_form(name, step, gates)
        self.name, self.step, self.gates, self.key, self.value = name, step, gates, key, value
        self.as_fast_weights = as_fast_weights
        self.names = ("q", "k", "v", *gates)
        if as_fast_weights is None:
            self._call_operator = make_operator(self)
        elif not callable(as_fast_weights):
            check_terms(name, as_fast_weights, gates)
            self._erases = bool(as_fast_weights.get("erases"))
            self._places = {term: [*gates].index(str(x)) for term, x in as_fast_weights.items() if term != "erases"}
        self._one_shape = [(i, len(shapes[0])) for i, shapes in enumerate(gates.values()) if len(shapes) == 1]
        update_wrapper(self, step, assigned=("__module__", "__doc__"), updated=())
        self.__name__ = self.__qualname__ = name
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in self.names]
        parameters.append(Parameter("state", Parameter.POSITIONAL_OR_KEYWORD, default=None))
        parameters += [Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in OPTIONS.items()]
        self.__signature__ = Signature(parameters)

    @property
    def has_kernel(self) -> bool:
        """Whether it is a case of ``fast_weights``, which compiled kernels can compute."""
        return self.as_fast_weights is not None

    def __repr__(self) -> str:
        return f"{self.name}{Signature.from_callable(self)}"

    def __reduce__(self) -> str:
        return self.name

    def __call__(self, *arguments: Any, first: Tensor | None = None, backend: str = "auto", **named: Any) -> Results:
        """Return out (B, H, L, Dv) and the new state. Arguments: q, k, v, gates and state, in this order or by name."""
        count = len(self.names)
        if not named and len(arguments) in (count, count + 1):  # the rest costs microseconds
            state = arguments[count] if len(arguments) > count else None
            return self.run(*arguments[:count], state=state, first=first, backend=backend)
        tokens, state = self.bind(arguments, named)
        return self.run(*tokens, state=state, first=first, backend=backend)

    def bind(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[list[Tensor], Tensor | None]:
        """Return q, k, v and the gates in their order, and the state, of a call's arguments. Raises TypeError."""
        values = dict(zip((*self.names, "state"), arguments, strict=False)) | dict(named)
        each_once = len(values) == len(arguments) + len(named)
        state = values.pop("state", None)
        if not each_once or len(values) != len(self.names) or any(name not in values for name in self.names):
            by_name = f" and {', '.join(named)} by name" if named else ""
            raise TypeError(
                f"the arguments of {self.name} must be {', '.join(self.names)} and, if wanted, state, by position or "
                f"by name, and first and backend only by name, got {len(arguments)} by position{by_name}"
            )
        return [values[name] for name in self.names], state

    def run(
        self, *tokens: Tensor, state: Tensor | None = None, first: Tensor | None = None, backend: str = "auto"
    ) -> Results:
        """Return the same for q, k, v and the gates in their order."""
        compute = self._choose(backend, tokens[0], tokens[2])
        # On small inputs the checks cost several times as much as the kernel, which checks its arguments itself. So
        # they only run after it fails, to explain the error. (Some rules would take None for another rule.)
        if compute != self.run_operator or torch.compiler.is_compiling() or any(x is None for x in tokens):
            self.check(*tokens, state=state, first=first)
            return compute(*tokens, state=state, first=first)
        if forward_ad._current_level >= 0:
            self._refuse_tangents(*tokens, state)
        try:
            return compute(*tokens, state=state, first=first)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            self.check(*tokens, state=state, first=first)
            if is_transformed():
                raise NotImplementedError(f"{self.name} has no derivative in torch.func: {REFERENCE}") from error
            raise

    def _choose(self, backend: str, q: object, v: object) -> Callable[..., Results]:
        """Return what computes: fla, the reference, or the operator, which runs the kernel if there is one.

        ValueError: there is no such backend. RuntimeError: it is "kernel", and there is no kernel, or a wrong one.
        """
        check_backend(backend)
        if backend == "fla":
            return self._run_fla
        if backend == "reference" or not isinstance(q, Tensor) or not isinstance(v, Tensor):  # which `check` refuses
            return self.reference
        required = backend == "kernel"
        if required and not self.has_kernel:
            raise RuntimeError(f"{self.name} has no compiled kernel: use backend='auto' or 'reference'")
        if required:
            require_kernel(q.device.type)
        checked = self.has_kernel and q.device.type in self_check.CHECKED
        if warn_of_size(q, v, required) or (checked and self_check.warn_of_fault(self.name, str(q.device), required)):
            return self.reference
        return self.run_operator

    def run_operator(self, *tokens: Tensor, state: Tensor | None, first: Tensor | None) -> Results:
        """Return the result of an operator of PyTorch: the family's, or one of its own, which is another loop."""
        case, (q, k, v, *gates) = self.as_fast_weights, tokens
        if case is None:
            return self._call_operator(*tokens, state, first)[:2]
        for place, dimensions in self._one_shape:  # the family's operator takes some gates in more shapes
            if gates[place].dim() != dimensions:
                raise ValueError(f"the gate must have {dimensions} dimensions, got {gates[place].dim()}")
        if callable(case):
            return case(*tokens, state=state, first=first)
        terms: dict[str, Any] = {term: gates[place] for term, place in self._places.items()}
        return fast_weights(q, k, v, **terms, state=state, first=first, erases=self._erases)

    def reference(self, *tokens: Tensor, state: Tensor | None = None, first: Tensor | None = None) -> Results:
        """Return the result of a loop over the step, which is differentiable any number of times."""
        return loop(self.name, self.step, tokens, state, first)

    def check(self, *tokens: Tensor, state: Tensor | None = None, first: Tensor | None = None) -> None:
        """Raise ValueError or TypeError, in one sentence, unless the arguments fit one another."""
        shapes = [(SHARED_KEY,), (self.key,), (self.value,), *self.gates.values()]
        named = dict(zip(self.names, zip(tokens, shapes, strict=True), strict=True))
        check_arguments(self.name, named, state, first)

    def _run_fla(self, *tokens: Tensor, state: Tensor | None, first: Tensor | None) -> Results:
        return fla.run(self.name, dict(zip(self.names, tokens, strict=True)), state, first)

    def _refuse_tangents(self, *arguments: Tensor | None) -> None:
        """Refuse forward-mode derivatives, which would silently be zero; loaded kernels refuse them themselves."""
        if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
            raise NotImplementedError(f"{self.name} has no derivative in forward mode: {REFERENCE}")


def _check_form(name: str, step: Callable[..., Tensor], gates: Mapping[str, tuple[Shape, ...]]) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"the name of a rule must be an identifier such as my_rule, got {name!r}")
    if not callable(step):
        raise ValueError(f"{name}: step must be a function of the memory and a token, got {step!r}")
    if not isinstance(gates, Mapping):
        raise ValueError(f"{name}: gates must be a mapping of names to shapes, got {gates!r}")
    for gate, shapes in gates.items():
        if gate in ("q", "k", "v", "state", *OPTIONS) or not gate.isidentifier():
            raise ValueError(f"{name}: the name of a gate must be an unused identifier, got {gate!r}")
        if not shapes or not all(isinstance(shape, tuple) and {*shape} <= SIZES for shape in shapes):
            raise ValueError(f"{name}: the shapes of {gate} must be a tuple such as (ops.PER_TOKEN,), got {shapes!r}")


def _expect_rule(rule: object) -> None:
    if not isinstance(rule, Rule):
        raise TypeError(f"the rule must be an ops.Rule, got {type(rule).__name__}")


def states_after(
    rule: Rule,
    ends: Sequence[int],
    *arguments: Any,
    first: Tensor | None = None,
    backend: str = "auto",
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out and the new state of a call of the rule, and the states after some tokens (B, H, n, Dk, Dv).

    ends: n ascending numbers of tokens, in [1, L]; each costs one more call. The other arguments are the rule's. Raises
    TypeError and ValueError for other numbers, and what the rule raises.
    """
    _expect_rule(rule)
    tokens, state = rule.bind(arguments, named)
    rule.check(*tokens, state=state, first=first)
    length = tokens[0].shape[2]
    try:
        places = [0, *map(index, ends), length]
    except TypeError:
        raise TypeError(f"{rule.name}: the ends must be a list of integers, got {ends!r}") from None
    if places[:-1] != sorted({*places[:-1]}) or not 0 <= places[-2] <= length:
        raise ValueError(f"{rule.name}: the ends must be ascending numbers in [1, {length}], got {places[1:-1]}")
    outs, states = [], []
    for piece in starmap(slice, pairwise(places)):
        some, some_first = [x[:, :, piece] for x in tokens], None if first is None else first[:, piece]
        out, state = rule.run(*some, state=state, first=some_first, backend=backend)
        outs.append(out)
        states.append(state)
    return torch.cat(outs, 2), states[-1], torch.stack(states, 2)[:, :, :-1]


def explain(rule: Rule, q: Tensor, v: Tensor) -> str:
    """Return in lines which backend a call of the rule with such q and v runs here and now, and why it runs no other.

    Like the first call, it builds and checks the kernels. Raises TypeError for a function that is not an ops.Rule.
    """
    _expect_rule(rule)
    kernel = _refusal(rule._choose, "kernel", q, v)
    fla_too = _refusal(fla.check_inputs, rule.name, q, v) or "it runs only with backend='fla'"
    other = f"not the kernel: {kernel}" if kernel else "not the reference: it runs only with backend='reference'"
    lines = [f"{rule.name}, {q.dtype} on {q.device}: the {'reference' if kernel else 'kernel'}", other]
    if torch.compiler.is_compiling() or is_transformed():
        lines.append(f"a graph keeps the call as one operator, which has no derivative in torch.func: {REFERENCE}")
    return "\n".join([*lines, f"not fla: {fla_too}"])


def _refusal(choose: Callable[..., object], *arguments: object) -> str:
    """Return the sentence with which a choice is refused, or an empty string."""
    try:
        choose(*arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return ""


def _free_name(name: str) -> str:
    """Return the name, with a number if such an operator exists already, from this package or the same rule."""
    free, number = name, 1
    while any(hasattr(torch.ops.fwp, taken) for taken in (free, f"{free}_backward")):
        number += 1
        free = f"{name}_{number}"
    return free


def make_operator(rule: Rule) -> OpOverload:
    """Define the rule as an operator ``fwp::<name>`` of PyTorch: (*tokens, state, first) -> out, the state, others.

    It has a fake, and its autograd.
    """
    name, tensors = _free_name(rule.name), ", ".join(f"Tensor {tensor}" for tensor in rule.names)
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
    return op
