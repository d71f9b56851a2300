"""The recipe of fast weight layers: its table, its analysis, and its stages on a miniature text."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fwl import analysis, rows

ROOT = Path(__file__).parents[2]
MODELS = [f"local/{name}" for name in ("base", "slow", "fwl", "bias")]
MODELS += [f"xl/{name}" for name in ("base", "slow", "fwl", "carried", "bias")]
WORDS = ["=", "PEP", "</s>", "a", "b", "</s>", "=", "=", "a", "</s>", "=", "c", "</s>", "a", "a", "</s>"]


def write_scores(path, words, log_probs):
    lines = [f"{i}\t{word}\t{value}" for i, (word, value) in enumerate(zip(words, log_probs, strict=True))]
    path.write_text("\n".join(["position\ttoken\tlog_prob", *lines]) + "\n")
    return path


def test_documents_start_with_headings_or_blocks():
    assert analysis.document_starts(WORDS, None) == {0, 10}  # not the heading of a section
    assert analysis.document_starts(WORDS, 6) == {0, 6, 12}


def test_gains_are_grouped_as_the_figure_has_them(tmp_path):
    base = write_scores(tmp_path / "base.tsv", WORDS, [-3.0] * len(WORDS))
    other = write_scores(tmp_path / "other.tsv", WORDS, [-3.0 + i for i in range(len(WORDS))])
    tokens = list(analysis.compare(base, other))
    assert [token.gain for token in tokens] == list(map(float, range(16)))
    assert [token.place for token in tokens] == [*range(10), *range(6)]
    assert [token.seen for token in tokens if token.word == "a"] == [0, 1, 0, 1]
    (label, count, mean, half), *_ = analysis.group(tokens, lambda token: token.seen, [0, 1, 2])
    first = [0, 1, 2, 3, 4, 10, 11, 12, 13]  # gains of tokens not seen before in their document
    assert (label, count, mean) == ("0", len(first), sum(first) / len(first)) and half > 0
    assert [row[0] for row in analysis.group(tokens, lambda token: token.place, [0, 2, 8])] == ["0-1", "2-7", "8+"]


def test_the_picture_comes_with_its_numbers(tmp_path):
    words = WORDS * 20
    base = write_scores(tmp_path / "base.tsv", words, [-3.0] * len(words))
    other = write_scores(tmp_path / "other.tsv", words, [-2.5] * len(words))
    (tmp_path / "dict.txt").write_text("a 400\nb 5\nc 20\nPEP 1\n= 9000\n")
    paths = [str(path) for path in (base, other, tmp_path / "dict.txt", tmp_path / "where.png")]
    analysis.main([*paths, "--title", "FWLs"])
    assert (tmp_path / "where.png").stat().st_size > 1000
    found = list(csv.DictReader((tmp_path / "where.csv").open()))
    assert {float(row["gain"]) for row in found} == {0.5}
    counted = [int(row["tokens"]) for row in found if row["by"] == "count in the training text"]
    assert sum(counted) == sum(word != "</s>" for word in words)
    write_scores(other, [*words[:-1], "b"], [-2.5] * len(words))
    with pytest.raises(ValueError, match="score different texts"):
        list(analysis.compare(base, other))


def result(folder, name, perplexity):
    folder.mkdir(parents=True, exist_ok=True)
    values = {"loss": perplexity, "perplexity": perplexity, "tokens": 100, "seconds": 4}
    (folder / f"{name}.json").write_text(json.dumps(values))


def test_the_table_has_the_best_step_of_the_validation_text(tmp_path, capsys):
    base = tmp_path / "xl" / "base"
    for name, perplexity in (("valid plain", 30), ("test plain", 31), ("valid rms 1e-4", 25), ("valid rms 3e-4", 24)):
        result(base, name, perplexity)
    result(base, "speed plain", 31)
    assert rows.best(base, "rms") == "3e-4" and rows.best(base, "plain") == ""
    rows.main(["csv", str(tmp_path)])
    (tmp_path / "rows.csv").write_text(capsys.readouterr().out)
    table = "\n".join(rows.table(tmp_path / "rows.csv"))
    assert "| No FWLs | base.yaml | - | 30.00 | 31.00 | 25 | 17.3 |" in table
    assert "| Dynamic evaluation, RMS | base.yaml | 3e-4 | 24.00 | not run | - | 15.8 |" in table
    assert "| FWLs | fwl.yaml | - | not run | not run | - | 22.4 |" in table
    local, xl = table.split("**Transformer-XL**")
    assert "carried" not in local and xl.count("| FWLs, gradients at carried weights | carried.yaml |") == 1
    with pytest.raises(ValueError, match="no result on the validation text for sgd"):
        rows.best(base, "sgd")


def copy_recipe(folder):
    """The recipes in a folder of the test, with the environment that the tests run in -> the script."""
    shutil.copytree(ROOT / "recipes", folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    (folder / "env.sh").write_text(f'root={str(ROOT)!r}\nrun() {{ echo "+ $*" >&2; "$@"; }}\n')
    return folder / "fwl" / "run.sh"


def run(*command):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    return subprocess.run(["bash", *map(str, command)], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["xl/fwll", "xl/common", "wt103/xl", "xl"])
def test_a_model_that_there_is_not_is_named(tmp_path, name):
    answer = run(copy_recipe(tmp_path / "recipes"), "all", "--models", f"xl/base {name}", "--out", tmp_path / "out")
    assert answer.returncode == 1 and not (tmp_path / "out").exists()
    assert answer.stderr.strip().endswith(f"there is no model {name}: they are {', '.join(MODELS)}.")


@pytest.mark.slow
def test_all_stages(tmp_path):
    """Every row of Transformer-XL is trained from its base, evaluated and drawn; then nothing is done again."""
    folder, out = tmp_path / "text", tmp_path / "an out"
    folder.mkdir()
    line = "= PEP 1 =\nthe memory is a matrix that every token reads and writes once\n"
    for name, lines in (("train", 100), ("valid", 15), ("test", 16)):
        (folder / f"{name}.txt").write_text(line * lines)
    script = copy_recipe(tmp_path / "recipes")
    script.write_text(script.read_text().replace("merges=8000", "merges=60").replace("statistics=400", "statistics=3"))
    arguments = ["--data", folder, "--out", out, "--models", "xl/base xl/slow xl/fwl xl/carried xl/bias"]
    arguments += ["--adaptive-softmax-cutoff", "", "--max-update", "4", "--warmup-updates", "1", "--batch-size", "2"]
    answer = run(script, "all", *arguments)
    assert answer.returncode == 0, answer.stderr[-3000:]
    table = (out / "table.md").read_text().partition("**Transformer-XL**")[2]
    assert "not run" not in table and table.count("\n|") == 2 + len(rows.ROWS)
    assert (out / "xl.png").exists() and (out / "xl_carried.png").exists() and not (out / "local.png").exists()
    again = run(script, "all", *arguments)
    assert again.returncode == 0 and "fairseq-train" not in again.stderr and "fwp-eval-lm" not in again.stderr
