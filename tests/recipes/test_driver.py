"""The core of the recipes' driver: commands, flags, logs, evaluations, tables."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import commands
import engine
import evaluation
import flags
import log
import made_up
import pytest
import tables
from commands import RecipeError
from data import prepare
from support.pairwise import looped

RECIPES = sorted(
    path.parent
    for path in (made_up.ROOT / "recipes").glob("*/run.sh")
    if path.parent.name not in ("benchmarks", "browser_demo", "onnx", "transformers")  # without the driver
)


def test_every_recipe_names_extras_that_the_set_up_knows():
    known = re.search(r"^known=\((.*)\)$", (made_up.ROOT / "recipes/setup.sh").read_text(), re.M)[1].split()
    for path in [*(made_up.ROOT / "recipes").glob("*/run.sh"), made_up.ROOT / "tests/run.sh"]:
        (named,) = re.findall(r'env\.sh"(.*) -- "\$@"$', path.read_text(), re.M)
        assert {*named.split()} <= {*known}, path


@looped("recipe", RECIPES)
def test_the_help_of_every_recipe(recipe, tmp_path):
    """It says what stages do, how to resume, and how to use another text; Python needs no package for it."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    command, environment = ["bash", recipe / "run.sh", "--help"], {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    options, stages = shown.split("\noptions:\n")[1].split("\n\nstages (default: all):\n")
    assert re.search(r"^  all +\S", stages, re.M) and "\nresume:\n" in stages
    assert ("your own data:" in stages) == ("--data FOLDER" in options)
    assert "share of <unk> tokens" in stages or "--test" not in options


@looped("output, reason", [("/dev/full", "cannot be written: No space left on device"), ("&-", "must be open, got a")])
def test_output_that_cannot_be_written(output, reason):
    command = [sys.executable, Path(commands.__file__).parent, "problems", "--recipe", "x", "--", "--help"]
    shell = ["bash", "-c", f'"$@" >{output}', "-", *command]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr.startswith(f"run.sh: standard output {reason}") and done.returncode == 1


def test_what_is_half_made_does_not_count(tmp_path):
    with pytest.raises(KeyError), commands.whole(tmp_path / "a" / "data") as work:
        work.mkdir()
        raise KeyError
    assert not (tmp_path / "a" / "data").exists()
    with commands.whole(tmp_path / "a" / "data") as work:
        assert not work.exists()  # the files of the first one are removed
        work.mkdir()
    assert (tmp_path / "a" / "data").is_dir()


@looped(
    ("made", "given", "differing"),
    [
        ("--lr 2e-5 --x", "--lr 0.00002 --x", None),
        (r"--adam-betas \(0.9\,\ 0.98\)", "--adam-betas '(0.9, 0.98)'", None),
        ("--lr nan", "--lr 1", ", which differ in --lr"),
        ("/a's text", "/a's text", None),
        ("/a's text", "/b's text", ""),
        ("--lr 0.003 --max-update 9 --seed 1 --max-update 4 --cpu", "--lr 1 --max-update 9 --seed 1.0 --amp",
         ", which differ in --amp, --cpu, --lr, --max-update"),
    ],
)  # fmt: skip
def test_settings_compare_numbers_by_their_value(tmp_path, made, given, differing):
    (tmp_path / "settings.txt").write_text(made + "\n")
    if differing is None:
        commands.check_same(tmp_path / "settings.txt", given)
    else:
        with pytest.raises(RecipeError, match=rf"other settings \(see \S+\){differing}: give another --out"):
            commands.check_same(tmp_path / "settings.txt", given)


def test_flags_are_passed_on_as_written(tmp_path):
    (tmp_path / "common.yaml").write_text("lr: 1e-3\nno-save: true\n")
    conf = tmp_path / "a.yaml"
    conf.write_text("include: common.yaml\nadam-betas: (0.9, 0.98)\nlr: 2e-3\n")
    found = flags.read_flags(conf)
    assert found == ["--lr", "1e-3", "--no-save", "--adam-betas", "(0.9, 0.98)", "--lr", "2e-3"]
    assert flags.value_of([*found, "--seed=3"], "--lr") == "2e-3" and flags.value_of(["--seed=3"], "--seed") == "3"
    assert flags.as_flags({"a": True, "b": False, "c": 0}) == ["--a", "--c", "0"]
    # A result is named by the flags that change it.
    assert flags.label(["--stride", "8", "--cpu", "--batch-size", "2", "--path=/a/b"]) == "stride 8 path=_a_b"


