"""The pieces that the quick start and the PEP recipe share, on a miniature text."""

import contextlib
import gzip
import io
import os
import subprocess
import sys
from pathlib import Path

import lm_grid
import lm_progress
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


def run(*arguments, cwd=ROOT, tools=None, before="", last='read_arguments "$@"; compare'):
    """A recipe as run.sh runs it, but in the environment of the tests; tools: a folder of programs that come first."""
    script = f"""set -euo pipefail
root=$PWD here=$PWD/recipes/quickstart data= out=$PWD/runs/none merges=60 models="delta sum" prompt=the per_word=
protocols=(valid test "test 128")
{before}
run() {{ "$@"; }}
show_sample() {{ cat; }}
. recipes/lm_comparison.sh
{last}"""
    path = ":".join([*([str(tools)] if tools else []), str(Path(sys.executable).parent), os.environ["PATH"]])
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
    few = run("prepare", "--data", text, "--models", "sum", "softmax", "--out", tmp_path / "few", "--lines", "5")
    assert few.returncode == 0 and "--models sum\\ softmax" in few.stdout, few.stderr
    assert (tmp_path / "few" / "data" / "text" / "test.txt").read_text() == LINE * 5
    assert (tmp_path / "few" / "data" / "text" / "train.txt").read_text() == LINE * 200
    untrained = run("eval", "--data", text, "--out", out)
    assert untrained.returncode == 1 and "delta is not trained" in untrained.stderr


def test_a_recipe_needs_the_text_until_it_is_prepared(text, tmp_path):
    def need(*arguments):
        hint = '\nread_arguments "$@"; need_data "get it."; compare'
        return run(*arguments, "--out", tmp_path / "out", before=f"data={tmp_path}/none", last=hint)

    assert f"there is no folder {tmp_path}/none: get it." in need("prepare").stderr
    assert need("prepare", "--data", text).returncode == 0
    assert need("prepare").returncode == 0 and "delta is not trained" in need("eval").stderr
    assert "there is no folder" in need("eval", "--data", tmp_path / "none").stderr


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


def test_progress_shows_how_far_it_is_and_the_bleu_that_chooses_checkpoints(monkeypatch, capsys):
    lines = """2026 | INFO | settings: optimization.max_update=120, task=translation
2026 | INFO | train_inner | {"ppl": "10.25", "num_updates": "30", "wps": "500", "ups": "3"}
2026 | INFO | valid | {"valid_ppl": "9.5", "valid_bleu": "31.25", "valid_num_updates": "60"}
2026 | INFO | valid | {"valid_ppl": "9.5", "valid_num_updates": "60"}
2026 | INFO | fairseq_cli.train | done training in 40.0 seconds
"""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert lm_progress.show("sum", terminal=False)
    training, translation, language_model = capsys.readouterr().out.splitlines()
    assert "30 of 120 ( 25%)" in training
    assert translation.endswith("validation ppl      9.5   BLEU 31.25") and language_model.endswith("ppl      9.5")


DIVERGED = """\
2026-11-21 23:59:00 | INFO | fairseq_cli.train | num. shared model params: 1,234 (num. trained: 1,234)
2026-11-21 23:59:36 | INFO | train_inner | {"ppl": "90", "num_updates": "50", "wall": "36"}
2026-11-22 00:00:12 | INFO | valid | {"valid_ppl": "88.25", "valid_num_updates": "60", "wall": "72"}
2026-11-22 00:00:48 | INFO | valid | {"valid_ppl": "nan", "valid_num_updates": "90"}
Traceback (most recent call last):
FloatingPointError: gradients are Nan/Inf
"""


def stand_in(tools, log):
    """A fairseq-train that says `log` and fails for delta, and finishes for every other model."""
    tools.mkdir(exist_ok=True)
    (tools / "log").write_text(log)
    (tools / "fairseq-train").write_text(
        f'#!/bin/bash\ncase "$*" in *delta_lm*) cat "{tools}/log"; exit 1;; *) echo "| done training";; esac\n'
    )
    (tools / "fairseq-train").chmod(0o755)


def test_a_model_that_diverges_is_marked_and_the_others_go_on(text, tmp_path):
    arguments = ["train", "--data", text, "--out", tmp_path / "out"]
    delta, tools = tmp_path / "out" / "delta", tmp_path / "tools"
    stand_in(tools, DIVERGED.replace("FloatingPointError", "RuntimeError"))
    failed = run(*arguments, tools=tools)
    assert failed.returncode == 1 and "the training of delta failed: see" in failed.stderr
    assert not (delta / "diverged").exists() and not (tmp_path / "out" / "sum").exists()
    stand_in(tools, DIVERGED)
    marked = run(*arguments, tools=tools)
    assert marked.returncode == 0, marked.stderr
    where = "gradient not finite after update 90, last finite validation perplexity 88.25 at 60"
    assert (delta / "diverged").read_text() == f"{where}\n"
    assert (tmp_path / "out" / "sum" / "trained").exists() and not (delta / "trained").exists()
    again = run(*arguments, tools=tools)
    assert again.returncode == 0 and "fairseq-train" not in again.stderr
    other = run(*arguments, "--lr", "1", tools=tools)
    assert other.returncode == 1 and "another --out" in other.stderr


@pytest.mark.slow
def test_fairseq_itself_stops_at_a_gradient_that_is_not_finite(text, tmp_path):
    out = tmp_path / "out"
    result = run("all", "--data", text, "--out", out, "--models", "delta", "--lr", "1e38", "--warmup-updates", "1")
    assert "diverged: gradient not finite after update" in result.stdout, result.stdout + result.stderr
    assert (out / "delta" / "diverged").exists()


