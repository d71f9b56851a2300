"""How operators of PyTorch are defined here."""

from collections.abc import Callable
from functools import update_wrapper

import torch
from torch._ops import OpOverload


def define(name: str, schema: str) -> Callable[[Callable[..., object]], OpOverload]:
    """Define the operator fwp::name, which calls the decorated function on devices without a kernel.

    The first call of an operator of torch.library.custom_op imports the compiler, which takes a second.
    """

    def add(function: Callable[..., object]) -> OpOverload:
        torch.library.define(f"fwp::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(f"fwp::{name}", "default", function)
        operator: OpOverload = getattr(torch.ops.fwp, name).default
        update_wrapper(operator, function, assigned=("__doc__",), updated=())
        return operator

    return add


def refuse_double_backward(op: OpOverload) -> None:
    """Make differentiating a backward operator an error: it has no derivative, and silence would be a wrong one."""

    def raise_error(ctx: object, *grads: object) -> None:
        raise RuntimeError(f"{op.name()} cannot be differentiated: for second derivatives use backend='reference'")

    torch.library.register_autograd(op, raise_error)
