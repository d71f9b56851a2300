"""Laws of every feature map in the table, and hand-computed vectors."""

import math

import pytest
import torch

from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.feature_maps.dpfp import Dpfp

HEAD_DIM = 6
HAND_COMPUTED = {
    "elu": ({}, [-1.0, 0.0, 2.0], [math.exp(-1.0), 1.0, 3.0]),
    "identity": ({}, [-1.0, 0.0, 2.0], [-1.0, 0.0, 2.0]),
    # [x; -x] rectified is (1, 0, 3, 0, 2, 0); each element times its neighbour one, then two places before it
    "dpfp": ({"nu": 2}, [1.0, -2.0, 3.0], [0, 0, 0, 0, 0, 0, 2, 0, 3, 0, 6, 0]),
}


@pytest.fixture(params=FEATURE_MAPS)
def name(request):
    return request.param


def test_hand_computed_vector(name):
    arguments, x, expected = HAND_COMPUTED[name]
    features = FEATURE_MAPS[name](len(x), **arguments)(torch.tensor(x))
    torch.testing.assert_close(features, torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=0)


def test_dpfp_is_equation_37_up_to_the_order_of_features():
    x = torch.randn(5, 4, dtype=torch.float64)
    rectified = torch.cat([x, -x], -1).relu()
    for nu in range(1, 8):
        expected = [rectified[:, i] * rectified[:, (i + shift) % 8] for shift in range(1, nu + 1) for i in range(8)]
        features = Dpfp(4, nu)(x)
        torch.testing.assert_close(features.sort(-1).values, torch.stack(expected, -1).sort(-1).values)


def test_dpfp_pairs_every_neighbour_within_reach():
    # with one-hot pairs (i, j) exactly one product of every shift is not zero
    features = Dpfp(2, 3)(torch.tensor([1.0, 1.0]))
    assert features.shape == (12,) and features.sum() == 3 - 1  # shifts 1 and 3 pair the two, shift 2 does not


@pytest.mark.parametrize("nu", [0, -1, 12])
def test_dpfp_refuses_nu_out_of_range(nu):
    with pytest.raises(ValueError, match=r"between 1 and 2 \* head_dim - 1 = 11, got"):
        Dpfp(HEAD_DIM, nu)


def test_shape_sign_and_independence_of_positions(name):
    feature_map = FEATURE_MAPS[name](HEAD_DIM)
    x = torch.randn(2, 3, 4, HEAD_DIM)
    features = feature_map(x)
    assert features.shape == (2, 3, 4, feature_map.feature_dim)
    assert not feature_map.positive or (features >= 0).all()
    assert torch.equal(feature_map(x[1, 2, 3]), features[1, 2, 3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_exact_to_the_rounding_of_its_input(name, dtype):
    x = torch.linspace(-12, 4, 96).reshape(-1, HEAD_DIM).to(dtype)
    feature_map = FEATURE_MAPS[name](HEAD_DIM)
    torch.testing.assert_close(feature_map(x).double(), feature_map(x.double()), rtol=2e-7, atol=0)


def test_elu_keeps_relative_accuracy_where_the_textbook_form_cancels():
    x = torch.linspace(-12, 4, 101)
    exact = torch.where(x > 0, x.double() + 1, x.double().exp())
    torch.testing.assert_close(FEATURE_MAPS["elu"](101)(x).double(), exact, rtol=3e-7, atol=0)


def test_gradient(name):
    feature_map = FEATURE_MAPS[name](HEAD_DIM)
    x = torch.randn(3, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(feature_map, x)
