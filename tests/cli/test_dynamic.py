"""Dynamic evaluation agrees with a loop that follows the papers' formulas weight by weight, and its flags."""

import copy
from dataclasses import replace

import pytest
import torch
from models.conftest import build_model, make_dictionary  # noqa: F401  (a fixture)

from fairseq_fwp.cli import eval_lm
from fairseq_fwp.cli.dynamic import DynamicRule, DynamicScorer, gather_statistics
from fairseq_fwp.cli.eval_lm import training_statistics
from fairseq_fwp.cli.protocol import Protocol, document_starts, make_scorer, plan_windows
from fairseq_fwp.cli.scoring import Text, WindowScorer, score

LENGTH, SIZE = 37, 8
MODELS = {
    "delta": ("fwp_lm", {"sum_normalization": True, "no_token_positional_embeddings": True}),
    "local": ("fwp_lm", {"decoder_update_rule": "softmax", "attention_window": 3}),
    "softmax": ("fwp_lm", {"decoder_update_rule": "softmax"}),
    "adaptive": ("fwp_lm", {"decoder_update_rule": "softmax", "adaptive_softmax_cutoff": "10,30"}),
    "Transformer-XL": ("fwp_xl_lm", {"mem_len": 6}),
    "fast weight layer": ("fwp_fwl_lm", {"fwl_base": "fwp_xl_lm", "mem_len": 6, "fwl_step_size": 0.02}),
}
CARRIED = [name for name in MODELS if name not in ("softmax", "adaptive")]
RULES = {
    "sgd": DynamicRule(0.05),
    "sgd, decay": DynamicRule(0.05, decay=0.3),
    "rms": DynamicRule(0.002, epsilon=1e-3, kind="rms"),
    "rms, decay": DynamicRule(0.002, decay=0.3, epsilon=1e-3, kind="rms"),
    "rms-sum, decay": DynamicRule(0.002, decay=0.3, epsilon=1e-3, kind="rms-sum", windows=3),
}


def random_text(length=LENGTH):
    tokens = torch.randint(4, 50, (length,))
    return Text(torch.cat([torch.tensor([2]), tokens[:-1]]), tokens)


def loss_of(model, text, start, first, end, state):
    """The mean loss of tokens first to end - 1 after inputs[start:], and the next state."""
    output, extra = model.decoder(text.inputs[None, start:end], state=state)
    log_probs = model.get_normalized_probs((output, extra), log_probs=True)[0, first - start :]
    found = log_probs.gather(1, text.tokens[first:end, None]).squeeze(1)
    return -found.mean(), found.detach(), extra["state"].detach()


def segments(length, size, given):
    """Where windows start, what they score, and where they end."""
    step = size - given
    read = size // step * step
    return [(0, 0, min(read, length))] + [
        (first - given, first, min(first + step, length)) for first in range(read, length, step)
    ]


def brute_force(model, text, rule, training, given, carry, starts=(0,)):
    """One number after the other, on a copy of the model."""
    model = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    trained = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    squares = dict.fromkeys(names, 0)
    state, places = None, segments(len(training.tokens), SIZE, given)[: rule.windows]
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
    for document, until in zip(starts, [*starts[1:], len(text.tokens)], strict=True):
        state = None
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(trained[name])
        for start, first, end in segments(until - document, SIZE, given):
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


@pytest.mark.parametrize(
    ("name", "given", "rule"),
    [
        *(("Transformer-XL", None, rule) for rule in RULES),
        *((name, None, "rms, decay") for name in CARRIED if name != "Transformer-XL"),
        ("softmax", 5, "rms, decay"),
        ("adaptive", 0, "sgd, decay"),
    ],
)
def test_it_is_the_loop_over_windows(build_model, name, given, rule):  # noqa: F811
    """given: tokens that a window only reads; None: the state is carried."""
    rule, (arch, flags) = RULES[rule], MODELS[name]
    model, text, training = build_model(arch, **flags), random_text(), random_text(29)
    protocol = Protocol(SIZE, given or 0, given is None, rule)
    expected = brute_force(model, text, rule, training, given or 0, given is None)
    rms = None
    if rule.needs_statistics:
        rms, windows = training_statistics(model, training, protocol, rule, make_dictionary(50))
        assert windows == len(segments(29, SIZE, given or 0)[: rule.windows])
    scorer = make_scorer(model, text, protocol, [0], rms)
    actual = score(scorer, plan_windows([0], LENGTH, protocol, 1), LENGTH)
    torch.testing.assert_close(actual, expected, atol=1e-8, rtol=0)


