"""The layer itself: f, the gradients of its losses in one backward pass, and f with the updated weights."""

import math
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.models.fast_weight_layer.initialization import HEIGHT, be_identity, white_bases
from fairseq_fwp.models.fast_weight_layer.update import (
    FAST_WEIGHTS,
    FastWeightLayerState,
    Gradients,
    Number,
    Update,
    end_segment,
)
from fairseq_fwp.modules.adaptive_softmax import AdaptiveSoftmax
from fairseq_fwp.modules.attention.base import detach
from fairseq_fwp.ops.checks import check, look_up

# Initial step sizes are from the public code (google-research, fwl); the paper does not give them. Neither gives an
# initial gamma: here, a segment counts 9 tenths of the next one.
STEP_SIZE = 0.01
DECAY = 0.9

# Standard deviation of U and W in the public code.
RANDOM_STD = 0.05

# Adam moves every number by about the learning rate in an update, which suits weights. Best step sizes and decays may
# be orders of magnitude away: they are learned as 0.01 exp(30 s) and sigmoid(30 d), 3% an update at rate 0.001.
PACE = 30.0

# The weights at which a segment's losses are differentiated.
GRADIENTS_AT = ("trained", "carried")


# M positions with a loss: the inputs (B, M, D) of U, and the hidden units (B, M, F) with trained U and a. Then the
# tokens (B, M) that they predict, and whether position and token exist, (B, M) bool.
Losses: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


