"""Small models of every architecture, built as fairseq builds them."""

from argparse import Namespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
)
from omegaconf import OmegaConf

import fairseq_fwp  # noqa: F401  (registers the models)

SMALL = {"decoder_layers": 2, "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_attention_heads": 4}


def make_dictionary(size: int) -> Dictionary:
    dictionary = Dictionary()
    for index in range(size - len(dictionary)):
        dictionary.add_symbol(f"w{index}")
    return dictionary


def random_tokens(*shape, vocabulary=50):
    return torch.randint(4, vocabulary, shape)


def log_probs(model, tokens, **kwargs):
    return model.get_normalized_probs(model(tokens, **kwargs), log_probs=True)


def configure(arch: str, **flags):
    """Return the configuration of `--arch arch` and the given flags."""
    args = Namespace(**{"tokens_per_sample": 32, "max_target_positions": None, "add_bos_token": False, **flags})
    ARCH_CONFIG_REGISTRY[arch](args)
    config = MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY[arch]]
    return OmegaConf.merge(OmegaConf.structured(config), vars(args))


@pytest.fixture
def build_model():
    """A function (arch, vocabulary=50, **flags) -> a small float64 model in evaluation mode, with large weights."""

    def build(arch: str, vocabulary: int = 50, **flags):
        if ARCH_MODEL_NAME_REGISTRY[arch] == "fwp_lm":
            flags = {"fwp_backend": "reference", **flags}
        config = configure(arch, **{**SMALL, **flags})
        task = Namespace(target_dictionary=make_dictionary(vocabulary))
        model = ARCH_MODEL_REGISTRY[arch].build_model(config, task)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "layer_norm" not in name:
                    parameter.normal_(std=0.3)  # the small initial weights would hide differences
        return model.double().eval()

    return build