@looped("text", ["", "- a", "a: [1", "a: {b: 1}", "a:", "a: false", "include: no.yaml", "include: a.yaml"])
def test_what_is_not_flat_is_refused(tmp_path, text):
    conf = tmp_path / "a.yaml"
    conf.write_text(text)
    with pytest.raises(RecipeError, match=r"\.yaml"):
        flags.read_flags(conf)


def test_of_a_log_counts_what_was_not_done_again(tmp_path):
    path = tmp_path / "train.log"
    start = "+ fairseq-train DATA\n"
    path.write_text(start + made_up.DIVERGED)
    found = log.read_training(path)
    assert (found.parameters, found.updates, found.hours) == (1234, 90, pytest.approx(108 / 3600))
    assert found.divergence == "gradient not finite after update 90, last finite validation perplexity 88.25 at 60"
    assert found.best() == 88.25 and found.curve()[0] == (60, 88.25)
    path.write_text(start + made_up.DIVERGED + made_up.log((60, 7.5)))
    found = log.read_training(path)
    assert found.curve() == [(60, 7.5)] and not found.divergence
    assert (found.updates, found.hours, found.seconds) == (60, pytest.approx((108 + 36) / 3600), 3)
    path.write_text("FloatingPointError: gradients are Nan/Inf\n")
    with pytest.raises(RecipeError, match="must be a log of fairseq-train that reached the start of training"):
        log.read_training(path)
    path.write_text(made_up.log((60, 7.5)) + '| {"valid_ppl": "1", | {"x": "2"}\n')
    with pytest.raises(RecipeError, match=r"is damaged: .* remove its folder to train again"):
        log.read_training(path)


def test_progress_shows_how_far_it_is(capsys):
    shown = log.Progress("sum")
    for line in (
        "settings: optimization.max_update=120, task=translation",
        "| num. shared model params: 1,234 (num. trained: 1,234)",
        '| train_inner | {"ppl": "10.25", "num_updates": "30", "wps": "500", "ups": "3"}',
        '| valid | {"valid_ppl": "9.5", "valid_bleu": "31.25", "valid_num_updates": "60"}',
        '| valid | {"valid_loss": "0.3329", "valid_num_updates": "60"}',
        "Traceback",
    ):
        shown.read(line + "\n")
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "sum: 1,234 parameters",
        "sum update 30 of 120 ( 25%) ppl 10.2 500 tokens/s 0m 30s left",
        "sum update 60 validation ppl 9.50 BLEU 31.25",
        "sum update 60 validation loss 0.3329",
    ]


def test_ways_of_evaluation_are_those_of_the_first_pattern(tmp_path):
    path = tmp_path / "evaluation.yaml"
    assert evaluation.read_ways(path, "delta") == [evaluation.Way()]
    path.write_text(
        "xl/*: {window: --stride 8}\n'*':\n  rms: {flags: --lr @, values: 1 2, splits: valid test, test_all: true}\n"
    )
    assert evaluation.read_ways(path, "xl/base") == [evaluation.Way("window", "--stride 8")]
    (way,) = evaluation.read_ways(path, "delta")
    assert way == evaluation.Way("rms", "--lr @", ("valid", "test"), ("1", "2"), test_all=True)
    path.write_text("xl: {a: {flag: --x}}\n")
    with pytest.raises(RecipeError, match=r"the fields of an evaluation must be among flags, .*, got flag\."):
        evaluation.read_ways(path, "xl")
    with pytest.raises(RecipeError, match="has no pattern that fits delta"):
        evaluation.read_ways(path, "delta")
    for splits in ("tst", "test"):
        path.write_text(f"xl: {{a: {{flags: --lr @, values: 1, splits: {splits}}}}}\n")
        with pytest.raises(RecipeError, match=f"the splits of 'a' must be valid or test, and .* valid, got {splits}"):
            evaluation.read_ways(path, "xl")
    for text in ("- xl\n", "xl: --stride 8\n", "xl: {a: {values: 1}}\n", "xl: {a: {flags: --x, values: [1]}}\n"):
        path.write_text(text)
        with pytest.raises(RecipeError, match=r"evaluation\.yaml must be like recipes/peps/evaluation\.yaml, got"):
            evaluation.read_ways(path, "xl")


