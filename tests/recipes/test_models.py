"""Recipes that train models: their models, stages and seeds, without a training; and language models."""

import os
import re
from pathlib import Path

import conversion
import evaluation
import fast_weight_layers
import language_models
import made_up
import pytest
import recipe as recipes
import training
from commands import RecipeError
from recipe import Recipe

CONF = "arch: fwp_lm\ntask: language_modeling\n"


class Kind(Recipe):
    """A recipe that records its calls."""

    done: list

    def settings(self):
        return "a text"

    def prepare(self, work):
        self.done.append("prepare")

    def train(self, model):
        self.done.append(f"train {model.label}")
        made_up.trained(model.folder, diverged="" if "delta" not in model.name else "at 3")

    def evaluate(self, model):
        self.done.append(f"evaluate {model.label}")

    def report(self):
        self.done.append("report")

    def check_flags(self):
        self.done.append("check")


@pytest.fixture
def recipe(tmp_path):
    folder = tmp_path / "recipes" / "mine"
    for name in ("delta", "sum", "common", "grid/b", "grid/a", "small/x"):
        path = folder / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CONF)
    (folder / "grid.yaml").write_text("- {table: T, rows: [{run: b}, {run: a}]}\n- {table: U, rows: [{run: b}]}\n")
    (folder / "run.sh").write_text("#!/usr/bin/env bash\n")
    return folder


@pytest.fixture
def start(recipe, tmp_path, monkeypatch):
    (tmp_path / "fwp-info").write_text("#!/bin/sh\n")  # which would compile the kernels
    (tmp_path / "fwp-info").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def start(*words, kind=Kind, settings=("--models", "delta", "sum")):
        made = kind(["--recipe", str(recipe), *settings, "--", *map(str, words), "--out", str(tmp_path / "out")])
        made.done = []
        return made

    return start


def test_seeds_are_models_of_their_own(start, tmp_path):
    made = start("train", "--seeds", "2", "--models", "sum")
    made.main()
    assert made.done[2:] == ["train sum, seed 1", "train sum, seed 2"]
    assert made.models[1].flags[-2:] == ["--seed", "2"]
    assert (tmp_path / "out" / "sum" / "seed_2" / "trained").exists()
    with pytest.raises(RecipeError, match="--seeds must be at least 1, got 0"):
        start("--seeds", "0")


class Converting(Kind):
    """Train models that begin with another one, and record the flags."""

    def train(self, model):
        self.done.append([*self.start(model), self.teacher(model)])
        made_up.trained(model.folder)

    def conversion_flags(self):
        return ["--source", "fwp-lm"]


def test_a_model_begins_with_another_one(start, recipe, tmp_path, monkeypatch):
    """A start is converted or not; the teacher is a model too; both have the seed if trained with seeds."""
    for name, lines in {
        "first": "from: sum\nconvert: --decoder-update-rule decay\nteacher: sum\n",
        "second": "from: first\nteacher: sum\n",
    }.items():
        (recipe / "conf" / f"{name}.yaml").write_text(CONF + lines)
    out, ran = tmp_path / "out", []

    def run(*words):
        ran.append(list(map(str, words)))
        folder = Path(ran[-1][ran[-1].index("--out") + 1])
        folder.mkdir(parents=True)
        (folder / "flags.txt").write_text("--arch fwp_lm --decoder-update-rule decay\n")

    monkeypatch.setattr(recipes, "run", run)
    with pytest.raises(RecipeError, match="sum must be trained first, because other models start from it"):
        start("train", "--models", "first", kind=Converting).main()
    made_up.trained(out / "sum")
    made = start("train", "--models", "first second", "--seeds", "2", kind=Converting)
    made.main()
    assert "--from" not in made.models[0].flags and "--convert" not in made.models[0].flags
    converted = out / "first" / "seed_2" / "converted"
    assert ran[1] == ["fwp-convert", "--source", "fwp-lm", str(out / "sum" / "checkpoint_best.pt"), "--out",
                      str(converted), "--decoder-update-rule", "decay"]  # fmt: skip
    assert len(ran) == 2
    architecture, teacher = (
        ["--arch", "fwp_lm", "--decoder-update-rule", "decay"],
        str(out / "sum" / "checkpoint_best.pt"),
    )
    assert made.done[1:][1::2] == [
        [architecture, ["--finetune-from-model", str(start)], ["--teacher", teacher]]
        for start in (converted / "checkpoint.pt", out / "first" / "seed_2" / "checkpoint_best.pt")
    ]


