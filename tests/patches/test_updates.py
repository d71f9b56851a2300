"""Adam by PyTorch's fused operator is fairseq's, and what an update no longer does changes nothing."""

import copy
import inspect
import os
import subprocess
import sys
import traceback
from types import SimpleNamespace

import pytest
import torch
from fairseq import utils
from fairseq.optim import FP16Optimizer, MemoryEfficientFP16Optimizer
from fairseq.optim.adam import Adam, FairseqAdam
from omegaconf import OmegaConf
from support.pairwise import looped
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_fwp import patches
from fairseq_fwp.patches import updates

SHAPES = [(40, 16), (16, 16), (16,), (1,), (3, 5, 7)]
HALF = {"--bf16": FP16Optimizer, "--memory-efficient-bf16": MemoryEfficientFP16Optimizer}
COMMON = {"bf16": True, "fp16_scale_window": 3, "fp16_init_scale": 4, "min_loss_scale": 1e-4}
COMMON |= {"fp16_scale_tolerance": 0.0, "threshold_loss_scale": None}
ADAM = {"_name": "adam", "lr": [0.01], "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-6, "weight_decay": 0.1}
ADAM |= {"tpu": False, "use_old_adam": False, "fp16_adam_stats": False}


def fairseqs(adam, closure=None):
    return inspect.unwrap(Adam.step)(adam, closure)


def fused(adam):
    def refuse(*given):
        raise AssertionError("left to fairseq")

    return updates.fuse_adam(refuse, adam)


def either(adam, closure=None):
    return updates.fuse_adam(inspect.unwrap(Adam.step), adam, closure)


class Training:
    """Clipped random gradients for random parameters, of which the last has none in every other update."""

    def __init__(self, step, flag=""):
        self.draw, self.step, self.count = torch.Generator().manual_seed(1), step, 0
        dtype = torch.bfloat16 if flag else torch.float32
        self.parameters = [torch.nn.Parameter(torch.randn(size, generator=self.draw).to(dtype)) for size in SHAPES]
        self.flag, self.optimizer = flag, self.build(flag)

    def build(self, flag):
        cfg = SimpleNamespace(common=SimpleNamespace(**COMMON), optimizer=OmegaConf.create(ADAM))
        if flag:
            optimizer = HALF[flag].build_optimizer(cfg, self.parameters)
        else:
            optimizer = FairseqAdam(cfg.optimizer, self.parameters)
        optimizer.optimizer.step = lambda closure=None: self.step(optimizer.optimizer)
        return optimizer

    def update(self, times):
        for _ in range(times):
            self.count += 1
            self.optimizer.zero_grad()
            some = self.parameters[: len(SHAPES) - self.count % 2]
            scale = 10 ** (self.count % 4 - 3)
            parts = [(torch.randn(p.shape, generator=self.draw) * scale * p.float()).sum() for p in some]
            self.optimizer.set_lr(0.01 / self.count)
            self.optimizer.backward(sum(parts))
            self.optimizer.multiply_grads(0.5)
            self.optimizer.clip_grad_norm(1.0)
            self.optimizer.step()

    def resume(self, other, step):
        """Load the checkpoint of another training, and go on with the gradients that it would have had."""
        for p, q in zip(self.parameters, other.parameters, strict=True):
            p.data.copy_(q)
        self.optimizer = self.build(self.flag)  # as a trainer does after it has loaded the weights
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.draw.set_state(other.draw.get_state())
        self.count, self.step = other.count, step

    def numbers(self):
        """Weights and moments of each parameter; the weights in float32, if they are kept so."""
        weights = getattr(self.optimizer, "fp32_params", self.parameters)
        states = self.optimizer.optimizer.state.values()
        return [*(p.detach() for p in weights)], [(s["step"], s["exp_avg"], s["exp_avg_sq"]) for s in states]


def test_fused_adam_is_fairseqs_to_rounding():
    """Over twelve updates with weight decay, clipping and a rate that changes, also with float32 copies of bfloat16."""
    for flag in ("", "--bf16"):
        results = []
        for step in (fairseqs, fused):
            training = Training(step, flag)
            training.update(12)
            results.append(training.numbers())
        torch.testing.assert_close(results[1], results[0], rtol=2e-6, atol=2e-7)
        counts = [count for count, _, _ in results[1][1]]
        # A copy in float32 has a gradient of zero where its parameter has none.
        assert sorted(counts) == [12 if flag else 6, 12, 12, 12, 12] and {type(count) for count in counts} == {int}


class Calls(TorchDispatchMode):
    """The operators that PyTorch is asked for: on a GPU each is one launch, or few."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):  # of `.data`
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


TOGETHER = {
    "_sync_fp16_grads_to_fp32": "_foreach_copy_",
    "_sync_fp32_params_to_fp16": "_foreach_copy_",
    "zero_grad": "_foreach_zero_",
}


@pytest.mark.parametrize("whole", [True, False])
def test_copies_of_all_parameters_are_made_together(whole):
    """Their bits are those of fairseq, also if a parameter has no gradient; fairseq's flat copies stay its own."""
    results = []
    for find in (inspect.unwrap, lambda method: method):
        training = Training(either, "--bf16")
        training.update(2)
        optimizer = training.optimizer
        optimizer.zero_grad()
        sum((p.float() ** 3).sum() for p in training.parameters[: None if whole else -1]).backward()
        optimizer._needs_sync = True
        found = []
        for name in TOGETHER:
            for p in optimizer.fp32_params:
                p.data.mul_(1.01)
            with Calls() as calls:
                find(getattr(FP16Optimizer, name))(optimizer)
            found += [x.clone() for p in optimizer.fp32_params for x in (p.data, p.grad)]
            found += [p.data.clone() for p in training.parameters]
            if find is not inspect.unwrap and (whole or "grads" not in name):
                assert calls.names == [TOGETHER[name]], name
            assert not optimizer._needs_sync and (name != "zero_grad" or training.parameters[0].grad is None)
        results.append(found)
    assert all(map(torch.equal, *results)) and len(results[0]) == 3 * 3 * len(SHAPES)


class OnGpu(torch.Tensor):
    """A tensor that claims to lie on a GPU."""

    is_cuda = True


def test_norms_of_all_gradients_are_taken_together():
    """On a CPU their bits are those of fairseq, and nobody is asked to install apex."""
    gradients = [torch.linspace(-1, 2, 1 << n) for n in (1, 4, 12)]
    parameters = [torch.nn.Parameter(torch.zeros_like(x)) for x in gradients]
    for p, x in zip(parameters, gradients, strict=True):
        p.grad = x.clone()
    norm = utils.clip_grad_norm_(parameters, 0.0)
    assert utils.multi_tensor_l2norm_available
    assert torch.equal(norm, torch.norm(torch.stack([torch.norm(x, p=2, dtype=torch.float32) for x in gradients])))
    with Calls() as calls:
        together = utils.multi_tensor_total_norm([x.as_subclass(OnGpu) for x in gradients])
    assert calls.names == ["_foreach_norm", "stack", "linalg_vector_norm"]
    torch.testing.assert_close(together.as_subclass(torch.Tensor), norm)


def test_small_weight_decays_are_not_rounded_away():
    """A decay of 1e-7 of a weight in each update, which PyTorch's AdamW makes 1.2e-7."""
    for step in (fairseqs, fused):
        p = torch.nn.Parameter(torch.full((64, 64), 1.0).uniform_(1, 2))
        start, adam = p.detach().double(), Adam([p], lr=1e-3, weight_decay=1e-4)
        for _ in range(200):
            p.grad = torch.zeros_like(p)
            step(adam)
        assert float((1 - p.detach().double() / start).mean() / 2e-5) == pytest.approx(1, abs=0.05), step


@pytest.mark.parametrize("flag", ["", *HALF])
@pytest.mark.parametrize("first, then", [(fairseqs, either), (either, fairseqs)])
def test_checkpoints_are_exchanged_with_fairseqs_adam(flag, first, then):
    whole, begun, resumed = (Training(step, flag) for step in (first, first, then))
    whole.update(9)
    begun.update(5)
    saved = begun.optimizer.state_dict()["state"]
    assert all(type(s["step"]) is int and s.keys() == {"step", "exp_avg", "exp_avg_sq"} for s in saved.values())
    resumed.resume(begun, then)
    resumed.update(4)
    exact = {"rtol": 0, "atol": 0} if flag == "--memory-efficient-bf16" else {"rtol": 2e-6, "atol": 2e-7}
    torch.testing.assert_close(resumed.numbers(), whole.numbers(), **exact)


def test_each_group_has_its_rate():
    results = []
    for step in (fairseqs, fused):
        weights = [torch.nn.Parameter(torch.ones(8)) for _ in range(3)]
        adam = Adam([{"params": weights[:2], "lr": 0.5}, {"params": weights[2:], "weight_decay": 0.5}], lr=0.1)
        for p in weights[1:]:
            p.grad = torch.arange(8.0)
        step(adam)
        results.append([p.detach() for p in weights])
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)
    assert results[0][0].eq(1).all() and results[0][1][1] == pytest.approx(0.5)


