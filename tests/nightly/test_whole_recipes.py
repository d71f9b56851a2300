"""Every recipe with its driver on small data: killed and resumed, it has the results of an uninterrupted run."""

import csv
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard
from made_up import RECIPES, write_pairs
from support import jobs
from support.command_server import run

import fairseq_fwp
from tests.checkpoints.convert import test_gpt2

ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
SIZES = {"layers": "1", "embed-dim": "16", "ffn-embed-dim": "16", "attention-heads": "2"}
SMALL = [word for name, value in SIZES.items() for word in (f"--decoder-{name}", value)]
ENCODER = [word.replace("decoder", "encoder") for word in SMALL]
EVERY = ["--validate-interval-updates", "2", "--save-interval-updates", "2"]
STEPS = ["--max-update", "4", "--warmup-updates", "1", *EVERY, "--cpu"]
CUTOFFS = ["--adaptive-softmax-cutoff", "5,10"]
RETRIEVAL = "- {arch: sum_retrieval, num-keys: 8, seed: [1, 2], max-update: 900}\n"
PROBLEMS = """
seeds: [1]
common: {arch: fwp_lm, decoder-layers: 1, decoder-embed-dim: 8, decoder-ffn-embed-dim: 8, decoder-attention-heads: 2,
         optimizer: adam, lr: 0.01, batch-size: 64, max-update: 40}
problems:
  parity:
    flags: {problem: parity, length: 8, valid-length: 8, train-sequences: 640}
    chance: 50
    models: [sum, delta]
models:
  sum: {decoder-update-rule: sum, decoder-feature-map: elu}
  delta: {decoder-update-rule: delta, l2-normalization: true}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with texts for every recipe."""
    folder = tmp_path_factory.mktemp("data")
    words = random.Random(0)
    for split, lines in (("train", 400), ("valid", 30), ("test", 30)):
        text = "".join(f"the word {words.randrange(30)} and {words.randrange(9)} more\n" for _ in range(lines))
        (folder / f"{split}.txt").write_text(text)
    (folder / "long").mkdir()  # as a carried state is evaluated after tens of thousands of tokens
    for split, times in (("train", 21), ("valid", 1), ("test", 1)):
        (folder / "long" / f"{split}.txt").write_text((folder / f"{split}.txt").read_text() * times)
    (folder / "rich").mkdir()  # in words: the converted model has a vocabulary in parts
    for split, lines in (("train", 900), ("valid", 30), ("test", 30)):
        text = "".join(
            " ".join("".join(words.choices("aeiklmnorst", k=4)) for _ in range(9)) + "\n" for _ in range(lines)
        )
        (folder / "rich" / f"{split}.txt").write_text(text)
    (folder / "enwik8").write_bytes((folder / "train.txt").read_bytes())
    for name, count in (("train", 120), ("val", 9), ("test_2016_flickr", 8), ("valid", 9), ("test", 8)):
        write_pairs(folder / name, count)
    (folder / "retrieval.yaml").write_text(RETRIEVAL)
    (folder / "problems.yaml").write_text(PROBLEMS)
    return folder


