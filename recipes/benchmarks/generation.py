"""Time and memory of generating the next token after contexts of 256 to 16,384: Mao 2022, arXiv 2210.04243, Figure 1.

Whole models and only their attention layers, one sequence and eight at once, float32, one thread. The sizes are those
of Schlag et al. 2021, small (16 layers, D = 128, 8 heads, feed-forward 2,048), with 8,000 words. The paper plots decay,
delta and attention, and does not give the number of sequences. Attention keeps keys and values in a cache. fairseq and
this package copy it for every token to make room. A second cache is allocated beforehand for all tokens and written in
place: attention cannot do less. States are random numbers. Memory is the peak beyond the model, of a process for each
name.
"""

from itertools import product

import models
import torch
import torch.nn.functional as F
from pictures import Curves
from record import BYTES, SECONDS, Goal, Record, compare, say
from timing import GIVE_BACK, Contender, alone, interleave, memory

from fairseq_fwp.models.decoder import DecoderState
from fairseq_fwp.modules.attention.softmax import KeyValueCache, SoftmaxAttention

VOCABULARY = 8000
CONTEXTS = (256, 1024, 2048, 4096, 8192, 16384)
# One sequence, and as many as sampling or a beam extends at once: they share the weights, but no cache.
SEQUENCES = (1, 8)
ROUNDS = 5
DECAY, DELTA, SOFTMAX, IN_PLACE = NAMES = ("decay", "delta", "softmax", "softmax, cache in place")
MODEL, LAYERS = "whole model", "attention layers only"
# The paper only has a picture; its readers may expect these ratios at 8,192 tokens.
GOAL_CONTEXT, GOALS = 8192, {MODEL: 5, LAYERS: 50}
# Calls whose peak memory is taken.
CALLS = 3
# Fewer bytes of a process mean nothing: the allocator has not returned all pages.
LEAST_MEMORY = 2**20


class InPlaceAttention(SoftmaxAttention):
    """Softmax attention on a cache with room for the next token: the last keys and values of the state are written."""

    def forward(self, x, state=None, key_padding_mask=None, first=None, shared=None):
        q, k, v = self.project(x)
        state.keys[:, :, -1:], state.values[:, :, -1:] = k, v
        y = F.scaled_dot_product_attention(q, state.keys, state.values)
        return self.out_proj(y.transpose(1, 2).flatten(2)), state


def in_place(attention):
    made = InPlaceAttention(attention.out_proj.in_features, attention.num_heads)
    made.load_state_dict(attention.state_dict())
    return made


def build(name):
    """Return the model of that name in evaluation mode."""
    flags = ("--tokens-per-sample", 1, "--adaptive-softmax-cutoff", "")
    model = models.build(VOCABULARY, "--arch", f"{name.split(',')[0]}_lm_wt103", *flags).model
    for layer in model.decoder.layers if name == IN_PLACE else ():
        layer.self_attn = in_place(layer.self_attn)
    return model.eval()