def test_other_parameters_are_left_to_fairseq():
    """The operator does not read strides, and takes no sparse gradients."""
    for change in (
        lambda p: p.double(),
        lambda p: p.bfloat16(),
        lambda p: p.T,
        lambda p: p[:, ::2],
    ):
        results = []
        for step in (fairseqs, either):
            p = torch.nn.Parameter(change(torch.linspace(-1, 1, 48).reshape(6, 8)))
            adam = Adam([p], lr=0.1)
            for _ in range(3):
                p.grad = torch.full_like(p, 0.5) + p.detach()
                step(adam)
            results.append(p.detach())
        assert torch.equal(*results)
    p = torch.nn.Parameter(torch.zeros(4, 4))
    p.grad = torch.zeros(4, 4).T[::2].T.contiguous().repeat(1, 2).T  # of the same size, but in another order
    p.grad.copy_(torch.arange(16.0).reshape(4, 4))
    assert not p.grad.is_contiguous()
    either(Adam([p], lr=0.1))
    assert p.detach().flatten()[0] == 0 and p.detach().flatten()[1:].allclose(torch.tensor(-0.1))
    p.grad = torch.eye(4).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        either(Adam([p]))


def settings(**changed):
    return lambda adam: adam.param_groups[0].update(changed)


def set_state(**changed):
    """Change the state of the second parameter, where it has one."""
    return lambda adam: [*adam.state.values()][1:2] and [*adam.state.values()][1].update(copy.deepcopy(changed))


