"""The fast weight layer against its equations: one position after the other, by autograd, in float64.

Shapes: B batch, L tokens, D features, V words.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from support.pairwise import looped
from torch import nn

from fairseq_fwp.models.decoder import initialize
from fairseq_fwp.models.fast_weight_layer import FAST_WEIGHTS, GRADIENTS_AT, FastWeightLayer
from fairseq_fwp.models.fast_weight_layer.initialization import DAMPING, SPREAD
from fairseq_fwp.models.fast_weight_layer.layer import PACE, STEP_SIZE
from fairseq_fwp.modules.adaptive_softmax import AdaptiveInput, AdaptiveSoftmax

DIM, HIDDEN, WORDS = 6, 14, 23
SOFTMAXES = {"plain": [], "adaptive": [7, 15], "projected": [7, 15]}
FAST = list(FAST_WEIGHTS)
# Every softmax with all fast weights, and every choice of fast weights with one softmax.
PAIRS = [*(("both", kind) for kind in SOFTMAXES), *((fast, "adaptive") for fast in FAST if fast != "both")]


def build_softmax(kind, fast):
    cutoffs = SOFTMAXES[kind]
    words = AdaptiveInput(WORDS, DIM, cutoffs, 2, 1) if kind == "projected" else nn.Embedding(WORDS, DIM, 1)
    return AdaptiveSoftmax(words, cutoffs, shifted=fast == "softmax-bias")


def build(fast="both", kind="plain", **options):
    """Return a layer and an output softmax with large weights and different step sizes, in float64."""
    softmax = build_softmax(kind, fast)
    layer = FastWeightLayer(DIM, HIDDEN, fast, softmax.shift_entries, **options)
    for module in (layer, softmax):
        for parameter in module.double().parameters():
            nn.init.normal_(parameter, std=0.5)
    if layer.log_step_sizes is not None:
        set_step_sizes(layer, torch.rand(len(layer.fast)) + 0.1)
        nn.init.normal_(layer.decay_logits, std=1 / PACE)
    return layer, softmax


def set_step_sizes(layer, values):
    with torch.no_grad():
        layer.log_step_sizes.copy_((torch.as_tensor(values, dtype=torch.float64) / STEP_SIZE).log() / PACE)


def random_features(batch, length):
    return torch.randn(batch, length, DIM, dtype=torch.float64, requires_grad=True)


def random_tokens(batch, length):
    return torch.randint(2, WORDS, (batch, length))


def weights_of(layer, softmax):
    """Return the weights of f by the paper's names, and the softmax's biases: those of words, then of clusters."""
    clusters = () if softmax.clusters is None else (softmax.clusters.bias,)
    return {
        "first.weight": layer.first.weight.mT, "first.bias": layer.first.bias,
        "second.weight": layer.second.weight.mT, "second.bias": layer.second.bias,
        "norm.weight": layer.norm.weight, "norm.bias": layer.norm.bias,
        "softmax.bias": torch.cat([softmax.bias, *clusters]),
    }  # fmt: skip


def apply(weights, h):
    """Return f(h) of one h (D,)."""
    squares = (h @ weights["first.weight"] + weights["first.bias"]).relu().square()
    outputs = squares @ weights["second.weight"] + weights["second.bias"]
    return F.layer_norm(outputs, (DIM,)) * weights["norm.weight"] + weights["norm.bias"]


def loss_of(softmax, weights, y, token):
    """Return the loss, with the bias of the softmax from the weights if it is fast."""
    if "softmax.bias" in weights and softmax.shift_entries:
        clusters = () if softmax.clusters is None else (softmax.clusters.bias,)
        y = torch.cat([y, weights["softmax.bias"] - torch.cat([softmax.bias, *clusters]).detach()])
    return -softmax.target_log_prob(y[None], token[None])[0]


class Brute:
    """Compute one row position by position; `segments` as in the paper's formula."""

    def __init__(self, layer, softmax):
        self.layer, self.softmax = layer, softmax
        self.weights = weights_of(layer, softmax)
        self.fast = layer.fast
        self.steps, self.decays = layer.step_sizes(), layer.decays()

    def gradient(self, h, token, carried):
        """Return dL / d theta at one position, with a graph: at the trained weights, or at the segment's start."""
        slow = dict(self.weights)
        if "softmax.bias" in self.fast:  # a leaf that replaces the softmax's bias, for autograd
            slow["softmax.bias"] = slow["softmax.bias"].detach().requires_grad_()
        if self.layer.gradients_at == "carried":
            slow = {name: value - carried.get(name, 0) for name, value in slow.items()}
        loss = loss_of(self.softmax, slow, apply(slow, h), token)
        found = torch.autograd.grad(loss, [slow[name] for name in self.fast], create_graph=True)
        return dict(zip(self.fast, found, strict=True))

    def segment(self, features, tokens, following, delta):
        """Return y (L, D + shifts), and the gradients of all positions; following: the last one's target."""
        total = {name: torch.zeros_like(self.weights[name]) for name in self.fast}
        carried, ys = {name: self.steps[name] * delta.get(name, 0) for name in self.fast}, []
        for t, h in enumerate(features):
            changed = {name: carried[name] + self.steps[name] * total[name] for name in self.fast}
            fast = {name: value - changed.get(name, 0) for name, value in self.weights.items()}
            y = apply(fast, h)
            ys.append(torch.cat([y, -changed["softmax.bias"]]) if self.layer.bias_entries else y)
            token = tokens[t + 1] if t + 1 < len(tokens) else following
            if token is not None and self.fast:
                for name, value in self.gradient(h, token, carried).items():
                    total[name] = total[name] + value
        return torch.stack(ys), total

    def stream(self, segments):
        """Return y of each segment of (features (L, D), tokens (L,)), with Delta as in Clark et al. 2022, Sec. 3."""
        delta, ys = {}, []
        for index, (features, tokens) in enumerate(segments):
            following = segments[index + 1][1][0] if index + 1 < len(segments) else None
            y, total = self.segment(features, tokens, following, delta)
            ys.append(y)
            # gamma has a gradient of one step, as in the layer: the earlier Delta has no graph.
            delta = {
                name: self.decays[name] * delta[name].detach() + total[name].detach() if delta else total[name].detach()
                for name in self.fast
            }
        return ys