def test_what_a_model_cannot_begin_with(start, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "run", lambda *words: Path(words[words.index("--out") + 1]).mkdir(parents=True))
    conf = recipe / "conf" / "first.yaml"
    conf.write_text(CONF + "convert: --decoder-update-rule decay\n")
    with pytest.raises(RecipeError, match=r"first\.yaml must have a model to convert: add a line `from: NAME`"):
        start("--models", "first")
    conf.write_text(CONF + "from: summ\n")
    with pytest.raises(RecipeError, match=r"--conf must be conf/NAME.yaml, got conf/summ.yaml"):
        Recipe.check_flags(start("train", "--models", "first"))
    (recipe / "conf" / "shared.yaml").write_text("from: sum\nconvert: --decoder-update-rule decay\n")
    conf.write_text(CONF + "include: shared.yaml\n")
    (model,) = start("--models", "first").models
    assert (model.origin, model.convert) == ("sum", "--decoder-update-rule decay")
    made_up.trained(tmp_path / "out" / "sum", diverged="at 3")
    with pytest.raises(RecipeError, match="sum must not have diverged, because other models start from it"):
        start("--models", "first", kind=Converting).converted(model)
    (tmp_path / "out" / "sum" / "diverged").unlink()
    made_up.trained(tmp_path / "out" / "sum")
    assert start("--models", "first", kind=Converting).converted(model).is_dir()
    with pytest.raises(RecipeError, match=r"was made with other settings \(see .*conversion.txt\)"):
        start("--models", "first", kind=Converting).converted(model._replace(convert="--decoder-update-rule delta"))


def test_a_stage_says_which_is_missing(start, tmp_path):
    with pytest.raises(RecipeError, match="run the stage prepare first"):
        start("evaluate").main()
    (tmp_path / "out" / "data").mkdir(parents=True)
    with pytest.raises(RecipeError, match="delta is not trained: run the stage train first"):
        start("evaluate").main()


def test_other_data_needs_another_folder(start, tmp_path):
    start("prepare").main()
    (tmp_path / "out" / "data" / "source.txt").write_text("another text\n")
    with pytest.raises(RecipeError, match="was made with other settings"):
        start("prepare").main()


def test_models_are_names_folders_or_files(start, recipe, tmp_path):
    def names(*words):
        return [model.name for model in start(*words).models]

    assert names() == ["delta", "sum"]
    assert names("--models", "grid delta", "grid/a") == ["grid/b", "grid/a", "delta"]
    assert names("--models", "small") == ["small/x"]
    assert names("--conf", "conf/small/x.yaml") == ["small/x"]
    (tmp_path / "own.yaml").write_text(CONF)
    assert names("--conf", tmp_path / "own.yaml") == ["own"]
    for words in (["--models", "nosuch"], ["--models", "common"], ["--conf", "conf/nosuch.yaml"]):
        with pytest.raises(RecipeError, match=r"must be .*delta, grid/a, grid/b, small/x, sum"):
            start(*words)
    assert not start("prepare", settings=()).models
    with pytest.raises(RecipeError, match=r"--conf conf/NAME.yaml or --models NAME must be given"):
        start("train", settings=())


def test_flags_are_checked_before_any_work(start, recipe, monkeypatch):
    made = start("train", "--max-update", "x")
    with pytest.raises(RecipeError, match=r"delta: fairseq-train refuses the flags: .*--max-update"):
        Recipe.check_flags(made)


# Language models.


@pytest.fixture
def language(start, text):
    def language(*words, name="peps", merges="20", data=True):
        settings = ["--models", "delta", "sum", "--text", name, "--merges", merges]
        given = ["--data", text] if data else []
        return start(*words, *given, kind=language_models.LanguageModels, settings=settings)

    return language


