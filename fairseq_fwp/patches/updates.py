"""Time that fairseq and torch lose around the model: in each update of a training, and at its start."""

import contextlib
import ctypes
import math
import os
import sys
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fairseq_fwp.patches.patch import patch

Values = dict[str, Any]  # of a group of parameters, or the state of one
OPTIMIZER = "torch.optim.Optimizer"
# Names of settings in glibc's malloc.h, and their values with which it keeps memory: up to 2 GiB, and none apart.
TRIM_THRESHOLD, MMAP_MAX = -1, -4
SETTINGS = ((TRIM_THRESHOLD, 2**31 - 1), (MMAP_MAX, 0))


@patch("fairseq.optim.adam.Adam.step")
def fuse_adam(step, self, closure=None):
    """Compute Adam on a CPU by PyTorch's fused operator, in one pass: fairseq makes eleven over each parameter.

    Results are those of fairseq's Adam to rounding, and its state is the same. Half precision, other devices, sparse
    gradients, tensors that share memory, amsgrad and settings that are no plain numbers are left to fairseq.
    """
    loss = None if closure is None else closure()  # which makes gradients, and may change all else
    if not _can_be_fused(self.param_groups, self.state):
        step(self)
        return loss
    with torch.no_grad():
        for group in self.param_groups:
            _step_of_group(group, self.state)
    return loss


def _can_be_fused(groups: list[Values], states: dict[Tensor, Values]) -> bool:
    """Return whether the operator computes what fairseq does: it reads no strides or shapes, and all at once."""
    spans = []  # of memory: first and last byte
    for group in groups:
        settings = [*group["betas"], group["lr"], group["eps"], group["weight_decay"]]
        if not all(isinstance(x, int | float) for x in settings) or not all(0 <= beta < 1 for beta in settings[:2]):
            return False
        if group.get("amsgrad"):
            return False
        for p in group["params"]:
            if p.grad is None:
                continue
            state, tensors = states.get(p), [p, p.grad]
            if state:
                tensors += [state.get("exp_avg"), state.get("exp_avg_sq")]
            if (state and type(state.get("step")) is not int) or not all(_is_dense(x, p.shape) for x in tensors):
                return False
            if size := p.numel():
                spans += [(start, start + 4 * size - 1) for start in map(Tensor.data_ptr, tensors)]
    spans.sort()
    return all(last < start for (_, last), (start, _) in pairwise(spans))


def _is_dense(x: object, shape: torch.Size) -> bool:
    return (
        isinstance(x, Tensor)
        and x.dtype == torch.float32
        and x.is_cpu
        and x.layout == torch.strided
        and x.is_contiguous()
        and x.shape == shape
    )


def _step_of_group(group: Values, states: dict[Tensor, Values]) -> None:
    by_count: dict[int, list[Tensor]] = defaultdict(list)  # not every parameter has a gradient in every update
    for p in group["params"]:
        if p.grad is not None:
            state = states[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            by_count[int(state["step"])].append(p)
    beta1, beta2 = group["betas"]
    for count, parameters in by_count.items():
        weights = [p.data for p in parameters]  # as in fairseq: a graph that needs them may be used again
        if group["weight_decay"]:  # apart: the operator rounds 1 - decay * rate first, which changes small decays
            torch._foreach_add_(weights, weights, alpha=-group["weight_decay"] * group["lr"])
        adamw(
            weights,
            [p.grad for p in parameters if p.grad is not None],
            [states[p]["exp_avg"] for p in parameters],
            [states[p]["exp_avg_sq"] for p in parameters],
            [],
            [*torch.full((len(parameters),), count - 1.0, dtype=torch.float32, device="cpu").unbind()],  # it adds one
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=0,
            # fairseq adds epsilon to the root of the second moment, PyTorch after that is divided by its bias.
            eps=group["eps"] / math.sqrt(1 - beta2**count),
            maximize=False,
        )


@patch("fairseq.utils.set_torch_seed.__init__")
def seed_the_cpu_alone(init, self, seed):
    """Seed only the CPU where there is no GPU: for GPUs to come, torch formats its call stack in every update."""
    from fairseq import utils

    if torch.cuda.is_available() or utils.xm is not None:
        init(self, seed)
        return
    self.rng_state = utils.get_rng_state()
    torch.default_generator.manual_seed(seed)


@patch("fairseq.trainer.Trainer.__init__")
def keep_freed_memory(init, self, *args, **kwargs):
    """Keep the memory that an update on a CPU frees: glibc gives it back, and the next update fetches it by pages.

    Settings of the user, MALLOC_... or GLIBC_TUNABLES, stay.
    """
    init(self, *args, **kwargs)
    if self.cuda or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc
        for name, value in SETTINGS:
            ctypes.CDLL(None).mallopt(name, value)


@patch(f"{OPTIMIZER}.add_param_group", since="torch 2.1")
@patch(f"{OPTIMIZER}.load_state_dict", since="torch 2.1")
@patch(f"{OPTIMIZER}.state_dict", since="torch 2.1")
@patch(f"{OPTIMIZER}.zero_grad", since="torch 2.1")
def leave_the_compiler_out(method, self, *args, **kwargs):
    """Do not import torch's compiler, which takes two seconds, only to keep it from compiling an optimizer."""
    if "torch._dynamo" not in sys.modules:
        method = getattr(method, "__wrapped__", method)
    return method(self, *args, **kwargs)
