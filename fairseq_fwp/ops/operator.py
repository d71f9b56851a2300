"""How operators of PyTorch are defined here.

Most have a body in Python (`define`), which runs where no library has a kernel: autograd, graphs and fakes know one
operator on every device. Those of `rows` and `projection` only join what PyTorch computes well, so they are only
declared. A layer calls the kernel where `suits_kernel` says so. Elsewhere it calls PyTorch's operations, which a
compiler can join itself.
"""

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Protocol

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd import forward_ad

from .kernels import load_kernels


def is_transformed() -> bool:
    """Return whether a transform of torch.func, or forward mode, is active."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def suits_kernel(x: Tensor, device_type: str, dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether an operator with a definition in PyTorch next to it may call its kernel for a tensor."""
    return (
        type(x) in (Tensor, nn.Parameter)  # not a fake one, or another that only looks like one
        and x.device.type == device_type
        and x.dtype in dtypes
        and not torch.compiler.is_compiling()  # a compiler joins operations itself
        and not is_transformed()
        and load_kernels(device_type).built
    )


class Context(Protocol):
    """What autograd gives to both passes of an operator."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


def declare(name: str, schema: str) -> OpOverload:
    """Declare the operator fwp::name, which libraries of kernels compute.

    The first call of an operator of torch.library.custom_op imports the compiler, which takes a second.
    """
    torch.library.define(f"fwp::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    operator: OpOverload = getattr(torch.ops.fwp, name).default
    return operator


def define(name: str, schema: str) -> Callable[[Callable[..., object]], OpOverload]:
    """Declare the operator fwp::name, which calls the decorated function on devices without a kernel."""

    def add(function: Callable[..., object]) -> OpOverload:
        operator = declare(name, schema)
        torch.library.impl(f"fwp::{name}", "default", function)
        update_wrapper(operator, function, assigned=("__doc__",), updated=())
        return operator

    return add


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether a backward pass may follow, so that the forward pass must keep what that needs."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors if x is not None)


def differentiate_definition(
    definition: Callable[..., Tensor], tensors: Sequence[Tensor | None], wanted: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients of definition(*tensors), where wanted, as functions that can be differentiated again.

    For backward passes of operators under `create_graph=True`. grad: the gradient of the result.
    """
    # Views: one tensor may depend on another, which is not this operator's part of the gradient.
    views = [None if x is None else x.view_as(x) for x in tensors]
    inputs = [x for x, is_wanted in zip(views, wanted, strict=True) if is_wanted and x is not None]
    found = iter(torch.autograd.grad(definition(*views), inputs, grad, create_graph=True))
    return [next(found) if is_wanted else None for is_wanted in wanted]


def refuse_double_backward(op: OpOverload) -> None:
    """Make differentiating a backward operator an error: it has no derivative, and silence would be a wrong one."""

    def raise_error(ctx: object, *grads: object) -> None:
        raise RuntimeError(f"{op.name()} cannot be differentiated: for second derivatives use backend='reference'")

    torch.library.register_autograd(op, raise_error)