@looped("test_all", [False, True])
def test_the_best_value_of_valid_is_used_on_test(tmp_path, monkeypatch, test_all):
    def score(checkpoint, path, data, split, text, flags):
        made_up.result(tmp_path, path.stem, {"1": 5.0, "2": 4.0}[flags[1]])

    monkeypatch.setattr(evaluation, "score", score)
    way = evaluation.Way("rms", "--lr @", values=("1", "2"), test_all=test_all)
    evaluation.evaluate(tmp_path, tmp_path / "x.pt", prepare.Data(tmp_path), way, [])
    asked = {"valid rms 1", "valid rms 2", "test rms 2"} | ({"test rms 1"} if test_all else set())
    assert {path.stem for path in tmp_path.glob("*.json")} == asked
    assert evaluation.best(tmp_path, "rms") == "2"
    with pytest.raises(RecipeError, match="no result on the validation text for sgd"):
        evaluation.best(tmp_path, "sgd")


def test_a_result_is_that_of_its_flags(tmp_path, monkeypatch, capsys):
    def run(program, *words):
        words[words.index("--json") + 1].write_text('{"perplexity": 4.0}')

    def score(*flags):
        evaluation.score(tmp_path / "best.pt", tmp_path / "valid.json", tmp_path, "valid", None, list(flags))

    monkeypatch.setattr(evaluation, "run", run)
    score("--stride", 8)
    score("--stride", "8", "--batch-size", "2", "--cpu")
    assert "is evaluated already" in capsys.readouterr().out
    with pytest.raises(RecipeError, match=r"other settings \(see .*valid\.flags\), which differ in --stride"):
        score("--stride", 4)
    (tmp_path / "valid.flags").unlink()  # the version before kept none
    score("--stride", 4)


def test_tokens_that_were_not_scored_are_an_error(tmp_path, monkeypatch):
    (tmp_path / "test.txt").write_text("a b@@ c\nd\n")

    def score(tokens):
        result = f'{{"perplexity": 4.0, "tokens": {tokens}}}'
        monkeypatch.setattr(evaluation, "run", lambda *words: words[words.index("--json") + 1].write_text(result))
        evaluation.score(tmp_path / "best.pt", tmp_path / f"{tokens}.json", tmp_path, "test", tmp_path, [])

    score(6)
    with pytest.raises(RecipeError, match=r"5 tokens were scored, but .* has 6: nothing is reported"):
        score(5)
    assert (tmp_path / "6.json").exists() and not (tmp_path / "5.json").exists()


