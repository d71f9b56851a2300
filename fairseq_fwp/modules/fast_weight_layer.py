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

The paper's L_t, of the trained weights, asks for the same step again wherever it has been taken already. With gradients
at "carried" weights, L_t is the loss with theta - alpha Delta, the weights that a segment begins with, as in dynamic
evaluation: what is learned asks for no more, and Delta can count longer. It costs one more product with Delta.

Shapes: B batch, L tokens, M positions that teach, D embed_dim, F hidden_dim.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.modules.causal_sum import Number, causal_sum, cumulative_sum
from fairseq_fwp.modules.look_up import look_up
from fairseq_fwp.modules.precision import at_least_float32

# Step sizes start where those of the public code do (google-research, fwl); the paper does not say. It does not say
# where gamma starts either, which that code has not: here, a segment counts 9 tenths of the next.
STEP_SIZE = 0.01
DECAY = 0.9

# Of U and W in the public code, which draws them.
RANDOM_STD = 0.05

# Adam moves every number by about the learning rate an update, which suits weights. Step sizes and decays, whose best
# values may be orders of magnitude away, are learned as 0.01 exp(30 s) and sigmoid(30 d): 3% an update at 0.001.
PACE = 30.0

FIRST = ("first.weight", "first.bias")
SECOND = ("second.weight", "second.bias", "norm.weight", "norm.bias")
SOFTMAX = ("softmax.bias",)

# Linear layers, whose bias has the gradients of their outputs, as their weight has.
LAYERS = ("first", "second")

# The identity is a difference of squares, in which small changes of U or W tell. Adam moves all weights alike, so that
# these begin large: hidden units at HEIGHT, squared, and outputs, which are normalised, SPREAD times the features.
HEIGHT = 8.0
SPREAD = 1024.0

# Of the median eigenvalue, what is added to all of a covariance before it is inverted.
DAMPING = 0.1

# Which weights are fast: both layers, one of them, the output softmax's bias alone (Table 2, "bias only"), or none.
FAST_WEIGHTS = {"both": FIRST + SECOND, "first": FIRST, "second": SECOND, "softmax-bias": SOFTMAX, "none": ()}

# At which weights a segment's losses are differentiated, see above.
GRADIENTS_AT = ("trained", "carried")


def damped_power(moments: Tensor, exponent: float) -> Tensor:
    """The power (D, D), float64, of a positive semi-definite matrix (D, D) over its median eigenvalue, plus DAMPING."""
    values, vectors = torch.linalg.eigh(moments.double())
    return vectors * (values.clamp(min=0) / values.median() + DAMPING) ** exponent @ vectors.mT


def part_of(weight: str) -> str:
    """What the gradients of a fast weight are kept under: its layer, or its own name."""
    layer, _, _ = weight.partition(".")
    return layer if layer in LAYERS else weight


class Softmax(Protocol):
    """The output layer: what it does with features (B, M, D) and tokens (B, M)."""

    def target_log_prob(self, features: Tensor, target: Tensor) -> Tensor:
        """The tokens' log-probabilities (B, M)."""

    def loss_gradient(self, features: Tensor, target: Tensor) -> Tensor:
        """The gradients (B, M, D) of minus the tokens' log-probabilities by the features, without a graph."""


class Lessons(NamedTuple):
    """M positions that teach: the inputs x (B, M, D) of U, hidden = x U + a (B, M, F) with the trained U and a.

    targets, known: the tokens (B, M) that they are to predict, and whether there are both, (B, M) bool.
    """

    x: Tensor
    hidden: Tensor
    targets: Tensor
    known: Tensor

    def at(self, positions: slice) -> "Lessons":
        """Some of them."""
        return Lessons(*(values[:, positions] for values in self))


class Gradients(NamedTuple):
    """What M positions teach a fast part: of a linear layer the inputs (B, M, in) and its outputs' errors (B, M, out).

    The gradient of the layer's weight is inputs^T errors, that of its bias the sum of errors. Any other vector has no
    inputs, and its gradients for errors.
    """

    inputs: Tensor | None
    errors: Tensor

    def then(self, more: "Gradients") -> "Gradients":
        """These and more, in this order."""
        inputs = None if self.inputs is None or more.inputs is None else torch.cat([self.inputs, more.inputs], 1)
        return Gradients(inputs, torch.cat([self.errors, more.errors], 1))

    def detach(self) -> "Gradients":
        """The same values, cut from the graph."""
        return Gradients(None if self.inputs is None else self.inputs.detach(), self.errors.detach())

    def sum(self, of_weight: bool) -> Tensor:
        """The gradient of all positions, float32 at least: of a layer's weight (B, in, out), or a vector (B, out)."""
        errors = at_least_float32(self.errors)
        return at_least_float32(self.inputs).mT @ errors if of_weight and self.inputs is not None else errors.sum(1)