class FastWeightLayer(nn.Module):
    """The function f_theta' (see the package), from the features of a language model to those of its output softmax.

    embed_dim: D; hidden_dim: F; map_inputs: a linear map before U, see `whiten`;
    random_start: U and W are drawn as in the public code, instead of the identity;
    fast_weights: a key of FAST_WEIGHTS; bias_entries: with "softmax-bias", the number of entries of that bias;
    gradients_at: one of GRADIENTS_AT, "trained" in the paper;
    step_size, decay: one fixed number for all weights, instead of a learned one for each;
    global_step_size: one learned step size for all weights, "slightly" worse in the paper (Sec. 2);
    divide_gradients_by: a divisor; 1 in the paper, the number of losses in the batch in its public code.

    Raises ValueError for numbers out of their ranges, an identity with fewer than 2 D hidden units, and a random start
    with a map, which only the identity uses.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        fast_weights: str = "both",
        bias_entries: int = 0,
        step_size: float | None = None,
        decay: float | None = None,
        divide_gradients_by: float = 1.0,
        map_inputs: bool = False,
        gradients_at: str = "trained",
        random_start: bool = False,
        global_step_size: bool = False,
    ) -> None:
        super().__init__()
        check(
            not (random_start and map_inputs),
            "`map_inputs` must be off with `random_start`, got on: the map needs a start as the identity",
        )
        check(
            hidden_dim >= 2 * embed_dim or random_start,
            f"`hidden_dim` must be at least {2 * embed_dim}, got {hidden_dim}: a layer that starts as the identity "
            "needs two units for each feature",
        )
        check(0 < divide_gradients_by < math.inf, f"`divide_gradients_by` must be above 0, got {divide_gradients_by}")
        check(step_size is None or 0 <= step_size < math.inf, f"`step_size` must be at least 0, got {step_size}")
        check(decay is None or 0 <= decay <= 1, f"`decay` must be in [0, 1], got {decay}")
        check(
            not global_step_size or step_size is None,
            f"`global_step_size` must be off with `step_size`, got {step_size}: a fixed step size is not learned",
        )
        choices = ", ".join(GRADIENTS_AT)
        check(gradients_at in GRADIENTS_AT, f"`gradients_at` must be one of {choices}, got {gradients_at!r}")
        self.inputs = nn.Linear(embed_dim, embed_dim) if map_inputs else None
        self.first = nn.Linear(embed_dim, hidden_dim)
        self.second = nn.Linear(hidden_dim, embed_dim)
        self.norm = nn.LayerNorm(embed_dim)
        self.fast = look_up("choice of fast weights", fast_weights, FAST_WEIGHTS)
        self.bias_entries = bias_entries
        self.divisor = divide_gradients_by
        self.gradients_at = gradients_at
        self.random_start = random_start
        self.fixed_step_size, self.fixed_decay = step_size, decay
        count = len(self.fast)
        step_sizes = 1 if global_step_size else count
        self.log_step_sizes = nn.Parameter(torch.zeros(step_sizes)) if count > 0 and step_size is None else None
        start = torch.full((count,), DECAY).logit() / PACE
        self.decay_logits = nn.Parameter(start) if count > 0 and decay is None else None

    def initialize(self) -> None:
        """Start as the identity on normalised features (|x| <= sqrt D, before gain and shift), or at random.

        Units beyond 2 D are random. They have no effect until W learns to read them.
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
        be_identity(self, eye, eye, torch.zeros(dim))

    def whiten(self, mean: Tensor, covariance: Tensor, of_gradients: Tensor) -> None:
        """Start as the identity in a basis where gradient steps of U are steps of K-FAC, see `white_bases`.

        mean (D,), covariance (D, D): of the features; of_gradients (D, D): second moments of the loss's gradients by
        the features. Raises ValueError for a layer without the map.
        """
        check(self.inputs is not None, "`map_inputs` must be on to whiten inputs, got a layer without the map")
        keys, basis = white_bases(covariance, of_gradients)
        be_identity(self, keys.to(mean), basis.to(mean), mean)

    def forward(
        self,
        x: Tensor,
        tokens: Tensor,
        softmax: AdaptiveSoftmax,
        state: FastWeightLayerState | None = None,
        padding: Tensor | None = None,
        same_segment: bool = False,
    ) -> tuple[Tensor, FastWeightLayerState]:
        """Return y (B, L, D + bias_entries) for features x (B, L, D) after the tokens (B, L), and the new state.

        The last bias_entries are added to the entries of the softmax's bias. state: after earlier tokens, None = none.
        padding (B, L): True at padding. same_segment: the tokens continue the segment of the state, else the next one.
        """
        slots = x if state is None else torch.cat([state.pending.unsqueeze(1).to(x.dtype), x], 1)
        inputs = slots if self.inputs is None else self.inputs(slots)
        hidden = self.first(inputs)
        losses = (inputs[:, :-1], hidden[:, :-1], *_targets(tokens, padding, state))
        update: dict[str, Tensor] = {} if state is None else state.update
        if state is None or same_segment:
            history = self._differentiate(losses, softmax, update)
            if state is not None:
                history = {part: state.history[part].then(new) for part, new in history.items()}
        else:
            # The last loss of the previous segment needs the first token of this one.
            of_last, of_rest = zip(*(part.tensor_split([1], 1) for part in losses), strict=True)
            last = self._differentiate(of_last, softmax, update)
            whole = {part: state.history[part].then(detach(new)) for part, new in last.items()}
            with torch.autocast(x.device.type, enabled=False):
                update = end_segment(update, whole, self.decays())
            history = self._differentiate(of_rest, softmax, update)
        new = slots.shape[1] - x.shape[1]
        fast = Update(self.step_sizes(), update, history)
        y = self._apply_above(hidden[:, new:] + fast.of_layer("first", inputs[:, new:]), fast)[-1]
        return y, detach(FastWeightLayerState(update, history, *_last(x, padding, state)))

    def state_size(self, length: int, carried: bool = False) -> int:
        """Return the numbers in a state after a segment of `length` tokens, with Delta if it is carried."""
        embed_dim, hidden_dim = self.first.in_features, self.first.out_features
        sizes = {
            "first.weight": (embed_dim, hidden_dim),
            "first.bias": (hidden_dim,),
            "second.weight": (hidden_dim, embed_dim),
            "softmax.bias": (self.bias_entries,),
        }
        update = {name: sizes.get(name, (embed_dim,)) for name in self.fast}
        history = [sum(size) for name, size in update.items() if name not in ("first.bias", "second.bias")]
        return embed_dim + (length - 1) * sum(history) + carried * sum(map(math.prod, update.values()))

    def step_sizes(self) -> dict[str, Number]:
        """Return alpha of each fast weight."""
        if self.log_step_sizes is None:
            return dict.fromkeys(self.fast, self.fixed_step_size or 0.0)
        with torch.autocast(self.log_step_sizes.device.type, enabled=False):
            sizes = STEP_SIZE * (PACE * self.log_step_sizes).exp()
            return dict(zip(self.fast, sizes.expand(len(self.fast)), strict=True))

    def decays(self) -> dict[str, Number]:
        """Return gamma of each fast weight."""
        if self.decay_logits is None:
            return dict.fromkeys(self.fast, self.fixed_decay or 0.0)
        return dict(zip(self.fast, (PACE * self.decay_logits).sigmoid(), strict=True))

    def _differentiate(
        self, losses: Losses, softmax: AdaptiveSoftmax, update: dict[str, Tensor]
    ) -> dict[str, Gradients]:
        """Return the gradients of the losses by the fast parts; zero where no target is known."""
        if not self.fast:
            return {}
        x, hidden, targets, has_target = losses
        second_order = torch.is_grad_enabled()
        moves = self.gradients_at == "carried" and len(update) > 0
        fast = Update(self.step_sizes(), update, {}) if moves else Update({}, {}, {})
        with torch.enable_grad():
            hidden = hidden + fast.of_layer("first", x)
            if not (second_order and hidden.requires_grad):
                hidden = hidden.detach().requires_grad_()
            squares, outputs, normal, y = self._apply_above(hidden, fast)
            if second_order:
                loss = -softmax.target_log_prob(y, targets).where(has_target, 0).sum() / self.divisor
                (of_y,) = torch.autograd.grad(loss, y, create_graph=True)
            else:
                of_y = softmax.loss_gradient(y.detach(), targets) * has_target.unsqueeze(-1) / self.divisor
            outs = {"first": hidden, "second": outputs}
            outs = {layer: out for layer, out in outs.items() if f"{layer}.weight" in self.fast}
            errors = torch.autograd.grad(y, list(outs.values()), of_y, create_graph=second_order) if outs else ()
        if not second_order:
            squares, normal = squares.detach(), normal.detach()
        inputs = {"first": x, "second": squares}
        gradients = {layer: Gradients(inputs[layer], error) for layer, error in zip(outs, errors, strict=True)}
        of_y, of_bias = of_y.split([normal.shape[-1], self.bias_entries], -1)
        of_vectors = {"norm.weight": normal * of_y, "norm.bias": of_y, "softmax.bias": of_bias}
        return gradients | {name: Gradients(None, error) for name, error in of_vectors.items() if name in self.fast}

    def _apply_above(self, hidden: Tensor, fast: Update) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the squares of hidden units (B, L, F), the outputs of W, the normalised outputs, and y."""
        squares = hidden.relu().square()
        outputs = self.second(squares) + fast.of_layer("second", squares)
        normal = F.layer_norm(outputs, outputs.shape[-1:], eps=self.norm.eps)
        weight, length = self.norm.weight, hidden.shape[1]
        gain = weight + fast.of_vector("norm.weight", weight, length)
        y = normal * gain + self.norm.bias + fast.of_vector("norm.bias", weight, length)
        if self.bias_entries:
            shifts = y.new_zeros(*y.shape[:-1], self.bias_entries)
            y = torch.cat([y, shifts + fast.of_vector("softmax.bias", weight, length)], -1)
        return squares, outputs, normal, y


def _targets(tokens: Tensor, padding: Tensor | None, state: FastWeightLayerState | None) -> tuple[Tensor, Tensor]:
    """Return the token (B, M) that each position except the last predicts, and whether both exist, (B, M)."""
    start = 0 if state is not None else 1
    valid = torch.ones_like(tokens, dtype=torch.bool) if padding is None else ~padding
    before = valid[:, :-1]
    if state is not None:
        before = torch.cat([state.started.unsqueeze(1), before], 1)
    if padding is None:
        return tokens[:, start:], before
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    following = places.masked_fill(padding, tokens.shape[1]).flip(1).cummin(1).values.flip(1)[:, start:]
    there = following < tokens.shape[1]
    return tokens.gather(1, following.where(there, 0)), before & there


def _last(x: Tensor, padding: Tensor | None, state: FastWeightLayerState | None) -> tuple[Tensor, Tensor]:
    """Return the features (B, D) after the last token of each row, and whether the row has a token, (B,)."""
    if padding is None:
        return x[:, -1], torch.ones(len(x), dtype=torch.bool, device=x.device)
    places = torch.arange(1, x.shape[1] + 1, device=x.device).masked_fill(padding, 0)
    last, started = places.max(1).values, (~padding).any(1)
    pending = x[torch.arange(len(x), device=x.device), (last - 1).clamp(min=0)]
    before = torch.zeros_like(pending) if state is None else state.pending.to(x.dtype)
    pending = pending.where(started.unsqueeze(1), before)
    return pending, started if state is None else started | state.started