LANGUAGE = ["--models", "delta sum", *SMALL, *STEPS]
CASES = {
    "quickstart": ("language-model --text stdlib --merges 60 --prompt the", LANGUAGE),
    "peps": ("language-model --text peps --merges 60 --per-word", LANGUAGE),
    "peps grid": ("language-model --text peps --merges 60", ["--models", "grid/sum_elu", *SMALL, *STEPS, *CUTOFFS]),
    "peps carried": (
        "language-model --text peps --merges 60",
        ["--models", "carried/sum carried/delta_limited", *SMALL, *STEPS, *CUTOFFS],
    ),
    "wikitext103": (
        "language-model --text wikitext103",
        ["--conf", "conf/small/delta.yaml", "--any-text", *SMALL, *STEPS, *CUTOFFS, "--batch-size", 2],
    ),
    "enwik8": (
        "language-model --text enwik8",
        ["--conf", "conf/base.yaml", "--any-text", *SMALL, *STEPS, "--batch-size", 2, "--tokens-per-sample", 80],
    ),
    "fwl": (
        "fast-weight-layer --text peps --merges 60",
        ["--models", "xl/base xl/fwl", "--lines", 10, "--max-update", 4, "--cpu", *CUTOFFS],
    ),
    "decay_finetune": (
        "conversion --text peps --merges 4000",
        ["--source-updates", 4, "--rows", "softmax", "decay_m4", "decay_m32_attention", "decay_m32_distribution"]
        + ["--max-update", 4, "--warmup-updates", 1, "--lines", 10, *EVERY, "--cpu"],
    ),
    "multi30k": (
        "translation --pairs multi30k --merges 60 --search --beam\\ 2",
        ["--models", "sum", *SMALL, *ENCODER, *STEPS, "--max-tokens", 200],
    ),
    "multi30k stages": (
        "translation --pairs multi30k --merges 60 --search --beam\\ 2",
        ["--models", "softmax distilled/sum_attention distilled/sum", *SMALL, *ENCODER, *STEPS, "--max-tokens", 200],
    ),
    "wmt14_en_de": (
        "translation --pairs wmt14_en_de --merges 60",
        ["--conf", "conf/sum.yaml", "--any-text", *SMALL, *ENCODER, *STEPS, "--max-tokens", 200, "--update-freq", 1],
    ),
    "associative_retrieval": ("retrieval", ["--conf", "retrieval.yaml", "--workers", 2]),
    "sequence_problems": ("problems", ["--conf", "problems.yaml", "--workers", 2]),
}


def drive(kind, recipe, settings, folder, *arguments):
    """Start the driver of a recipe in a folder, in a separate process group."""
    command = [sys.executable, RECIPES / "driver", kind, "--recipe", recipe, *settings, "--", *arguments]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen([*map(str, command)], cwd=folder, env=ENVIRONMENT, **said)


def finish(process):
    """Return what a driver says, which must succeed."""
    said = process.communicate()[0]
    assert process.returncode == 0, said
    return said


def start(case, data, out):
    settings, given = CASES[case]
    kind, *settings = shlex.split(settings)
    recipe = RECIPES / case.split()[0]
    folder = data / {"decay_finetune": "rich", "peps carried": "long"}.get(case, "")
    words = given if kind in ("retrieval", "problems") else ["--data", folder, *given]
    return drive(kind, recipe, settings, data, "all", *words, "--out", out)


