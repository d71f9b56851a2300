"""fwp-plot --gain, on the scores of two models: Figure 2 of Clark et al. 2022."""

import csv
import math
import statistics

import pytest
from support.pairwise import looped
from support.refusals import refused

from fairseq_fwp.cli import plot
from fairseq_fwp.cli.gain import GROUPS, compare, labels

# Two documents; = = B = = is a heading inside the first one. A = inside a line begins nothing.
LINES = "= A =", "a = b a", "= = B = =", "a", "= C =", "a b"
TEXT = [word for line in LINES for word in [*line.split(), "</s>"]]
HEAD = "position\ttoken\tlog_prob\n"
GAINS = [0.5 * index - 4 for index in range(len(TEXT))]


def write_scores(folder, words=TEXT, gains=GAINS):
    """Write what two models give, and a dictionary in which a is frequent."""
    for name, values in (("base", [0] * len(words)), ("model", gains)):
        rows = (f"0\t{word}\t{value - 9:.9g}\n" for word, value in zip(words, values, strict=True))
        (folder / f"{name}.tsv").write_text("".join([HEAD, *rows]))
    (folder / "dict.txt").write_text("a 120\n= 80\nb 20\nA 1\nB 1\nC 1\n")
    return folder / "base.tsv", folder / "model.tsv"


def test_documents_begin_at_headings(tmp_path):
    tokens = list(compare(*write_scores(tmp_path), None))
    assert [token.word for token in tokens] == TEXT and [token.gain for token in tokens] == pytest.approx(GAINS)
    second = len(TEXT) - 7
    assert [token.position for token in tokens] == [*range(second), *range(7)]
    assert [token.seen for token in tokens if token.word == "a"] == [0, 1, 2, 0]
    assert [token.seen for token in tokens if token.word == "="] == [*range(7), 0, 1]


def test_blocks_are_documents(tmp_path):
    tokens = list(compare(*write_scores(tmp_path), 4))
    assert [token.position for token in tokens] == [index % 4 for index in range(len(TEXT))]
    assert [token.seen for token in tokens[4:8]] == [0, 0, 0, 1]  # a = b a


def test_groups_have_the_mean_gain_and_its_interval(tmp_path, capsys):
    words = TEXT * 30
    base, model = write_scores(tmp_path, words, [math.sin(index) for index in range(len(words))])
    out = tmp_path / "gain.png"
    plot.main(["--gain", str(base), str(model), "--dictionary", str(tmp_path / "dict.txt"), "--out", str(out)])
    assert capsys.readouterr().out == f"wrote {out} and gain.csv\n" and out.read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "gain.csv").open()))
    tokens = list(compare(base, model, None))
    by = dict(zip(GROUPS, ("position", "count", "seen"), strict=True))
    expected = {
        ("count", "100-299"): [token.gain for token in tokens if token.word == "a"],
        ("seen", "0"): [token.gain for token in tokens if token.seen == 0],
        ("position", "0-63"): [token.gain for token in tokens],
    }
    found = {(by[row["by"]], row["group"]): row for row in rows}
    for group, gains in expected.items():
        row, interval = found[group], 1.96 * statistics.stdev(gains) / len(gains) ** 0.5
        assert int(row["tokens"]) == len(gains)
        assert float(row["gain"]) == pytest.approx(statistics.fmean(gains), abs=1e-5)
        assert float(row["half_interval"]) == pytest.approx(interval, abs=1e-5)
    counted = sum(int(row["tokens"]) for (name, _), row in found.items() if name == "count")
    assert counted == len(words) - words.count("</s>")
    assert labels((0, 1, 2, 64)) == ["0", "1", "2-63", "64+"]


# Which file, its text, words of the sentence.
REFUSALS = [
    ("model.tsv", "", "must be a table that fwp-eval-lm --scores wrote"),
    ("model.tsv", f"{HEAD}0\t=\t-1\n", "must score the same text, got others"),
    ("model.tsv", f"{HEAD}0\ta\t-1\n", "must score the same text, got others"),
    ("model.tsv", f"{HEAD}0\t=\tx\n", r"model\.tsv, line 2: it must have .* a number, got \['0', '=', 'x'\]"),
    ("model.tsv", f"{HEAD}0\t=\tnan\n", r"line 2: the log-probability must be finite, got nan"),
    ("dict.txt", "\udcff 1\n", r"the dictionary .*dict\.txt cannot be read: Incorrect encoding"),
    ("model.tsv", "\udcff", r"model\.tsv must be a table .*, got another file \('utf-8' codec"),
]


@looped("name, text, says", REFUSALS)
def test_refusals(tmp_path, name, text, says):
    write_scores(tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    words = ["--gain", tmp_path / "base.tsv", tmp_path / "model.tsv", "--dictionary", tmp_path / "dict.txt"]
    refused(plot.main, *words, "--out", tmp_path / "gain.png", says=says)
    assert not list(tmp_path.glob("gain.*"))


def test_a_picture_that_would_replace_or_show_nothing_is_refused(tmp_path):
    base, model = write_scores(tmp_path)
    scores = model.rename(tmp_path / "gain.csv")
    before = scores.read_bytes()
    flags = ["--dictionary", tmp_path / "dict.txt", "--out", tmp_path / "gain.png"]
    refused(plot.main, "--gain", base, scores, *flags, says=r"gain\.csv is read: its numbers would replace it")
    assert scores.read_bytes() == before
    scores.unlink()
    base.write_text(f"{HEAD}0\ta\t-1\n")
    refused(plot.main, "--gain", base, base, *flags, says="must score two tokens or more of a group, got fewer")
    assert not list(tmp_path.glob("gain.*"))
