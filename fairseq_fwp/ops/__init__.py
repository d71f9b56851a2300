"""Update rules of fast weight programmers as pure functions of tensors: state in, state out, no parameters.

Each rule is one file: the plain loop that defines it, the operator ``fwp::<rule>_rule`` with its fake and
autograd, and the public function. Kernels in ``cuda_ext/`` replace the loop once they are built, at first use.
"""

from ..kernels import KernelStatus, kernel_status
from .decay import decay_rule, decay_rule_reference
from .delta import delta_rule, delta_rule_reference
from .fwm import fwm_rule, fwm_rule_reference
from .gated import gated_rule, gated_rule_reference
from .sum import sum_rule, sum_rule_reference

__all__ = [
    "KernelStatus",
    "decay_rule",
    "decay_rule_reference",
    "delta_rule",
    "delta_rule_reference",
    "fwm_rule",
    "fwm_rule_reference",
    "gated_rule",
    "gated_rule_reference",
    "kernel_status",
    "sum_rule",
    "sum_rule_reference",
]