def set_gradients(change):
    def set_each(adam):
        for p in adam.param_groups[0]["params"]:
            p.grad = change(p, adam.state[p])

    return set_each


# What a closure does after it has computed gradients
CLOSURES = [
    lambda adam: None,
    set_gradients(lambda p, state: p.grad.T.contiguous().T),
    set_gradients(lambda p, state: None if state.get("step") == 1 else p.grad),
    set_gradients(lambda p, state: p.data),
    set_gradients(lambda p, state: state.get("exp_avg", p.grad)),
    set_gradients(lambda p, state: p.grad[:1].expand(p.shape)),
    lambda adam: adam.zero_grad(),
    lambda adam: len(adam.param_groups) == 1 and adam.add_param_group({"params": torch.nn.Parameter(torch.ones(0))}),
    lambda adam: adam.param_groups.append(adam.param_groups[0] | {"betas": (0.5, 0.6)}),
    settings(amsgrad=True),
    settings(betas=(0.5, 0.6)),
    settings(betas=(torch.tensor(0.5), 0.6)),
    settings(lr=torch.tensor(0.3), weight_decay=torch.tensor(0.1)),
    settings(eps=1),
    set_state(step=torch.tensor(3.0)),
    set_state(exp_avg=torch.ones(4, 4, dtype=torch.float64)),
    set_state(exp_avg_sq=torch.ones(4, 4).T),
]


