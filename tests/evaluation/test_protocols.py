"""Each protocol against brute force, and refusals."""

import itertools
import math
import re
import textwrap
import time
from functools import partialmethod

import pytest
import torch
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pairwise import looped
from support.small_models import build_model, make_dictionary

import fairseq_fwp.evaluation
from fairseq_fwp.evaluation import Protocol, Text, evaluate
from fairseq_fwp.evaluation.scoring import Scorer, StreamScorer, WindowScorer, score
from fairseq_fwp.evaluation.windows import Window, batches, windows

LENGTH = 61


def random_text(length=LENGTH, starts=(0,)):
    return Text.after(2, torch.randint(4, 50, (length,)), starts)


def brute_force(model, text, start_of):
    """Score token by token: a forward pass over inputs[start_of(i) : i + 1], with probabilities of all words."""
    log_probs = []
    for i, token in enumerate(text.tokens):
        with torch.no_grad():
            output = model(text.inputs[start_of(i) : i + 1].unsqueeze(0))
            log_probs.append(model.get_normalized_probs(output, log_probs=True)[0, -1, token])
    return torch.stack(log_probs)


@given(length=st.integers(1, 200), size=st.integers(1, 40), data=st.data())
@settings(deadline=None)
def test_windows_are_fairseqs_blocks_with_context(length, size, data):
    given_tokens = data.draw(st.integers(0, size - 1))
    step = size - given_tokens
    scored = []
    for window in windows(length, size, given_tokens):
        assert window.end - window.start <= size
        for i in range(window.first, window.end):
            assert window.start == max(0, i // step * step - given_tokens)
            scored.append(i)
    assert scored == list(range(length))


def test_batches_are_of_one_shape():
    found = list(batches(windows(23, 8, 5), 2))
    assert [w for batch in found for w in batch] == list(windows(23, 8, 5))
    shapes = [[(w.end - w.start, w.end - w.first) for w in batch] for batch in found]
    assert shapes == [[(6, 6)], [(8, 3), (8, 3)], [(8, 3), (8, 3)], [(8, 3)], [(7, 2)]]


MODELS = {
    "delta": {"decoder_update_rule": "delta"},
    "softmax": {"decoder_update_rule": "softmax"},
    "pre-norm without positions": {"decoder_normalize_before": True, "no_token_positional_embeddings": True},
    "clusters": {"adaptive_softmax_cutoff": "10,30"},
    "one layer": {"decoder_layers": 1},
}


WINDOWS = [(16, 15), (16, 0), (LENGTH + 5, LENGTH + 4), (1, 0)]


@looped("kind, size, given_tokens", [*((kind, 16, 11) for kind in MODELS), *(("delta", *window) for window in WINDOWS)])
def test_windows_agree_with_brute_force(kind, size, given_tokens):
    model, text = build_model("fwp_lm", **MODELS[kind], max_target_positions=2 * LENGTH), random_text()
    step = size - given_tokens
    expected = brute_force(model, text, lambda i: max(0, i // step * step - given_tokens))
    actual = evaluate(model, text, Protocol(size, given_tokens), batch_size=3).log_probs
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=0)


@looped("size", [1, 16, LENGTH])
@looped("flags", [MODELS["delta"], MODELS["pre-norm without positions"]])
def test_a_carried_state_reads_the_text_in_one_piece(flags, size):
    model, text = build_model("fwp_lm", **flags, max_target_positions=2 * LENGTH), random_text()
    expected = brute_force(model, text, lambda i: 0)
    actual = evaluate(model, text, Protocol(size, carry_state=True)).log_probs
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=0)


def test_documents_begin_with_the_state_after_the_training_text():
    model, starts = build_model("fwp_lm", no_token_positional_embeddings=True), (0, 20, 41)
    text, train = random_text(starts=starts), random_text(30)
    actual = evaluate(model, text, Protocol(7, carry_state=True, warm_up=9), train).log_probs
    whole = Text(torch.cat([train.inputs[-9:], text.inputs]), torch.cat([train.tokens[-9:], text.tokens]))
    for start, end in itertools.pairwise([*starts, LENGTH]):
        parts = [torch.cat([part[:9], part[9 + start : 9 + end]]) for part in whole[:2]]
        expected = brute_force(model, Text(*parts), lambda i: 0)[9:]
        torch.testing.assert_close(actual[start:end], expected, atol=1e-9, rtol=0)


def test_a_stream_has_no_gaps():
    scorer = StreamScorer(build_model("fwp_lm"), random_text())
    scorer([Window(0, 0, 4)])
    with pytest.raises(ValueError, match="the next window must begin after the 4 tokens read"):
        scorer([Window(5, 5, 9)])


@looped("cutoffs", [None, "10,30"])
def test_fairseqs_own_models(cutoffs):
    config = TransformerLanguageModelConfig(
        decoder_layers=2, decoder_embed_dim=16, decoder_ffn_embed_dim=24, decoder_attention_heads=4,
        decoder_input_dim=16, decoder_output_dim=16, adaptive_softmax_cutoff=cutoffs, tokens_per_sample=LENGTH,
        max_target_positions=LENGTH,
    )  # fmt: skip

    class Task:
        source_dictionary = target_dictionary = make_dictionary(50)

    model, text = TransformerLanguageModel.build_model(config, Task).double().eval(), random_text()
    actual = evaluate(model, text, Protocol(16, 12), batch_size=3).log_probs
    # Without cutoffs fairseq's softmax is float32 for every model.
    expected = brute_force(model, text, lambda i: max(0, i // 4 * 4 - 12)).double()
    torch.testing.assert_close(actual, expected, atol=1e-9 if cutoffs else 1e-6, rtol=0)
    with pytest.raises(ValueError, match=r"`carry_state` must be off for TransformerLanguageModel, which has no state"):
        evaluate(model, text, Protocol(16, carry_state=True))


@pytest.mark.parametrize("carry_state", [False, True])
def test_seconds_are_without_what_is_loaded_at_first_use(monkeypatch, carry_state):
    clock = [0, 0]  # seconds, calls

    def log_probs(self, batch, compute=Scorer.log_probs):
        clock[0] += 1 if clock[1] else 100
        clock[1] += 1
        return compute(self, batch)

    for kind in (WindowScorer, StreamScorer):
        monkeypatch.setattr(kind, "log_probs", partialmethod(log_probs, compute=kind.log_probs))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    scores = evaluate(build_model("delta_lm_wt103"), random_text(), Protocol(16, carry_state=carry_state), batch_size=1)
    assert scores.seconds == clock[1] - 1 == 4


def test_every_token_counts_once():
    def scorer(batch):
        return torch.zeros(sum(window.end - window.first for window in batch))

    for gap in ([[Window(0, 0, 4)], [Window(5, 5, 8)]], [[Window(0, 0, 5)], [Window(4, 4, 8)]]):
        with pytest.raises(RuntimeError, match="every token must be scored exactly once, got 1 of 8"):
            score(scorer, gap, torch.arange(8))
    for wrong, got in ((-torch.inf, "0"), (torch.nan, "nan")):
        with pytest.raises(ValueError, match=f"probabilities must be above 0, got {got} for the token 'w6'"):
            found = torch.tensor([-1.0] * 6 + [wrong] * 2)
            score(lambda batch, found=found: found, [[Window(0, 0, 8)]], torch.arange(8), "w{}".format)
    reports, plan = [], [[Window(0, 0, 4)], [Window(4, 4, 8)]]
    score(lambda batch: torch.tensor([-1.0] * 4), plan, torch.arange(8), report=reports.append)
    assert reports == [{"tokens": 4, "ppl": math.e}, {"tokens": 8, "ppl": math.e}]


@looped(
    "arch, numbers",
    [
        # Schlag et al. 2021, Table 4: 0.13 M. For the Transformer, keys and values by the formula of Appendix F.
        ("sum_lm_wt103_medium", 16 * 8 * 32 * 32),
        ("delta_lm_wt103_medium", 131_072),
        ("softmax_lm_wt103_medium", 384 * 512 * 16),
        ("delta_dpfp_lm_wt103", 16 * 8 * 32 * 16),
    ],
)
def test_state_size_is_that_of_the_paper(arch, numbers):
    paper = {"decoder_layers": 16, "decoder_attention_heads": 8, "decoder_embed_dim": 256 if "medium" in arch else 128}
    model, text = build_model(arch, **paper, max_target_positions=384), random_text(3)
    assert evaluate(model, text, Protocol(384)).state_size == numbers


def test_the_example_of_the_docstring_runs(capsys):
    """The example prints the perplexities of brute force."""
    example = re.search(r"\n\n((?: {4}.*\n|\n)+)", fairseq_fwp.evaluation.__doc__)[1]
    model, tokens, dictionary = build_model("fwp_lm"), random_text().tokens, make_dictionary(50)
    exec(textwrap.dedent(example), {"model": model, "tokens": tokens, "dictionary": dictionary})
    printed = [float(number) for number in capsys.readouterr().out.split()[:2]]
    text = Text.after(dictionary.eos(), tokens)
    for ppl, start_of in zip(printed, (lambda i: max(0, i - 7), lambda i: 0), strict=True):
        assert ppl == pytest.approx(math.exp(-brute_force(model, text, start_of).mean()), rel=1e-6)


def test_what_cannot_be_is_refused():
    model, text = build_model("fwp_lm", tokens_per_sample=9), random_text()
    for says, call in {
        "`window` must be at least 1, got 0": lambda: Protocol(0),
        "`context` must be from 0 to 7, got -1": lambda: Protocol(8, -1),
        "`context` must be from 0 to 7, got 8": lambda: Protocol(8, 8),
        "`context` must be from 0 to 0, got 4": lambda: Protocol(8, 4, carry_state=True),
        "`carry_state` must be on with `warm_up`, got off": lambda: Protocol(8, warm_up=1),
        "`warm_up` must be at most 0, the tokens of `train`, got 1": lambda: evaluate(
            model, text, Protocol(8, carry_state=True, warm_up=1)
        ),
        "`window` must be at most 9, .* training, got 10: pass at most 9": lambda: evaluate(model, text, Protocol(10)),
    }.items():
        with pytest.raises(ValueError, match=says):
            call()
