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
from fairseq_fwp.patches.training import FP16

Values = dict[str, Any]  # of a group of parameters, or the state of one
OPTIMIZER = "torch.optim.Optimizer"
# Names of settings in glibc's malloc.h, and their values with which it keeps memory: up to 2 GiB, and none apart.
TRIM_THRESHOLD, MMAP_MAX = -1, -4
SETTINGS = ((TRIM_THRESHOLD, 2**31 - 1), (MMAP_MAX, 0))


@patch("fairseq.optim.adam.Adam.step")
def fuse_adam(step, self, closure=None):
    """Compute Adam by PyTorch's fused operator, in one pass: fairseq makes eleven over each parameter.

    Results are those of fairseq's Adam to rounding, and its state is the same. Half precision, sparse gradients,
    tensors that share memory, amsgrad and settings that are no plain numbers are left to fairseq. So are groups on
    several devices, and devices that are neither a CPU nor one of NVIDIA's GPUs.
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
        parameters = [p for p in group["params"] if p.grad is not None]
        if len({p.device for p in parameters}) > 1:
            return False
        for p in parameters:
            state, tensors = states.get(p), [p, p.grad]
            if state:
                tensors += [state.get("exp_avg"), state.get("exp_avg_sq")]
            if (state and type(state.get("step")) is not int) or not all(_is_dense(x, p) for x in tensors):
                return False
            if size := p.numel():
                spans += [(start, start + 4 * size - 1) for start in map(Tensor.data_ptr, tensors)]
    spans.sort()
    return all(last < start for (_, last), (start, _) in pairwise(spans))


def _is_dense(x: object, p: Tensor) -> bool:
    return (
        isinstance(x, Tensor)
        and x.dtype == torch.float32
        and (x.is_cpu or x.is_cuda)
        and x.device == p.device
        and x.layout == torch.strided
        and x.is_contiguous()
        and x.shape == p.shape
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
        # Before this update: the operator adds one. On a GPU, a tensor for each parameter would be a launch for each.
        counts = torch.full((len(parameters),), count - 1.0, dtype=torch.float32, device=weights[0].device)
        if group["weight_decay"]:  # apart: the operator rounds 1 - decay * rate first, which changes small decays
            torch._foreach_add_(weights, weights, alpha=-group["weight_decay"] * group["lr"])
        adamw(
            weights,
            [p.grad for p in parameters if p.grad is not None],
            [states[p]["exp_avg"] for p in parameters],
            [states[p]["exp_avg_sq"] for p in parameters],
            [],
            [*counts.unbind()],
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


@patch(f"{FP16}._sync_fp16_grads_to_fp32")
def copy_gradients_together(copy, self):
    """Copy the gradients of --bf16 to float32 together: on a GPU, fairseq launches a kernel for each."""
    copies = _trained_copies(self)
    pairs = [(p32.grad, p.grad) for p, p32 in copies if p32.grad is not None and p.grad is not None]
    if not self._needs_sync or not copies or len(pairs) < len(copies):
        copy(self)
        return
    _copy_all(pairs)
    self._needs_sync = False


@patch(f"{FP16}._sync_fp32_params_to_fp16")
def round_weights_together(copy, self):
    """Round the float32 weights of --bf16 together: on a GPU, fairseq launches a kernel for each."""
    if pairs := _trained_copies(self):
        _copy_all(pairs)
    else:
        copy(self)


@patch(f"{FP16}.zero_grad")
def clear_gradients_together(zero_grad, self):
    """Clear the float32 gradients of --bf16 together: on a GPU, fairseq launches a kernel for each."""
    weights = [] if self.has_flat_params else [p for p in self.fp32_params if p.grad is not None]
    gradients = [p.grad for p in weights]
    if gradients:
        torch._foreach_zero_(gradients)
    for p in weights:
        p.grad = None  # for a moment, so that fairseq has none to clear
    zero_grad(self)
    for p, gradient in zip(weights, gradients, strict=True):
        p.grad = gradient


def _trained_copies(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """Return each trained parameter of --bf16, and its copy in float32; nothing, if one flat copy has all of them."""
    if optimizer.has_flat_params:
        return []
    return [x for x in zip(optimizer.fp16_params, optimizer.fp32_params, strict=True) if x[0].requires_grad]


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, which a graph may need again, as in fairseq."""
    torch._foreach_copy_([to.data for to, _ in pairs], [given.data for _, given in pairs])


@patch("fairseq.utils.multi_tensor_l2norm_available")
def have_norms_together() -> None:
    """Let --clip-norm compute the norms of all gradients together: fairseq does only with NVIDIA's apex."""
    from fairseq import utils

    utils.multi_tensor_l2norm_available = True


@patch("fairseq.utils.multi_tensor_total_norm")
def take_norms_together(total_norm, grads, *args, **kwargs):
    """Compute the norms of all gradients on a GPU together: without apex, fairseq launches kernels for each."""
    from fairseq import utils

    if hasattr(utils, "multi_tensor_l2norm"):  # apex's
        return total_norm(grads, *args, **kwargs)
    devices = {x.device for x in grads}
    if len(devices) == 1 and grads[0].is_cuda:
        return torch.norm(torch.stack(torch._foreach_norm(grads, 2, torch.float32)))
    device = torch.cuda.current_device() if torch.cuda.is_available() else grads[0].device
    return torch.norm(torch.stack([torch.norm(x, p=2, dtype=torch.float32).to(device) for x in grads]))


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