def figures(out):
    """Return the results of evaluations, without times and paths, and the curves of grids."""
    found = {}
    for path in sorted(out.rglob("*.json")):
        values = json.loads(path.read_text())
        kept = {name: value for name, value in values.items() if name not in ("seconds", "path", "tokens_per_second")}
        found[path.relative_to(out)] = kept
    for name in ("curves.csv", "accuracy.csv"):
        if (out / name).exists() and not found:
            found[name] = (out / name).read_text()
    return found


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed(case, data, tmp_path):
    begun = time.monotonic()
    finish(start(case, data, tmp_path / "whole"))
    seconds = time.monotonic() - begun
    # Layers are put on a base at random.
    expected = {name: x for name, x in figures(tmp_path / "whole").items() if case != "fwl" or "fwl/" not in f"{name}"}
    assert expected
    process = start(case, data, tmp_path / "killed")
    time.sleep(random.Random(case).uniform(0.3, 0.8) * seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finish(start(case, data, tmp_path / "killed"))
    found = figures(tmp_path / "killed")
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("model", ["local", "wt103"])
def test_figure_2_of_fast_weight_layers(model, data, tmp_path):
    """The whole script: two thirds of a text train both models, which score the last third."""
    recipes, text = tmp_path / "recipes", tmp_path / "text"
    shutil.copytree(RECIPES, recipes, ignore=shutil.ignore_patterns("results", "__pycache__"))
    driver = shlex.join([sys.executable, str(RECIPES / "driver")])
    (recipes / "env.sh").write_text(
        f'here=$(dirname -- "${{BASH_SOURCE[1]}}")\nroot={tmp_path}\nrun() {{ "$@"; }}\n'
        f'recipe() {{ {driver} "$1" --recipe "$here" "${{@:2}}"; }}\n'
    )
    text.mkdir()
    for split in ("train", "valid"):
        name = f"wiki.{split}.tokens" if model == "wt103" else f"{split}.txt"
        lines = (data / f"{split}.txt").read_text().splitlines(keepends=True)
        (text / name).write_text("".join("= a =\n" * (index % 20 == 0) + line for index, line in enumerate(lines)))
    small = [*STEPS, *CUTOFFS] if model == "local" else [*SMALL, *STEPS, *CUTOFFS, "--tokens-per-sample", "64"]
    command = ["bash", recipes / "fwl" / "figure2.sh", model, text, *small]
    for _ in range(2):  # made, and found made
        environment = ENVIRONMENT | {"OUT": str(tmp_path / "out")}
        found = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
    with (tmp_path / "out" / "figure2.csv").open() as file:
        rows = list(csv.DictReader(file))
    positions = [int(row["tokens"]) for row in rows if row["by"].startswith("position")]
    (scores,) = (tmp_path / "out").glob("**/base/third.tsv" if model == "local" else "local_base/third.tsv")
    assert sum(positions) == len(scores.read_text().splitlines()) - 1
    assert (tmp_path / "out" / "figure2.png").exists()


def write_source(corpus, folder, text):
    """Write a tiny source model, and the text next to it in the layout of the corpus; return the model's path."""
    if corpus == "gpt2":
        model = test_gpt2.Gpt2("gpt2", folder)
        model.save(test_gpt2.make_tensors())
        (model.path / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate("abcdeĠĊ")}))
        (model.path / "merges.txt").write_text("#version: 0.2\n")
        (folder / "train").mkdir()
        lines = zstandard.compress(b'{"text": "ab ab dad\\nabe", "meta": {}}\n' * 200)
        for name in ("train/00", "val", "test"):
            (folder / f"{name}.jsonl.zst").write_bytes(lines)
        return model.path
    for split in ("train", "valid", "test"):
        shutil.copy(text / f"{split}.txt", folder / f"wiki.{split}.tokens")
    run("fairseq-preprocess", "--only-source", "--trainpref", text / "train.txt", "--destdir", folder, "--workers", 1)
    flags = ["--task", "language_modeling", "--arch", "transformer_lm_wiki103", *SMALL, *CUTOFFS, *jobs.OPTIMIZATION]
    flags += ["--adaptive-input-cutoff", "5,10", *jobs.ADAPTIVE, "--tokens-per-sample", 512, "--batch-size", 2]
    jobs.train(folder, folder, *flags, "--disable-validation", updates=2)
    return folder / "checkpoint_last.pt"


@pytest.mark.parametrize("corpus, rows", [("wikitext103", ["decay_m32"]), ("gpt2", ["softmax", "decay_m4"])])
def test_the_public_sources_of_the_conversion(corpus, rows, data, tmp_path):
    """Tables 1 to 3 of Mao 2022 on stand-ins: every row and the source have all numbers."""
    settings, folder = shlex.split(CASES["decay_finetune"][0])[1:], tmp_path / "source"
    folder.mkdir()
    words = ["--corpus", corpus, "--model", write_source(corpus, folder, data), "--data", folder, "--rows", *rows]
    words += ["--max-update", 4, "--warmup-updates", 1, *EVERY, "--cpu", "--out", tmp_path / "out"]
    finish(drive("conversion", RECIPES / "decay_finetune", settings, tmp_path, "all", *words))
    with (tmp_path / "out" / "results.csv").open() as file:
        found = {row["run"]: row for row in csv.DictReader(file)}
    assert found.keys() == {"source", *rows}
    measures = ["valid 0", "test 0", *["test 480"] * (corpus == "wikitext103")]
    assert all(float(row[measure]) > 1 for row in found.values() for measure in measures)


