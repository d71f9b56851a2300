"""Initial values of a fast weight layer: the identity, in a basis that can be chosen.

The paper does not give them. From random weights the layer must first learn again what the model below knows.
"""

from typing import Any

import torch
from torch import Tensor

# The identity is a difference of squares, in which small changes of U or W tell. Adam moves all weights alike, so that
# these begin large: hidden units at HEIGHT, squared, and outputs, which are normalised, SPREAD times the features.
HEIGHT = 8.0
SPREAD = 1024.0

# Of the median eigenvalue, what is added to all of a covariance before it is inverted.
DAMPING = 0.1


@torch.no_grad()
def be_identity(layer: Any, keys: Tensor, basis: Tensor, mean: Tensor) -> None:
    """Make a layer the identity on x with |x| <= sqrt D, up to its normalisation.

    U's inputs are (x - mean) keys, with keys (D, D) and mean (D,); pairs of hidden units stand along z = x basis, with
    basis (D, D). With r a bound of |z|: ReLU(1 + z / r)^2 - ReLU(1 - z / r)^2 = 4 z / r, of which W makes x, SPREAD
    times.
    """
    dim = len(basis)
    scaled = basis / (dim**0.5 * basis.norm(dim=0).max())
    if layer.inputs is not None:
        layer.inputs.weight.copy_(keys.mT)
        layer.inputs.bias.copy_(-mean @ keys)
    for sign, units in ((1, slice(dim)), (-1, slice(dim, 2 * dim))):
        layer.first.weight[units] = sign * HEIGHT * torch.linalg.solve(keys, scaled).mT
        layer.first.bias[units] = HEIGHT * (1 + sign * (mean @ scaled))
        layer.second.weight[:, units] = sign * SPREAD / (4 * HEIGHT**2) * torch.linalg.inv(scaled).mT


def white_bases(covariance: Tensor, of_gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and the basis (D, D) in which a step down the gradient of U is one of K-FAC.

    Martens & Grosse 2015 (arXiv 1503.05671): inverse covariances of a weight's inputs and of its outputs' gradients
    from either side of its gradient. Here U's inputs are white, and the pairs of units stand along axes on which
    gradients are: what one word teaches moves others less.

    covariance (D, D): of the features; of_gradients (D, D): second moments of the loss's gradients by them.
    """
    keys = damped_power(covariance, -0.5)
    # As long as the features themselves, on average.
    keys = keys * (len(keys) / (keys.mT @ covariance @ keys).trace()).sqrt()
    return keys, damped_power(of_gradients, 0.5)


def damped_power(moments: Tensor, exponent: float) -> Tensor:
    """Return the power (D, D), float64, of a semi-definite matrix (D, D) over its median eigenvalue, plus DAMPING."""
    values, vectors = torch.linalg.eigh(moments.double())
    return vectors * (values.clamp(min=0) / values.median() + DAMPING) ** exponent @ vectors.mT