def check_gradients(ours, expected, inputs):
    """Check the gradients of a random projection of all values by every input."""
    direction = torch.randn_like(ours)
    found, wanted = (
        torch.autograd.grad((values * direction).sum(), inputs, retain_graph=True, materialize_grads=True)
        for values in (ours, expected)
    )
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other)
    return found


@pytest.mark.parametrize(("fast", "kind"), PAIRS)
def test_one_pass_is_the_loop_over_positions(fast, kind):
    """Values and derivatives through the updates agree: by features, weights, step sizes and softmax weights."""
    (layer, softmax), x, tokens = build(fast, kind), random_features(2, 5), random_tokens(2, 5)
    brute = Brute(layer, softmax)
    expected = torch.stack([brute.segment(x[row], tokens[row], None, {})[0] for row in range(2)])
    ours, _ = layer(x, tokens, softmax)
    torch.testing.assert_close(ours, expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, tokens, softmax)[0], expected)
    names, parameters = zip(*[*layer.named_parameters(), *softmax.named_parameters()], strict=True)
    found = dict(zip(("x", *names), check_gradients(ours, expected, (x, *parameters)), strict=True))
    if fast != "none":
        assert found["log_step_sizes"].abs().min() > 0 and found["bias"].abs().sum() > 0


@looped("lengths", [(4, 3, 2), (1, 2, 1)])
@looped("gradients_at", GRADIENTS_AT)
@pytest.mark.parametrize(("fast", "kind"), PAIRS)
def test_segments_carry_what_was_learnt(fast, kind, gradients_at, lengths):
    """Delta, gamma and the loss of a segment's last position agree, with all derivatives of the last segment."""
    layer, softmax = build(fast, kind, gradients_at=gradients_at)
    features = [random_features(2, length) for length in lengths]
    tokens = [random_tokens(2, length) for length in lengths]
    brute, state, ours = Brute(layer, softmax), None, []
    without_graph = None
    for x, given in zip(features, tokens, strict=True):
        y, state = layer(x, given, softmax, state)
        with torch.no_grad():
            evaluated, without_graph = layer(x, given, softmax, without_graph)
        torch.testing.assert_close(evaluated, y)
        ours.append(y)
    rows = [brute.stream([(x[row], given[row]) for x, given in zip(features, tokens, strict=True)]) for row in range(2)]
    for y, *expected in zip(ours, *rows, strict=True):
        torch.testing.assert_close(y, torch.stack(expected))
    inputs = (features[-1], *layer.parameters(), *softmax.parameters())
    check_gradients(ours[-1], torch.stack([row[-1] for row in rows]), inputs)
    if fast != "none":
        # Not the sum: gradients of the biases of a softmax sum to zero.
        output = (ours[-1] * torch.randn_like(ours[-1])).sum()
        assert torch.autograd.grad(output, features[0], allow_unused=True, retain_graph=True)[0] is None
        (of_decay,) = torch.autograd.grad(output, layer.decay_logits)
        assert of_decay.abs().min() > 0


