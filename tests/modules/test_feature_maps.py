"""Laws of every feature map in the table, and hand-computed vectors."""

import copy
import math

import pytest
import torch
from support.pairwise import looped

from fairseq_fwp.modules.feature_maps import DRAWS, FEATURE_MAPS, Dpfp, Favor, FeatureMap

HEAD_DIM = 6
HALF = [torch.float16, torch.bfloat16]
ROWS, EXPONENTIALS = {"projection": [[2.0, -1.0], [0.5, -0.5]]}, [math.exp(x) / 2 for x in (2, 0, -4, -2)]
# arguments, parameters set by hand, x, phi(x)
HAND_COMPUTED = {
    "elu": ({}, {}, [-1.0, 0.0, 2.0], [math.exp(-1.0), 1.0, 3.0]),
    "identity": ({}, {}, [-1.0, 0.0, 2.0], [-1.0, 0.0, 2.0]),
    "tanh": ({}, {}, [-1.0, 0.0, 2.0], [-math.tanh(1.0), 0.0, math.tanh(2.0)]),
    "silu": ({}, {}, [-1.0, 0.0, 2.0], [-1 / (1 + math.e), 0.0, 2 / (1 + math.exp(-2.0))]),
    # [x; -x] rectified is (1, 0, 3, 0, 2, 0); each element times its neighbour one, then two places before it
    "dpfp": ({"nu": 2}, {}, [1.0, -2.0, 3.0], [0, 0, 0, 0, 0, 0, 2, 0, 3, 0, 6, 0]),
    # |x|^2 / 2 = 1, R x = (3, 1), 2 m = 4
    "favor": ({"features": 2}, ROWS, [1.0, -1.0], EXPONENTIALS),
    # added to the exponentials; q . k / sqrt(4), with both rows and |x|^2 / 2 = 2 from x / sqrt(2)
    "favor, offset": ({"features": 2, "offset": 0.01}, ROWS, [1.0, -1.0], [x + 0.005 for x in EXPONENTIALS]),
    "favor, softmax scale": (
        {"features": 1, "softmax_scale": True},
        {"projection": [[1.0, 0.0, 1.0, 0.0]]},
        [2.0, 0.0, 0.0, 2.0],
        [math.exp(exponent) / 2**0.5 for exponent in (2**0.5 - 2, -(2**0.5) - 2)],
    ),
    # R x = (3, 1) and -(3, 1), over sqrt(m); added to ReLU
    "favor, relu": ({"features": 2, "relu": True}, ROWS, [1.0, -1.0], [3 / 2**0.5, 1 / 2**0.5]),
    "favor, relu, offset": (
        {"features": 2, "relu": True, "offset": 0.1},
        ROWS,
        [-1.0, 1.0],
        [0.1 / 2**0.5, 0.1 / 2**0.5],
    ),
    "relu": (
        {"features": 3},
        {"linear.weight": [[1.0, 2.0], [0.5, 3.0], [0.0, 1.0]], "linear.bias": [0.25, 0.5, 2.0]},
        [2.0, -1.0],
        [0.25, 0.0, 1.0],
    ),
}
FEATURE_DIM = {"elu": 6, "favor": 6, "dpfp": 12, "relu": 6, "identity": 6, "tanh": 6, "silu": 6}
# The rounding of float32 in the steps between x and phi(x). The exponent of FAVOR+ is a sum of terms up to |x|^2 / 2 =
# 432. A feature below the smallest normal number has less relative accuracy. The terms of the learned map's sum add up
# to 6 x 12 / sqrt(6) + 1 at most.
ROUNDING = {"favor": {"rtol": 432 * 2**-22, "atol": 2.0**-126}, "relu": {"rtol": 2e-7, "atol": 31 * 2**-22}}


every_map = looped("name", FEATURE_MAPS)


def vectors_of_norm(norm, count=64):
    x = torch.randn(count, HEAD_DIM)
    return x * norm / x.norm(dim=-1, keepdim=True)


