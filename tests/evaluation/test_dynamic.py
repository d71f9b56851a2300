"""Dynamic evaluation agrees with a loop that follows the papers' formulas weight by weight."""

import copy
from dataclasses import replace

import pytest
import torch
from support.pairwise import looped
from support.small_models import build_model

from fairseq_fwp.evaluation import DynamicRule, Protocol, Text, evaluate, gather_statistics
from fairseq_fwp.evaluation.dynamic import KINDS, measure
from fairseq_fwp.evaluation.scoring import WindowScorer
from fairseq_fwp.evaluation.windows import windows

LENGTH, SIZE = 37, 8
MODELS = {
    "delta": ("fwp_lm", {"sum_normalization": True, "no_token_positional_embeddings": True}),
    "local": ("fwp_lm", {"decoder_update_rule": "softmax", "attention_window": 3}),
    "softmax": ("fwp_lm", {"decoder_update_rule": "softmax"}),
    "adaptive": ("fwp_lm", {"decoder_update_rule": "softmax", "adaptive_softmax_cutoff": "10,30"}),
    "Transformer-XL": ("fwp_xl_lm", {"mem_len": 6}),
    "fast weight layer": ("fwp_fwl_lm", {"fwl_base": "fwp_xl_lm", "mem_len": 6, "fwl_step_size": 0.02}),
}
XL = "Transformer-XL"
CARRIED = [name for name in MODELS if name not in ("softmax", "adaptive")]
RULES = {
    "sgd": DynamicRule(0.05),
    "sgd, decay": DynamicRule(0.05, decay=0.3),
    "rms": DynamicRule(0.002, epsilon=1e-3, kind="rms"),
    "rms, decay": DynamicRule(0.002, decay=0.3, epsilon=1e-3, kind="rms"),
    "rms-sum, decay": DynamicRule(0.002, decay=0.3, epsilon=1e-3, kind="rms-sum", windows=3),
}


def random_text(length=LENGTH, starts=(0,)):
    return Text.after(2, torch.randint(4, 50, (length,)), starts)


def loss_of(model, text, start, first, end, state):
    """Return the mean loss of tokens first to end - 1 after inputs[start:], and the next state."""
    output, extra = model.decoder(text.inputs[None, start:end], state=state)
    log_probs = model.get_normalized_probs((output, extra), log_probs=True)[0, first - start :]
    found = log_probs.gather(1, text.tokens[first:end, None]).squeeze(1)
    return -found.mean(), found.detach(), extra["state"].detach()


def brute_force(model, text, rule, training, given, carry):
    """Compute one number after the other, on a copy of the model."""
    model = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    trained = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    squares = dict.fromkeys(names, 0)
    state, places = None, [*windows(len(training.tokens), SIZE, given)][: rule.windows]
    for start, first, end in places:
        model.zero_grad()
        loss, _, after = loss_of(model, training, start, first, end, state)
        state = after if carry else None
        loss.backward()
        for name, weight in model.named_parameters():
            squares[name] = squares[name] + (0 if weight.grad is None else weight.grad**2)
    divisor = 1 if rule.kind == "rms-sum" else len(places)
    rms = {name: torch.sqrt(torch.as_tensor(squares[name]) / divisor) for name in names}
    flat = torch.cat([value.expand_as(trained[name]).flatten() for name, value in rms.items()])
    scores, state = [], None
    for document, until in zip(text.starts, [*text.starts[1:], len(text.tokens)], strict=True):
        state = None
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(trained[name])
        for start, first, end in windows(until - document, SIZE, given):
            model.zero_grad()
            places = document + start, document + first, document + end
            loss, found, after = loss_of(model, text, *places, state)
            state = after if carry else None
            scores.append(found)
            loss.backward()
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                    pull = {
                        "sgd": rule.decay,
                        "rms": torch.clamp(rule.decay * rms[name] / flat.mean(), max=1),
                        "rms-sum": rule.decay * rms[name],
                    }[rule.kind]
                    step = rule.lr * grad / (1 if rule.kind == "sgd" else rms[name] + rule.epsilon)
                    weight += pull * (trained[name] - weight) - step
    return torch.cat(scores)


