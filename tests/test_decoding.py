"""What `decoding` promises of decoders that continue from a state holds for each of ours, and only for ours."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from support.small_models import build_model

from fairseq_fwp.models.decoder import DecoderState
from fairseq_fwp.models.fast_weight_layer.model import FwlDecoder, FwlXlDecoder
from fairseq_fwp.models.fwp_lm import FwpDecoder
from fairseq_fwp.models.fwp_xl_lm import FwpXlDecoder
from fairseq_fwp.modules.decoding import State, StreamingDecoder, streaming


def arguments(kind, name):
    return [(x.name, x.default, x.kind) for x in inspect.signature(getattr(kind, name)).parameters.values()]


@pytest.mark.parametrize("kind", [FwpDecoder, FwpXlDecoder, FwlDecoder, FwlXlDecoder])
@pytest.mark.parametrize("name", ["extract_features", "state_size"])
def test_decoders_have_the_methods_of_the_protocol(kind, name):
    assert arguments(kind, name) == arguments(StreamingDecoder, name)


@pytest.mark.parametrize("name", ["detach", "reorder", "reset"])
def test_states_have_the_methods_of_the_protocol(name):
    assert arguments(DecoderState, name) == arguments(State, name)


def test_the_decoder_of_a_model_with_a_state_is_found():
    model = build_model("delta_lm_wt103")
    decoder = streaming(model)
    assert decoder is model.decoder
    features, extra = decoder(torch.full((2, 3), 5), state=None)
    assert extra["state"].reorder(torch.tensor([1])).positions.tolist() == [3] and len(features) == 2


def test_another_decoder_has_no_state():
    assert streaming(SimpleNamespace(decoder=torch.nn.Linear(1, 1))) is None


def test_what_a_decoder_says_of_old_states():
    """Sums go on changing, windows of tokens do not."""
    arches = ("delta_lm_wt103", "mlstm_lm_wt103", "softmax_lm_wt103", "xl_lm_wt103")
    found = {arch: streaming(build_model(arch)) for arch in arches}
    assert [arch for arch, decoder in found.items() if decoder.ages] == ["delta_lm_wt103", "mlstm_lm_wt103"]
    assert [arch for arch, decoder in found.items() if not decoder.has_positions] == ["xl_lm_wt103"]
