"""The memory of an attention by itself: padding, documents and whole sequences, for every rule."""

import pytest
import torch
from support.attentions import memories, random
from support.pairwise import looped

from fairseq_fwp.modules.attention import FastWeightAttention, FastWeightState
from fairseq_fwp.modules.attention.memory import Memory
from fairseq_fwp.modules.attention.normalization import AttentionNormalization
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

HEADS, LENGTH = 2, 6


def inputs(rule, size=3):
    """Return a memory with a rule, and what a layer lets it read."""
    layer = FastWeightAttention(HEADS * size, HEADS, FEATURE_MAPS["elu"](size), rule, backend="reference").double()
    return layer.memory, *layer.prepare(random(2, LENGTH, HEADS * size))[:4]


@looped("rule", UPDATE_RULES)
def test_padded_tokens_do_not_change_the_memory(rule):
    memory, q, k, v, gates = inputs(rule)
    state = FastWeightState(random(2, HEADS, 3, 3) / 9)  # the norm of fwm's memory is at most 1
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1] = True
    k, gates = memory.pad(k, gates, padding)
    _, after = memory.read(q, k, v, gates, state)
    assert torch.equal(after.weights[1], state.weights[1])
    assert not torch.equal(after.weights[0], state.weights[0])
    assert memory.pad(k, gates, None)[1] is gates


@looped("rule", UPDATE_RULES)
def test_a_document_is_read_as_a_sequence_of_its_own(rule):
    memory, q, k, v, gates = inputs(rule)
    first = torch.zeros(2, LENGTH, dtype=torch.bool)
    first[:, 4] = True
    out, state = memory.read(q, k, v, gates, first=first)
    alone, after = memory.read(
        *(x[:, :, 4:] for x in (q, k, v)), {name: gate[:, :, 4:] for name, gate in gates.items()}
    )
    torch.testing.assert_close(out[:, :, 4:], alone)
    torch.testing.assert_close(state.weights, after.weights)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@looped("rule", UPDATE_RULES)
def test_whole_sequences_are_read_as_by_a_memory_with_a_state(rule, backend):
    _, q, k, v, gates = inputs(rule)
    read_out_only = AttentionNormalization(read_out_only=True)
    for normalization in (None, read_out_only) if UPDATE_RULES[rule].normalizer else (None,):
        memory = Memory(UPDATE_RULES[rule], normalization, backend)
        out, state = memory.read(q, k, v, gates)
        torch.testing.assert_close(memory.read_whole(q, k, v, gates), out)
        *_, (w, z) = memories(rule, k, v, gates.values())
        torch.testing.assert_close(state.weights, w)
        if normalization is None:
            assert state.normalizer is None
        else:
            torch.testing.assert_close(state.normalizer, z)