def stand_in(folder, monkeypatch, text, status=0):
    """A fairseq-train that prints a text."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "said").write_text(text)
    program = folder / "bin" / "fairseq-train"
    program.write_text(f'#!/bin/sh\necho ran >>"{folder}/runs"; cat "{folder}/said"; exit {status}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin")


def test_a_training_ends_once_as_trained_or_diverged(tmp_path, monkeypatch, capsys):
    def runs():
        return len((tmp_path / "runs").read_text().splitlines())

    def train(name, *more):
        engine.train(engine.Training(name, tmp_path / name, ["--lr", "1e-3", *more], tmp_path))

    stand_in(tmp_path, monkeypatch, made_up.DIVERGED.replace("FloatingPointError", "RuntimeError"), 1)
    with pytest.raises(RecipeError, match="the training of delta failed: see"):
        train("delta")
    *_, reason, end = capsys.readouterr().out.splitlines()
    assert reason.startswith("RuntimeError: gradients") and end.startswith("delta: the training stopped early; its")
    assert not (tmp_path / "delta" / "diverged").exists()
    stand_in(tmp_path, monkeypatch, made_up.DIVERGED, 1)
    train("delta")
    assert (tmp_path / "delta" / "diverged").read_text().startswith("gradient not finite after update 90")
    stand_in(tmp_path, monkeypatch, made_up.log((60, 8.0)) + "| done training")
    for name in ("sum", "sum", "delta"):
        train(name)
    assert runs() == 3 and (tmp_path / "sum" / "trained").read_text() == "best loss inf, 60 updates\n"
    written = tmp_path / "sum" / "train.log"
    assert "--lr 1e-3 --save-dir" not in written.read_text()  # what is given comes last
    assert tables.read_run(tmp_path / "sum").updates == 60
    written.write_text(made_up.log((30, 9.0)))
    with pytest.raises(RecipeError, match=r"has changed since .* was best loss inf, 60 updates, .* is .* 30 updates"):
        tables.read_run(tmp_path / "sum")
    for name in ("sum", "delta"):
        with pytest.raises(RecipeError, match="was made with other settings"):
            train(name, "--seed", "2")


def test_a_training_whose_validations_are_no_numbers_has_diverged(tmp_path, monkeypatch, capsys):
    """fairseq ends well then, and saves no best checkpoint."""
    training = engine.Training("sum", tmp_path / "sum", [], tmp_path)
    stand_in(tmp_path, monkeypatch, made_up.log((60, math.nan)), 1)
    with pytest.raises(RecipeError, match="the training of sum failed"):  # it stopped for another reason
        engine.train(training)
    stand_in(tmp_path, monkeypatch, made_up.log((60, math.nan), (90, math.nan)))
    engine.train(training)
    assert "sum diverged: no validation perplexity was a number.\n" in capsys.readouterr().out
    assert tables.read_run(tmp_path / "sum").diverged == "no validation perplexity was a number"


def test_a_training_that_is_left_behind_goes_on_with_its_log(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "")
    wait = "touch begun; while [ ! -e go ]; do sleep 0.02; done"
    (tmp_path / "bin/fairseq-train").write_text(f"#!/bin/sh\necho first; {wait}; echo last; touch ended\n")
    path = [str(Path(engine.__file__).parent), str(made_up.ROOT)]
    train = "from engine import *; train(Training('sum', Path('sum'), [], Path('data')))"
    code = f"import sys; sys.path[:0] = {path}; {train}"

    def until(name):
        for _ in range(2000):
            if (tmp_path / name).exists():
                return
            time.sleep(0.02)
        raise TimeoutError(name)

    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.DEVNULL) as driver:
        until("begun")
        driver.kill()
    (tmp_path / "go").touch()
    until("ended")
    assert (tmp_path / "sum/train.log").read_text().endswith("\nfirst\nlast\n")


def test_launch_starts_several_processes(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, made_up.log((60, 8.0)) + "| done training")
    monkeypatch.setenv("LAUNCH", "env TRIED=1")
    engine.train(engine.Training("sum", tmp_path / "sum", [], tmp_path))
    program = tmp_path / "bin" / "fairseq-train"
    assert (tmp_path / "sum" / "train.log").read_text().startswith(f"+ env TRIED=1 {program} ")


def test_counts_are_those_of_the_text_or_it_is_another(tmp_path):
    for split, lines in (("train", 4), ("valid", 2), ("test", 2)):
        (tmp_path / f"{split}.txt").write_text("a <unk> b\n" * lines)
    prepare.preprocess_text(tmp_path, tmp_path / "bin")
    expected = {"train": 16, "valid": 8, "test": 8, "words": 2}
    prepare.check_counts(tmp_path / "bin", expected)
    with pytest.raises(RecipeError, match=r"another text than the recipe's: valid 8 in place of 9\..*--any-text"):
        prepare.check_counts(tmp_path / "bin", expected | {"valid": 9})
    prepare.cut(tmp_path, 1)
    assert (tmp_path / "test.txt").read_text() == "a <unk> b\n"


def test_a_folder_has_one_run(tmp_path):
    """A program that a killed run has left behind still has the lock; it ends with the program."""
    code = f"""
import os, pathlib, sys, threading, time
sys.path.insert(0, {str(Path(commands.__file__).parent)!r})
import commands
folder = pathlib.Path({str(tmp_path)!r})
commands.lock(folder)
commands.lock(folder)  # is its own
started = "echo $$ > pid.unfinished; mv pid.unfinished pid; exec sleep 100"
threading.Thread(target=commands.run, args=("bash", "-c", started), daemon=True).start()
while not (folder / "pid").exists():
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.raises(RecipeError, match=r"left behind, works in .*: wait for its end, or give another --out"):
        commands.lock(tmp_path)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    for _ in range(100):  # the process ends a moment later
        with contextlib.suppress(RecipeError):
            commands.lock(tmp_path)
            break
        time.sleep(0.05)
    assert tmp_path in commands.LOCKS


@looped("text", ["", '{"loss": 1', "{}", "[]"])
def test_a_damaged_result_is_named(tmp_path, text):
    assert log.read_json(tmp_path / "none.json") == {}
    (tmp_path / "valid.json").write_text(text)
    with pytest.raises(RecipeError, match=r"valid\.json must have the result of an evaluation: remove it, and"):
        log.read_json(tmp_path / "valid.json")
