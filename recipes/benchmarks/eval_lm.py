"""Tokens per second of `fwp-eval-lm`'s sliding window, compared with one window at a time.

The models are the medium ones of Schlag et al. 2021 with a context of 384 tokens, untrained. The words follow Zipf's
law; there are 267,744, as in fairseq's dictionary of WikiText-103. One window at a time is a forward pass and the
log-probabilities of all words at all positions. fairseq-eval-lm, given for information, skips clusters without a
target.
"""

from functools import partial

import models
import torch
from fairseq.sequence_scorer import SequenceScorer
from pictures import Bars
from record import Goal, compare, say
from timing import Contender, interleave

from fairseq_fwp.evaluation.scoring import WindowScorer
from fairseq_fwp.evaluation.windows import Text, batches, windows
from fairseq_fwp.modules.layers import faster_linear

ARCHS = ("delta_lm_wt103_medium", "softmax_lm_wt103_medium")
VOCABULARY = 267_744
CONTEXT = 384
STRIDE = 32
WINDOWS = 8
BATCH = 4
ROUNDS = 5
THREADS = 2
OURS, STRIDES, ALL, FAIRSEQ = (
    "fwp-eval-lm",
    f"fwp-eval-lm --stride {STRIDE}",
    "all log-probabilities",
    "fairseq-eval-lm",
)
SPEED = "tokens per second"


def make_text(length):
    drawn = models.draw_words(VOCABULARY, length + 1)
    return Text(drawn[:-1], drawn[1:])


def sliding(model, text, stride):
    """Return the log-probabilities of WINDOWS windows."""
    scorer = WindowScorer(model, text)
    full = list(windows(len(text.tokens), CONTEXT, CONTEXT - stride))[1 : WINDOWS + 1]
    with faster_linear():
        return torch.cat([scorer(batch) for batch in batches(full, BATCH)])


def one_window(text):
    """Return the inputs (1, CONTEXT) of the first full window, and its targets."""
    read = slice(1, CONTEXT + 1)
    return text.inputs[read].unsqueeze(0), text.tokens[read].unsqueeze(0)


@torch.no_grad()
def all_log_probs(model, text):
    """Compute the log-probabilities of all words at all positions of a window; return that of its last token."""
    inputs, targets = one_window(text)
    return model.get_normalized_probs(model(inputs), log_probs=True)[0, -1, targets[0, -1]]


def fairseq_eval_lm(model, text, scorer):
    """Score a window as fairseq-eval-lm --context-window: targets that do not count are padding."""
    inputs, targets = one_window(text)
    targets = torch.cat([torch.full_like(targets[:, :-1], scorer.pad), targets[:, -1:]], dim=1)
    sample = {"net_input": {"src_tokens": inputs}, "target": targets, "start_indices": [CONTEXT - 1]}
    return scorer.generate([model], sample)[0][0]["positional_scores"]


def make_contenders(model, text, dictionary):
    """Return {name: (call, number of tokens that it scores)}, after a check that the calls agree."""
    found = {
        OURS: (partial(sliding, model, text, 1), WINDOWS),
        STRIDES: (partial(sliding, model, text, STRIDE), WINDOWS * STRIDE),
        ALL: (partial(all_log_probs, model, text), 1),
        FAIRSEQ: (partial(fairseq_eval_lm, model, text, SequenceScorer(dictionary)), 1),
    }
    expected = found[OURS][0]()[0]
    for name in (ALL, FAIRSEQ):
        torch.testing.assert_close(found[name][0]().squeeze(), expected, atol=1e-5, rtol=0)
    return found


def work(model):
    """Return the GFLOP of a window in matrix products: of the layers, and of the logits of all words."""
    layers = sum(p.numel() for p in model.decoder.layers.parameters() if p.dim() == 2)
    softmax = model.decoder.adaptive_softmax
    logits = softmax.weight.numel() + softmax.clusters.weight.numel()
    return {
        "GFLOP of a window's layers": 2 * CONTEXT * layers / 1e9,
        "GFLOP of a window's logits": 2 * CONTEXT * logits / 1e9,
    }


def measure(record):
    text = make_text(CONTEXT + WINDOWS * STRIDE)
    for arch in ARCHS:
        say(f"building {arch}")
        built = models.build(VOCABULARY, "--arch", arch, "--tokens-per-sample", CONTEXT)
        model = built.model.eval()
        found = make_contenders(model, text, built.task.target_dictionary)
        times = interleave({name: Contender(call, THREADS) for name, (call, _) in found.items()}, ROUNDS, arch)
        for name, seconds in times.items():
            record.add(arch, "scoring", name, [found[name][1] / second for second in seconds], SPEED)
        record.take(arch, "scoring", "the model", work(model))


def goals(record):
    comparisons = [
        (f"sliding window vs {ALL} of one window at a time", ALL, OURS, 20),
        (f"sliding window vs {FAIRSEQ} of one window at a time", FAIRSEQ, OURS, None),
        (f"--stride {STRIDE} vs --stride 1", OURS, STRIDES, None),
    ]
    return [
        compare(record, Goal(f"{SPEED}, {what}", arch, bound), *((arch, "scoring", x) for x in (slow, fast)), SPEED)
        for arch in ARCHS
        for what, slow, fast, bound in comparisons
    ]


def paragraphs(record):
    found = [f"{THREADS} threads, {CONTEXT} tokens of context, {VOCABULARY:,} words, {BATCH} windows at once.\n"]
    for arch in ARCHS:
        layers, logits = (
            record.values(arch, "scoring", "the model", f"GFLOP of a window's {part}")[0]
            for part in ("layers", "logits")
        )
        found.append(
            f"{arch}: {max(record.values(arch, 'scoring', OURS, SPEED)):.1f} tokens a second with the sliding window. "
            f"A window takes {layers:.1f} GFLOP in the products of its layers, {logits:.1f} in the logits of all words "
            "at all of its positions.\n"
        )
    return [
        *found,
        "At stride 1 nearly all the work of the layers remains: from the second layer on, a token's vector depends on "
        "where its window begins, so that windows share nothing. What is saved is the logits but those of the last "
        "position's clusters, and the last layer's feed-forward network at other positions; oneDNN does the rest.\n",
    ]


PANELS = [Bars("Evaluation in a sliding window", "tokens per second, multiple of the second's")]
