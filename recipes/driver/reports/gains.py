"""The gain of a model over another, by tokens: Clark et al. 2022 (arXiv 2212.02475), Figure 2; from fwp-eval-lm.

The mean improvement of a token's log-probability (base e) is grouped by three properties. These are its place in its
document, the count of its word in the training text (from the dictionary), and its earlier occurrences in the document.
A document begins with a heading as in WikiText, a line that starts with = and not with = =. For models that read blocks
of N tokens separately, a block is a document. Bars have 95% intervals of the mean, as if tokens were independent. The
numbers go to a CSV next to the picture.
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from commands import RecipeError
from tables import write_csv

from fairseq_fwp.cli.plot_style import load_pyplot, save

END = "</s>"  # of a line
PLACES = [0, 64, 128, 256, 384, 512, 1024, 4096]
COUNTS = [0, 100, 300, 1000, 3000, 10000]
SEEN = [0, 1, 2, 4, 8, 16, 64]


class Token(NamedTuple):
    """A token. gain: of its log-probability; place: tokens of the document before it; seen: the same word there."""

    word: str
    gain: float
    place: int
    seen: int


def document_starts(words: list[str], block: int | None) -> set[int]:
    """Return the places of the first tokens of documents."""
    if block:
        return set(range(0, len(words), block))
    lines = [0, *(place + 1 for place, word in enumerate(words) if word == END)]
    return {0} | {place for place in lines if words[place : place + 1] == ["="] and words[place + 1] != "="}


def read_scores(path: Path) -> list[tuple[str, float]]:
    """Return the tokens of a text, with their log-probabilities."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["token"], float(row["log_prob"])) for row in rows]


def compare(base: Path, other: Path, block: int | None = None) -> Iterator[Token]:
    """Yield the tokens that both files score. Raises RecipeError if they score different texts."""
    ours, theirs = read_scores(base), read_scores(other)
    words = [word for word, _ in ours]
    if words != [word for word, _ in theirs]:
        raise RecipeError(f"{base} and {other} score different texts: evaluate both models on one.")
    starts, start, seen = document_starts(words, block), 0, Counter[str]()
    for place, ((word, old), (_, new)) in enumerate(zip(ours, theirs, strict=True)):
        if place in starts:
            start, seen = place, Counter()
        yield Token(word, new - old, place - start, seen[word])
        seen[word] += 1


def group(tokens: list[Token], value: Callable[[Token], float], edges: list[float]) -> list[tuple]:
    """Return (label, tokens, mean gain, half of its 95% interval) of tokens with edges[i] <= value < edges[i + 1]."""
    found = []
    for low, high in zip(edges, [*edges[1:], math.inf], strict=True):
        gains = [token.gain for token in tokens if low <= value(token) < high]
        label = f"{low:,}" if high == low + 1 else f"{low:,}+" if high == math.inf else f"{low:,}-{high - 1:,}"
        if len(gains) > 1:
            found.append((label, len(gains), fmean(gains), 1.96 * stdev(gains) / math.sqrt(len(gains))))
    return found


def write(base: Path, other: Path, dictionary: Path, picture: Path, title: str, block: int | None) -> None:
    """Draw a panel for each grouping, on one scale, and write their numbers into a CSV of the same name."""
    tokens = list(compare(base, other, block))
    lines = (line.rsplit(" ", 1) for line in dictionary.read_text(encoding="utf-8").splitlines())
    counts = {word: int(count) for word, count in lines}
    counted = [token for token in tokens if token.word in counts]  # line ends are not in the dictionary
    found = {
        "position in the document (tokens)": group(tokens, lambda token: token.place, PLACES),
        "count in the training text": group(counted, lambda token: counts[token.word], COUNTS),
        "occurrences before it in the document": group(tokens, lambda token: token.seen, SEEN),
    }
    figure, axes = load_pyplot().subplots(1, len(found), figsize=(12, 4), sharey=True)
    for panel, (grouping, groups) in zip(axes, found.items(), strict=True):
        labels, _, means, errors = zip(*groups, strict=True)
        panel.bar(labels, means, yerr=errors, color="0.6", ecolor="black", capsize=2)
        panel.axhline(0, color="black", lw=0.8)
        panel.set_xlabel(grouping)
        panel.tick_params(axis="x", labelrotation=35, labelsize=8)
        panel.grid(visible=False, axis="x")
    axes[0].set_ylabel("gain in log-probability (nats per token)")
    figure.suptitle(f"{title}: gain over the base model, test set; mean and its 95% interval")
    save(figure, picture)
    heads = ("by", "group", "tokens", "gain", "half_interval")
    rows = [(by, *row[:2], *map("{:.5f}".format, row[2:])) for by, groups in found.items() for row in groups]
    write_csv(picture.with_suffix(".csv"), [dict(zip(heads, row, strict=True)) for row in rows])
    print(f"Where {other.parent} gains is in {picture}, its numbers in {picture.with_suffix('.csv')}.")
