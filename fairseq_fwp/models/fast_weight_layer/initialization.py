"""Initial values of a fast weight layer: the identity, in a basis of choice.

The paper does not give them. With random weights the layer would first have to relearn what the model below knows.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # importing fairseq registers our models, and that of this package needs this file
    from fairseq.models import FairseqLanguageModel

# The identity is a difference of squares, which is sensitive to small changes of U or W. Adam moves all weights by
# equal steps, so these start large: squared hidden units at HEIGHT, and normalised outputs SPREAD times the features.
HEIGHT = 8.0
SPREAD = 1024.0

# Share of the median eigenvalue that is added to all eigenvalues of a covariance before inversion.
DAMPING = 0.1

# A training text is cut into this many equal parts, and the beginning of each is read.
STREAMS = 16


@torch.no_grad()
def be_identity(layer: Any, keys: Tensor, basis: Tensor, mean: Tensor) -> None:
    """Make a layer the identity on x with |x| <= sqrt D, up to its normalisation.

    U's inputs are (x - mean) keys, with keys (D, D) and mean (D,). Pairs of hidden units lie along z = x basis, with
    basis (D, D). With r a bound of |z|: ReLU(1 + z / r)^2 - ReLU(1 - z / r)^2 = 4 z / r, which W maps to SPREAD x.
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
    """Return the keys and the basis (D, D) in which a gradient step of U is a step of K-FAC.

    Martens & Grosse 2015 (arXiv 1503.05671) multiply the gradient of a weight from both sides: by the inverse
    covariance of its inputs, and by that of its outputs' gradients. Here U's inputs are white, and pairs of units lie
    along axes on which gradients are white. A step for one word then changes others less.

    covariance (D, D): of the features; of_gradients (D, D): second moments of the loss's gradients by the features.
    """
    keys = damped_power(covariance, -0.5)
    # As long as the features themselves, on average.
    keys = keys * (len(keys) / (keys.mT @ covariance @ keys).trace()).sqrt()
    return keys, damped_power(of_gradients, 0.5)


def damped_power(moments: Tensor, exponent: float) -> Tensor:
    """Return the power (D, D), float64, of a semi-definite matrix (D, D) over its median eigenvalue, plus DAMPING."""
    values, vectors = torch.linalg.eigh(moments.double())
    return vectors * (values.clamp(min=0) / values.median() + DAMPING) ** exponent @ vectors.mT


def read_moments(
    model: "FairseqLanguageModel", tokens: Tensor, count: int, carry: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean (D,) and covariance (D, D) of the layer's inputs, and second moments of the loss's gradients.

    They come from `count` of the tokens (N,), in segments as long as in training. `carry`: the state is carried over
    segments.
    """
    decoder = model.eval().decoder
    length = min(decoder.sample_length, len(tokens) // STREAMS)
    if length < 2:
        raise ValueError(
            f"the training text must have at least {2 * STREAMS} tokens, got {len(tokens):,}: preprocess a longer one"
        )
    streams = tokens[: len(tokens) // STREAMS * STREAMS].view(STREAMS, -1)
    read = max(length, min(count // STREAMS, streams.shape[1]) // length * length)
    norm, state = decoder.fast_weight_layer.norm, None
    features, gradients = [], []
    for segment in streams[:, :read].split(length, 1):
        with torch.no_grad():
            inputs, state = decoder.extract_inputs(segment, state if carry else None)
        features.append(inputs)
        with torch.enable_grad():
            x = inputs[:, :-1].detach().requires_grad_()
            y = norm(x)
            of_y = decoder.adaptive_softmax.loss_gradient(y.detach(), segment[:, 1:])
            gradients.append(torch.autograd.grad(y, x, of_y)[0].flatten(0, 1))
    x, of_x = torch.cat(features, 1).flatten(0, 1).double(), torch.cat(gradients).double()
    return x.mean(0).float(), x.mT.cov(), of_x.mT @ of_x / len(of_x)
