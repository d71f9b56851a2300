"""Count the operations of scoring with fast weight layers: `python recipes/benchmarks/operations.py`.

Clark et al. 2022 (arXiv 2212.02475), Sec. 2, "Runtime": less than 1.3 times those of the base. PyTorch's counter adds
up those of matrix products. Weights are untrained, which changes no count. The words, by which an adaptive softmax has
more or less to do, are drawn by Zipf's law. Counted is a text's last segment, when memory and fast weights are full.
"""

import csv
import sys

import models
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fairseq_fwp.evaluation import DynamicRule, Protocol, Text, evaluate

WIDTH = ("--decoder-embed-dim", 128, "--decoder-ffn-embed-dim", 512, "--decoder-attention-heads", 4)
LOCAL = ("--arch", "fwp_lm", "--decoder-update-rule", "softmax", "--attention-window", 32, "--tokens-per-sample", 512)
XL = ("--arch", "fwp_xl_lm", "--carry-state", "--mem-len", 128, "--tokens-per-sample", 128)
CUTOFF = ("--adaptive-softmax-cutoff", "500,2000")
LAYER, OF_XL, MAP = ("--arch", "fwp_fwl_lm"), ("--fwl-base", "fwp_xl_lm"), ("--fwl-map-inputs",)
# Name: words, flags of the base, and those of the layer. The last is the paper's Transformer-XL, conf/wt103/xl.yaml.
BASES = {
    "local attention, 2 layers": (8390, (*LOCAL, *WIDTH, *CUTOFF, "--decoder-layers", 2), (*LAYER, *MAP)),
    "local attention, 16 layers": (8390, (*LOCAL, *WIDTH, *CUTOFF, "--decoder-layers", 16), (*LAYER, *MAP)),
    "Transformer-XL, 2 layers": (8390, (*XL, *WIDTH, *CUTOFF, "--decoder-layers", 2), (*LAYER, *OF_XL, *MAP)),
    "Transformer-XL, 8 layers": (8390, (*XL, *WIDTH, *CUTOFF, "--decoder-layers", 8), (*LAYER, *OF_XL, *MAP)),
    "Transformer-XL, 18 layers of 1,024, 267,744 words": (
        267744, ("--arch", "xl_lm_wt103_large", "--carry-state", "--mem-len", 384, "--tokens-per-sample", 128),
        ("--arch", "fwl_xl_lm_wt103"),
    ),
}  # fmt: skip


class Counter(TorchDispatchMode):
    """PyTorch's counts, of all products in its scope. Its own FlopCounterMode refuses gradients of weights."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=found)
        return found


def operations(words, flags, dynamic=None):
    """Return the operations of scoring the last segment of a text, per token."""
    built = models.build(words, *flags, "--dropout", 0, task="fwp_language_modeling")
    window, memory = built.cfg.task.tokens_per_sample, getattr(built.cfg.model, "mem_len", 0)
    segments = 2 + memory // window
    seen = []

    def last(plan):
        for batch in plan:
            seen.append(counter.total)
            yield batch

    text = Text.after(2, models.draw_words(words, segments * window))
    with Counter() as counter:
        evaluate(built.model.eval(), text, Protocol(window, carry_state=memory > 0, dynamic=dynamic), None, 1, last)
    return (counter.total - seen[-1]) / window


def main():
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["base", "base, operations a token", "with the layer", "dynamic evaluation, SGD"])
    for name, (words, base, layer) in BASES.items():
        plain = operations(words, base)
        others = operations(words, (*base, *layer)), operations(words, base, DynamicRule(lr=1e-6))
        writer.writerow([name, f"{plain:.0f}", *(f"{count / plain:.3f}" for count in others)])
        sys.stdout.flush()


if __name__ == "__main__":
    main()