def test_text_is_cut_into_pieces_once_and_for_one_source(language, tmp_path, text):
    made = language("prepare", "--lines", "10")
    made.main()
    assert (made.data / "bpe" / "test.txt").read_text().count("\n") == 10
    assert (made.bin / "train.bin").exists() and (made.data / "bpe" / "codes").exists()
    language("prepare", "--lines", "10").main()
    for words in ([], ["--lines", "9"]):
        with pytest.raises(RecipeError, match="was made with other settings"):
            language("prepare", *words).main()
    (text / "test.txt").write_text("other " + made_up.LINE * 30)
    with pytest.raises(RecipeError, match="was made with other settings"):
        language("prepare", "--lines", "10").main()


def test_a_text_of_ones_own_is_read_with_the_vocabulary_of_the_training(language, tmp_path, capsys):
    made = language("prepare")
    made.main()
    own = tmp_path / "mine.txt"
    own.write_text("the  matrix reads \u2211\n")
    made = language("evaluate", "--test", own)
    for _ in range(2):  # the second is there already
        capsys.readouterr()
        folder = made.prepare_own("own_mine")
        assert re.search(r"mine.txt: \d+ tokens, of which [1-9]\S+ % are not in the voc", capsys.readouterr().out)
    assert (folder / "test.txt").read_text().replace("@@ ", "") == "the matrix reads \u2211\n"
    assert (folder / "bin" / "dict.txt").read_text() == (made.bin / "dict.txt").read_text()
    other = tmp_path / "other" / "mine.txt"
    other.parent.mkdir()
    other.write_text("the\n")
    with pytest.raises(RecipeError, match=r"own_mine holds another text of this name, .*: rename the new"):
        language("evaluate", "--test", other).prepare_own("own_mine")
    own.write_text("every token reads\n")
    with pytest.raises(RecipeError, match=r"rename the new text, or remove .*own_mine and own_mine\*\.json"):
        language("evaluate", "--test", own).prepare_own("own_mine")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["all", "--test", "none.txt"], "--test needs the stage evaluate, got the stage all"),
        (["evaluate", "--test", "none.txt"], "--test must be the name of a text file, got none.txt, which does not"),
        (["prepare", "--data", "/nonexistent"], "--data must be a folder, got /nonexistent"),
        (["prepare", "--any-text"], "--data FOLDER must be given with --any-text"),
    ],
)
def test_wrong_arguments_of_a_text(language, words, said):
    with pytest.raises(RecipeError, match=said):
        language(*words, data=False)


def test_the_command_line_replaces_the_way_of_reading(language, recipe, capsys):
    (recipe / "evaluation.yaml").write_text("'*': {window: --stride 1, blocks: --context-window 0}\n")
    made = language("evaluate", "--dynamic", "sgd", "--cpu")
    assert [way.label for way in made.ways(made.models[0])] == ["window dynamic sgd", "blocks dynamic sgd"]
    assert made.evaluation_flags == ["--dynamic", "sgd", "--cpu"]
    made = language("evaluate", "--stride=8")
    assert made.ways(made.models[0]) == [evaluation.Way("stride=8", "")]
    assert "replaces the recipe's way of reading" in capsys.readouterr().out
    assert language("all", "--lr", "1", "--cpu").evaluation_flags == ["--cpu"]


# Fast weight layers.


@pytest.fixture
def layers(start, recipe, text):
    for name in ("local/base", "local/fwl", "xl/base", "xl/fwl", "wt103/xl"):
        path = recipe / "conf" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(CONF)

    def layers(*words):
        settings = ["--models", "local", "xl", "--text", "peps", "--merges", "20"]
        return start(*words, kind=fast_weight_layers.FastWeightLayers, settings=settings)

    return layers


def test_a_layer_is_put_on_its_base(layers, monkeypatch, tmp_path):
    made, done = layers("train", "--cpu"), []
    monkeypatch.setattr(fast_weight_layers, "run", lambda *words: done.append(words))
    monkeypatch.setattr(training, "train", lambda folder, data, flags: done.append((folder.name, flags)))
    assert [model.name for model in made.models] == ["local/base", "xl/base", "local/fwl", "xl/fwl"]
    with pytest.raises(RecipeError, match=r"local/fwl needs .*base, which is not trained"):
        made.train(made.models[2])
    made_up.trained(tmp_path / "out" / "local" / "base")
    made.train(made.models[0])
    made.train(made.models[2])
    start = str(tmp_path / "out" / "local" / "start.pt")
    assert done[0][0] == "base" and "--finetune-from-model" not in done[0][1]
    assert done[1][0] == "fwp-add-layer" and str(done[1][-1]) == start
    assert done[2] == ("fwl", [*made.models[2].flags, "--cpu", "--finetune-from-model", start])