@looped(
    ("name", "given", "rule"),
    [
        *(("Transformer-XL", None, rule) for rule in RULES),
        *((name, None, "rms, decay") for name in CARRIED if name != "Transformer-XL"),
        ("softmax", 5, "rms, decay"),
        ("adaptive", 0, "sgd, decay"),
    ],
)
def test_it_is_the_loop_over_windows(name, given, rule):
    """given: tokens that a window only reads; None: the state is carried."""
    rule, (arch, flags) = RULES[rule], MODELS[name]
    model, text, training = build_model(arch, **flags), random_text(), random_text(29)
    protocol = Protocol(SIZE, given or 0, given is None, rule)
    expected = brute_force(model, text, rule, training, given or 0, given is None)
    before = copy.deepcopy(model.state_dict())
    scores = evaluate(model, text, protocol, training)
    if rule.needs_statistics:
        assert scores.protocol.dynamic.statistics.windows == len([*windows(29, SIZE, given or 0)][: rule.windows])
    torch.testing.assert_close(scores.log_probs, expected, atol=1e-8, rtol=0)
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)  # as it was trained


@looped("starts, carry, name", [((0, 11, 12, 30), True, XL), ((0, 11, 12, 30), False, XL), ((0,), False, "adaptive")])
def test_documents_start_with_the_trained_weights(starts, carry, name):
    """Words that a model lacks have the bias minus infinity, from which decay would compute NaN."""
    (arch, flags), rule = MODELS[name], RULES["sgd, decay"]
    model, text = build_model(arch, **flags), random_text(starts=starts)
    weights = model.state_dict()
    weights["decoder.adaptive_softmax.bias"][:2] = -torch.inf
    model.load_state_dict(weights)
    expected = brute_force(model, text, rule, random_text(9), 0, carry)
    actual = evaluate(model, text, Protocol(SIZE, 0, carry, rule)).log_probs
    torch.testing.assert_close(actual, expected, atol=1e-8, rtol=0)


def test_a_rule_of_sums_is_one_of_means_by_other_numbers():
    """Values published for one rule can be used with the other."""
    arch, flags = MODELS["Transformer-XL"]
    model, text, training = build_model(arch, **flags), random_text(), random_text(29)
    rule = DynamicRule(0.002, 1e-3, 1e-3, "rms-sum", windows=3)
    protocol = Protocol(SIZE, 0, True, replace(rule, kind="rms"))
    statistics = gather_statistics(model, training, protocol).dynamic.statistics
    mean = torch.cat([part.flatten() for part in statistics.rms]).mean().item()
    same = DynamicRule(0.002 / 3**0.5, 1e-3 * 3**0.5 * mean, 1e-3 / 3**0.5, "rms", windows=3)
    scores = []
    for one in (same, rule):
        protocol = gather_statistics(model, training, Protocol(SIZE, 0, True, one))
        scores.append(evaluate(model, text, protocol).log_probs)
    torch.testing.assert_close(*scores, atol=1e-9, rtol=0)


def test_refusals():
    model, text, unprepared = build_model("fwp_lm"), random_text(), Protocol(SIZE, dynamic=RULES["rms"])
    for says, call in {
        "`train` must be given for the statistics of kind 'rms'": lambda: evaluate(model, text, unprepared),
        "`train` must have at least one window": lambda: measure(WindowScorer(model, text), [], "rms"),
        "`kind` must be one of sgd, rms, rms-sum, got 'adam'": lambda: DynamicRule(0.1, kind="adam"),
        "`decay` must be at least 0, got -0.5": lambda: DynamicRule(0.1, decay=-0.5),
        "`lr` must be at least 0, got nan": lambda: DynamicRule(float("nan")),
    }.items():
        with pytest.raises(ValueError, match=says):
            call()


def test_it_says_what_it_did():
    """The kind of a rule, and its numbers."""
    for rule in RULES.values():
        said = str(rule)
        assert str(Protocol(8, 0, True, rule)).endswith(f", {said}")
        assert said.startswith(f"dynamic evaluation ({KINDS[rule.kind]}{' of' if rule.kind == 'rms-sum' else ','}")
        assert said.endswith(f", lr {rule.lr}, decay {rule.decay:g})")
        assert ("epsilon 0.001" in said) == (rule.kind != "sgd")
        assert ("of 3 windows" in said) == (rule.kind == "rms-sum")