def test_one_learned_step_size_for_all_weights():
    """It acts as equal ones do, and its gradient is the sum of theirs."""
    layer, softmax = build()
    single = FastWeightLayer(DIM, HIDDEN, global_step_size=True).double()
    single.load_state_dict({**layer.state_dict(), "log_step_sizes": torch.zeros(1)})
    steps, outputs = [], []
    segments = [(random_features(2, 4), random_tokens(2, 4)) for _ in range(2)]
    for either in (layer, single):
        set_step_sizes(either, 0.25)
        state = None
        for x, tokens in segments:
            y, state = either(x, tokens, softmax, state)
        outputs.append(y)
        steps.append(torch.autograd.grad(y.square().sum(), either.log_step_sizes)[0])
    torch.testing.assert_close(outputs[1], outputs[0])
    assert steps[0].abs().min() > 0 and steps[1].shape == (1,)
    torch.testing.assert_close(steps[1], steps[0].sum(0, keepdim=True))


@looped("graph", [True, False])
@looped("gradients_at", GRADIENTS_AT)
def test_divided_gradients_are_smaller_steps(gradients_at, graph):
    layer, softmax = build(divide_gradients_by=7, gradients_at=gradients_at)
    segments = [(random_features(2, 5), random_tokens(2, 5)) for _ in range(2)]

    def read():
        state, ys = None, []
        with torch.set_grad_enabled(graph):
            for x, tokens in segments:
                y, state = layer(x, tokens, softmax, state)
                ys.append(y)
        return torch.cat(ys, 1)

    ours = read()
    layer.divisor = 1
    with torch.no_grad():
        layer.log_step_sizes -= math.log(7) / PACE
    torch.testing.assert_close(ours, read(), rtol=1e-10, atol=1e-10)  # not by a factor of float32


@looped("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype):
    layer, softmax = build()
    x, tokens = random_features(2, 12), random_tokens(2, 12)
    with torch.no_grad():
        set_step_sizes(layer, 0.01)
        expected, _ = layer(x, tokens, softmax)
        ours, _ = layer.to(dtype)(x.to(dtype), tokens, softmax.to(dtype))
    assert ours.dtype == dtype
    assert (ours - expected).abs().mean() < 0.03 * expected.abs().mean()


REFUSED = [
    ({"hidden_dim": 2 * DIM - 1}, f"`hidden_dim` must be at least {2 * DIM}, got {2 * DIM - 1}"),
    ({"map_inputs": True, "random_start": True}, "`map_inputs` must be off with `random_start`"),
    *(({"divide_gradients_by": x}, f"`divide_gradients_by` must be above 0, got {x}") for x in (0, -1, math.nan)),
    *(({"step_size": x}, f"`step_size` must be at least 0, got {x}") for x in (-0.1, math.inf, math.nan)),
    *(({"decay": x}, rf"`decay` must be in \[0, 1\], got {x}") for x in (-0.1, 1.1, math.nan)),
    ({"step_size": 0.5, "global_step_size": True}, "`global_step_size` must be off with `step_size`, got 0.5"),
    ({"fast_weights": "all"}, "the choice of fast weights must be one of both, first, .*, got 'all'"),
    ({"gradients_at": "carry"}, "trained, carried, got 'carry'"),
]  # fmt: skip


@looped("options, sentence", REFUSED)
def test_what_cannot_be_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        FastWeightLayer(DIM, **{"hidden_dim": HIDDEN, **options})
    with pytest.raises(ValueError, match="`map_inputs` must be on"):
        FastWeightLayer(DIM, HIDDEN).whiten(torch.zeros(DIM), torch.eye(DIM), torch.eye(DIM))


@looped("fast", FAST)
def test_a_map_of_inputs_comes_before_all_else(fast):
    """Gradients reach the features that wait for their target, over segments, with all derivatives."""
    layer, softmax = build(fast, map_inputs=True)
    plain, _ = build(fast)
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "inputs" not in name})
    ours = expected = (None, None)
    for _ in range(3):
        x, tokens = random_features(2, 4), random_tokens(2, 4)
        ours = layer(x, tokens, softmax, ours[1])
        expected = plain(layer.inputs(x), tokens, softmax, expected[1])
        torch.testing.assert_close(ours[0], expected[0])
    check_gradients(ours[0], expected[0], (x, layer.inputs.weight, layer.inputs.bias))


