"""Small models of every architecture, built as fairseq builds them."""

from argparse import Namespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import OmegaConf

from fairseq_fwp.models.fwp_lm import FwpLanguageModel, FwpLanguageModelConfig

SMALL = {"decoder_layers": 2, "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_attention_heads": 4}


def make_dictionary(size: int) -> Dictionary:
    dictionary = Dictionary()
    for index in range(size - len(dictionary)):
        dictionary.add_symbol(f"w{index}")
    return dictionary


def configure(arch: str, **flags) -> FwpLanguageModelConfig:
    """The configuration that `--arch arch` and the given flags lead to."""
    args = Namespace(**{"tokens_per_sample": 32, "max_target_positions": None, "add_bos_token": False, **flags})
    ARCH_CONFIG_REGISTRY[arch](args)
    return OmegaConf.merge(OmegaConf.structured(FwpLanguageModelConfig), vars(args))


@pytest.fixture
def build_model():
    """build_model(arch, vocabulary=50, **flags) -> a small float64 model in evaluation mode, with large weights."""

    def build(arch: str, vocabulary: int = 50, **flags) -> FwpLanguageModel:
        config = configure(arch, **{**SMALL, "fwp_backend": "reference", **flags})
        model = FwpLanguageModel.build_model(config, Namespace(target_dictionary=make_dictionary(vocabulary)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "layer_norm" not in name:
                    parameter.normal_(std=0.3)  # the tiny weights of the initialisation would hide differences
        return model.double().eval()

    return build
