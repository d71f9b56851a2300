"""Problems against separate definitions: Python itself, regular expressions and counts. And what is drawn of them."""

import itertools
import math
import re
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fairseq import metrics
from support.pairwise import looped

from fairseq_fwp.tasks.synthetic.model import AnswersCriterion
from fairseq_fwp.tasks.synthetic.problems import (
    CODE,
    GROUPS,
    HIGHEST,
    LISTOPS,
    LOWEST,
    NOT_ASKED,
    NOTHING,
    PROBLEMS,
    Setting,
)
from fairseq_fwp.tasks.synthetic.problems import expression as draw_expression


def draws(problem, count, **setting):
    """Return sequences as lists of symbols and of answers."""
    generator = np.random.default_rng(7)
    found = [PROBLEMS[problem].draw(generator, Setting(**setting)) for _ in range(count)]
    largest = max(int(np.concatenate(parts).max()) for parts in found)
    assert largest < PROBLEMS[problem].symbols(Setting(**setting))
    return [[part.tolist() for part in parts] for parts in found]


# States and recall.


def test_parity_is_the_exclusive_or_so_far():
    for bits, answers in draws("parity", 20, length=30):
        assert answers == list(itertools.accumulate(bits, lambda odd, bit: odd ^ bit))


@looped("name, size, moved", [("s3", 6, 3), ("a4", 12, 4), ("a5", 60, 5), ("s5", 120, 5), ("z60", 60, 60)])
def test_a_group_asks_for_the_product_of_permutation_matrices_so_far(name, size, moved):
    matrices = [np.eye(moved, dtype=int)[list(permutation)] for permutation in GROUPS[name]()]
    signs = {round(np.linalg.det(matrix)) for matrix in matrices}
    assert len(matrices) == size and signs == ({1} if name[0] == "a" else {1, -1})
    seen = set()
    for symbols, answers in draws(name, 20, length=30):
        product = np.eye(moved, dtype=int)
        for symbol, answer in zip(symbols, answers, strict=True):
            product = product @ matrices[symbol]
            assert (matrices[answer] == product).all()
            seen.add((symbol, answer))
    assert len(seen) > min(35, 4 * size)


def test_mqar_asks_for_the_value_that_stands_after_the_key():
    places = set()
    for sequence, answers in draws("mqar", 20, length=30, pairs=5, symbols=7):
        keys, values = sequence[0:10:2], sequence[1:10:2]
        assert len(set(keys)) == 5 and set(keys) <= set(range(7)) and set(values) <= set(range(7, 14))
        assert answers[:10] == [NOT_ASKED] * 10
        for query, answer in zip(sequence[10:], answers[10:], strict=True):
            places.add(keys.index(query))
            assert answer == values[keys.index(query)]
    assert places == set(range(5))


# Nested operators.


def value_of(words):
    calls = {"[MIN": "min((", "[MAX": "max((", "[FIRST": "first((", "]": ")),"}
    source = "".join(calls.get(word, f"{word},") for word in words)
    return eval(source, {"first": lambda values: values[0]})[0]


@looped("depth", [1, 2, 5, 10])
def test_listops_asks_for_the_value_of_an_expression_of_that_depth(depth):
    for symbols, answers in draws("listops", 60, length=depth):
        words = [LISTOPS[symbol] for symbol in symbols]
        opened = np.cumsum([word[0] == "[" for word in words]) - np.cumsum([word == "]" for word in words])
        assert opened.max() == depth and opened[-1] == 0 and (opened[:-1] > 0).all()
        assert answers == [NOT_ASKED] * (len(symbols) - 1) + [value_of(words)]


def test_expressions_are_distributed_as_whole_ones_of_the_right_depth():
    generator = np.random.default_rng(1)

    def whole(level):  # tokens and depth, as in the public code
        if level > 1 and generator.random() > 0.25:
            return 1, 0
        parts = [whole(level + 1) for _ in range(generator.integers(2, 6))]
        return 2 + sum(size for size, _ in parts), 1 + max(depth for _, depth in parts)

    wanted = [size for size, depth in (whole(1) for _ in range(4000)) if depth == 3]
    found = [len(draw_expression(generator, 3)[0]) for _ in range(len(wanted))]
    error = math.sqrt(np.var(wanted) / len(wanted) + np.var(found) / len(found))
    assert len(wanted) > 300 and abs(np.mean(wanted) - np.mean(found)) < 4 * error
    assert np.std(found) == pytest.approx(np.std(wanted), rel=0.25)


# Programs.


def printed(words, published=False):
    """Run a program in Python; return for each token what it prints, or None. A name without a value ends it."""
    known, answers = {}, []
    for statement in re.findall(r"[^;]+;", " ".join(words)):
        line = re.sub(r"(\w) (\+\+|--)", lambda found: f"{found[1]} {found[2][0]}= 1", statement.strip(" ;"))
        line = re.sub(r"print (\w)", r"shown = \1", line)
        if published and (found := re.fullmatch(r"(if .*) : (\w) (= \d)", line)):
            line = f"{found[1]} and {found[2]!r} not in globals() : {found[2]} {found[3]}"
        known["shown"] = None
        exec(line, known)
        answers += [None] * (len(statement.split()) - 1) + [known["shown"]]
    return answers