def test_what_ended_the_last_start_counts(tmp_path):
    log = tmp_path / "train.log"
    start = "+ fairseq-train DATA\n"
    log.write_text(start + DIVERGED)
    assert lm_results.diverged(log).startswith("gradient not finite")
    log.write_text(start + DIVERGED + start + "Killed\n")
    with pytest.raises(ValueError, match="does not end at a gradient"):
        lm_results.diverged(log)
    log.write_text("FloatingPointError: gradients are Nan/Inf\n")
    with pytest.raises(ValueError, match="no log of fairseq-train"):
        lm_results.diverged(log)


def test_training_that_is_done_again_counts_once(tmp_path):
    log = tmp_path / "train.log"
    start = "+ fairseq-train DATA\n2026-11-22 07:00:00 | INFO | fairseq.trainer | Loaded checkpoint\n"
    entry = '2026-11-22 07:00:18 | INFO | valid | {"valid_ppl": "7.5", "valid_num_updates": "60", "wall": "0"}\n'
    log.write_text(DIVERGED + start + entry)
    assert lm_results.read_training(log) == (1234, 60, pytest.approx((108 + 18) / 3600), [(60, 7.5)], False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tain"], "there is no stage tain"),
        (["eval", "--out", "/nonexistent"], "run the stage prepare first"),
        (["all", "--data"], "--data needs a value"),
        (["all", "--models", "nosuch"], "there is no model nosuch: they are delta long/decay long/delta"),
        (["all", "--lines", "abc"], "--lines must be a whole number of at least 1, got 'abc'"),
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


GRID = [
    {
        "table": "A",
        "rows": [
            {"run": "best", "row": "Best", "valid": 10.0, "test": 20.0},
            {"run": "worse", "row": "Worse", "valid": 9.0, "test": 30.0},
            {"run": "alike", "row": "Alike", "valid": 8.0, "test": 30.0},
            {"run": "none", "row": "None", "valid": 8.0, "test": 40.0},
        ],
    },
    {
        "table": "B",
        "rows": [{"run": "nan", "row": "Nan", "valid": 1.0}, {"run": "far", "row": "Far", "valid": "diverged"}],
    },
    {"table": "C", "rows": [{"run": "best", "row": "Extra"}]},
]


@pytest.fixture
def grid(tmp_path):
    """Runs of every kind: finished with 3 bits a token, with 2, with 2, diverged, ended far above its best, none."""
    for name, last in (("best", 8), ("worse", 8), ("alike", 11.9), ("nan", 8), ("far", 12.1)):
        folder = tmp_path / "grid" / name
        for split in ("valid", "test"):
            eval_log(folder / f"{split}.ppl.log", 6)
        lines = DIVERGED.splitlines()[:2]
        for update, ppl in ((60, 8), (90, last)):
            lines.append(f'| INFO | valid | {{"valid_ppl": "{ppl}", "valid_num_updates": "{update}"}}')
        (folder / "train.log").write_text("\n".join(lines) + "\n")
        (folder / ("diverged" if name == "nan" else "trained")).write_text("at update 7\n" if name == "nan" else "")
    best = tmp_path / "grid" / "best" / "test.ppl.log"
    best.write_text(best.read_text().replace("2.0000", "3.0000"))
    return tmp_path


def outcomes(out):
    """Those of the runs, through the file that has their numbers."""
    with contextlib.redirect_stdout(io.StringIO()) as written:
        lm_grid.write_csv(out, GRID)
    (out / "grid.csv").write_text(written.getvalue())
    found = lm_grid.read_csv(out / "grid.csv")
    runs = {row["run"]: lm_grid.read_outcome(out / "grid" / row["run"]) for table in GRID for row in table["rows"]}
    assert found == {run: outcome for run, outcome in runs.items() if outcome != lm_grid.Outcome()}
    return found


def test_grid_has_ranks_beside_the_papers_and_hides_nothing(grid):
    lines = lm_grid.markdown(lm_grid.read_tables(outcomes(grid), GRID))
    rows = [
        line.strip("| ").split(" | ")
        for line in lines
        if line.startswith("|") and "conf/" not in line and "---" not in line
    ]
    assert [row[2:8] for row in rows] == [
        ["4.0", "8.0", "3", "10.0", "20.0", "1"],
        ["4.0", "4.0", "1", "9.0", "30.0", "2"],
        ["4.0", "4.0", "1", "8.0", "30.0", "2"],
        ["not run", "not run", "not run", "8.0", "40.0", "4"],
        ["diverged", "diverged", "diverged", "1.0", "-", "1"],
        ["diverged", "diverged", "diverged", "diverged", "-", "diverged"],
        ["4.0", "8.0", "-", "-", "-", "-"],
    ]
    assert rows[0][8:] == ["1,234", "90", "0.010"]
    assert [line for line in lines if line.startswith("**")] == [
        "**A**, ranked by test",
        "**B**, ranked by valid",
        "**C**",
    ]
    assert lines[-2:] == [
        "- nan diverged: at update 7",
        "- far diverged: ended at a validation perplexity of 12.1, its best was 8.0",
    ]


def test_grid_is_drawn_before_and_after_its_runs(grid, tmp_path):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", grid):
        lm_grid.draw(lm_grid.read_tables(outcomes(out), GRID), tmp_path / "grid.png")
        assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_two_tables_is_named_once():
    assert lm_grid.names(GRID) == [f"grid/{name}" for name in ("best", "worse", "alike", "none", "nan", "far")]


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
