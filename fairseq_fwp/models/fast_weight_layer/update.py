"""The state of a fast weight layer, and the update of its weights: what gradients of earlier tokens add to outputs."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_fwp.ops.arguments import at_least_float32

Number = float | Tensor

FIRST = ("first.weight", "first.bias")
SECOND = ("second.weight", "second.bias", "norm.weight", "norm.bias")
SOFTMAX = ("softmax.bias",)

# Which weights are fast: both layers, one of them, only the output softmax's bias (Table 2, "bias only"), or none.
FAST_WEIGHTS = {"both": FIRST + SECOND, "first": FIRST, "second": SECOND, "softmax-bias": SOFTMAX, "none": ()}

# Weight and bias of a linear layer share the gradients of its outputs.
PARTS = {f"{layer}.{kind}": layer for layer in ("first", "second") for kind in ("weight", "bias")}

# Queries that share one product of scores. Sums before a chunk cost 2 Dk Dv a query, scores chunk * (Dk + Dv).
CHUNK = 256


class Gradients(NamedTuple):
    """Gradients of a linear layer at M positions: its inputs (B, M, in) and errors, gradients of outputs (B, M, out).

    The gradient of the layer's weight is inputs^T errors, and the gradient of its bias is the sum of errors. For a
    vector, inputs are None and errors are its gradients.
    """

    inputs: Tensor | None
    errors: Tensor

    def then(self, more: "Gradients") -> "Gradients":
        """Return these gradients followed by `more`."""
        inputs = None if self.inputs is None or more.inputs is None else torch.cat([self.inputs, more.inputs], 1)
        return Gradients(inputs, torch.cat([self.errors, more.errors], 1))

    def sum(self, of_weight: bool) -> Tensor:
        """Return the sum over positions in float32 or wider: of a weight (B, in, out), or of a vector (B, out)."""
        errors = at_least_float32(self.errors)
        return at_least_float32(self.inputs).mT @ errors if of_weight and self.inputs is not None else errors.sum(1)


class FastWeightLayerState(NamedTuple):
    """The state of a layer after part of a stream, detached from the graph: an immutable tree of tensors.

    update: Delta, the running update of past segments by weight, (B, in, out) or (B, out); empty in the first segment;
    history: the gradients at the positions of the current segment, by part;
    pending (B, D): features after the last token, whose loss needs the next token;
    started (B,) bool: rows that have read a token.
    """

    update: dict[str, Tensor]
    history: dict[str, Gradients]
    pending: Tensor
    started: Tensor


def end_segment(
    update: Mapping[str, Tensor], history: Mapping[str, Gradients], decays: Mapping[str, Number]
) -> dict[str, Tensor]:
    """Return Delta after a segment whose gradients are in `history`."""
    return {
        name: history[PARTS.get(name, name)].sum(name.endswith("weight")) + (decay * update[name] if update else 0)
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


def causal_sum(
    q: Tensor, k: Tensor, v: Tensor, chunk: int = CHUNK, scale: Number = 1.0, offset: Number = 0.0
) -> Tensor:
    """Return out_t = sum over i < M - L + 1 + t of (scale q_t . k_i + offset) v_i; the last query sees all keys.

    For M = L, scale 1 and offset 0 this is `ops.sum_rule` with one head, which visits a Dk x Dv memory L times. Here
    the memory is a weight matrix, often larger than L x L scores. So these are scores within a chunk, and the sum of
    what is before it: the linear part of the mixed chunk attention of Hua et al. 2022, arXiv 2202.10447, Sec. 3.2.

    Queries q (B, L, Dk), keys k (B, M, Dk), values v (B, M, Dv), numbers scale and offset -> (B, L, Dv); M at least
    L - 1.
    """
    length, size = q.shape[1], k.shape[2] + v.shape[2]
    # Otherwise scores of all pairs are cheaper.
    summing = length * size > 2 * (chunk * size + 2 * k.shape[2] * v.shape[2])
    ahead = k.shape[1] - length + 1  # keys that query 0 sees
    outs, summed = [], 0
    memory: Number = 0.0
    total: Number = 0.0
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        before: Number = 0.0
        if start and summing:
            old = slice(summed, start + ahead)
            memory, total = memory + k[:, old].mT @ v[:, old], total + v[:, old].sum(1, keepdim=True)
            before, summed = scale * (q[:, start:end] @ memory) + offset * total, start + ahead
        seen = slice(summed, end - 1 + ahead)
        scores = scale * (q[:, start:end] @ k[:, seen].mT) + offset
        outs.append(scores.tril(start + ahead - 1 - summed) @ v[:, seen] + before)
    return torch.cat(outs, 1) if outs else v.new_zeros(q.shape[0], 0, v.shape[2])


def cumulative_sum(v: Tensor, length: int) -> Tensor:
    """Return out_t = sum over i < M - L + 1 + t of v_i, for scores of one: v (B, M, Dv) -> (B, length, Dv)."""
    padded = torch.cat([v.new_zeros(v.shape[0], 1, v.shape[2]), v], 1)
    return padded.cumsum(1)[:, padded.shape[1] - length :]
