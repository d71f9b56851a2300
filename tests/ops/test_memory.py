"""Memory of the backward pass: proportional to the tokens, never a state for each token."""

import json
import sys
from pathlib import Path

import pytest
from support.isolated import run_isolated
from support.subjects import PER_KEY, RULES, fastest_backend

MEASURE = """
import json, torch
from fairseq_fwp import ops
torch.manual_seed(0)

def tensors(length):
    sizes = {"B": 1, "H": 8, "L": length, "Dk": 64, "Dv": 64, "N": 2}
    return {name: (torch.rand([sizes[size] for size in shape]) / 32).requires_grad_() for name, shape in SHAPES.items()}

def high_water_mark(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

function = getattr(ops, FUNCTION)
warm_up = tensors(16)  # by the same calls: torch imports some of itself at the first gradient
out, _ = function(**warm_up, backend=BACKEND)
torch.autograd.grad(out, list(warm_up.values()), torch.ones_like(out))
given = tensors(8192)
cotangent = torch.randn(1, 8, 8192, 64)
open("/proc/self/clear_refs", "w").write("5")  # peak = now
before = high_water_mark("VmRSS")
out, state = function(**given, backend=BACKEND)
gradients = torch.autograd.grad(out, list(given.values()), cotangent)
extra = high_water_mark("VmHWM") - before
print(json.dumps(extra / (out.element_size() * (out.numel() + sum(x.numel() for x in given.values())))))
"""
# In sizes of all inputs and the output. The results of a training step are one of them, less the gates' for which a
# rule has none. Rules that forget keep a state of 64 x 64 after every 32 tokens: half of q + k + v + out.
BOUND = 2
# Otherwise freed temporaries stay resident, and may or may not be used again.
FREED_MEMORY_GOES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "65536"}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=() if rule in ("delta", "rwkv7") else pytest.mark.slow) for rule in RULES]
)
def test_extra_memory_at_8192_tokens(rule):
    """Return the memory in sizes of inputs + output; two are needed; a state per token would be 16 (decay: 11)."""
    of_rule = RULES[rule]
    shapes = {"q": PER_KEY, "k": of_rule.key, "v": of_rule.value, **of_rule.gates}
    script = MEASURE.replace("FUNCTION", repr(of_rule.function.__name__)).replace("SHAPES", repr(shapes))
    script = script.replace("BACKEND", repr(fastest_backend(rule)))
    extra = json.loads(run_isolated(script, **FREED_MEMORY_GOES_BACK).stdout)
    print(f"{rule}: {extra:.2f}", file=sys.stderr)
    # delta_product runs N tokens of the family for each token, each with a query and a state.
    assert 0.9 < extra < (3.5 if "N" in of_rule.key else BOUND)  # at least the output and the gradients of the inputs
