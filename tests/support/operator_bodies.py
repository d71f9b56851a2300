"""Operators of PyTorch whose passes other functions compute, with their own derivative."""

import inspect

import torch


def replace_passes(patch, module, forward, backward):
    """Let the operator of a module of `fairseq_fwp.ops` call these functions."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            results = forward(*given)
            module._setup_context(ctx, given, results)
            return results

        backward = staticmethod(module._differentiate)

    patch.setattr(module, "_forward", Function.apply)
    patch.setattr(module, "_backward", backward)


def use_bodies(patch, module):
    """As if the kernel could not be built: the operator's bodies in Python."""
    patch.setattr(module, "kernel_ready", lambda device: False)
    replace_passes(patch, module, *map(inspect.unwrap, (module._forward, module._backward)))


def results_and_gradients(function, given):
    """Return all results, and the gradients of all numbers among the arguments."""
    leaves = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    results = function(**leaves)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results]
    return [*results, *torch.autograd.grad(results, [x for x in leaves.values() if x.requires_grad], cotangents)]
