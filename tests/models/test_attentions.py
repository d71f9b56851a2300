"""The tables of `models.attentions`, which join arguments and options by hand, hold against constructors and fields."""

import inspect
from dataclasses import fields

import pytest

from fairseq_fwp.cli.flags import MODELS
from fairseq_fwp.models import attentions
from fairseq_fwp.models.attention_options import AttentionOptions
from fairseq_fwp.models.attentions import ATTENTIONS, MAPS, NORMALIZATIONS, SIZES, Configurable, make_attention
from fairseq_fwp.models.fast_weight_layer.layer import FastWeightLayer
from fairseq_fwp.models.fast_weight_layer.model import LAYER_OPTIONS
from fairseq_fwp.models.fwp_lm import FwpLanguageModelConfig
from fairseq_fwp.modules.attention import SoftmaxAttention
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.tasks.synthetic.model import MEMORY

ATTENTION_OPTIONS = {option.name for option in fields(AttentionOptions) if option.metadata}
TABLES = [*(kind.options for kind in ATTENTIONS.values()), MEMORY.options, LAYER_OPTIONS, *MAPS.values()]


def arguments(make):
    return set(inspect.signature(make).parameters)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_argument_of_an_attention_is_an_option_or_computed(name):
    kind = ATTENTIONS[name]
    table = [*SIZES, *kind.options, *kind.computed]
    assert arguments(kind.module) == set(table) and len(table) == len(set(table))


def test_arguments_of_memories_maps_normalisations_and_the_layer_are_options():
    assert arguments(MEMORY.module) == {*MEMORY.options, *MEMORY.computed}
    assert arguments(FastWeightLayer) == {*LAYER_OPTIONS, "embed_dim", "bias_entries"}
    for name, make in FEATURE_MAPS.items():
        assert arguments(make) - {"head_dim", "feature_dim"} == {*MAPS.get(name, {})}, name
    for name, (make, table) in NORMALIZATIONS.items():
        assert arguments(make) == {*table.values()}, name


def test_every_option_in_a_table_is_one_of_a_model():
    described = {option.name for model in MODELS.values() for option in fields(model)}
    named = {*SIZES.values(), *(option for table in TABLES for option in table.values())}
    named.update(option for _, table in NORMALIZATIONS.values() for option in table)
    assert named <= described
    assert named >= ATTENTION_OPTIONS, "a field of attention has no argument"


def test_an_argument_without_a_line_in_the_table_stays_at_its_default(monkeypatch):
    """An argument that is named like another option of the model does not silently receive that option."""

    class Layered(SoftmaxAttention):
        def __init__(self, embed_dim, num_heads, layers=None, swiglu=None, normalization=None, size=None):
            super().__init__(embed_dim, num_heads)
            self.received = (layers, swiglu, normalization, size)

    options = {"size": "decoder_key_dim"}
    monkeypatch.setitem(attentions.ATTENTIONS, "layered", Configurable(Layered, options))
    cfg = FwpLanguageModelConfig(swiglu=True, attention_normalization=True, decoder_key_dim=5)
    layer = make_attention(cfg, *cfg.attention_sizes, "layered")
    assert layer.received == (None, None, None, 5)