@torch.no_grad()
def layer_state(name, attention, sequences, context):
    """Return a layer's state after a context. Its numbers are random: they do not change the time."""
    heads, dim = attention.num_heads, attention.out_proj.in_features
    if name not in (SOFTMAX, IN_PLACE):
        return attention(torch.randn(sequences, 1, dim))[1]
    shape = (sequences, heads, context + (name == IN_PLACE), dim // heads)
    return KeyValueCache(torch.randn(shape), torch.randn(shape))


def prepare(what, name, model, sequences, context):
    """Return the measured call: the next token's log-probabilities, or the attention layers on vectors."""
    attentions = [layer.self_attn for layer in model.decoder.layers]
    states = tuple(layer_state(name, attention, sequences, context) for attention in attentions)
    x = torch.randn(sequences, 1, attentions[0].out_proj.in_features)
    tokens = torch.randint(4, VOCABULARY, (sequences, 1))
    whole = DecoderState(states, torch.full((sequences,), context))

    @torch.no_grad()
    def call():
        if what == LAYERS:
            return [attention(x, state)[0] for attention, state in zip(attentions, states, strict=True)]
        return model.get_normalized_probs(model.decoder(tokens, state=whole), log_probs=True)

    return call


def check():
    """Check that both caches give the same result; raise ValueError otherwise."""
    attention, x = build(SOFTMAX).decoder.layers[0].self_attn, torch.randn(1, 5, 128)
    with torch.no_grad():
        whole, cache = attention(x)
        if not torch.allclose(in_place(attention)(x[:, -1:], cache)[0], whole[:, -1:], atol=1e-5):
            raise ValueError(
                "the cache in place must give the output of the copied cache, got another: nothing is measured"
            )


def measure_alone(name, sequences):
    """Return {context: peak bytes of generating a token beyond the model}: the state and temporary tensors.

    Contexts grow, so the peak of the process is that of the last one.
    """
    model, sequences = build(name), int(sequences)
    call = prepare(MODEL, name, model, sequences, 1)
    for _ in range(CALLS):  # load the kernels, and fill the memory pools
        call()
    del call
    # The first context uses that memory again.
    states = [layer_state(name, layer.self_attn, sequences, 1) for layer in model.decoder.layers]
    kept = sum(x.nbytes for state in states for x in state if x is not None)
    del states
    before, found = memory("VmRSS"), {}
    for context in CONTEXTS:
        call = prepare(MODEL, name, model, sequences, context)
        for _ in range(CALLS):
            call()
        found[context] = memory("VmHWM") - before + kept
        del call
    return found


def place(sequences, context="{}"):
    return f"cpu, {sequences} at once, context {context}"


def measure(record):
    torch.set_num_threads(1)
    check()
    built = {name: build(name) for name in NAMES}
    for what, sequences, context in product(GOALS, SEQUENCES, CONTEXTS):
        where = place(sequences, context)
        contenders = {name: Contender(prepare(what, name, built[name], sequences, context)) for name in NAMES}
        for name, seconds in interleave(contenders, ROUNDS, f"{what}, {where}").items():
            record.add(where, what, name, seconds)
    for name, sequences in product(NAMES, SEQUENCES):
        say(f"memory of {name}, {sequences} at once, in a process of its own")
        for context, size in alone("generation", name, sequences, **GIVE_BACK).items():
            record.add(place(sequences, context), MODEL, name, [size], BYTES)


def goals_at(record, sequences):
    at, where = place(sequences, GOAL_CONTEXT), f"cpu, {sequences} at once"
    for (what, bound), slow, name in product(GOALS.items(), (SOFTMAX, IN_PLACE), (DECAY, DELTA)):
        goal = Goal(f"time of a token, {slow} vs {name}, {what}", at, bound if slow == SOFTMAX else None)
        yield compare(record, goal, (at, what, slow), (at, what, name))
    first, last = (place(sequences, CONTEXTS[end]) for end in (0, -1))
    grown = f"{where}, context {CONTEXTS[0]} -> {CONTEXTS[-1]}"
    for kind, label in ((SECONDS, "the time of a token"), (BYTES, "peak memory")):
        for name in NAMES:
            bound = 1.2 if name in (DECAY, DELTA) else None
            goal = Goal(f"{name}, growth of {label}, {MODEL}", grown, bound, at_most=True)
            yield compare(record, goal, (last, MODEL, name), (first, MODEL, name), kind)
    for slow in (SOFTMAX, IN_PLACE):
        goal = Goal(f"peak memory, {slow} vs {DECAY}, {MODEL}", at)
        yield compare(record, goal, (at, MODEL, slow), (at, MODEL, DECAY), BYTES)


def goals(record):
    record = Record([*row[:5], max(float(row[5]), LEAST_MEMORY)] if row[3] == BYTES else row for row in record.rows)
    return [row for sequences in SEQUENCES for row in goals_at(record, sequences)]


PANELS = [
    Curves(
        place(SEQUENCES[-1]),
        MODEL,
        unit="milliseconds per token",
        scale=lambda value, n: 1000 * value,
        log=True,
        title=f"The next token of {SEQUENCES[-1]} sequences: 16 layers, D = 128, one thread",
    )
]
