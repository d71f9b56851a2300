"""Time and memory of generating the next token after contexts of 256 to 16,384: Mao 2022, arXiv 2210.04243, Figure 1.

Whole models and their attention layers alone, one sequence and eight at once, float32, one thread, and a GPU where
there is one; the sizes are those of Schlag et al. 2021, small (16 layers, D = 128, 8 heads, feed-forward 2,048), with
8,000 words. The paper plots decay, delta and attention, and does not say of how many sequences. Attention keeps its
keys and values in a cache: as fairseq's and this package's, which for every token is copied to make room; and one in
place, made beforehand for as many as there will be, which is the least that attention can do.
"""

import os
import subprocess
import sys
from argparse import Namespace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf
from report import Contender, Goal, goal_row, interleave, memory, publish, ratios, say

from fairseq_fwp.models.decoder import DecoderState
from fairseq_fwp.models.fwp_lm import FwpLanguageModelConfig
from fairseq_fwp.modules.attention.softmax import KeyValueCache, SoftmaxAttention

VOCABULARY = 8000
CONTEXTS = (256, 1024, 2048, 4096, 8192, 16384)
# One alone, and as many as sampling or a beam goes on with at once: they share the weights, and nothing of a cache.
SEQUENCES = (1, 8)
ROUNDS = 5
DECAY, DELTA, SOFTMAX, IN_PLACE = "decay", "delta", "softmax", "softmax, cache in place"
NAMES = (DECAY, DELTA, SOFTMAX, IN_PLACE)
WHERE = {"model": "whole model", "layers": "attention layers alone"}
# The paper's claim is a picture; these are what its readers may expect: at 8,192 tokens.
GOAL_CONTEXT, GOALS = 8192, {"model": 5, "layers": 50}
# Of which the peak memory is taken.
CALLS = 3
# Bytes below which a process's memory says nothing: pages that the allocator has not given back.
LEAST_MEMORY = 2**20


class InPlaceAttention(SoftmaxAttention):
    """Softmax attention on a cache with room for the next token: the last of a state's keys and values is written."""

    def forward(self, x, state, key_padding_mask=None):
        q, k, v = self.project(x)
        state.keys[:, :, -1:], state.values[:, :, -1:] = k, v
        y = F.scaled_dot_product_attention(q, state.keys, state.values)
        return self.out_proj(y.transpose(1, 2).flatten(2)), state


def build(name, device):
    """The model of one name, in evaluation."""
    arch = f"{name.split(',')[0]}_lm_wt103"
    args = Namespace(tokens_per_sample=1, max_target_positions=None, add_bos_token=False, adaptive_softmax_cutoff="")
    ARCH_CONFIG_REGISTRY[arch](args)
    cfg = OmegaConf.merge(OmegaConf.structured(FwpLanguageModelConfig), vars(args))
    dictionary = Dictionary()
    for index in range(VOCABULARY - len(dictionary)):
        dictionary.add_symbol(str(index))
    torch.manual_seed(1)
    model = ARCH_MODEL_REGISTRY["fwp_lm"].build_model(cfg, Namespace(target_dictionary=dictionary))
    if name == IN_PLACE:
        for layer in model.decoder.layers:
            attention = InPlaceAttention(cfg.decoder_embed_dim, cfg.decoder_attention_heads)
            attention.load_state_dict(layer.self_attn.state_dict())
            layer.self_attn = attention
    return model.eval().to(device)


