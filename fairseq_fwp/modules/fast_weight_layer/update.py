"""The update of fast weights: the terms that gradients of earlier tokens add to the outputs of later ones."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_fwp.modules.causal_sum import Number, causal_sum, cumulative_sum
from fairseq_fwp.modules.fast_weight_layer.state import Gradients
from fairseq_fwp.modules.precision import at_least_float32

FIRST = ("first.weight", "first.bias")
SECOND = ("second.weight", "second.bias", "norm.weight", "norm.bias")
SOFTMAX = ("softmax.bias",)

# Which weights are fast: both layers, one of them, only the output softmax's bias (Table 2, "bias only"), or none.
FAST_WEIGHTS = {"both": FIRST + SECOND, "first": FIRST, "second": SECOND, "softmax-bias": SOFTMAX, "none": ()}

# Linear layers, whose bias has the gradients of their outputs, as their weight has.
LAYERS = ("first", "second")


def part_of(weight: str) -> str:
    """Return what the gradients of a fast weight are kept under: its layer, or its own name."""
    layer, _, _ = weight.partition(".")
    return layer if layer in LAYERS else weight


def end_segment(
    update: Mapping[str, Tensor], history: Mapping[str, Gradients], decays: Mapping[str, Number]
) -> dict[str, Tensor]:
    """Return Delta after a segment whose positions have the gradients of the history."""
    return {
        name: history[part_of(name)].sum(name.endswith("weight")) + (decay * update[name] if update else 0)
        for name, decay in decays.items()
    }


class Update(NamedTuple):
    """theta' - theta = -alpha (Delta + sum of gradients): step sizes alpha, update Delta, history of gradients.

    Delta counts for every position of a segment, the gradients of the history for those after their own. One that is
    empty counts for none. Step sizes and Delta are by weight, the history is by part.
    """

    step_sizes: Mapping[str, Number]
    update: Mapping[str, Tensor]
    history: Mapping[str, Gradients]

    def of_layer(self, layer: str, inputs: Tensor) -> Number:
        """Return what it adds to the outputs of a linear layer for inputs (B, L, in): (B, L, out)."""
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
        """Return what it adds to a vector at `length` positions: (B, length, out), or (B, 1, out) for them all.

        like: a tensor of the dtype and on the device of the sum.
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