# Spaces, quotes, code, a newline, a pattern, and a dash at the beginning.
AWKWARD = "-a b'c\"d$(touch pwned)`touch pwned`;touch pwned\n* \\é"


@pytest.mark.parametrize("case, more", [("peps", []), ("wikitext103", ["--any-text"]), ("multi30k", [])])
def test_any_path_is_taken(tmp_path, case, more):
    """Relative paths that begin with a dash; no part of them is run."""
    data, (kind, *settings) = tmp_path / AWKWARD, shlex.split(CASES[case][0])
    data.mkdir()
    line = "the memory is a matrix that every token reads and writes $(touch pwned) `touch pwned`\n"
    names = [f"{split}.{side}" for split in ("train", "val", "test_2016_flickr") for side in ("en", "de")]
    for name in ("train.txt", "valid.txt", "test.txt", *names):
        (data / name).write_text(line * 80)
    for _ in range(2):  # prepared, and found prepared
        arguments = ["prepare", f"--data={AWKWARD}", f"--out={AWKWARD} out", *more]
        finish(drive(kind, RECIPES / case, settings, tmp_path, *arguments))
    assert {path.name for path in tmp_path.iterdir()} == {AWKWARD, AWKWARD + " out"}
    assert not list(tmp_path.rglob("pwned*")) and list((tmp_path / (AWKWARD + " out")).rglob("dict*.txt"))


@pytest.mark.parametrize("form", ["names", "tokenizer", "stream"])
def test_a_published_model_becomes_recurrent(form, data, tmp_path):
    """By one command, killed in between: lines of names, lines and a stream of a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = test_gpt2.Gpt2("gpt2", tmp_path)
    model.save(test_gpt2.make_tensors())
    names = [f"w{number}" for number in range(test_gpt2.WORDS)]
    if form == "names":
        (model.path / "vocab.txt").write_text("\n".join(names) + "\n")
    else:
        made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="w0"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made.save(str(model.path / "tokenizer.json"))
    chooser, text = random.Random(form), tmp_path / "text"
    text.mkdir()
    for split, count in (("train", 60), ("valid", 9), ("test", 9)):
        lines = [" ".join(chooser.choice(names[1:-1]) for _ in range(chooser.randint(2, 9))) for _ in range(count)]
        (text / f"{split}.txt").write_text("\n".join(lines) + "\n")
    out, settings = tmp_path / "out", ["--model", model.path, "--data", text, "--cpu", "--state-size", 4, "--seeds", 2]
    settings += ["--lines"] * (form != "stream") + (["--minutes", 1] if form == "names" else [*STEPS[:4]])

    def launch(*stage):
        return drive("recurrent", RECIPES / "recurrent", [], tmp_path, *stage, *settings, "--out", out)

    process = launch("all")
    while not (out / "attention" / "seed_1" / "train.log").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    for stage in ("all", "sample"):
        said = finish(launch(stage))
    assert said.count("\nw") >= 3 or "| w" in said
    table = (out / "table.md").read_text()
    rows = ["source", "source, fine-tuned on the text, 2 seeds", "converted, not trained, 2 seeds"]
    assert all(f"| {row} |" in table for row in [*rows, "3. words learned, 2 seeds"])
    assert ("The source reads lines best" in table) == (form != "stream")
    loaded = fairseq_fwp.load(out / "recurrent")
    log_probs, state = loaded(loaded.encode("w3 w4" if form == "names" else "3 4"))
    assert log_probs.isfinite().any() and state is not None
