"""Tokens per second of `fwp-eval-lm`'s sliding window against one window at a time (run.sh does it).

The medium models of Schlag et al. 2021 with their context of 384 tokens and the 267,744 words of fairseq's dictionary
of WikiText-103, untrained, on words that follow Zipf's law. One window at a time is a forward pass and the
log-probabilities of all words at all of its positions; fairseq-eval-lm, given for information, leaves out those of
clusters without a target.
"""

from argparse import Namespace

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.sequence_scorer import SequenceScorer
from omegaconf import OmegaConf
from report import Contender, Goal, goal_row, interleave, publish, ratios, say

from fairseq_fwp.evaluation.scoring import WindowScorer
from fairseq_fwp.evaluation.windows import Text, batches, windows
from fairseq_fwp.models.fwp_lm import FwpLanguageModel, FwpLanguageModelConfig
from fairseq_fwp.modules.onednn import OneDnnLinear

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


def make_dictionary():
    dictionary = Dictionary()
    for index in range(VOCABULARY - len(dictionary)):
        dictionary.add_symbol(f"w{index}")
    return dictionary


def make_model(arch, dictionary):
    args = Namespace(tokens_per_sample=CONTEXT, max_target_positions=None, add_bos_token=False)
    ARCH_CONFIG_REGISTRY[arch](args)
    config = OmegaConf.merge(OmegaConf.structured(FwpLanguageModelConfig), vars(args))
    return FwpLanguageModel.build_model(config, Namespace(target_dictionary=dictionary)).eval()


def make_text(dictionary):
    special, length = dictionary.nspecial, CONTEXT + WINDOWS * STRIDE
    frequencies = 1 / torch.arange(1, VOCABULARY - special + 1)
    drawn = torch.multinomial(frequencies, length + 1, replacement=True, generator=torch.Generator().manual_seed(1))
    return Text(drawn[:-1] + special, drawn[1:] + special)


def sliding(model, text, stride):
    """A call that scores WINDOWS windows, and returns the log-probabilities."""
    scorer = WindowScorer(model, text)
    full = list(windows(len(text.tokens), CONTEXT, CONTEXT - stride))[1 : WINDOWS + 1]

    def call():
        with OneDnnLinear():
            return torch.cat([scorer(batch) for batch in batches(full, BATCH)])

    return call


def one_window(text):
    """What the first full window reads, (1, CONTEXT), and its targets."""
    read = slice(1, CONTEXT + 1)
    return text.inputs[read].unsqueeze(0), text.tokens[read].unsqueeze(0)


@torch.no_grad()
def all_log_probs(model, text):
    """One window: the log-probabilities of all words at all of its positions; returns that of its last token."""
    inputs, targets = one_window(text)
    return model.get_normalized_probs(model(inputs), log_probs=True)[0, -1, targets[0, -1]]


def fairseq_eval_lm(model, text, scorer):
    """One window as fairseq-eval-lm scores it with --context-window: targets that do not count are padding."""
    inputs, targets = one_window(text)
    targets = torch.cat([torch.full_like(targets[:, :-1], scorer.pad), targets[:, -1:]], dim=1)
    sample = {"net_input": {"src_tokens": inputs}, "target": targets, "start_indices": [CONTEXT - 1]}
    return scorer.generate([model], sample)[0][0]["positional_scores"]


def make_contenders(model, text, dictionary):
    """{name: (call, tokens that it scores)}, after a check that the calls agree."""
    scorer = SequenceScorer(dictionary)
    found = {
        OURS: (sliding(model, text, 1), WINDOWS),
        STRIDES: (sliding(model, text, STRIDE), WINDOWS * STRIDE),
        ALL: (lambda: all_log_probs(model, text), 1),
        FAIRSEQ: (lambda: fairseq_eval_lm(model, text, scorer), 1),
    }
    expected = found[OURS][0]()[0]
    for name in (ALL, FAIRSEQ):
        torch.testing.assert_close(found[name][0]().squeeze(), expected, atol=1e-5, rtol=0)
    return found


def work(model):
    """GFLOP of a window in the products of the layers, and in those of all its words' logits."""
    layers = sum(p.numel() for p in model.decoder.layers.parameters() if p.dim() == 2)
    softmax = model.decoder.adaptive_softmax
    logits = softmax.weight.numel() + softmax.clusters.weight.numel()
    return [2 * CONTEXT * weights / 1e9 for weights in (layers, logits)]


def main():
    dictionary = make_dictionary()
    text = make_text(dictionary)
    raw, rows, paragraphs = [], [], []
    for arch in ARCHS:
        say(f"building {arch}")
        model = make_model(arch, dictionary)
        found = make_contenders(model, text, dictionary)
        times = interleave({name: Contender(call, THREADS) for name, (call, _) in found.items()}, ROUNDS, arch)
        times = {name: [seconds / found[name][1] for seconds in times[name]] for name in times}
        raw += [[arch, name, i, f"{1 / s:.3f}"] for name in times for i, s in enumerate(times[name])]
        for peer, bound in ((ALL, 20), (FAIRSEQ, None)):
            goal = Goal(f"tokens per second, sliding window vs {peer} of one window at a time", arch, bound)
            rows.append(goal_row(goal, ratios(times[peer], times[OURS])))
        goal = Goal(f"tokens per second, --stride {STRIDE} vs --stride 1", arch)
        rows.append(goal_row(goal, ratios(times[OURS], times[STRIDES])))
        layers, logits = work(model)
        paragraphs.append(
            f"{arch}: {1 / min(times[OURS]):.1f} tokens a second with the sliding window. A window takes {layers:.1f} "
            f"GFLOP in the products of its layers, {logits:.1f} in the logits of all words at all of its positions.\n"
        )
    publish(
        "eval_lm",
        ["arch", "contender", "round", "tokens_per_second"],
        raw,
        rows,
        f"{THREADS} threads, {CONTEXT} tokens of context, {VOCABULARY:,} words, {BATCH} windows at once.\n",
        *paragraphs,
        "At stride 1 nearly all the work of the layers remains: from the second layer on, a token's vector depends on "
        "where its window begins, so that windows share nothing. What is saved is the logits but those of the last "
        "position's clusters, and the last layer's feed-forward network at other positions; oneDNN does the rest.\n",
    )


if __name__ == "__main__":
    main()
