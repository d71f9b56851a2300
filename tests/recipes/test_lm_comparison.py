"""The pieces that the quick start and the PEP recipe share, on a miniature text."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import lm_results
import lm_text
import pytest
import stdlib_text

ROOT = Path(__file__).parents[2]
LINE = "the memory is a matrix that every token reads and writes once\n"


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "a text"
    folder.mkdir()
    for name, lines in (("train", 200), ("valid", 30), ("test", 31)):
        (folder / f"{name}.txt").write_text(LINE * lines)
    return folder


def run(*arguments, cwd=ROOT):
    """A recipe as run.sh runs it, but in the environment of the tests."""
    script = """set -euo pipefail
root=$PWD here=$PWD/recipes/quickstart data= out=$PWD/runs/none merges=60 models="delta sum" prompt=the per_word=
protocols=(valid test "test 128")
run() { "$@"; }
show_sample() { cat; }
. recipes/lm_comparison.sh
read_arguments "$@"
compare"""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-c", script, "run.sh", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=os.environ | {"PATH": path}, capture_output=True, text=True)


def test_prepare_finishes_once_and_for_one_source(text, tmp_path):
    out = tmp_path / "an out"
    first = run("prepare", "--data", text, "--out", out)
    assert first.returncode == 0, first.stderr
    assert not (out / "data.unfinished").exists()
    made = (out / "data" / "bin" / "train.bin").stat().st_mtime_ns
    assert run("prepare", "--data", text, "--out", out).returncode == 0
    assert (out / "data" / "bin" / "train.bin").stat().st_mtime_ns == made
    other = run("prepare", "--data", tmp_path, "--out", out)
    assert other.returncode == 1 and "another --out" in other.stderr
    untrained = run("eval", "--data", text, "--out", out)
    assert untrained.returncode == 1 and "delta is not trained" in untrained.stderr


@pytest.mark.slow
def test_all_stages(text, tmp_path):
    out = tmp_path / "an out"
    arguments = ["all", "--data", text, "--out", out, "--max-update", "4", "--warmup-updates", "1"]
    first = run(*arguments)
    assert first.returncode == 0, first.stdout + first.stderr
    table = (out / "table.md").read_text()
    assert table in first.stdout
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| delta", "| sum"]
    assert (out / "curves.png").stat().st_size > 10_000
    assert (out / "sample.txt").read_text().startswith("the memory is a")
    again = run(*arguments)
    assert again.returncode == 0 and "fairseq-train" not in again.stderr
    other = run(*arguments, "--lr", "1")
    assert other.returncode == 1 and "another --out" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tain"], "there is no stage tain"),
        (["eval", "--out", "/nonexistent"], "run the stage prepare first"),
        (["all", "--data"], "--data needs a value"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message):
    result = run(*arguments)
    assert result.returncode == 1 and message in result.stderr


def test_text_is_copied_with_single_spaces(text, tmp_path):
    (text / "test.txt").unlink()
    with gzip.open(text / "test.txt.gz", "wt", encoding="utf-8") as file:
        file.write("a\u3000b \t c\n\n" * 100)
    lm_text.copy(text, tmp_path / "copy")
    assert (tmp_path / "copy" / "test.txt").read_text() == "a b c\n\n" * 100
    assert (tmp_path / "copy" / "train.txt").read_text() == LINE * 200


def test_bad_text_is_refused_before_anything_is_written(text, tmp_path):
    def refused(message):
        with pytest.raises(ValueError, match=message):
            lm_text.copy(text, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()

    (text / "valid.txt").write_bytes(b"\xff\xfe" * 500)
    refused("UTF-8")
    (text / "valid.txt").write_text("")
    refused("has 0 words, but at least 100")
    (text / "valid.txt").unlink()
    refused(r"valid\.txt is missing")
    with pytest.raises(ValueError, match="does not exist"):
        lm_text.copy(tmp_path / "none", tmp_path / "copy")


def eval_log(path, tokens):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"INFO | num. model params: 1,234\nINFO | Evaluated {tokens:,} tokens in 1.0s (9 tokens/s)\n"
        "INFO | Loss (base 2): 2.0000, Perplexity: 4.00\n"
    )


def test_tokens_that_were_not_scored_are_an_error(tmp_path):
    text = tmp_path / "test.txt"
    text.write_text("a b@@ c\nd\n")
    eval_log(tmp_path / "log", 6)
    lm_results.check(tmp_path / "log", text)
    eval_log(tmp_path / "log", 5)
    with pytest.raises(ValueError, match=r"5 tokens were scored, but .* has 6"):
        lm_results.check(tmp_path / "log", text)
    (tmp_path / "log").write_text("Traceback")
    with pytest.raises(ValueError, match="no result"):
        lm_results.check(tmp_path / "log", text)


def test_table_has_the_perplexity_per_token_and_per_word(tmp_path):
    eval_log(tmp_path / "delta" / "test.ppl.log", 6)
    (tmp_path / "data" / "text").mkdir(parents=True)
    (tmp_path / "data" / "text" / "test.txt").write_text("a b\n")  # 6 tokens of 2 bits make 12 bits for 3 words
    (tmp_path / "curves.csv").write_text("run,update,hours\ndelta,10,0.1\ndelta,20,0.2\n")
    assert lm_results.table(tmp_path, ["delta"])[-1] == "| delta | 1,234 | 4.00 | 20 | 0.2 |"
    assert lm_results.table(tmp_path, ["delta"], with_words=True)[-1] == "| delta | 1,234 | 4.00 | 16.0 | 20 | 0.2 |"


CODE = '''def read(self, size=-1):
    """Read up to size bytes."""
    if size < 0:
        return self.readall()
    return self._read(size)'''


def test_layout_survives_the_line_break_words():
    assert [stdlib_text.show(block) for block in stdlib_text.blocks(CODE + "\n\n\nX = 1\n")] == [CODE, "X = 1"]


def test_standard_library_is_split_by_file_and_always_alike(tmp_path):
    for folder in ("one", "two"):
        stdlib_text.write(tmp_path / folder)
    names = [f"{split}.txt" for split in ("train", "valid", "test")]
    texts = [(tmp_path / "one" / name).read_bytes() for name in names]
    assert texts == [(tmp_path / "two" / name).read_bytes() for name in names]
    assert len(texts[0]) > 1_000_000 and min(map(len, texts)) > 50_000
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(names)
    used, skipped = stdlib_text.standard_library()
    assert not [name for name in used if "/test/" in f"/{name}" or "site-packages" in name]
    assert all(skipped.values())
