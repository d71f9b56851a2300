"""Problems that distinguish update rules: sequences of symbols, with the right answer for some of their tokens.

State at every token: `parity` (Grazzi et al. 2025, arXiv 2411.12537), and products in a group (Siems et al. 2025, arXiv
2502.10297, Sec. 5). Recall: `mqar`, multi-query associative recall (Arora et al. 2024, arXiv 2312.04927). Nested
operators and programs: `listops` and `code_execution` (Irie et al. 2021, arXiv 2106.06295, App. B). Formal languages
(Bhattamishra et al. 2020, arXiv 2009.11264; Irie, Csordas & Schmidhuber 2023): strings are drawn as by the public code
of the former, except that a string may occur twice.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import permutations
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

NOT_ASKED = -1
Sequence = tuple[np.ndarray, np.ndarray]  # symbols (L,), and answers (L,) or NOT_ASKED


class Setting(NamedTuple):
    """The settings of a sequence.

    length: its tokens, the depth of listops, the statements of code_execution, or the n of a counter; shortest: the
    least length, if lengths are drawn; pairs, symbols: of mqar, its pairs and its numbers of keys and of values;
    variables, published: of code_execution, see `Program`.
    """

    length: int
    pairs: int = 8
    symbols: int = 64
    shortest: int | None = None
    variables: int = 3
    published: bool = False


class Problem(NamedTuple):
    """How a problem draws a sequence, and its number of symbols, to which answers belong too.

    tokens: of one unit of length, at most (listops: on average); multiple: lengths are multiples of it; varies: whether
    lengths may be drawn; most: the greatest length that is drawn in less than half a second.
    """

    draw: Callable[[Generator, Setting], Sequence]
    symbols: Callable[[Setting], int]
    tokens: int = 1
    multiple: int = 1
    varies: bool = True
    most: int | None = None


def least(setting: Setting, multiple: int = 1) -> int:
    """Return the least length of a sequence; without a shortest one the greatest."""
    return setting.length // multiple * multiple if setting.shortest is None else max(setting.shortest, multiple)


def draw_length(generator: Generator, setting: Setting, multiple: int = 1) -> int:
    """Draw a length evenly, rounded down to a multiple; one that is then too short is drawn again."""
    if setting.shortest is None:
        return least(setting, multiple)
    while True:
        length = int(generator.integers(setting.shortest, setting.length + 1)) // multiple * multiple
        if length >= least(setting, multiple):
            return length


def parity(generator: Generator, setting: Setting) -> Sequence:
    """Draw bits; an answer says whether the number of ones so far is odd."""
    bits = generator.integers(2, size=draw_length(generator, setting))
    return bits, bits.cumsum() % 2


def _symmetric(n: int) -> list[tuple[int, ...]]:
    return list(permutations(range(n)))


def _alternating(n: int) -> list[tuple[int, ...]]:
    """The permutations with an even number of pairs in the wrong order."""
    return [p for p in _symmetric(n) if sum(a > b for i, b in enumerate(p) for a in p[:i]) % 2 == 0]


# Groups of permutations by name; the first one of each is the identity. Only those of a5 and s5 are not solvable.
GROUPS = {
    "s3": lambda: _symmetric(3),
    "a4": lambda: _alternating(4),
    "a5": lambda: _alternating(5),
    "s5": lambda: _symmetric(5),
    "z60": lambda: [tuple((i + shift) % 60 for i in range(60)) for shift in range(60)],
}


@cache
def product_table(name: str) -> np.ndarray:
    """Return product[a, b] of the permutations of a group; a is applied first."""
    place = {permutation: index for index, permutation in enumerate(GROUPS[name]())}
    return np.array([[place[tuple(b[i] for i in a)] for b in place] for a in place])


def count_elements(name: str, setting: Setting) -> int:
    return len(product_table(name))


def products(name: str, generator: Generator, setting: Setting) -> Sequence:
    """Draw elements of a group; an answer is their product so far."""
    table = product_table(name)
    symbols = generator.integers(len(table), size=draw_length(generator, setting))
    answers, product = np.empty_like(symbols), 0
    for t, symbol in enumerate(symbols):
        answers[t] = product = table[product, symbol]
    return symbols, answers


def mqar(generator: Generator, setting: Setting) -> Sequence:
    """Draw pairs of a key and a value with different keys, then random keys of them, which ask for their values.

    Keys are symbols 0 ... n - 1, values n ... 2 n - 1.
    """
    pairs, symbols = setting.pairs, setting.symbols
    keys = generator.permutation(symbols)[:pairs]
    values = symbols + generator.integers(symbols, size=pairs)
    queries = generator.integers(pairs, size=setting.length - 2 * pairs)
    sequence = np.concatenate([np.stack([keys, values], axis=1).ravel(), keys[queries]])
    return sequence, np.concatenate([np.full(2 * pairs, NOT_ASKED), values[queries]])


OPERATORS: dict[str, Callable[[list[int]], int]] = {"[MIN": min, "[MAX": max, "[FIRST": itemgetter(0)}
LISTOPS = (*"0123456789", *OPERATORS, "]")
IS_OPERATOR = 0.25  # the probability of an argument to be one, in the public code
ARGUMENTS = (2, 3, 4, 5)  # of an operator, evenly


@cache
def depth_distribution(depth: int) -> np.ndarray:
    """Return the probabilities that an argument has at most 0, 1, ... depth nested operators."""
    at_most = [1 - IS_OPERATOR]
    for _ in range(depth):
        all_arguments = sum(at_most[-1] ** count for count in ARGUMENTS) / len(ARGUMENTS)
        at_most.append(1 - IS_OPERATOR + IS_OPERATOR * all_arguments)
    return np.array(at_most)


def expression(generator: Generator, depth: int) -> tuple[list[int], int]:
    """Draw an expression whose deepest digit is in that many operators; return its symbols and its value.

    The depths of arguments are drawn until the greatest one fits. That is the distribution of whole expressions that
    are drawn until their depth fits, as in the public code.
    """
    if depth == 0:
        digit = int(generator.integers(10))
        return [digit], digit
    depths = np.array([depth])
    while depths.max() != depth - 1:
        count = ARGUMENTS[generator.integers(len(ARGUMENTS))]
        depths = depth_distribution(depth - 1).searchsorted(generator.random(count), side="right")
    operator = LISTOPS[10 + generator.integers(len(OPERATORS))]
    arguments = [expression(generator, each) for each in depths.tolist()]
    symbols = [LISTOPS.index(operator), *(symbol for inner, _ in arguments for symbol in inner), LISTOPS.index("]")]
    return symbols, OPERATORS[operator]([value for _, value in arguments])


def listops(generator: Generator, setting: Setting) -> Sequence:
    """Draw operators on lists of digits, nested as deep as `length`; the last token asks for the value."""
    symbols, value = expression(generator, setting.length)
    return np.array(symbols), np.array([NOT_ASKED] * (len(symbols) - 1) + [value])


VARIABLES = "xyzab"
CODE = (*VARIABLES, *"0123456789", "=", "++", "--", "print", "if", "<", ">", ":", ";")
LOWEST, HIGHEST = -8, 16  # of values
NOTHING = len(CODE)  # the answer where nothing is printed; those of values follow


class Program:
    """A program that runs while it is drawn, with what each of its tokens prints.

    variables: how many names it may use. published: behind a true condition, an assignment changes undefined variables
    only, as in the public code; Python would change all.
    """

    def __init__(self, generator: Generator, variables: int, published: bool) -> None:
        self.generator, self.names, self.published = generator, VARIABLES[:variables], published
        self.values: dict[str, int] = {}
        self.symbols: list[int] = []
        self.answers: list[int] = []

    def choose(self, options: tuple[str, ...] | str) -> str:
        return options[int(self.generator.random() * len(options))]

    def write(self, *words: str, answer: int = NOTHING) -> None:
        """Write words; the last one asks for the answer."""
        self.symbols += map(CODE.index, words)
        self.answers += [NOTHING] * (len(words) - 1) + [answer]

    def add(self, kind: str, condition: bool | None = None) -> None:
        """Draw a statement: an assignment "=", "++" for one up or down, "print", or "if" with one of the others.

        condition: whether that before it holds; None: without one.
        """
        runs, defined = condition is not False, tuple(self.values)
        if kind == "if":
            name, sign, bound = self.choose(defined), self.choose("<>"), self.choose("0123456789")
            self.write("if", name, sign, bound, ":")
            value, limit = self.values[name], int(bound)
            self.add(self.choose(("=", "++", "print")), value < limit if sign == "<" else value > limit)
        elif kind == "=":
            name, digit = self.choose(self.names), self.choose("0123456789")
            self.write(name, "=", digit, ";")
            if runs and not (condition and self.published and name in self.values):
                self.values[name] = int(digit)
        elif kind == "++":
            name, sign = self.choose(defined), self.choose(("++", "--"))
            if self.values[name] == {"++": HIGHEST, "--": LOWEST}[sign]:
                sign = "--" if sign == "++" else "++"
            self.write(name, sign, ";")
            self.values[name] += runs * (1 if sign == "++" else -1)
        else:
            name = self.choose(defined)
            self.write("print", name, ";", answer=NOTHING + 1 + self.values[name] - LOWEST if runs else NOTHING)


def code_execution(generator: Generator, setting: Setting) -> Sequence:
    """Draw a program of `length` statements; every token asks for what it prints, which mostly is nothing.

    The first statement assigns, the last one prints.
    """
    program = Program(generator, setting.variables, setting.published)
    for place in range(setting.length):
        last = place == setting.length - 1
        program.add("=" if place == 0 else "print" if last else program.choose(("=", "++", "print", "if")))
    return np.array(program.symbols), np.array(program.answers)


# Formal languages.


def repetitions(word: tuple[int, ...], generator: Generator, setting: Setting) -> Sequence:
    """Repeat a word; an answer says whether the string so far is in the language, 1, or not, 0."""
    length = draw_length(generator, setting, len(word))
    return np.resize(word, length), (np.arange(1, length + 1) % len(word) == 0).astype(int)


def counter(letters: int, generator: Generator, setting: Setting) -> Sequence:
    """Draw n, and write each letter n times; an answer is the next symbol.

    After the first letters that is either of the first two, which is one answer; after the last letter it is the end.
    """
    n = draw_length(generator, setting)
    following = np.repeat(np.arange(1, letters), n)[1:]
    return np.repeat(np.arange(letters), n), np.concatenate([np.full(n, letters), following, [letters + 1]])


def brackets(generator: Generator, pairs: int, most: int, outside: int = 0) -> list[int]:
    """Draw S -> [ S ] with probability 1/2, S S with 1/4, else nothing; a string longer than `most` becomes nothing.

    Bracket p opens as 2 p and closes as 2 p + 1. outside: the brackets around the string.
    """
    drawn = generator.random()
    if outside >= most or drawn >= 0.75:
        return []
    if drawn < 0.5:
        pair = 2 * int(2 * drawn * pairs)
        string = [pair, *brackets(generator, pairs, most, outside + 2), pair + 1]
    else:
        string = [symbol for _ in range(2) for symbol in brackets(generator, pairs, most, outside)]
    return string if len(string) <= most else []


def are_open(symbols: list[int], pairs: int) -> np.ndarray:
    """Return for each token the sum of 2^p over the pairs p that are open after it."""
    tokens = np.array(symbols, dtype=int)
    steps = 1 - 2 * (tokens % 2)
    opened = [((tokens // 2 == pair) * steps).cumsum() > 0 for pair in range(pairs)]
    return np.array(opened).T @ 2 ** np.arange(pairs)


def dyck(pairs: int, generator: Generator, setting: Setting) -> Sequence:
    """Draw nested brackets; an answer says which pairs are open."""
    string: list[int] = []
    while len(string) < least(setting, 2):
        string = brackets(generator, pairs, setting.length)
    return np.array(string), are_open(string, pairs)


def reset_dyck(generator: Generator, setting: Setting) -> Sequence:
    """Draw the start of nested brackets, a symbol 2 that closes all, and other ones; an answer says if one is open.

    In the public code a string may be twice as long as the longest, and one more.
    """
    while True:
        before, after = (brackets(generator, 1, setting.length) for _ in range(2))
        del before[generator.integers(len(before) + 1) :]
        if least(setting) <= len(before) + 1 + len(after) <= setting.length:
            return np.array([*before, 2, *after]), np.concatenate([are_open(before, 1), [0], are_open(after, 1)])


PROBLEMS = {
    "parity": Problem(parity, lambda _: 2),
    **{name: Problem(partial(products, name), partial(count_elements, name)) for name in GROUPS},
    "mqar": Problem(mqar, lambda setting: 2 * setting.symbols, varies=False),
    "listops": Problem(listops, lambda _: len(LISTOPS), tokens=10, varies=False, most=20),
    # The longest statement: if x > 3 : y = 4 ;
    "code_execution": Problem(code_execution, lambda _: NOTHING + 2 + HIGHEST - LOWEST, tokens=9, varies=False),
    "aa_star": Problem(partial(repetitions, (0, 0)), lambda _: 2, multiple=2),
    "abab_star": Problem(partial(repetitions, (0, 1, 0, 1)), lambda _: 2, multiple=4),
    "counter_2": Problem(partial(counter, 2), lambda _: 4, tokens=2),
    "counter_3": Problem(partial(counter, 3), lambda _: 5, tokens=3),
    "dyck1": Problem(partial(dyck, 1), lambda _: 2, multiple=2, most=100),
    "shuffle_2": Problem(partial(dyck, 2), lambda _: 4, multiple=2, most=100),
    "reset_dyck1": Problem(reset_dyck, lambda _: 3, most=100),
}
