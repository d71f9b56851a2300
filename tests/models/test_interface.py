"""All causal attentions are called alike."""

import inspect

import pytest
import torch

from fairseq_fwp.models.attentions import ATTENTIONS
from fairseq_fwp.modules.attention import RelativeAttention, SoftmaxAttention
from fairseq_fwp.modules.attention.base import Attention
from fairseq_fwp.modules.attention.relative import LearnedDistances

CAUSAL = [kind.module for kind in ATTENTIONS.values() if issubclass(kind.module, Attention)]


@pytest.mark.parametrize("kind", CAUSAL)
def test_an_attention_takes_what_the_interface_says(kind):
    ours, promised = (inspect.signature(of.forward).parameters.values() for of in (kind, Attention))
    assert [(x.name, x.kind, x.default) for x in ours] == [(x.name, x.kind, x.default) for x in promised]
    assert len(CAUSAL) == len(ATTENTIONS) - 1  # linear attention reads the whole sequence


ONE_DOCUMENT = [
    SoftmaxAttention(8, 2),
    SoftmaxAttention(8, 2, window=3),
    RelativeAttention(8, 2, LearnedDistances(2, 4, 3)),
]


@pytest.mark.parametrize("layer", ONE_DOCUMENT, ids=lambda layer: type(layer).__name__)
def test_documents_are_refused_where_they_would_be_mixed(layer):
    with pytest.raises(ValueError, match=f"`first` must be None for {type(layer).__name__}, which reads one document"):
        layer(torch.randn(1, 4, 8), first=torch.tensor([[False, False, True, False]]))