class FastWeightLayerState(NamedTuple):
    """What a layer has learnt, without a graph: sums over past segments, the open segment, and what is yet to learn.

    sums: Delta by weight, (B, in, out) or (B, out), none before the second segment; gradients: of the open segment's
    positions, by part; pending (B, D): features after the last token, whose loss the next token tells, and
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

    embed_dim: D; hidden_dim: F; map_inputs: a linear map before U, see `whiten`; random_start: U and W are drawn as in
    the public code, in place of the identity; fast: a key of FAST_WEIGHTS;
    bias_entries: with "softmax-bias", how many that bias has;
    gradients_at: one of GRADIENTS_AT, "trained" in the paper;
    step_size, decay: one for all weights, fixed, in place of learned ones for each; divisor: what gradients are divided
    by, 1 in the paper. Its public code divides by the number of losses in the batch: a divisor of as many tokens as
    training has in a batch is the same there, without making the steps of evaluation depend on its batches. Raises
    ValueError for an identity of fewer than 2 D hidden units, for a random start with a map, which is for the identity,
    and for a divisor that is not above 0, a step size below 0 or a decay that is not from 0 to 1.
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
        map_inputs: bool = False,
        gradients_at: str = "trained",
        random_start: bool = False,
    ) -> None:
        super().__init__()
        if random_start and map_inputs:
            raise ValueError(
                "the map is for a layer that begins as the identity: leave out --fwl-map-inputs or --fwl-random-start"
            )
        if hidden_dim < 2 * embed_dim and not random_start:
            raise ValueError(
                f"the layer begins as the identity, for which it needs 2 x {embed_dim} hidden units, got {hidden_dim}: "
                "change --fwl-hidden-dim"
            )
        if not 0 < divisor < math.inf:
            raise ValueError(f"gradients are divided by a number above 0: change --fwl-divide-gradients-by {divisor}")
        if step_size is not None and not 0 <= step_size < math.inf:
            raise ValueError(
                f"a step goes down the gradient, by 0 or more times of it: change --fwl-step-size {step_size}"
            )
        if decay is not None and not 0 <= decay <= 1:
            raise ValueError(f"of what was learnt a part is kept, from 0 to 1: change --fwl-decay {decay}")
        if gradients_at not in GRADIENTS_AT:
            raise ValueError(f"gradients_at must be one of {', '.join(GRADIENTS_AT)}, got {gradients_at!r}")
        self.inputs = nn.Linear(embed_dim, embed_dim) if map_inputs else None
        self.first = nn.Linear(embed_dim, hidden_dim)
        self.second = nn.Linear(hidden_dim, embed_dim)
        self.norm = nn.LayerNorm(embed_dim)
        self.fast = look_up("choice of fast weights", fast, FAST_WEIGHTS)
        self.bias_entries = bias_entries
        self.divisor = divisor
        self.gradients_at = gradients_at
        self.random_start = random_start
        self.fixed_step_size, self.fixed_decay = step_size, decay
        count = len(self.fast)
        self.log_step_sizes = nn.Parameter(torch.zeros(count)) if count > 0 and step_size is None else None
        start = torch.full((count,), DECAY).logit() / PACE
        self.decay_logits = nn.Parameter(start) if count > 0 and decay is None else None

    def initialize(self) -> None:
        """Begins as the identity on features x that are normalised (|x| <= sqrt D), gain and shift aside, or at random.

        The paper does not say where it begins; from random weights it first has to learn again what the model below
        knows, as those of a random start have to. The units beyond 2 D are random, and add nothing until W learns to
        read them.
        """
        dim = self.first.in_features
        nn.init.normal_(self.first.weight, std=HEIGHT * dim**-0.5)
        for parameter in (self.first.bias, self.second.weight, self.second.bias):
            nn.init.zeros_(parameter)
        self.norm.reset_parameters()
        if self.random_start:
            for layer in (self.first, self.second):
                nn.init.normal_(layer.weight, std=RANDOM_STD)
            return
        eye = torch.eye(dim)
        self._be_identity(eye, eye, torch.zeros(dim))

    @torch.no_grad()
    def _be_identity(self, keys: Tensor, basis: Tensor, mean: Tensor) -> None:
        """On x with |x| <= sqrt D, with U's inputs (x - mean) keys and pairs of hidden units along z = x basis.

        With r a bound of |z|: ReLU(1 + z / r)^2 - ReLU(1 - z / r)^2 = 4 z / r, of which W makes x, SPREAD times.
        """
        dim = len(basis)
        scaled = basis / (dim**0.5 * basis.norm(dim=0).max())
        if self.inputs is not None:
            self.inputs.weight.copy_(keys.mT)
            self.inputs.bias.copy_(-mean @ keys)
        for sign, units in ((1, slice(dim)), (-1, slice(dim, 2 * dim))):
            self.first.weight[units] = sign * HEIGHT * torch.linalg.solve(keys, scaled).mT
            self.first.bias[units] = HEIGHT * (1 + sign * (mean @ scaled))
            self.second.weight[:, units] = sign * SPREAD / (4 * HEIGHT**2) * torch.linalg.inv(scaled).mT

    def whiten(self, mean: Tensor, covariance: Tensor, of_gradients: Tensor) -> None:
        """Begins as the identity where a step down the gradient of U is one of K-FAC (Martens & Grosse 2015).

        arXiv 1503.05671: inverse covariances of a weight's inputs and of its outputs' gradients from either side of its
        gradient. Here U's inputs are white by the linear map before it, and the pairs of units stand along axes on
        which gradients are: what one word teaches moves others less.

        mean (D,), covariance (D, D): of the features; of_gradients (D, D): second moments of the loss's gradients by
        them. Raises ValueError for a layer without the map.
        """
        if self.inputs is None:
            raise ValueError("white inputs need a map before the layer: give --fwl-map-inputs")
        keys = damped_power(covariance, -0.5)
        # As long as the features themselves, on average.
        keys = keys * (len(mean) / (keys.mT @ covariance @ keys).trace()).sqrt()
        self._be_identity(keys.to(mean), damped_power(of_gradients, 0.5).to(mean), mean)

    def forward(
        self,
        x: Tensor,
        tokens: Tensor,
        softmax: Softmax,
        state: FastWeightLayerState | None = None,
        padding: Tensor | None = None,
        same_segment: bool = False,
    ) -> tuple[Tensor, FastWeightLayerState]:
        """x (B, L, D), features after each of the tokens (B, L) -> y (B, L, D + bias_entries) and the new state.

        The bias_entries are what is added to each entry of the softmax's bias: its features end with them.
        state: after what was read before, None = nothing. padding (B, L): True at tokens that are none. same_segment:
        the tokens go on with the segment of the state; otherwise they are the next one, whole or its beginning.
        """
        slots = x if state is None else torch.cat([state.pending.unsqueeze(1).to(x.dtype), x], 1)
        inputs = slots if self.inputs is None else self.inputs(slots)
        hidden = self.first(inputs)
        lessons = Lessons(inputs[:, :-1], hidden[:, :-1], *self._targets(tokens, padding, state))
        sums: dict[str, Tensor] = {} if state is None else state.sums
        if state is None:
            gradients = self._learn(lessons, softmax, sums)
        elif same_segment:
            found = self._learn(lessons, softmax, sums)
            gradients = {name: state.gradients[name].then(new) for name, new in found.items()}
        else:
            # The last loss of the segment before was not known before its token.
            last = self._learn(lessons.at(slice(1)), softmax, sums)
            sums = self._decay(sums, {name: state.gradients[name].then(new.detach()) for name, new in last.items()})
            gradients = self._learn(lessons.at(slice(1, None)), softmax, sums)
        new = slots.shape[1] - x.shape[1]
        y = self._read(inputs[:, new:], hidden[:, new:], gradients, sums)
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
        summed = {name: sizes.get(name, (embed_dim,)) for name in self.fast}
        kept = [sum(size) for name, size in summed.items() if name not in ("first.bias", "second.bias")]
        return embed_dim + (length - 1) * sum(kept) + carried * sum(map(math.prod, summed.values()))

    def step_sizes(self) -> dict[str, Number]:
        """alpha of each fast weight."""
        if self.log_step_sizes is None:
            return dict.fromkeys(self.fast, self.fixed_step_size or 0.0)
        return dict(zip(self.fast, STEP_SIZE * (PACE * self.log_step_sizes).exp(), strict=True))

    def decays(self) -> dict[str, Number]:
        """gamma of each fast weight."""
        if self.decay_logits is None:
            return dict.fromkeys(self.fast, self.fixed_decay or 0.0)
        return dict(zip(self.fast, (PACE * self.decay_logits).sigmoid(), strict=True))

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

    def _learn(self, lessons: Lessons, softmax: Softmax, sums: dict[str, Tensor]) -> dict[str, Gradients]:
        """What M positions teach the fast parts; zero where no target is known."""
        if not self.fast:
            return {}
        x, hidden, targets, known = lessons
        second_order = torch.is_grad_enabled()
        if self.gradients_at == "trained":
            sums = {}
        with torch.enable_grad():
            hidden = hidden + self._change_layer("first", x, {}, sums)
            if not (second_order and hidden.requires_grad):
                hidden = hidden.detach().requires_grad_()
            squares, outputs, normal, y = self._apply_above(hidden, {}, sums)
            if second_order:
                loss = -softmax.target_log_prob(y, targets).where(known, 0).sum() / self.divisor
                (of_y,) = torch.autograd.grad(loss, y, create_graph=True)
            else:
                of_y = softmax.loss_gradient(y.detach(), targets) * known.unsqueeze(-1) / self.divisor
            outs = {"first": hidden, "second": outputs}
            outs = {layer: out for layer, out in outs.items() if f"{layer}.weight" in self.fast}
            errors = torch.autograd.grad(y, list(outs.values()), of_y, create_graph=second_order) if outs else ()
        if not second_order:
            squares, normal = squares.detach(), normal.detach()
        inputs = {"first": x, "second": squares}
        found = {layer: Gradients(inputs[layer], error) for layer, error in zip(outs, errors, strict=True)}
        of_y, of_bias = of_y.split([normal.shape[-1], self.bias_entries], -1)
        of_vectors = {"norm.weight": normal * of_y, "norm.bias": of_y, "softmax.bias": of_bias}
        return found | {name: Gradients(None, error) for name, error in of_vectors.items() if name in self.fast}

    def _decay(self, sums: dict[str, Tensor], gradients: dict[str, Gradients]) -> dict[str, Tensor]:
        """Delta after a segment with these gradients."""
        with torch.autocast(self.first.weight.device.type, enabled=False):
            return {
                name: gradients[part_of(name)].sum(name.endswith("weight")) + (decay * sums[name] if sums else 0)
                for name, decay in self.decays().items()
            }

    def _read(self, x: Tensor, hidden: Tensor, gradients: dict[str, Gradients], sums: dict[str, Tensor]) -> Tensor:
        """f with the fast weights of each position; hidden = x U + a."""
        hidden = hidden + self._change_layer("first", x, gradients, sums)
        return self._apply_above(hidden, gradients, sums)[-1]

    def _apply_above(
        self, hidden: Tensor, gradients: dict[str, Gradients], sums: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the hidden units (B, L, F): their squares, the outputs of W, these normalised, and y."""
        squares = hidden.relu().square()
        outputs = self.second(squares) + self._change_layer("second", squares, gradients, sums)
        normal = F.layer_norm(outputs, outputs.shape[-1:], eps=self.norm.eps)
        length = hidden.shape[1]
        gain = self.norm.weight + self._change_vector("norm.weight", length, gradients, sums)
        y = normal * gain + self.norm.bias + self._change_vector("norm.bias", length, gradients, sums)
        if self.bias_entries:
            shifts = y.new_zeros(*y.shape[:-1], self.bias_entries)
            y = torch.cat([y, shifts + self._change_vector("softmax.bias", length, gradients, sums)], -1)
        return squares, outputs, normal, y

    def _change_layer(
        self, layer: str, inputs: Tensor, gradients: dict[str, Gradients], sums: dict[str, Tensor]
    ) -> Number:
        """What the steps of a layer's weight and bias add to its outputs for inputs (B, L, in): (B, L, out)."""
        weight, bias = f"{layer}.weight", f"{layer}.bias"
        if layer not in gradients and weight not in sums:
            return 0.0
        with torch.autocast(inputs.device.type, enabled=False):
            queries, of_weight, of_bias = at_least_float32(inputs), -self.step_sizes()[weight], -self.step_sizes()[bias]
            total = queries.new_zeros(())
            if layer in gradients:
                keys, errors = gradients[layer]
                assert keys is not None
                total = causal_sum(
                    queries, at_least_float32(keys), at_least_float32(errors), scale=of_weight, offset=of_bias
                )
            if sums:
                total = total + queries @ (of_weight * sums[weight]) + of_bias * sums[bias].unsqueeze(1)
            return total.to(inputs.dtype)

    def _change_vector(
        self, name: str, length: int, gradients: dict[str, Gradients], sums: dict[str, Tensor]
    ) -> Number:
        """What the steps of a vector add to it at `length` positions: (B, length, out), or (B, 1, out) for them all."""
        if name not in gradients and name not in sums:
            return 0.0
        with torch.autocast(self.norm.weight.device.type, enabled=False):
            total = self.norm.weight.new_zeros(())
            if name in gradients:
                total = cumulative_sum(at_least_float32(gradients[name].errors), length)
            if sums:
                total = total + sums[name].unsqueeze(1)
            return (-self.step_sizes()[name] * total).to(self.norm.weight.dtype)

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