def normalised_features(count):
    """Return correlated features with a mean, as long as after layer normalisation, in float64."""
    values = torch.randn(count, DIM, dtype=torch.float64) @ torch.randn(DIM, DIM, dtype=torch.float64)
    return F.layer_norm(values + 0.3 * torch.arange(DIM), (DIM,))


@looped("map_inputs", [False, True])
def test_it_begins_as_the_identity(map_inputs):
    """It is the identity up to the epsilon of its normalisation, for features of any size."""
    layer = FastWeightLayer(DIM, HIDDEN, "none", map_inputs=map_inputs).double()
    layer.initialize()
    x = torch.cat([normalised_features(50), DIM**0.5 * torch.eye(DIM)])[None]
    for _ in range(1 + map_inputs):
        inputs = x if layer.inputs is None else layer.inputs(x)
        outputs = layer.second(layer.first(inputs).relu().square())
        torch.testing.assert_close(outputs / SPREAD, x, rtol=0, atol=1e-5)
        if map_inputs:
            moments = (torch.randn(DIM, DIM, dtype=torch.float64) for _ in range(2))
            layer.whiten(x[0].mean(0), *(root.mT @ root for root in moments))
    assert layer.second.weight[:, 2 * DIM :].abs().max() == 0 < layer.first.weight[2 * DIM :].abs().min()


def test_a_random_start_is_that_of_the_public_code():
    """The weights are 0.05 N(0, 1), without biases and with neutral normalisation (google-research, fwl/tf/fwl.py)."""
    layer = FastWeightLayer(64, 96, "none", random_start=True)
    layer.apply(initialize)
    for weight in (layer.first.weight, layer.second.weight):
        assert abs(weight.detach().std() - 0.05) < 0.002 and abs(weight.detach().mean()) < 0.003
    for zero in (layer.first.bias, layer.second.bias, layer.norm.bias, layer.norm.weight - 1):
        assert zero.abs().max() == 0


def test_a_step_from_white_inputs_is_that_of_kfac():
    """A step of U changes outputs by Cg^-1 g (x - mean) C^-1 (x' - mean), up to a factor and both dampings."""
    layer = FastWeightLayer(DIM, 2 * DIM, map_inputs=True).double()
    root = torch.randn(40, DIM, dtype=torch.float64)
    x, mean = torch.randn(40, DIM, dtype=torch.float64) @ torch.randn(DIM, DIM, dtype=torch.float64), torch.ones(DIM)
    covariance, of_gradients = x.mT.cov(), root.mT @ root / 40
    layer.whiten(mean.double(), covariance, of_gradients)
    with torch.no_grad():  # in the middle of the pairs, where ReLU^2 has one slope
        keys = layer.inputs(x)
        slope = 2 * layer.second.weight
    damped = [
        moments + DAMPING * torch.linalg.eigvalsh(moments).median() * torch.eye(DIM)
        for moments in (covariance, of_gradients)
    ]
    ours = torch.einsum("ik,jk,du,eu->ijde", keys, keys, slope, slope)
    away = x - mean
    expected = torch.einsum("ik,jl,kl,de->ijde", away, away, *map(torch.linalg.inv, damped))
    torch.testing.assert_close(ours / ours.norm(), expected / expected.norm())
