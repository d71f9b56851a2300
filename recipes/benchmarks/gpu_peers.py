"""Implementations to compare with our operators on a GPU, imported from installed packages or from a checkout.

Every form takes tensors in its own layout and returns out. `FWP_DELTA_PEER` (or --delta-peer) is the folder `src` of a
checkout of IDSIA/lmtool-fwp (Schlag, Irie & Schmidhuber 2021). `FWP_DECAY_PEER` (or --decay-peer) is a checkout of
jenni-ai/T2FW (Mao 2022). Both compile their kernels when they are imported. flash-linear-attention is `fla-core`.
"""

import importlib
import importlib.metadata
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


class Missing(Exception):
    """The reason why a peer cannot be measured, in one clause."""


def first_line(error):
    """Return the message of an error, for a note in a table."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def reason(error):
    """Return the reason why something was not measured, for a note in a table."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "it needs more memory than this GPU has"
    return str(error) if isinstance(error, Missing) else f"it fails: {first_line(error)}"


def flash_attention(q, k, v):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def fla_delta():
    rule = imported("fla.ops.delta_rule", "fla-core is not installed").chunk_delta_rule
    return lambda q, k, v, beta: rule(q, k, v, beta, scale=1.0)[0]


def fla_sum():
    rule = imported("fla.ops.linear_attn", "fla-core is not installed").chunk_linear_attn
    return lambda q, k, v: rule(q, k, v, scale=1.0, normalize=False)[0]


def published_delta(folder):
    """Return the published delta rule; it writes the state in place, and finds its sources relative to its folder."""
    with standing_in(folder, "FWP_DELTA_PEER"):
        rule = imported("utils.fast_fast_weight", "it cannot be imported").fast_weight_memory

    def form(q, k, v, beta):
        state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
        return rule(q, k, v, beta.unsqueeze(-1), state)

    return form


def published_decay(folder):
    """Return the published decay rule; it has no heads, and its state is ours transposed."""
    with standing_in(folder, "FWP_DECAY_PEER"):
        rule = imported("t2fw.functional_lfw", "it cannot be imported").LFWFunction.apply

    def form(q, k, v, key_decay, value_decay):
        flat = [x.flatten(0, 1) for x in (v, value_decay, q, k, key_decay)]
        state = v.new_zeros(len(flat[0]), v.shape[3], k.shape[3])
        return rule(*flat, state)[0].view_as(v)

    return form


def imported(module, otherwise):
    try:
        return importlib.import_module(module)
    except Exception as error:  # a peer may fail in any way, most often when it compiles
        raise Missing(otherwise if isinstance(error, ModuleNotFoundError) else first_line(error)) from error


@contextmanager
def standing_in(folder, variable):
    if not folder:
        raise Missing(f"{variable} must be the folder of its checkout, got none")
    if not Path(folder).is_dir():
        raise Missing(f"{variable} must be a folder, got {folder}")
    before, inside = os.getcwd(), str(Path(folder).resolve())
    sys.path.insert(0, inside)
    os.chdir(inside)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(inside)


def versions():
    """Return {package: version} of the packages that the peers' speed depends on."""
    found = {"torch": torch.__version__, "CUDA": torch.version.cuda or "none"}
    for package in ("triton", "fla-core"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
