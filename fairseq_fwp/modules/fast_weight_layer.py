"""A layer that learns while it reads, after the last attention: the fast weight layer (FWL).

Clark, Guu, Chang, Pasupat, Hinton & Norouzi 2022, "Meta-Learning Fast Weight Language Models" (arXiv 2212.02475).
With theta = (U, a, W, b and the layer normalisation's gain and shift),

    f_theta(h) = LayerNorm(ReLU^2(h U + a) W + b)
    L_t = -log p(x_{t+1} | f_theta(h_t))                             the loss with the trained ("slow") weights
    y_t = f_theta'(h_t),  theta' = theta - alpha (Delta + sum over S <= i < t of dL_i / dtheta)
    Delta <- gamma Delta + stopgrad(sum over S <= i <= T of dL_i / dtheta)    after a segment S..T

with a step size alpha and a decay gamma for each weight. The sum is strict, as in the paper's Eq. 1: its last formula
prints i <= t, with which y_t would know the token that it predicts. No position waits for another: h_t has the
gradients of all L_i in one backward pass, and a sum of gradients of U or W is linear attention whose keys are the
weight's inputs and whose values are the gradients of its outputs (Eq. 2).

Shapes: B batch, L tokens, M positions that teach, D embed_dim, F hidden_dim.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.modules.causal_sum import causal_sum, cumulative_sum
from fairseq_fwp.modules.precision import at_least_float32

# The paper: step sizes start at 0.01. It does not say where gamma starts: here, a segment counts 9 tenths of the next.
STEP_SIZE = 0.01
DECAY = 0.9

FIRST = ("first.weight", "first.bias")
SECOND = ("second.weight", "second.bias", "norm.weight", "norm.bias")
SOFTMAX = ("softmax.bias",)

# Which weights are fast: both layers, one of them, the output softmax's bias alone (Table 2, "bias only"), or none.
FAST_WEIGHTS = {"both": FIRST + SECOND, "first": FIRST, "second": SECOND, "softmax-bias": SOFTMAX, "none": ()}

# (features (B, M, D), tokens (B, M)) -> the tokens' log-probabilities (B, M)
LogProb = Callable[[Tensor, Tensor], Tensor]


class Gradients(NamedTuple):
    """Of one weight at M positions: of a matrix inputs^T errors, (B, M, in) and (B, M, out); of a vector errors."""

    inputs: Tensor | None
    errors: Tensor

    def at(self, positions: slice) -> "Gradients":
        """Those of some positions."""
        return Gradients(None if self.inputs is None else self.inputs[:, positions], self.errors[:, positions])

    def then(self, more: "Gradients") -> "Gradients":
        """These and more, in this order."""
        inputs = None if self.inputs is None or more.inputs is None else torch.cat([self.inputs, more.inputs], 1)
        return Gradients(inputs, torch.cat([self.errors, more.errors], 1))

    def detach(self) -> "Gradients":
        """The same values, cut from the graph."""
        return Gradients(None if self.inputs is None else self.inputs.detach(), self.errors.detach())

    def sum(self) -> Tensor:
        """Of all positions, (B, in, out) or (B, out), float32 at least."""
        errors = at_least_float32(self.errors)
        return errors.sum(1) if self.inputs is None else at_least_float32(self.inputs).mT @ errors


class FastWeightLayerState(NamedTuple):
    """What a layer has learnt, without a graph: sums over past segments, the open segment, and what is yet to learn.

    sums: Delta by weight, (B, in, out) or (B, out), none before the second segment; gradients: of the open segment's
    positions, by weight; pending (B, D): features after the last token, whose loss the next token tells, and
    started (B,) bool: rows that have any.
    """

    sums: dict[str, Tensor]
    gradients: dict[str, Gradients]
    pending: Tensor
    started: Tensor

    def detach(self) -> "FastWeightLayerState":
        """Itself: it has no graph."""
        return self

    def reorder(self, new_order: Tensor) -> "FastWeightLayerState":
        """The rows new_order (B',) of the batch, as beam search selects them."""
        return self._map(lambda values: values.index_select(0, new_order))

    def reset(self, rows: Tensor) -> "FastWeightLayerState":
        """Nothing learnt in the rows of the batch that are True, rows (B,) bool."""
        return self._map(lambda values: values.masked_fill(rows.view(-1, *(1,) * (values.dim() - 1)), 0))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "FastWeightLayerState":
        return FastWeightLayerState(
            {name: change(value) for name, value in self.sums.items()},
            {
                name: Gradients(None if kept.inputs is None else change(kept.inputs), change(kept.errors))
                for name, kept in self.gradients.items()
            },
            change(self.pending),
            change(self.started),
        )


# A checkpoint in mid-epoch holds the state of its streams.
torch.serialization.add_safe_globals([FastWeightLayerState, Gradients])


class FastWeightLayer(nn.Module):
    """f_theta' above, from the features of a language model to those of its output softmax.

    embed_dim: D; hidden_dim: F; fast: a key of FAST_WEIGHTS; bias_entries: with "softmax-bias", how many that bias has;
    step_size, decay: one for all weights, fixed, in place of learned ones for each; divisor: what gradients are divided
    by, 1 in the paper. Its public code divides by the number of losses in the batch: a divisor of as many tokens as
    training has in a batch is the same there, without making the steps of evaluation depend on its batches. Raises
    ValueError for no hidden unit and a divisor that is not above 0.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        fast: str = "both",
        bias_entries: int = 0,
        step_size: float | None = None,
        decay: float | None = None,
        divisor: float = 1.0,
    ) -> None:
        super().__init__()
        if hidden_dim < 1:
            raise ValueError(f"the hidden layer must have at least 1 unit, got {hidden_dim}: change --fwl-hidden-dim")
        if divisor <= 0:
            raise ValueError(f"gradients are divided by a number above 0: change --fwl-divide-gradients-by {divisor}")
        self.first = nn.Linear(embed_dim, hidden_dim)
        self.second = nn.Linear(hidden_dim, embed_dim)
        self.norm = nn.LayerNorm(embed_dim)
        self.fast = FAST_WEIGHTS[fast]
        self.bias_entries = bias_entries
        self.divisor = divisor
        self.fixed_step_size, self.fixed_decay = step_size, decay
        count = len(self.fast)
        learned = count > 0 and step_size is None
        self.step_sizes = nn.Parameter(torch.full((count,), STEP_SIZE)) if learned else None
        # Through a sigmoid, which keeps gamma between 0 and 1.
        start = torch.full((count,), DECAY).logit()
        self.decays = nn.Parameter(start) if count > 0 and decay is None else None

    def forward(
        self,
        x: Tensor,
        tokens: Tensor,
        log_prob: LogProb,
        state: FastWeightLayerState | None = None,
        padding: Tensor | None = None,
        same_segment: bool = False,
    ) -> tuple[Tensor, FastWeightLayerState]:
        """x (B, L, D), features after each of the tokens (B, L) -> y (B, L, D + bias_entries) and the new state.

        The bias_entries are what is added to each entry of the softmax's bias, which log_prob adds for its features.
        state: after what was read before, None = nothing. padding (B, L): True at tokens that are none. same_segment:
        the tokens go on with the segment of the state; otherwise they are the next one, whole or its beginning.
        """
        slots = x if state is None else torch.cat([state.pending.unsqueeze(1).to(x.dtype), x], 1)
        hidden = self.first(slots)
        targets, known = self._targets(tokens, padding, state)
        gradients = self._learn(slots[:, :-1], hidden[:, :-1], targets, known, log_prob)
        sums: dict[str, Tensor] = {}
        if state is not None:
            # The last loss of before was not known before its token.
            before = {name: found.at(slice(0, 1)).detach() for name, found in gradients.items()}
            before = {name: state.gradients[name].then(found) for name, found in before.items()}
            gradients = {name: found.at(slice(1, None)) for name, found in gradients.items()}
            if same_segment:
                sums = state.sums
                gradients = {name: before[name].then(found) for name, found in gradients.items()}
            else:
                sums = self._decay(state.sums, before)
        y = self._read(x, hidden[:, hidden.shape[1] - x.shape[1] :], gradients, sums)
        return y, self._remember(x, gradients, sums, state, padding)

    def state_size(self, length: int, carried: bool = False) -> int:
        """Numbers in a state after a segment of `length` tokens, with the sums of earlier ones where it is carried."""
        embed_dim, hidden_dim = self.first.in_features, self.first.out_features
        sizes = {
            "first.weight": (embed_dim, hidden_dim),
            "first.bias": (hidden_dim,),
            "second.weight": (hidden_dim, embed_dim),
            "softmax.bias": (self.bias_entries,),
        }
        kept = [sizes.get(name, (embed_dim,)) for name in self.fast]
        return embed_dim + (length - 1) * sum(map(sum, kept)) + carried * sum(map(math.prod, kept))

    def _targets(
        self, tokens: Tensor, padding: Tensor | None, state: FastWeightLayerState | None
    ) -> tuple[Tensor, Tensor]:
        """The token (B, M) that each position but the last is to predict, and whether there are both, (B, M)."""
        first = 0 if state is not None else 1
        valid = torch.ones_like(tokens, dtype=torch.bool) if padding is None else ~padding
        before = valid[:, :-1]
        if state is not None:
            before = torch.cat([state.started.unsqueeze(1), before], 1)
        if padding is None:
            return tokens[:, first:], before
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        following = places.masked_fill(padding, tokens.shape[1]).flip(1).cummin(1).values.flip(1)[:, first:]
        there = following < tokens.shape[1]
        return tokens.gather(1, following.where(there, 0)), before & there

    def _learn(
        self, x: Tensor, hidden: Tensor, targets: Tensor, known: Tensor, log_prob: LogProb
    ) -> dict[str, Gradients]:
        """The gradients of the losses of M positions, of the fast weights; zero where no target is known."""
        if not self.fast:
            return {}
        second_order = torch.is_grad_enabled()
        with torch.enable_grad():
            if not (second_order and hidden.requires_grad):
                hidden = hidden.detach().requires_grad_()
            squares = hidden.relu().square()
            outputs = self.second(squares)
            normal = F.layer_norm(outputs, outputs.shape[-1:], eps=self.norm.eps)
            y = normal * self.norm.weight + self.norm.bias
            if self.bias_entries:
                y = torch.cat([y, y.new_zeros(*y.shape[:-1], self.bias_entries)], -1)
            loss = -log_prob(y, targets).where(known, 0).sum() / self.divisor
            wanted = {"first": hidden, "second": outputs, "y": y}
            if FIRST[0] not in self.fast:
                del wanted["first"]
            if SECOND[0] not in self.fast:
                del wanted["second"]
            errors = dict(
                zip(wanted, torch.autograd.grad(loss, list(wanted.values()), create_graph=second_order), strict=True)
            )
        if not second_order:
            squares, normal = squares.detach(), normal.detach()
        found = {}
        if "first" in errors:
            found["first.weight"] = Gradients(x, errors["first"])
            found["first.bias"] = Gradients(None, errors["first"])
        if "second" in errors:
            of_y = errors["y"][..., : self.norm.weight.shape[0]]
            found["second.weight"] = Gradients(squares, errors["second"])
            found["second.bias"] = Gradients(None, errors["second"])
            found["norm.weight"] = Gradients(None, normal * of_y)
            found["norm.bias"] = Gradients(None, of_y)
        if SOFTMAX[0] in self.fast:
            found["softmax.bias"] = Gradients(None, errors["y"][..., self.norm.weight.shape[0] :])
        return found

    def _decay(self, sums: dict[str, Tensor], gradients: dict[str, Gradients]) -> dict[str, Tensor]:
        """Delta after a segment with these gradients."""
        decays = self.decays.sigmoid() if self.decays is not None else [self.fixed_decay] * len(self.fast)
        with torch.autocast(self.first.weight.device.type, enabled=False):
            return {
                name: gradients[name].sum() + (decay * sums[name] if sums else 0)
                for name, decay in zip(self.fast, decays, strict=True)
            }

    def _read(self, x: Tensor, hidden: Tensor, gradients: dict[str, Gradients], sums: dict[str, Tensor]) -> Tensor:
        """f with the fast weights of each position; hidden = x U + a."""

        def change(name: str, inputs: Tensor) -> Tensor | float:
            return self._change(name, inputs, gradients, sums)

        hidden = hidden + change("first.weight", x) + change("first.bias", x)
        squares = hidden.relu().square()
        outputs = self.second(squares) + change("second.weight", squares) + change("second.bias", squares)
        normal = F.layer_norm(outputs, outputs.shape[-1:], eps=self.norm.eps)
        gain = self.norm.weight + change("norm.weight", x)
        y = normal * gain + self.norm.bias + change("norm.bias", x)
        if not self.bias_entries:
            return y
        return torch.cat([y, y.new_zeros(*y.shape[:-1], self.bias_entries) + change("softmax.bias", x)], -1)

    def _change(
        self, name: str, inputs: Tensor, gradients: dict[str, Gradients], sums: dict[str, Tensor]
    ) -> Tensor | float:
        """What the steps of a weight add to inputs (B, L, in) times it, or to a vector: (B, L, out)."""
        if name not in self.fast:
            return 0.0
        index, found = self.fast.index(name), gradients[name]
        step = self.fixed_step_size if self.step_sizes is None else self.step_sizes[index]
        assert step is not None
        with torch.autocast(inputs.device.type, enabled=False):
            errors = at_least_float32(found.errors)
            if found.inputs is None:
                total = cumulative_sum(errors, inputs.shape[1])
                total = total + sums[name].unsqueeze(1) if sums else total
            else:
                queries = at_least_float32(inputs)
                total = causal_sum(queries, at_least_float32(found.inputs), errors)
                total = total + queries @ sums[name] if sums else total
            return (-step * total).to(inputs.dtype)

    def _remember(
        self,
        x: Tensor,
        gradients: dict[str, Gradients],
        sums: dict[str, Tensor],
        state: FastWeightLayerState | None,
        padding: Tensor | None,
    ) -> FastWeightLayerState:
        started = torch.ones(len(x), dtype=torch.bool, device=x.device)
        pending = x[:, -1]
        if padding is not None:
            places = torch.arange(1, x.shape[1] + 1, device=x.device).masked_fill(padding, 0)
            last, started = places.max(1).values, (~padding).any(1)
            pending = x[torch.arange(len(x), device=x.device), (last - 1).clamp(min=0)]
            before = torch.zeros_like(pending) if state is None else state.pending.to(x.dtype)
            pending = pending.where(started.unsqueeze(1), before)
            started = started if state is None else started | state.started
        return FastWeightLayerState(
            {name: value.detach() for name, value in sums.items()},
            {name: found.detach() for name, found in gradients.items()},
            pending.detach(),
            started,
        )
