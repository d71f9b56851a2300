"""Attentions: each is an nn.Module, built from plain arguments, and a causal one is a `base.Attention`.

A new one is a file here, and a line of `models.attentions.ATTENTIONS`, the table of those that models have; what else
names it is in CONTRIBUTING.md.
"""

from fairseq_fwp.modules.attention.delta_rnn import DeltaRnn
from fairseq_fwp.modules.attention.fast_weight import FastWeightAttention
from fairseq_fwp.modules.attention.hybrid import Hybrid
from fairseq_fwp.modules.attention.linear import LinearAttention
from fairseq_fwp.modules.attention.memory import FastWeightState
from fairseq_fwp.modules.attention.mlstm import Mlstm
from fairseq_fwp.modules.attention.recurrent_delta import RecurrentDelta
from fairseq_fwp.modules.attention.relative import RelativeAttention, SegmentMemory
from fairseq_fwp.modules.attention.softmax import KeyValueCache, SoftmaxAttention
from fairseq_fwp.modules.attention.srwm import Srwm
from fairseq_fwp.modules.attention.time_mix import TimeMix

# The name of softmax among update rules and feature maps too.
SOFTMAX = "softmax"

__all__ = [
    "SOFTMAX",
    "DeltaRnn",
    "FastWeightAttention",
    "FastWeightState",
    "Hybrid",
    "KeyValueCache",
    "LinearAttention",
    "Mlstm",
    "RecurrentDelta",
    "RelativeAttention",
    "SegmentMemory",
    "SoftmaxAttention",
    "Srwm",
    "TimeMix",
]
