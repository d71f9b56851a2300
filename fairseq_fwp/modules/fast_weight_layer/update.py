"""The update of fast weights: terms that gradients of earlier tokens add to outputs of later tokens."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_fwp.modules.causal_sum import Number, causal_sum, cumulative_sum
from fairseq_fwp.modules.fast_weight_layer.state import Gradients
from fairseq_fwp.modules.layers import at_least_float32

FIRST = ("first.weight", "first.bias")
SECOND = ("second.weight", "second.bias", "norm.weight", "norm.bias")
SOFTMAX = ("softmax.bias",)

# Which weights are fast: both layers, one of them, only the output softmax's bias (Table 2, "bias only"), or none.
FAST_WEIGHTS = {"both": FIRST + SECOND, "first": FIRST, "second": SECOND, "softmax-bias": SOFTMAX, "none": ()}

# Linear layers: weight and bias share the gradients of the outputs.
LAYERS = ("first", "second")


def part_of(weight: str) -> str:
    """Return the key under which the gradients of a fast weight are kept: its layer, or its own name."""
    layer, _, _ = weight.partition(".")
    return layer if layer in LAYERS else weight


def end_segment(
    update: Mapping[str, Tensor], history: Mapping[str, Gradients], decays: Mapping[str, Number]
) -> dict[str, Tensor]:
    """Return Delta after a segment whose gradients are in `history`."""
    return {
        name: history[part_of(name)].sum(name.endswith("weight")) + (decay * update[name] if update else 0)
        for name, decay in decays.items()
    }


class Update(NamedTuple):
    """The update theta' - theta = -alpha (Delta + sum of gradients): step sizes alpha, Delta, and gradients.

    Delta applies to all positions of a segment, a gradient of the history to positions after its own. Empty parts have
    no effect. Step sizes and Delta are by weight, the history is by part.
    """

    step_sizes: Mapping[str, Number]
    update: Mapping[str, Tensor]
    history: Mapping[str, Gradients]

    def of_layer(self, layer: str, inputs: Tensor) -> Number:
        """Return the term (B, L, out) that is added to the outputs of a linear layer for inputs (B, L, in)."""
        weight, bias = f"{layer}.weight", f"{layer}.bias"
        if layer not in self.history and weight not in self.update:
            return 0.0
        with torch.autocast(inputs.device.type, enabled=False):
            queries, of_weight, of_bias = at_least_float32(inputs), -self.step_sizes[weight], -self.step_sizes[bias]
            total = queries.new_zeros(())
            if layer in self.history:
                keys, errors = self.history[layer]
                assert keys is not None
                total = causal_sum(
                    queries, at_least_float32(keys), at_least_float32(errors), scale=of_weight, offset=of_bias
                )
            if self.update:
                total = total + queries @ (of_weight * self.update[weight]) + of_bias * self.update[bias].unsqueeze(1)
            return total.to(inputs.dtype)

    def of_vector(self, name: str, like: Tensor, length: int) -> Number:
        """Return the term added to a vector at `length` positions: (B, length, out), or (B, 1, out) for all of them.

        like: a tensor with the dtype and device of the result.
        """
        if name not in self.history and name not in self.update:
            return 0.0
        with torch.autocast(like.device.type, enabled=False):
            total = like.new_zeros(())
            if name in self.history:
                total = cumulative_sum(at_least_float32(self.history[name].errors), length)
            if self.update:
                total = total + self.update[name].unsqueeze(1)
            return (-self.step_sizes[name] * total).to(like.dtype)