@looped("case", {**FEATURE_MAPS, **HAND_COMPUTED})
def test_hand_computed_vector(case):
    arguments, parameters, x, expected = HAND_COMPUTED[case]
    feature_map = FEATURE_MAPS[case.partition(",")[0]](len(x), **arguments)
    for key, value in parameters.items():
        owner, _, attribute = key.rpartition(".")
        getattr(feature_map.get_submodule(owner), attribute).data = torch.tensor(value)
    features = feature_map(torch.tensor(x))
    torch.testing.assert_close(features, torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=0)


def test_dpfp_is_equation_37_up_to_the_order_of_features():
    x = torch.randn(5, 4, dtype=torch.float64)
    rectified = torch.cat([x, -x], -1).relu()
    for nu in range(1, 8):
        expected = [rectified[:, i] * rectified[:, (i + shift) % 8] for shift in range(1, nu + 1) for i in range(8)]
        features = Dpfp(4, nu)(x)
        torch.testing.assert_close(features.sort(-1).values, torch.stack(expected, -1).sort(-1).values)


REFUSED = [
    *[("dpfp", {"nu": nu}, f"`nu` must be from 1 to 2 \\* key dimension - 1 = 11, got {nu}") for nu in (0, -1, 12)],
    ("favor", {"features": 0}, "`features` must be at least 1, got 0"),
    ("favor", {"draw": "sobol"}, "`draw` must be one of orthogonal, gaussian, authors, got 'sobol'"),
    *[("favor", {"offset": x}, f"`offset` must be a number of at least 0, got {x}") for x in (-0.1, math.nan)],
    ("favor", {"redraw": -1}, "`redraw` must be a number of mini-batches, or 0 for never, got -1"),
    ("relu", {"features": -1}, "`features` must be at least 1, got -1"),
]


@looped("name, arguments, message", REFUSED)
def test_refusals_name_the_argument(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        FEATURE_MAPS[name](HEAD_DIM, **arguments)


@every_map
def test_number_and_sign_of_features(name):
    """Autocast changes nothing, another draw only FAVOR+. tests/test_unusual_inputs.py has other layouts."""
    feature_map, x = FEATURE_MAPS[name](HEAD_DIM), torch.randn(2, 3, 4, HEAD_DIM)
    features = feature_map(x)
    assert features.shape == (2, 3, 4, feature_map.feature_dim) and feature_map.feature_dim == FEATURE_DIM[name]
    assert features.dtype == torch.float32 and feature_map.positive == bool((features >= 0).all())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(feature_map(x), features)
    assert isinstance(feature_map, FeatureMap)
    feature_map.resample()
    assert torch.equal(feature_map(x), features) == (name != "favor")


def test_favor_with_relu_has_as_many_features_as_the_key_dimension_or_as_said():
    assert Favor(HEAD_DIM, relu=True).feature_dim == HEAD_DIM and Favor(HEAD_DIM, 4, relu=True).feature_dim == 4
    assert Favor(HEAD_DIM, relu=True).epsilon == 1e-6 and Favor(HEAD_DIM).epsilon == 1e-24


@every_map
@looped("dtype", HALF)
@looped("half_model", [False, True])
def test_half_precision_is_exact_to_the_rounding_of_its_input(name, dtype, half_model):
    x = torch.linspace(-12, 4, 96).reshape(-1, HEAD_DIM).to(dtype)
    feature_map = FEATURE_MAPS[name](HEAD_DIM)
    if half_model:
        feature_map.to(dtype)
    features = feature_map(x)
    assert features.dtype == (dtype if name == "identity" else torch.float32)
    exact = copy.deepcopy(feature_map).double()(x.double())
    torch.testing.assert_close(features.double(), exact, **ROUNDING.get(name, {"rtol": 2e-7, "atol": 0}))


@every_map
@looped("dtype", [*HALF, torch.float32])
def test_features_and_gradients_are_finite_up_to_norm_30(name, dtype):
    for norm in (0.0, 1.0, 5.0, 10.0, 15.0, 30.0):
        feature_map = FEATURE_MAPS[name](HEAD_DIM).to(dtype)
        x = vectors_of_norm(norm).to(dtype).requires_grad_()
        features = feature_map(x)
        features.sum().backward()
        assert features.isfinite().all() and x.grad.isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in feature_map.parameters())


