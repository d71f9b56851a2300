"""Update rules of fast weight programmers as pure functions of tensors: state in, state out, no parameters.

``rules.py`` defines each by its equation, its step, and its form as a case of one operator, ``fast_weights``, which has
kernels (cuda_ext/, built at first use). All of them have the same call, and ``mlstm_rule`` nearly so:

    out, state = <name>_rule(q, k, v, <gates>, state=None, *, first=None, backend="auto")

    q, k: (B, H, L, Dk), already mapped and normalised; v: (B, H, L, Dv). They and the gates share one dtype: float32,
        float64, bfloat16 or float16 (under autocast too: nothing is cast here).
    state: (B, H, Dk, Dv) before the first token, float32 (float64 for float64 inputs); None is zeros.
    first: (B, L), bool: tokens that begin a document, where the memory starts empty; None is nowhere.
    backend: "auto", "kernel", "fla" (Triton kernels of flash-linear-attention, on CUDA: see ``fla.py``) or "reference"
        (a loop over the step).

    out: (B, H, L, Dv) in v's dtype, the output of each token, after its own write.
    state: the new state, after the last token. Both are differentiable once, with the reference any number of times.

    ValueError, TypeError: a shape, device, backend or dtype does not fit.
    RuntimeError: ``backend="kernel"`` or ``"fla"``, but the kernel cannot be built, found or used.

A rule of your own is ``Rule("my_rule", step, {"gate": (PER_TOKEN,)})``, which is called in the same way. Gradients,
checks and the operator of PyTorch come with it. ``fairseq_fwp.testing.check_rule(my_rule)`` tests it against the laws
of every rule.
"""

from .arguments import PER_KEY, PER_TOKEN, PER_VALUE, outer, retrieve
from .kernels import KernelStatus, kernel_status
from .mlstm import MlstmState, mlstm_rule
from .rule import Rule, explain, states_after
from .rules import (
    decay_rule,
    delta_product_rule,
    delta_rule,
    dplr_rule,
    fwm_rule,
    gated_delta_product_rule,
    gated_delta_rule,
    gated_rule,
    gdn2_rule,
    gla_rule,
    rwkv7_rule,
    sum_rule,
)

__all__ = [
    "PER_KEY",
    "PER_TOKEN",
    "PER_VALUE",
    "KernelStatus",
    "MlstmState",
    "Rule",
    "decay_rule",
    "delta_product_rule",
    "delta_rule",
    "dplr_rule",
    "explain",
    "fwm_rule",
    "gated_delta_product_rule",
    "gated_delta_rule",
    "gated_rule",
    "gdn2_rule",
    "gla_rule",
    "kernel_status",
    "mlstm_rule",
    "outer",
    "retrieve",
    "rwkv7_rule",
    "states_after",
    "sum_rule",
]