@looped("act", CLOSURES)
def test_a_closure_is_called_once_and_before_all_else(act):
    """It makes the gradients, and may change parameters' groups and states, memory and layouts."""
    results = []
    for step in (fairseqs, either):
        weights = [torch.nn.Parameter(torch.linspace(-1, scale, 16).view(4, 4)) for scale in (1, 2)]
        adam, losses = Adam(weights, lr=0.1, weight_decay=0.1, betas=(0.9, 0.98)), []

        def closure(adam=adam, weights=weights, losses=losses):
            adam.zero_grad()
            losses.append(sum(p.pow(3).sum() for p in weights))
            losses[-1].backward()
            act(adam)
            return losses[-1]

        assert all(step(adam, closure) is losses[-1] for _ in range(4)) and len(losses) == 4
        results.append([[p.detach() for p in weights], [adam.state[p] for p in weights]])
    torch.testing.assert_close(results[1], results[0], rtol=2e-6, atol=1e-6)


# Tensors that share memory, or lie next to each other in it
SHARED = [
    lambda x: [x[:40], x[24:]],
    lambda x: [x, x[3]],
    lambda x: [x, x],
    lambda x: x.split(16),
    lambda x: [x[:0], x[:0], x[0], x],
]


@looped("take", SHARED)
@looped("share", ["weights", "gradients", "both"])
def test_tensors_that_share_memory_are_updated_one_after_the_other(take, share):
    results = []
    for step in (fairseqs, either):
        memory = torch.linspace(-1, 1, 64), torch.linspace(0.5, 1, 64)
        weights, gradients = map(take, memory)
        weights = [torch.nn.Parameter(x if share != "gradients" else x.clone()) for x in weights]
        gradients = [x if share != "weights" else x.clone() for x in gradients]
        adam = Adam(weights, lr=0.1, weight_decay=0.1, betas=(0.9, 0.98))
        for _ in range(5):
            for p, gradient in zip(weights, gradients, strict=True):
                p.grad = gradient.mul_(-0.7)
            step(adam)
        results.append([p.detach() for p in weights])
    torch.testing.assert_close(results[1], results[0], rtol=2e-6, atol=1e-6)


def test_a_graph_outlives_an_update():
    """As with fairseq, whose updates PyTorch does not see."""
    p = torch.nn.Parameter(torch.ones(3))
    loss, adam = p.square().sum(), Adam([p])
    for _ in range(2):
        loss.backward(retain_graph=True)
        fused(adam)


def test_seeds_are_those_of_torch(monkeypatch):
    """Without a look at the call stack, and the generator continues afterwards."""
    patches.apply()
    torch.manual_seed(5)
    expected, before = torch.rand(3), torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(traceback, "format_stack", lambda: pytest.fail("the call stack is formatted"))
    with utils.set_torch_seed(5):
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(torch.get_rng_state(), before)


FAULTS = """
import resource, types, torch
from fairseq_fwp.patches import updates
updates.keep_freed_memory(lambda self: None, types.SimpleNamespace(cuda=False))
x = torch.ones(1 << 20)
for count in range(40):
    if count == 20:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    y, z = x * 2, x * 3
    del y, z
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


def test_an_update_does_not_fetch_memory_again():
    """At most one page in ten of two tensors of 1,024 pages, twenty times; a user's own setting is obeyed."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}

    def faults(**settings):
        command = [sys.executable, "-c", FAULTS]
        return int(subprocess.run(command, env=own | settings, capture_output=True, text=True, check=True).stdout)

    pages = 20 * 2 * 1024
    assert faults() < pages / 10 and faults(MALLOC_MMAP_THRESHOLD_="65536") > pages / 2


OPTIMIZERS = """
import sys, fairseq_fwp, torch
from fairseq.optim.adam import Adam
p = torch.nn.Parameter(torch.ones(3))
optimizer = Adam([p])
p.grad = torch.ones(3)
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
print(p.grad, [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))])
import torch._dynamo
optimizer.zero_grad()
"""


def test_optimizers_do_without_the_compiler():
    done = subprocess.run([sys.executable, "-c", OPTIMIZERS], capture_output=True, text=True)
    assert done.stdout == "None []\n" and done.returncode == 0, done.stderr


def test_moments_of_another_shape_are_an_error():
    """The fused operator would read and write beyond them."""
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    adam = Adam([parameter], lr=0.1)
    parameter.grad = torch.ones(4, 4)
    adam.state[parameter] = {"step": 1, "exp_avg": torch.zeros(2, 2), "exp_avg_sq": torch.zeros(2, 2)}
    with pytest.raises(RuntimeError, match="must match"):
        adam.step()
