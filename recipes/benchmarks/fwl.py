"""What scoring costs with a fast weight layer and with dynamic evaluation, against the model alone (run.sh does it).

The two models of Clark et al. 2022 (arXiv 2212.02475), untrained, on words that follow Zipf's law: Transformer-XL large
reads segments of 128 tokens with a memory of 1,600 (Dai et al. 2019), local attention blocks of 1,024. Operations are
those of matrix products, counted by PyTorch (torch.utils.flop_counter); times are those of the scorers of fwp-eval-lm.
"""

import math
from argparse import Namespace

import torch
from eval_lm import VOCABULARY, make_dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from omegaconf import OmegaConf
from report import Contender, Goal, goal_row, interleave, publish, ratios, say
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from fairseq_fwp.evaluation.dynamic import DynamicRule, DynamicScorer
from fairseq_fwp.evaluation.scoring import StreamScorer, WindowScorer
from fairseq_fwp.evaluation.windows import Text, Window
from fairseq_fwp.models.presets import FWL_PRESETS
from fairseq_fwp.modules.onednn import OneDnnLinear

MEMORY = {"mem_len": 1600, "clamp_len": 1000, "same_length": True}
LOCAL = ("fwl_local_lm_wt103", "fwp_lm", FWL_PRESETS["fwl_local_lm_wt103"])
# What is measured: the architecture with the layer, the one without it and its flags, the flags of both, tokens read
# before, tokens at once. The paper does not say how many words the head of its adaptive softmax has.
MODELS = {
    "fwl_xl_lm_wt103": ("fwl_xl_lm_wt103", "xl_lm_wt103_large", {}, MEMORY, 1664, 128),
    "fwl_local_lm_wt103": (*LOCAL, {}, 0, 1024),
    "fwl_local_lm_wt103, head of 4,000 words": (*LOCAL, {"adaptive_softmax_cutoff": "4000,40000,200000"}, 0, 1024),
}
BASE, LAYER, DYNAMIC = "the model alone", "fast weight layer", "dynamic evaluation"
ROUNDS = 5
THREADS = 2


# PyTorch's counter knows the attention of a GPU, and not that of a CPU.
@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def count_attention(queries, keys, values, *_, out_shape=None, **__):
    return sdpa_flop_count(queries, keys, values)


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
def count_attention_backward(gradient, queries, keys, values, *_, out_shape=None, **__):
    return sdpa_backward_flop_count(gradient, queries, keys, values)


# Nor does it know oneDNN's layers.
@register_flop_formula(torch.ops.mkldnn._linear_pointwise)
def count_linear(inputs, weight, *_, **__):
    return 2 * math.prod(inputs) * weight[0]


def make_model(arch, flags, dictionary, length):
    args = Namespace(tokens_per_sample=length, max_target_positions=None, add_bos_token=False, **flags)
    ARCH_CONFIG_REGISTRY[arch](args)
    config = OmegaConf.structured(MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY[arch]])
    config = OmegaConf.merge(config, {key: value for key, value in vars(args).items() if key in config})
    return ARCH_MODEL_REGISTRY[arch].build_model(config, Namespace(target_dictionary=dictionary)).eval()


def make_text(dictionary, length):
    special = dictionary.nspecial
    frequencies = 1 / torch.arange(1, VOCABULARY - special + 1)
    drawn = torch.multinomial(frequencies, length + 1, replacement=True, generator=torch.Generator().manual_seed(1))
    return Text(drawn[:-1] + special, drawn[1:] + special)


def scoring(scorer, before, length):
    """A call that scores one window, always the same one; with tokens before it, after the state that these leave.

    They are read in windows of that length too: a layer learns from the last of them while it scores the window.
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


def make_contenders(name, dictionary):
    """{name: call}: the three, on one text."""
    arch, base, own, flags, before, length = MODELS[name]
    text = make_text(dictionary, before + length)
    kind = StreamScorer if before else WindowScorer
    alone = make_model(base, {**own, **flags}, dictionary, length)
    layered = make_model(arch, flags, dictionary, length).requires_grad_(False)
    # A step so small that the weights stay what they are, however often the call is repeated.
    learning = DynamicScorer(kind(alone, text), DynamicRule(1e-30))
    scorers = {BASE: kind(alone, text), LAYER: kind(layered, text), DYNAMIC: learning}
    return {name: scoring(scorer, before, length) for name, scorer in scorers.items()}


def with_onednn(call):
    """The call as fwp-eval-lm makes it."""

    def wrapped():
        with OneDnnLinear():
            return call()

    return wrapped


def count(call):
    """Operations of the matrix products in a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def main():
    dictionary = make_dictionary()
    raw, rows, paragraphs = [], [], []
    for model in MODELS:
        say(f"building {model}")
        calls = make_contenders(model, dictionary)
        work = {name: count(call) for name, call in calls.items()}
        contenders = {name: Contender(with_onednn(call), THREADS) for name, call in calls.items()}
        times = interleave(contenders, ROUNDS, model)
        raw += [[model, name, i, f"{s:.4f}", work[name]] for name in times for i, s in enumerate(times[name])]
        for name, most, longest in ((LAYER, 1.3, 1.2), (DYNAMIC, None, None)):
            goal = Goal(f"operations, {name} vs {BASE}", model, most, at_most=True)
            rows.append(goal_row(goal, work[name] / work[BASE]))
            goal = Goal(f"time, {name} vs {BASE}", model, longest, at_most=True)
            rows.append(goal_row(goal, ratios(times[name], times[BASE])))
        *_, length = MODELS[model]
        speeds = ", ".join(f"{length / min(times[name]):.1f} with {name}" for name in times)
        paragraphs.append(f"{model}: tokens a second, {speeds}; {work[BASE] / length / 1e6:.0f} MFLOP a token alone.\n")
    publish(
        "fwl",
        ["model", "contender", "round", "seconds", "operations"],
        raw,
        rows,
        f"{THREADS} threads, {VOCABULARY:,} words, one window at a time.\n",
        *paragraphs,
    )


if __name__ == "__main__":
    main()