def test_the_table_has_the_best_step_of_the_validation_text(tmp_path):
    base = tmp_path / "xl" / "base"
    for name, perplexity in (("valid plain", 30), ("test plain", 31), ("valid rms 1e-4", 25), ("valid rms 3e-4", 24)):
        made_up.result(base, name, perplexity, tokens=100)
    made_up.result(base, "speed plain", 31, tokens=100)
    table = "\n".join(fast_weight_layers.table(fast_weight_layers.read_rows(tmp_path)))
    assert "| No FWLs | base.yaml | - | 30.00 | 31.00 | 25 | 17.3 |" in table
    assert "| Dynamic evaluation, RMS | base.yaml | 3e-4 | 24.00 | not run | - | 15.8 |" in table
    assert "| FWLs | fwl.yaml | - | not run | not run | - | 22.4 |" in table
    local, xl = table.split("**Transformer-XL**")
    assert "carried" not in local and xl.count("| FWLs, gradients at carried weights | carried.yaml |") == 1


# Conversion.


@pytest.fixture
def convert(tmp_path):
    def convert(*words):
        recipe = made_up.RECIPES / "decay_finetune"
        given = ["--recipe", str(recipe), "--text", "peps", "--merges", "20", "--", *words, "--out", str(tmp_path)]
        return conversion.Conversion(given)

    return convert


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "nosuch"], "--rows must be among softmax, local_w32.*, got nosuch"),
        (["--corpus", "gpt2", "--source-updates", "3"], "--source-updates must be left out without --corpus peps"),
        (["--model", "x"], "--model must be left out with --corpus peps"),
    ],
)
def test_wrong_arguments_of_a_conversion(convert, words, said):
    with pytest.raises(RecipeError, match=said):
        convert("all", *words)


def test_a_sample_is_as_long_as_the_source_allows(convert, tmp_path):
    folder = tmp_path / "softmax" / "converted"
    folder.mkdir(parents=True)
    (folder / "flags.txt").write_text("--arch fwp_lm --tokens-per-sample 128 --attention-bias\n")
    assert [convert("--corpus", corpus).tokens for corpus in ("peps", "wikitext103", "gpt2")] == [512, 512, 128]


def test_a_row_whose_validation_is_no_number_has_diverged(convert, tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(training, "train", lambda folder, data, flags: trained.append((made_up.trained(folder), flags)))
    made = convert("--rows", "softmax", "--lr", "1")
    (made.source).mkdir(parents=True)
    (made.source / "flags.txt").write_text("--arch fwp_lm\n")
    made.train(made.models[0])
    assert (tmp_path / "softmax" / "diverged").read_text() == "no validation perplexity was a number\n"
    flags = trained[0][1]
    assert flags[:2] == ["--arch", "fwp_lm"] and flags[-2:] == ["--lr", "1"]
    assert flags[flags.index("--finetune-from-model") + 1] == str(made.source / "checkpoint.pt")


def test_what_is_just_converted_may_give_no_number(convert, tmp_path, monkeypatch):
    def fail(*words, **_):
        raise RecipeError("it failed.")

    monkeypatch.setattr(conversion, "run", fail)
    made = convert("--corpus", "wikitext103")
    for name in ("converted", "decay_m32"):
        (tmp_path / name).mkdir()
    made.measure(tmp_path / "x.pt", tmp_path / "converted", "valid 0")
    assert (tmp_path / "converted" / "valid 0.json").read_text() == '{"perplexity": Infinity}\n'
    with pytest.raises(RecipeError, match="it failed"):
        made.measure(tmp_path / "x.pt", tmp_path / "decay_m32", "valid 0")
    assert not (tmp_path / "decay_m32" / "valid 0.json").exists()