def in_python(symbols, answers):
    meaning = [None if answer == NOTHING else answer - NOTHING - 1 + LOWEST for answer in answers]
    return [CODE[symbol] for symbol in symbols], meaning


@looped("variables, published", [(3, False), (5, False), (3, True), (5, True)])
def test_programs_print_what_python_prints(variables, published):
    for symbols, answers in draws("code_execution", 100, length=40, variables=variables, published=published):
        words, meaning = in_python(symbols, answers)
        assert meaning == printed(words, published)
        assert words.count(";") == 40 and words[-3] == "print" and set(words) <= {*"xyzab"[:variables], *CODE[5:]}
        assert all(LOWEST <= value <= HIGHEST for value in meaning if value is not None)


def test_most_programs_have_a_published_label_that_python_contradicts():
    programs = [in_python(*drawn) for drawn in draws("code_execution", 200, length=100, published=True)]
    wrong = 0
    for words, meaning in programs:
        try:
            wrong += printed(words) != meaning
        except NameError:
            wrong += 1
    assert wrong / 200 == pytest.approx(0.81, abs=0.1)  # of 2,000 programs of the public code
    assert np.mean([len(words) for words, _ in programs]) == pytest.approx(456, abs=10)
    assert np.mean([sum(value is not None for value in meaning) for _, meaning in programs]) == pytest.approx(29, abs=2)


# Formal languages.


def letters(symbols):
    return "".join("abc"[symbol] for symbol in symbols)


@looped("problem, language", [("aa_star", "(aa)*"), ("abab_star", "(abab)*")])
def test_an_answer_says_whether_the_string_is_in_the_language(problem, language):
    seen = set()
    for symbols, answers in draws(problem, 60, length=30, shortest=3):
        word = letters(symbols)
        seen.add(len(word))
        assert re.fullmatch(language, word)
        assert answers == [int(re.fullmatch(language, word[: t + 1]) is not None) for t in range(len(word))]
    assert seen == {length for length in range(3, 31) if length % (4 if "b" in language else 2) == 0}


@looped("count", [2, 3])
def test_a_counter_asks_for_the_next_symbol(count):
    seen = set()
    for symbols, answers in draws(f"counter_{count}", 60, length=9, shortest=2):
        word = letters(symbols)
        n = len(word) // count
        seen.add(n)
        assert word == "".join(letter * n for letter in "abc"[:count])
        following = ["abc".index(letter) for letter in word[1:]] + [count + 1]
        assert answers == [count if word[t] == "a" else following[t] for t in range(len(word))]
    assert seen == set(range(2, 10))


@looped("problem, pairs", [("dyck1", 1), ("shuffle_2", 2), ("reset_dyck1", 1)])
def test_answers_say_which_brackets_are_open(problem, pairs):
    lengths = set()
    for symbols, answers in draws(problem, 60, length=24, shortest=6):
        word = "".join("()2"[symbol] if pairs == 1 else "()[]"[symbol] for symbol in symbols)
        lengths.add(len(word))
        for t, answer in enumerate(answers):
            start = word[: t + 1].rpartition("2")[2]
            depths = [start.count(opens) - start.count(closes) for opens, closes in ("()", "[]")]
            assert min(depths) >= 0 and answer == (depths[0] > 0) + 2 * (depths[1] > 0)
        whole = word.rpartition("2")[2]
        while whole:
            whole, before = re.sub(r"\(\)|\[\]", "", whole), whole
            assert whole != before  # brackets are nested
        assert word.count("2") == (problem == "reset_dyck1")
    assert min(lengths) < 10 and 20 <= max(lengths) <= 24 and min(lengths) >= 6


@looped("problem", ["parity", "a5", "counter_2"])
def test_lengths_are_drawn_evenly_or_all_alike(problem):
    unit = PROBLEMS[problem].tokens
    lengths = [len(symbols) // unit for symbols, _ in draws(problem, 400, length=8, shortest=5)]
    assert all(80 < lengths.count(length) < 120 for length in (6, 7)) and set(lengths) == {5, 6, 7, 8}
    assert {len(symbols) // unit for symbols, _ in draws(problem, 5, length=8)} == {8}


# What is logged.


def test_whole_sequences_are_those_without_a_wrong_answer():
    scores = torch.randn(4, 5, 7)
    target = scores.argmax(-1)
    target[0, 2] = (target[0, 2] + 1) % 7
    target[3, 1:] = (target[3, 1:] + 2) % 7
    target[1, :3] = target[3, 3] = 9  # padding
    model = Mock(return_value=scores)
    model.get_normalized_probs = lambda output, log_probs: output.log_softmax(-1)
    criterion = AnswersCriterion(SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: 9)))
    loss, answers, log = criterion(model, {"net_input": {}, "target": target})
    chosen = [-scores[b, t].log_softmax(-1)[target[b, t]] for b, t in (target != 9).nonzero().tolist()]
    assert answers == 16 and loss == pytest.approx(float(sum(chosen)), rel=1e-5)
    with metrics.aggregate() as logged:
        criterion.reduce_metrics([log, log, {}])
    shown = logged.get_smoothed_values()
    assert (shown["accuracy"], shown["whole"]) == (75, 50)  # 4 of 16 are wrong, in 2 of 4 sequences
    assert shown["loss"] == pytest.approx(float(sum(chosen)) / 16 / math.log(2), abs=1e-3)