@every_map
def test_the_gradient_is_that_of_finite_differences(name):
    feature_map = FEATURE_MAPS[name](HEAD_DIM).double()
    x = torch.randn(3, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: feature_map(x), (x, *feature_map.parameters()))


def favor_estimates(favor, count, norm=0.6, product=1.147, pairs=256):
    """Return (count, pairs): for each draw, estimates of exp(x . y) = product for pairs of vectors of that norm."""
    x, across = torch.randn(2, pairs, favor.projection.shape[1], dtype=torch.float64)
    x = torch.nn.functional.normalize(x, dim=-1)
    across = torch.nn.functional.normalize(across - (across * x).sum(-1, keepdim=True) * x, dim=-1)
    cosine = math.log(product) / norm**2
    y = cosine * x + math.sqrt(1 - cosine**2) * across
    estimates = []
    for _ in range(count):
        favor.resample()
        phi_x, phi_y = favor(norm * torch.stack([x, y]))
        estimates.append((phi_x * phi_y).sum(-1))
    return torch.stack(estimates)


def test_favor_is_unbiased_but_for_the_authors_draw():
    """The mean is within 4 standard errors over draws; 41 rows are two blocks of 16 and an incomplete one.

    Orthogonal rows have a smaller variance. The authors' draw is too small: along some directions its bias is 0, along
    others up to 3 per cent.
    """
    variances = {}
    for draw, rows in (("orthogonal", 8), ("orthogonal", 41), ("gaussian", 8), ("authors", 8)):
        count = 4000 if draw == "authors" else 2000
        estimates = favor_estimates(Favor(16, rows, draw), count)
        means = estimates.mean(-1)  # the pairs of one draw are not independent
        mean, deviation = means.mean().item(), means.std().item() / count**0.5
        assert 1.1 < mean < 1.147 - 4 * deviation if draw == "authors" else abs(mean - 1.147) < 4 * deviation < 0.008
        variances[draw, rows] = estimates.var(0).mean()
    assert variances["orthogonal", 8] < 0.8 * variances["gaussian", 8]


def test_the_draws_rows():
    """Rows are orthogonal within blocks and as long as Gaussian vectors; the authors' draw has orthogonal columns."""
    rows = Favor(8, 20, "orthogonal").double().projection
    for block in rows.split(8):
        products = block @ block.T
        torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-5)
    assert (rows[:8] @ rows[8:16].T).abs().max() > 0.5  # blocks are independent of each other
    assert Favor(8, 20, "gaussian").projection.norm(dim=-1).std() > 0.2
    columns = Favor(20, 8, "authors").double().projection.T
    for block in columns.split(8):
        products = block @ block.T
        torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-5)


@looped("draw", ["orthogonal", "gaussian"])
def test_elements_of_the_matrix_are_standard_gaussian(draw):
    """Signs are random too: without the correction of the QR decomposition, first elements are negative."""
    favor = Favor(4, 6, draw)
    drawn = []
    for _ in range(3000):
        favor.resample()
        drawn.append(favor.projection.clone())
    drawn = torch.stack(drawn)
    assert drawn.mean(0).abs().max() < 4.5 / 3000**0.5
    assert (drawn.square().mean(0) - 1).abs().max() < 4.5 * (2 / 3000) ** 0.5
    assert (drawn.norm(dim=-1).square().var(0) / (2 * 4) - 1).abs().max() < 0.35  # chi-squared, not a fixed length


def test_resampling_leaves_the_global_generator_alone():
    favor = Favor(HEAD_DIM)
    before = torch.get_rng_state()
    favor.resample()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    first = Favor(HEAD_DIM).projection
    assert not torch.equal(first, Favor(HEAD_DIM).projection)  # two layers of a model
    torch.manual_seed(1)
    assert torch.equal(first, Favor(HEAD_DIM).projection)  # two workers


