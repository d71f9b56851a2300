"""A trained language model with a fast weight layer on top, in a basis that the training text gives."""

from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_fwp.models.fwp_fwl_lm import BASES, FwpFwlLanguageModel
from fairseq_fwp.models.language_model import fill_in_defaults

# The training text is cut into this many equal parts, and the beginning of each is read.
STREAMS = 16


def add_layer(base: Any, options: Any, arch: str, task: Any, hidden_dim: int | None) -> tuple[FwpFwlLanguageModel, Any]:
    """Return the model with a layer that does not learn yet, and its options, from a base and its options.

    arch: the name of the base's architecture. Raises ValueError for a model that the layer cannot be put on.
    """
    names = [name for name, model in BASES.items() if type(base) is model]
    if not names:
        raise ValueError(f"the model below the layer must be {' or '.join(BASES)}, got {arch}")
    settings = OmegaConf.to_container(options) if OmegaConf.is_config(options) else vars(options)
    settings |= {
        "_name": "fwp_fwl_lm", "arch": "fwp_fwl_lm", "fwl_base": names[0], "fwl_fast_weights": "none",
        "fwl_map_inputs": True, "fwl_hidden_dim": hidden_dim,
    }  # fmt: skip
    completed = fill_in_defaults(OmegaConf.create(settings), FwpFwlLanguageModel.config())
    model = FwpFwlLanguageModel.build_model(completed, task)
    if model.decoder.last_norm is None:
        raise ValueError(
            "the model must end with a layer normalisation, got --no-decoder-final-norm: train the base without this "
            "flag, because the layer is the identity only on normalised features"
        )
    model.load_state_dict(base.state_dict())
    return model, completed


def read_moments(model: Any, tokens: Tensor, count: int, carry: bool) -> tuple[Tensor, Tensor, Tensor]:
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
            found, state = decoder.base.extract_features(segment, state if carry else None)
        features.append(found)
        with torch.enable_grad():
            x = found[:, :-1].detach().requires_grad_()
            y = norm(x)
            of_y = decoder.adaptive_softmax.loss_gradient(y.detach(), segment[:, 1:])
            gradients.append(torch.autograd.grad(y, x, of_y)[0].flatten(0, 1))
    x, of_x = torch.cat(features, 1).flatten(0, 1).double(), torch.cat(gradients).double()
    return x.mean(0).float(), x.mT.cov(), of_x.mT @ of_x / len(of_x)
