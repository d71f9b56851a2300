"""The cost of scoring with a fast weight layer and with dynamic evaluation, compared with the base model.

The two models are those of Clark et al. 2022 (arXiv 2212.02475), untrained, on words that follow Zipf's law.
Transformer-XL large reads segments of 128 tokens with a memory of 1,600 (Dai et al. 2019), local attention reads blocks
of 1,024. Operations are those of matrix products, counted by PyTorch (torch.utils.flop_counter). Times are those of the
scorers of fwp-eval-lm.
"""

import math

import models
import torch
from eval_lm import VOCABULARY, make_text
from pictures import Bars
from record import SECONDS, Goal, compare, say
from timing import Contender, interleave
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from fairseq_fwp.evaluation.dynamic import DynamicRule, DynamicScorer
from fairseq_fwp.evaluation.scoring import StreamScorer, WindowScorer
from fairseq_fwp.evaluation.windows import Window
from fairseq_fwp.models.presets import FWL_PRESETS
from fairseq_fwp.modules.layers import faster_linear

MEMORY = {"mem_len": 1600, "clamp_len": 1000, "same_length": True}
LOCAL = ("fwl_local_lm_wt103", "fwp_lm", FWL_PRESETS["fwl_local_lm_wt103"])
# The architecture with the layer, the one without it and its flags, the flags of both, tokens read before, tokens at
# once. The paper does not say how many words the head of its adaptive softmax has.
MODELS = {
    "fwl_xl_lm_wt103": ("fwl_xl_lm_wt103", "xl_lm_wt103_large", {}, MEMORY, 1664, 128),
    "fwl_local_lm_wt103": (*LOCAL, {}, 0, 1024),
    "fwl_local_lm_wt103, head of 4,000 words": (*LOCAL, {"adaptive_softmax_cutoff": "4000,40000,200000"}, 0, 1024),
}
BASE, LAYER, DYNAMIC = "the base model", "fast weight layer", "dynamic evaluation"
OPERATIONS = "operations"
ROUNDS = 5
THREADS = 2


# PyTorch's counter knows only the attention of a GPU.
@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def count_attention(queries, keys, values, *_, out_shape=None, **__):
    return sdpa_flop_count(queries, keys, values)


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
def count_attention_backward(gradient, queries, keys, values, *_, out_shape=None, **__):
    return sdpa_backward_flop_count(gradient, queries, keys, values)


# It does not know oneDNN's layers either.
@register_flop_formula(torch.ops.mkldnn._linear_pointwise)
def count_linear(inputs, weight, *_, **__):
    return 2 * math.prod(inputs) * weight[0]


def make_model(arch, settings, length):
    flags = models.flags_of(settings)
    return models.build(VOCABULARY, "--arch", arch, *flags, "--tokens-per-sample", length).model.eval()


def scoring(scorer, before, length):
    """Return a call that scores one window, always the same one, from the state after the tokens before it.

    These are read in windows of the same length: a layer learns from the last of them while it scores the window.
    """
    window = Window(before, before, before + length)
    reader = getattr(scorer, "scorer", scorer)
    if before:
        for start in range(0, before, length):
            reader([Window(start, start, start + length)])
        state = reader.state

    def call():
        if before:
            reader.state, reader.read = state, before
        return scorer([window])

    return call


def make_contenders(name):
    """Return {name: call} of the three, on one text."""
    arch, base, own, flags, before, length = MODELS[name]
    text = make_text(before + length)
    kind = StreamScorer if before else WindowScorer
    alone = make_model(base, {**own, **flags}, length)
    layered = make_model(arch, flags, length).requires_grad_(False)
    # A step so small that the weights do not change, however often the call is repeated.
    learning = DynamicScorer(kind(alone, text), DynamicRule(1e-30))
    scorers = {BASE: kind(alone, text), LAYER: kind(layered, text), DYNAMIC: learning}
    return {name: scoring(scorer, before, length) for name, scorer in scorers.items()}


def with_onednn(call):
    """Return the call as fwp-eval-lm makes it."""

    def wrapped():
        with faster_linear():
            return call()

    return wrapped


def count(call):
    """Return the operations of the matrix products in a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def measure(record):
    for model in MODELS:
        say(f"building {model}")
        calls = make_contenders(model)
        for name, call in calls.items():
            record.add(model, "scoring", name, [count(call)], OPERATIONS)
        contenders = {name: Contender(with_onednn(call), THREADS) for name, call in calls.items()}
        for name, seconds in interleave(contenders, ROUNDS, model).items():
            record.add(model, "scoring", name, seconds)


def goals(record):
    return [
        compare(
            record,
            Goal(f"{label}, {name} vs {BASE}", model, bound, at_most=True),
            *((model, "scoring", x) for x in (name, BASE)),
            what,
        )
        for model in MODELS
        for name, bounds in ((LAYER, (1.3, 1.2)), (DYNAMIC, (None, None)))
        for what, label, bound in zip((OPERATIONS, SECONDS), (OPERATIONS, "time"), bounds, strict=True)
    ]


def paragraphs(record):
    found = [f"{THREADS} threads, {VOCABULARY:,} words, one window at a time.\n"]
    for model, (*_, length) in MODELS.items():
        best = {name: min(record.values(model, "scoring", name)) for name in (BASE, LAYER, DYNAMIC)}
        speeds = ", ".join(f"{length / seconds:.1f} with {name}" for name, seconds in best.items())
        (work,) = record.values(model, "scoring", BASE, OPERATIONS)
        found.append(f"{model}: tokens a second, {speeds}; {work / length / 1e6:.0f} MFLOP a token ({BASE}).\n")
    return found


PANELS = [Bars("Scoring with learning", "multiple of the base model")]