def layer_state(name, attention, sequences, context):
    """What a layer remembers of a context. Its numbers are random: they change nothing of the time that it takes."""
    device = attention.out_proj.weight.device
    heads, dim = attention.num_heads, attention.out_proj.in_features
    if name in (SOFTMAX, IN_PLACE):
        tokens = context + 1 if name == IN_PLACE else context
        return KeyValueCache(*(torch.randn(sequences, heads, tokens, dim // heads, device=device) for _ in range(2)))
    with torch.no_grad():
        return attention(torch.randn(sequences, 1, dim, device=device))[1]


def prepare(what, name, model, sequences, context):
    """The call that is measured: the next token's log-probabilities, or what the attention layers make of vectors."""
    device = next(model.parameters()).device
    attentions = [layer.self_attn for layer in model.decoder.layers]
    states = tuple(layer_state(name, attention, sequences, context) for attention in attentions)
    if what == "layers":
        x = torch.randn(sequences, 1, attentions[0].out_proj.in_features, device=device)

        def call():
            return [attention(x, state)[0] for attention, state in zip(attentions, states, strict=True)]

    else:
        state = DecoderState(states, torch.full((sequences,), context, device=device))
        tokens = torch.randint(4, VOCABULARY, (sequences, 1), device=device)

        def call():
            return model.get_normalized_probs(model.decoder(tokens, state=state), log_probs=True)

    return partial(without_gradients, call, device)


@torch.no_grad()
def without_gradients(call, device):
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result


def check(device):
    """Both caches make the same of the same past. Raises ValueError otherwise."""
    model = build(SOFTMAX, device)
    attention, x = model.decoder.layers[0].self_attn, torch.randn(1, 5, 128, device=device)
    other = InPlaceAttention(128, attention.num_heads).to(device)
    other.load_state_dict(attention.state_dict())
    with torch.no_grad():
        whole, cache = attention(x)
        if not torch.allclose(other(x[:, -1:], cache)[0], whole[:, -1:], atol=1e-5):
            raise ValueError("the cache in place computes something else: nothing is measured")


def print_memory(name, device, sequences):
    """Peak bytes of generating a token beyond the model itself: the state, and whatever is made on the way.

    One line for each context. They rise, so that the highest mark of the process is that of the last.
    """
    model, sequences = build(name, torch.device(device)), int(sequences)
    call = prepare("model", name, model, sequences, 1)
    for _ in range(CALLS):  # loads the kernels, and fills the pools of memory
        call()
    del call
    # What that took is there again for the first context.
    states = [layer_state(name, layer.self_attn, sequences, 1) for layer in model.decoder.layers]
    kept = sum(x.nbytes for state in states for x in state if x is not None)
    del states
    before = torch.cuda.memory_allocated() if device == "cuda" else memory("VmRSS")
    for context in CONTEXTS:
        call = prepare("model", name, model, sequences, context)
        for _ in range(CALLS):
            call()
        print((torch.cuda.max_memory_allocated() if device == "cuda" else memory("VmHWM")) - before + kept)
        del call


def measure_memory(name, device, sequences):
    """{(name, sequences, context): bytes}"""
    # Freed memory goes back at once, so that what is resident is what is in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "memory", name, device, str(sequences)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"the memory of {name} could not be measured: {answer.stderr.strip().splitlines()[-1]}")
    lines = zip(CONTEXTS, answer.stdout.split(), strict=True)
    return {(name, sequences, context): int(line) for context, line in lines}


def measure(device):
    """Rows of the CSV, and {(what, name, sequences, context): seconds} and {(name, sequences, context): bytes}."""
    check(torch.device(device))
    models = {name: build(name, torch.device(device)) for name in NAMES}
    seconds = {}
    for what, sequences, context in product(WHERE, SEQUENCES, CONTEXTS):
        contenders = {name: Contender(prepare(what, name, models[name], sequences, context)) for name in NAMES}
        title = f"{WHERE[what]} on {device}, {sequences} at once, context {context}"
        found = interleave(contenders, ROUNDS, title)
        seconds |= {(what, name, sequences, context): times for name, times in found.items()}
    used = {}
    for name, sequences in product(NAMES, SEQUENCES):
        say(f"memory of {name} on {device}, {sequences} at once, in a process of its own")
        used |= measure_memory(name, device, sequences)
    raw = [["seconds", device, *key, i, second] for key, times in seconds.items() for i, second in enumerate(times)]
    raw += [["bytes", device, "model", *key, 0, size] for key, size in used.items()]
    return raw, seconds, used


def goal_rows(device, seconds, used):
    """The ratios of a device."""
    rows = []
    for sequences in SEQUENCES:
        where = f"{device}, {sequences} at once"
        rows += speed_rows(f"{where}, context {GOAL_CONTEXT}", seconds, sequences)
        rows += growth_rows(f"{where}, context {CONTEXTS[0]} -> {CONTEXTS[-1]}", seconds, used, sequences)
        for slow in (SOFTMAX, IN_PLACE):
            goal = Goal(f"peak memory, {slow} vs {DECAY}, whole model", f"{where}, context {GOAL_CONTEXT}")
            least = max(used[DECAY, sequences, GOAL_CONTEXT], LEAST_MEMORY)
            rows.append(goal_row(goal, used[slow, sequences, GOAL_CONTEXT] / least))
    return rows


def speed_rows(where, seconds, sequences):
    """Softmax's time of a token over that of the fast weights."""
    rows = []
    for (what, bound), slow, name in product(GOALS.items(), (SOFTMAX, IN_PLACE), (DECAY, DELTA)):
        goal = Goal(f"time of a token, {slow} vs {name}, {WHERE[what]}", where, bound if slow == SOFTMAX else None)
        slower, faster = (seconds[what, of, sequences, GOAL_CONTEXT] for of in (slow, name))
        rows.append(goal_row(goal, ratios(slower, faster)))
    return rows


def growth_rows(where, seconds, used, sequences):
    """Time and peak memory of a token after the longest context over those after the shortest."""
    bounds, rows = {DECAY: 1.2, DELTA: 1.2}, []
    for name in NAMES:
        goal = Goal(f"{name}, growth of the time of a token, whole model", where, bounds.get(name), at_most=True)
        last, first = (seconds["model", name, sequences, CONTEXTS[end]] for end in (-1, 0))
        rows.append(goal_row(goal, ratios(last, first)))
    for name in NAMES:
        goal = Goal(f"{name}, growth of peak memory, whole model", where, bounds.get(name), at_most=True)
        last, first = (max(used[name, sequences, CONTEXTS[end]], LEAST_MEMORY) for end in (-1, 0))
        rows.append(goal_row(goal, last / first))
    return rows


def main():
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    raw, rows = [], []
    for device in devices:
        found, seconds, used = measure(device)
        raw += found
        rows += goal_rows(device, seconds, used)
    publish(
        "generation",
        ["what", "device", "of", "name", "sequences", "context", "round", "value"],
        raw,
        rows,
        "One thread, float32, 16 layers, D = 128, 8 heads, feed-forward 2,048, 8,000 words, states of random numbers. "
        "Memory is the peak beyond the model, of a process for each name; in the ratios less than 1 MB counts as 1 MB. "
        "The two caches of softmax: copied to make room for every token, as in fairseq and here, and in place. The "
        "attention layers include their projections; for the operators without them see the decoding steps above.\n",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        print_memory(*sys.argv[2:]) if sys.argv[1:2] == ["memory"] else main()
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"generation cannot be measured: {error}") from error
