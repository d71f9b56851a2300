"""The picture of fwp-plot --gain: where a model predicts better than another one (Clark et al. 2022, Figure 2).

The gain of a token is the difference of its log-probabilities (base e). Its mean is grouped by three properties of the
token: its position in the document, its count in the training text, and how often it occurred in the document before.
"""

import csv
import math
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fairseq_fwp.checkpoints.pretrained.dictionary import read_dictionary
from fairseq_fwp.cli.plot_style import load_pyplot, save, save_table

END = "</s>"  # of a line
# The lowest value of each group. Clark et al. give no numbers for theirs.
GROUPS = {
    "position in the document (tokens)": (0, 64, 128, 256, 384, 512, 1024, 4096),
    "count in the training text": (0, 100, 300, 1000, 3000, 10000),
    "occurrences before it in the document": (0, 1, 2, 4, 8, 16, 64),
}


class Token(NamedTuple):
    """A token. gain: of its log-probability; position: tokens of the document before it; seen: the same one there."""

    word: str
    gain: float
    position: int
    seen: int


class Bar(NamedTuple):
    """A group of tokens: its name, number, mean gain, and half of the mean's 95 % interval, for independent tokens."""

    name: str
    tokens: int
    mean: float
    half_interval: float

    @classmethod
    def of(cls, name: str, gains: list[float]) -> "Bar":
        return cls(name, len(gains), float(np.mean(gains)), 1.96 * float(np.std(gains, ddof=1)) / len(gains) ** 0.5)


def read_scores(path: Path) -> Iterator[tuple[str, float]]:
    """Yield the tokens of a text, with their log-probabilities. Raises ValueError for a file of another kind."""
    table = f"{path} must be a table that fwp-eval-lm --scores wrote"
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        try:
            if next(rows, None) != ["position", "token", "log_prob"]:
                raise ValueError(f"{table}, got other columns.")
            for number, row in enumerate(rows, 2):
                try:
                    token, log_prob = row[1], float(row[2])
                except (IndexError, ValueError):
                    raise ValueError(f"{path}, line {number}: it must have a token and a number, got {row}.") from None
                if not math.isfinite(log_prob):
                    raise ValueError(f"{path}, line {number}: the log-probability must be finite, got {log_prob}.")
                yield token, log_prob
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{table}, got another file ({error}).") from error


def compare(base: Path, model: Path, block: int | None) -> Iterator[Token]:
    """Yield the tokens that both files score.

    A document begins at a heading as in WikiText, a line that starts with = and not with = =. With `block`, blocks of
    so many tokens are documents. Raises ValueError if the files score different texts.
    """
    start, seen, line_begins = 0, Counter[str](), True
    both = chain(zip_longest(read_scores(base), read_scores(model)), [((END, 0.0), (END, 0.0))])
    for position, ((old, new), (following, _)) in enumerate(pairwise(both)):
        if old is None or new is None or old[0] != new[0]:
            raise ValueError(f"{base} and {model} must score the same text, got others: evaluate both models on one.")
        word = old[0]
        heading = line_begins and word == "=" and following is not None and following[0] != "="
        if position % block == 0 if block else heading:
            start, seen = position, Counter()
        yield Token(word, new[1] - old[1], position - start, seen[word])
        seen[word] += 1
        line_begins = word == END


def group(tokens: Iterator[Token], counts: dict[str, int]) -> dict[str, list[Bar]]:
    """Return groups of two tokens or more. The end of a line, which has no count, is in no group by count."""
    gains: dict[str, list[list[float]]] = {by: [[] for _ in lowest] for by, lowest in GROUPS.items()}
    for token in tokens:
        values = token.position, counts.get(token.word), token.seen
        for (by, lowest), value in zip(GROUPS.items(), values, strict=True):
            if value is not None:
                gains[by][bisect(lowest, value) - 1].append(token.gain)
    return {
        by: [Bar.of(*named) for named in zip(labels(lowest), gains[by], strict=True) if len(named[1]) > 1]
        for by, lowest in GROUPS.items()
    }


def labels(lowest: tuple[int, ...]) -> list[str]:
    """Return the name of each group: its values."""
    inner = [f"{low:,}" if high == low + 1 else f"{low:,}-{high - 1:,}" for low, high in pairwise(lowest)]
    return [*inner, f"{lowest[-1]:,}+"]


def draw_gain(base: Path, model: Path, dictionary: Path, block: int | None, out: Path) -> None:
    """Draw a panel for each property, and write the numbers of groups of two tokens or more into a CSV.

    dictionary: fairseq's, with the counts of the training text. Raises ValueError if the files do not fit together.
    """
    table_path = out.with_suffix(".csv")
    if table_path.resolve() in (base.resolve(), model.resolve()):
        raise ValueError(f"--out must have another name, because {table_path} is read: its numbers would replace it.")
    words = read_dictionary(dictionary)
    counts = dict(zip(words.symbols[words.nspecial :], words.count[words.nspecial :], strict=True))
    groups = group(compare(base, model, block), counts)
    if not any(groups.values()):
        raise ValueError(
            f"{base} and {model} must score two tokens or more of a group, got fewer: score a longer text."
        )
    figure, axes = load_pyplot().subplots(1, len(groups), figsize=(12, 4), sharey=True)
    rows = [["by", "group", "tokens", "gain", "half_interval"]]
    for panel, (by, bars) in zip(axes, groups.items(), strict=True):
        rows += [[by, bar.name, str(bar.tokens), f"{bar.mean:.5f}", f"{bar.half_interval:.5f}"] for bar in bars]
        means, intervals = [bar.mean for bar in bars], [bar.half_interval for bar in bars]
        panel.bar([bar.name for bar in bars], means, yerr=intervals, color="0.6", ecolor="black", capsize=2)
        panel.axhline(0, color="black", lw=0.8)
        panel.set_xlabel(by)
        panel.tick_params(axis="x", labelrotation=35, labelsize=8)
        panel.grid(visible=False, axis="x")
    axes[0].set_ylabel("gain in log-probability (nats per token)")
    figure.suptitle("Gain over the base model, by tokens; mean and its 95 % interval")
    save(figure, out)
    save_table(rows, table_path)