def test_words_that_a_model_lacks_have_no_weight_to_pull_back(build_model):  # noqa: F811
    """A converted model gives them the bias minus infinity, of which decay would make what is no number."""
    arch, flags = MODELS["adaptive"]
    model, text, rule = build_model(arch, **flags), random_text(), RULES["sgd, decay"]
    weights = model.state_dict()
    weights["decoder.adaptive_softmax.bias"][:2] = -torch.inf
    model.load_state_dict(weights)
    expected = brute_force(model, text, rule, random_text(9), 0, False)
    protocol = Protocol(SIZE, 0, False, rule)
    scorer = make_scorer(model, text, protocol, [0], None)
    actual = score(scorer, plan_windows([0], LENGTH, protocol, 1), LENGTH)
    torch.testing.assert_close(actual, expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("starts", [[0, 11, 12, 30], [0]], ids=str)
def test_documents_start_with_the_trained_weights(build_model, carry, starts):  # noqa: F811
    arch, flags = MODELS["Transformer-XL"]
    model, text, rule = build_model(arch, **flags), random_text(), RULES["sgd, decay"]
    protocol = Protocol(SIZE, 0, carry, rule, "</s>")
    expected = brute_force(model, text, rule, random_text(9), 0, carry, starts)
    scorer = make_scorer(model, text, protocol, starts, None)
    actual = score(scorer, plan_windows(starts, LENGTH, protocol, 1), LENGTH)
    torch.testing.assert_close(actual, expected, atol=1e-8, rtol=0)


def test_where_documents_start():
    dictionary = make_dictionary(50)
    end, word = dictionary.eos(), dictionary.index("w3")
    tokens = torch.tensor([5, end, end, 6, word, 20, end, end, end, 8, word, end])
    assert document_starts(tokens, dictionary, None) == [0]
    assert document_starts(tokens, dictionary, "w3") == [0, 5, 11]
    assert document_starts(tokens, dictionary, "blank-line") == [0, 3, 8, 9]
    assert document_starts(torch.tensor([end, 5, end]), dictionary, "blank-line") == [0, 1]
    with pytest.raises(ValueError, match="'nothing' is not in the dictionary"):
        document_starts(tokens, dictionary, "nothing")


def test_a_rule_of_sums_is_one_of_means_by_other_numbers(build_model):  # noqa: F811
    """So that values published for the one can be used with the other."""
    arch, flags = MODELS["Transformer-XL"]
    model, text, training = build_model(arch, **flags), random_text(), random_text(29)
    rule = DynamicRule(0.002, 1e-3, 1e-3, "rms-sum", windows=3)
    numbers = []
    for kind in ("rms", "rms-sum"):
        protocol = Protocol(SIZE, 0, True, replace(rule, kind=kind))
        numbers.append(training_statistics(model, training, protocol, protocol.dynamic, make_dictionary(50))[0])
    mean = torch.cat([part.flatten() for part in numbers[0]]).mean().item()
    same = DynamicRule(0.002 / 3**0.5, 1e-3 * 3**0.5 * mean, 1e-3 / 3**0.5, "rms", windows=3)
    scores = []
    for one, rms in zip((same, rule), numbers, strict=True):
        protocol, copied = Protocol(SIZE, 0, True, one), copy.deepcopy(model)
        scorer = make_scorer(copied, text, protocol, [0], rms)
        scores.append(score(scorer, plan_windows([0], LENGTH, protocol, 1), LENGTH))
    torch.testing.assert_close(*scores, atol=1e-9, rtol=0)


def test_rules_need_their_statistics(build_model):  # noqa: F811
    scorer = WindowScorer(build_model("fwp_lm"), random_text())
    with pytest.raises(ValueError, match="the RMS rules, and they alone"):
        DynamicScorer(scorer, RULES["rms"])
    with pytest.raises(ValueError, match="no window of the training text"):
        gather_statistics(scorer, [], RULES["rms"])


@pytest.mark.parametrize("rule", RULES)
def test_it_says_what_it_did(rule):
    assert str(Protocol(8, 0, True, RULES[rule], "</s>")).endswith(f"{RULES[rule]}, anew after </s>")
    assert rule[:3].upper() in str(RULES[rule])


MISUSES = {
    "no step size": (["--dynamic", "sgd"], "--dynamic needs its step size, --dynamic-lr"),
    "a step without a rule": (["--dynamic-lr", "1"], "--dynamic-lr belongs to --dynamic"),
    "statistics without a rule": (["--dynamic-statistics", "1"], "--dynamic-statistics belongs to --dynamic"),
    "an epsilon of SGD": (
        ["--dynamic", "sgd", "--dynamic-lr", "1", "--dynamic-epsilon", "1"],
        "--dynamic-epsilon belongs to --dynamic rms and rms-sum",
    ),
    "a decay without a rule": (["--dynamic-decay", "1"], "--dynamic-decay belongs to --dynamic"),
    "sums of all": (
        ["--dynamic", "rms-sum", "--dynamic-lr", "1"],
        "depend on the number of its windows: give --dynamic-s",
    ),
    "batches": (["--dynamic", "sgd", "--dynamic-lr", "1", "--batch-size", "2"], "leave out --batch-size"),
    "negative": (["--dynamic", "sgd", "--dynamic-lr", "-1"], "'-1' is no number from 0 on"),
    "no number": (["--dynamic", "sgd", "--dynamic-lr", "big"], "'big' is no number from 0 on"),
}


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_is_refused_at_once(capsys, case):
    arguments, sentence = MISUSES[case]
    with pytest.raises(SystemExit) as stopped:
        eval_lm.main(["data", "--path", "delta.pt", *arguments])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]