@looped("draw", DRAWS)
@looped("redraw, expected", [(1, [1] * 7), (3, [0, 0, 1, 0, 0, 1, 0]), (0, [0] * 7)])
def test_favor_draws_as_often_as_it_is_told(draw, redraw, expected):
    """A saved state continues the sequence after any number of draws, and with a given matrix.

    Draws from the global generator change nothing.
    """
    favor, found = Favor(HEAD_DIM, 4, draw, redraw=redraw), []
    favor.load_state_dict({**favor.state_dict(), "projection": torch.randn(4, HEAD_DIM)})
    resumed = Favor(HEAD_DIM, 4, draw, redraw=redraw)
    resumed.load_state_dict(favor.state_dict())
    for _ in expected:
        previous = favor.projection.clone()
        favor.resample()
        torch.rand(1)
        resumed.resample()
        found.append(not torch.equal(favor.projection, previous))
        loaded = Favor(HEAD_DIM, 4, draw, redraw=redraw)
        loaded.load_state_dict(favor.state_dict())
        for other in (resumed, loaded):
            assert torch.equal(other.projection, favor.projection) and other.draws == favor.draws
        assert ("projection" in favor.state_dict()) == (not any(found))
    assert found == list(map(bool, expected)) and favor.draws == 8


def test_resampling_before_backward_keeps_the_gradient():
    favor = Favor(HEAD_DIM)
    x = torch.randn(4, HEAD_DIM, requires_grad=True)
    (expected,) = torch.autograd.grad(favor(x).sum(), x)
    features = favor(x)
    favor.resample()
    (grad,) = torch.autograd.grad(features.sum(), x)
    assert torch.equal(grad, expected)


@looped("dtype", HALF)
def test_the_random_matrix_stays_in_float32(dtype):
    favor = Favor(HEAD_DIM)
    drawn = favor.projection.clone()
    model = torch.nn.Sequential(favor, torch.nn.Linear(6, 2)).to(dtype)
    assert model[1].weight.dtype == dtype
    assert favor.projection.dtype == torch.float32 and torch.equal(favor.projection, drawn)
    assert favor.seed.dtype == favor.draws.dtype == torch.int64
    favor.resample()
    assert favor.projection.dtype == torch.float32 and not torch.equal(favor.projection, drawn)
    model.double()
    assert favor.projection.dtype == torch.float64
    favor.resample()
    assert favor.projection.dtype == torch.float64
    assert model.to(dtype)[0].projection.dtype == torch.float32


def test_favor_is_bounded_next_to_a_row_of_its_matrix_and_underflows_to_zero():
    favor, small = Favor(64, 64), Favor(HEAD_DIM)
    for feature_map, x in ((favor, favor.projection.clone()), (small, vectors_of_norm(30.0))):
        features = feature_map(x.requires_grad_())
        features.sum().backward()
        assert features.isfinite().all() and x.grad.isfinite().all()
        assert features.max() > 1e6 if feature_map is favor else not features.any() and not x.grad.any()


def test_an_average_of_checkpoints_has_a_draw_like_any_other():
    favor, states = Favor(16, 8), []
    for _ in range(10):
        favor.resample()
        states.append(favor.state_dict())
    assert [int(state["draws"]) for state in states] == list(range(2, 12))
    averaged = Favor(16, 8)
    averaged.load_state_dict({name: sum(state[name] for state in states) // 10 for name in states[0]})
    assert 0.7 < averaged.projection.square().mean().sqrt() < 1.4


def test_a_matrix_comes_with_a_state():
    favor, matrix = Favor(8, 5), torch.randn(5, 8)
    own = favor.state_dict()
    for state, given in ((own, False), ({**own, "projection": matrix}, True), (own, False)):
        favor.load_state_dict(state)
        assert torch.equal(favor.projection, matrix) == ("projection" in favor.state_dict()) == given
    with pytest.raises(ValueError, match=r"projection must be \(5, 8\), got \(4, 8\)"):
        favor.load_state_dict({**own, "projection": torch.randn(4, 8)})
