"""Recipes that train models: their models, stages, seeds and texts, with trainings that are only recorded."""

import re
from pathlib import Path

import conversion
import engine
import evaluation
import fast_weight_layers
import language_models
import made_up
import model as models
import pytest
import translation
from commands import CommandError, RecipeError

CONF = "arch: fwp_lm\ntask: language_modeling\n"
MODELS = ("delta", "sum", "common", "grid/b", "grid/a", "local/base", "local/fwl", "xl/base", "xl/fwl", "wt103/xl")
TEXT = "--text peps --merges 20"
SETTINGS = {
    language_models: f"{TEXT} --models delta sum",
    fast_weight_layers: f"{TEXT} --models local xl",
    conversion: TEXT,
    translation: "--pairs multi30k --merges 20 --models sum",
}


@pytest.fixture
def recipe(tmp_path):
    folder = tmp_path / "recipes" / "mine"
    for name in MODELS:
        path = folder / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CONF)
    (folder / "grid.yaml").write_text(
        "- {table: T, rows: [{run: b}, {run: a}]}\n- {table: U, name: u, rows: [{run: b}]}\n"
    )
    (folder / "rows.yaml").write_bytes((made_up.RECIPES / "decay_finetune/rows.yaml").read_bytes())
    (folder / "run.sh").write_text("#!/usr/bin/env bash\n# What it does.\nset -e\n")
    return folder


@pytest.fixture
def done(tmp_path, monkeypatch):
    """Trainings (folder, flags), which end at once, those of delta as diverged."""
    done = []

    def train(training):
        done.append((str(training.folder.relative_to(tmp_path / "out")), training.flags))
        made_up.trained(training.folder, diverged="at 3" if "delta" in str(training.folder) else "")

    monkeypatch.setattr(engine, "train", train)
    return done


@pytest.fixture
def start(recipe, done, tmp_path):
    def start(*words, kind=language_models, settings=None):
        settings = SETTINGS[kind] if settings is None else settings
        given = ["--recipe", str(recipe), *settings.split(), "--", *map(str, words), "--out", str(tmp_path / "out")]
        return kind.compose(given)

    return start


REFUSED = [
    (language_models, "tain", r"the stage must be one of prepare, .*, all, got tain\."),
    (language_models, "--save-dir=x", r"--save-dir is set by the recipe \(--out\): leave it out"),
    (language_models, "--models", "--models: expected at least one argument"),
    (language_models, "--lines 3 surplus", "flags must begin with --, got surplus"),
    (language_models, "--models nosuch", "--models must be among delta, grid/a, grid/b, local/base,.*, got nosuch"),
    (language_models, "--models common", "--models must be among delta, grid/a, grid/b, local/base,.*, got common"),
    (language_models, "--conf conf/nosuch.yaml", "--conf must be conf/NAME.yaml, got conf/nosuch.yaml; names: delta, "),
    (language_models, "--seeds 0", "--seeds: it must be an integer above 0, got '0'"),
    (language_models, "train --max-update x", "delta: fairseq-train refuses the flags: .*--max-update"),
    (language_models, "evaluate", "run the stage prepare first"),
    (language_models, "all --test none.txt", "--test needs the stage evaluate, got the stage all"),
    (language_models, "evaluate --test none.txt", "--test must be the name of a text file, got none.txt, which"),
    (language_models, "evaluate --test .", "--test must be the name of a text file, got ., a folder"),
    (language_models, "prepare --data /nonexistent", "--data must be a folder, got /nonexistent"),
    (language_models, "prepare --any-text", "--data FOLDER must be given with --any-text"),
    (conversion, "all --rows nosuch", "--rows must be among softmax, local_w32.*, got nosuch"),
    (conversion, "all --corpus gpt2 --source-updates 3", "--source-updates must be left out with --corpus gpt2"),
    (conversion, "all --model x", "--model must be left out with --corpus peps"),
    (conversion, "prepare --corpus gpt2", "--model must be the source of --corpus gpt2, got none: see --help"),
    (conversion, "evaluate", "out must have a source, got none: run the stage prepare first"),
    (translation, "evaluate --test /x/none", "files PREFIX.en and PREFIX.de .*, and /x/none.en does not exist"),
    (translation, "evaluate --max-update 4", "fairseq-generate refuses the flags: unrecognized arguments: --max-upd"),
]


@pytest.mark.parametrize("kind, words, said", REFUSED)
def test_wrong_arguments_are_one_line_and_nothing_is_written(start, tmp_path, capsys, kind, words, said):
    with pytest.raises((RecipeError, SystemExit)) as error:
        start(*words.split(), kind=kind).run()
    line = capsys.readouterr().err.splitlines()[-1] if error.type is SystemExit else str(error.value)
    assert re.search(said, line) and "\n" not in line
    assert not (tmp_path / "out").exists()


def test_models_are_names_folders_or_files(start, recipe, tmp_path):
    def names(*words):
        return [model.name for model in start(*words).chosen]

    assert names() == ["delta", "sum"]
    assert names("--models", "grid delta", "grid/a") == ["grid/b", "grid/a", "delta"]
    assert names("--models", "local", "grid/u") == ["local/base", "local/fwl", "grid/b"]
    assert names("--conf", "conf/grid/a.yaml") == ["grid/a"]
    (tmp_path / "own.yaml").write_text(CONF)
    assert names("--conf", tmp_path / "own.yaml") == ["own"]
    for text in ("- b\n", "- {table: T, rows: [{name: b}]}\n", "rows: [{run: b}]\n"):
        (recipe / "grid.yaml").write_text(text)
        with pytest.raises(RecipeError, match=r"grid\.yaml must be like recipes/peps/grid\.yaml, got"):
            names("--models", "grid")
    assert not start("prepare", settings=TEXT).chosen
    with pytest.raises(RecipeError, match=r"--conf conf/NAME.yaml or --models NAME must be given"):
        start("train", settings=TEXT)


def test_what_a_user_gives_wins_and_the_rest_goes_on(start):
    made = start("eval", "--models", "sum", "grid/a", "--stride", "1", "--cpu")
    assert made.models.request.stage == "evaluate" and [model.name for model in made.chosen] == ["sum", "grid/a"]
    assert made.models.request.extra == ["--stride", "1", "--cpu"] and start().models.request.stage == "all"


def test_seeds_are_models_of_their_own_and_what_diverged_is_not_evaluated(start, done, tmp_path, monkeypatch):
    evaluated = []
    monkeypatch.setattr(evaluation, "score", lambda checkpoint, path, *rest: evaluated.append(str(path)))
    (tmp_path / "out" / "data").mkdir(parents=True)
    start("train", "--seeds", "2", "--lr", "1").run()
    assert done == [
        (f"{name}/seed_{seed}", ["--arch", "fwp_lm", "--task", "language_modeling", "--seed", str(seed), "--lr", "1"])
        for name in ("delta", "sum") for seed in (1, 2)
    ]  # fmt: skip
    start("evaluate", "--seeds", "2")._replace(write_table=lambda models: evaluated.append("report")).run()
    names = [f"sum/seed_{seed}/{split}.json" for seed in (1, 2) for split in ("valid", "test")]
    assert evaluated == [*(str(tmp_path / "out" / name) for name in names), "report"]
    with pytest.raises(RecipeError, match="sum is not trained: run the stage train first"):
        start("evaluate", "--models", "sum").run()


def test_a_model_begins_with_another_one(start, done, recipe, tmp_path, monkeypatch):
    """A start is converted or not; the teacher is a model too; both have the seed if trained with seeds."""
    for name, lines in {
        "first": "from: sum\nconvert: --decoder-update-rule decay\nteacher: sum\n",
        "second": "from: first\nteacher: sum\n",
        "plain": "from: sum\n",
    }.items():
        (recipe / "conf" / f"{name}.yaml").write_text(CONF + lines)
    out, ran = tmp_path / "out", []
    (out / "data").mkdir(parents=True)

    def run(*words):
        ran.append(list(map(str, words)))
        folder = Path(ran[-1][ran[-1].index("--out") + 1])
        folder.mkdir(parents=True)
        (folder / "flags.txt").write_text("--arch fwp_lm --decoder-update-rule decay\n")

    monkeypatch.setattr(models, "run", run)
    monkeypatch.setattr(models, "refusal", lambda *_: None)  # the criterion has no --teacher
    with pytest.raises(RecipeError, match="sum must be trained first, because other models start from it"):
        start("train", "--models", "first").run()
    made_up.trained(out / "sum")
    start("train", "--models", "plain").run()
    begun = ["--arch", "fwp_lm", "--task", "language_modeling", "--finetune-from-model"]
    assert done.pop() == ("plain", [*begun, str(out / "sum" / "checkpoint_best.pt")])
    start("train", "--models", "first second", "--seeds", "2").run()
    converted, best = out / "first/seed_2/converted", "checkpoint_best.pt"
    command = f"fwp-convert --source fwp-lm --vocabulary {out}/data/bin/dict.txt {out}/sum/{best} --out {converted}"
    assert ran[1] == [*command.split(), "--decoder-update-rule", "decay"] and len(ran) == 2
    architecture, own = ["--arch", "fwp_lm", "--decoder-update-rule", "decay"], ["--arch", "fwp_lm", "--task"]
    for (_, flags), begun in zip(done[1::2], (converted / "checkpoint.pt", out / "first/seed_2" / best), strict=True):
        assert flags[:7] == architecture + own and not {"--from", "--convert"} & {*flags}
        assert flags[-4:] == ["--finetune-from-model", str(begun), "--teacher", str(out / "sum" / best)]


def test_what_a_model_cannot_begin_with(start, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "run", lambda *words: Path(words[words.index("--out") + 1]).mkdir(parents=True))
    conf, convert = recipe / "conf" / "first.yaml", "convert: --decoder-update-rule decay\n"
    conf.write_text(CONF + convert)
    with pytest.raises(RecipeError, match=r"first\.yaml must have a model to convert: add a line `from: NAME`"):
        start("--models", "first")
    conf.write_text(CONF + "from: summ\n")
    with pytest.raises(RecipeError, match=r"`from` and `teacher` must be among delta, .*, got summ"):
        start("train", "--models", "first").check()
    (recipe / "conf" / "shared.yaml").write_text("from: sum\n" + convert)
    conf.write_text(CONF + "include: shared.yaml\n")
    (model,) = start("--models", "first").chosen
    assert (model.origin, model.convert) == ("sum", "--decoder-update-rule decay")
    made_up.trained(tmp_path / "out" / "sum", diverged="at 3")
    with pytest.raises(RecipeError, match="sum must not have diverged, because other models start from it"):
        start("--models", "first").models.convert(model)
    (tmp_path / "out" / "sum" / "diverged").unlink()
    made_up.trained(tmp_path / "out" / "sum")
    assert start("--models", "first").models.convert(model).is_dir()
    with pytest.raises(RecipeError, match=r"was made with other settings \(see .*conversion.txt\)"):
        start("--models", "first").models.convert(model._replace(convert="--decoder-update-rule delta"))


# Texts.


def test_text_is_cut_into_pieces_once_and_for_one_source(start, text):
    given = ["prepare", "--data", text, "--lines", "10"]
    made = start(*given)
    made.run()
    assert (made.models.data.folder / "bpe" / "test.txt").read_text().count("\n") == 10
    assert (made.models.data.bin / "train.bin").exists() and (made.models.data.folder / "bpe" / "codes").exists()
    start(*given).run()
    for words in (given[:3], [*given[:4], "9"]):
        with pytest.raises(RecipeError, match="was made with other settings"):
            start(*words).run()
    (text / "test.txt").write_text("other " + made_up.LINE * 30)
    with pytest.raises(RecipeError, match="was made with other settings"):
        start(*given).run()


def test_a_text_of_ones_own_is_read_with_the_vocabulary_of_the_training(start, text, tmp_path, capsys):
    start("prepare", "--data", text).run()
    own, other = tmp_path / "mine.txt", tmp_path / "other" / "mine.txt"
    own.write_text("the  matrix reads \u2211\n")

    def prepare(path):
        return start("evaluate", "--test", path).models.data.own_test("own_mine", path, [path])

    for _ in range(2):  # the second is there already
        capsys.readouterr()
        folder = prepare(own)
        assert re.search(r"mine.txt: \d+ tokens, of which [1-9]\S+ % are not in the voc", capsys.readouterr().out)
    assert (folder / "test.txt").read_text().replace("@@ ", "") == "the matrix reads \u2211\n"
    assert (folder / "bin/dict.txt").read_text() == (tmp_path / "out/data/bin/dict.txt").read_text()
    other.parent.mkdir()
    other.write_text("the\n")
    own.write_text("every token reads\n")
    for path in (other, own):
        with pytest.raises(RecipeError, match=r"own_mine holds another text .*rename the new .* own_mine\*\.json"):
            prepare(path)
    own.write_text("")
    with pytest.raises(RecipeError, match=r"--test must be a text of at least one line, got .*mine\.txt, which is"):
        start("evaluate", "--test", own).models.data.own_test("own_empty", own, [own])
    assert not (tmp_path / "out/tests/own_empty").exists()


def test_the_command_line_replaces_the_way_of_reading(start, recipe, capsys):
    (recipe / "evaluation.yaml").write_text("'*': {window: --strid 1, blocks: --context-window 0}\n")
    with pytest.raises(RecipeError, match=r"fwp-eval-lm refuses the flags of 'window': unrecognized .* --strid"):
        start("train").check()
    (recipe / "evaluation.yaml").write_text("'*': {window: --stride 1, blocks: --context-window 0}\n")
    made = start("evaluate", "--dynamic", "sgd", "--cpu")
    ways = made.evaluations[0].ways_of(made.chosen[0])
    assert [way.label for way in ways] == ["window dynamic sgd", "blocks dynamic sgd"]
    assert made.evaluations[0].flags == ["--dynamic", "sgd", "--cpu"]
    made = start("evaluate", "--stride=8")
    assert made.evaluations[0].ways_of(made.chosen[0]) == [evaluation.Way("stride=8", "")]
    assert "replaces the recipe's way of reading" in capsys.readouterr().out
    assert start("all", "--lr", "1", "--cpu").evaluations[0].flags == ["--cpu"]


# Fast weight layers.


def test_a_layer_is_put_on_its_base(start, done, monkeypatch, tmp_path):
    made, ran = start("train", "--cpu", kind=fast_weight_layers), []
    monkeypatch.setattr(fast_weight_layers, "run", lambda *words: ran.append([*map(str, words)]))
    assert [model.name for model in made.chosen] == ["local/base", "xl/base", "local/fwl", "xl/fwl"]
    with pytest.raises(RecipeError, match=r"local/fwl needs .*base, which is not trained"):
        made.train(made.chosen[2])
    for index in (0, 2):
        made.train(made.chosen[index])
    start_of = str(tmp_path / "out" / "local" / "start.pt")
    assert ran[0][0] == "fwp-add-layer" and ran[0][-1] == start_of
    flags = [*made.chosen[2].flags, "--cpu"]
    assert done == [("local/base", flags), ("local/fwl", [*flags, "--finetune-from-model", start_of])]


# Conversion.


def test_a_sample_is_as_long_as_the_source_allows(start, tmp_path):
    folder = tmp_path / "out/softmax/converted"
    folder.mkdir(parents=True)
    (folder / "flags.txt").write_text("--arch fwp_lm --tokens-per-sample 128 --attention-bias\n")
    recipes = [start("--corpus", corpus, kind=conversion) for corpus in ("peps", "wikitext103", "gpt2")]
    ways = [made.evaluations[0].ways()[0].flags for made in recipes]
    assert ways == [f"--tokens-per-sample {length} --context-window 0" for length in (512, 512, 128)]


def test_the_first_row_begins_with_the_source(start, done, recipe):
    (recipe / "conf" / "peps").mkdir()
    (recipe / "conf" / "peps" / "finetune.yaml").write_text("lr: 2\n")
    made = start("--rows", "softmax", "--lr", "1", kind=conversion)
    source, plugin = made.models.data.converted, ["--user-dir", str(recipe / "mao_ablations")]
    source.mkdir(parents=True)
    (source / "flags.txt").write_text("--arch fwp_lm\n")
    made.train(made.chosen[0])
    begun = ["--finetune-from-model", str(source / "checkpoint.pt")]
    assert done == [("softmax", ["--arch", "fwp_lm", "--lr", "2", *plugin, *begun, "--lr", "1"])]


def test_the_source_is_measured_even_if_no_row_is_softmax(start, tmp_path, monkeypatch):
    """Table 3 of Mao 2022 has the source's perplexities, and no row that is fine-tuned with softmax."""
    scored, out = [], tmp_path / "out"

    def score(checkpoint, path, *_):
        scored.append((checkpoint.relative_to(out), path.stem))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")

    monkeypatch.setattr(evaluation, "score", score)
    made = start("--corpus", "wikitext103", "--rows", "decay_m32", "decay_m64", kind=conversion)
    for model in made.chosen:
        (model.folder / "converted").mkdir(parents=True)
        (model.folder / "conversion.txt").write_text(f"{model.origin} {model.convert}\n")
        made.evaluations[0].evaluate(model)
    source, measures = Path("softmax/converted/checkpoint.pt"), ["valid 0", "test 0", "test 480"]
    expected = [(source, measure) for measure in measures]
    for name in ("decay_m32", "decay_m64"):
        expected.append((Path(name, "converted", "checkpoint.pt"), measures[0]))
        expected += [(Path(name, "checkpoint_last.pt"), measure) for measure in measures]
    assert sorted(scored) == sorted(expected)


def test_what_is_just_converted_may_give_no_number(start, tmp_path, monkeypatch):
    def fail(*words, **_):
        raise CommandError("it failed.")

    monkeypatch.setattr(evaluation, "run", fail)
    made, out = start("--corpus", "wikitext103", kind=conversion), tmp_path / "out"
    measures, (way, *_) = made.evaluations[0], made.evaluations[0].ways()
    measures.measure(out / "converted", out / "converted/checkpoint.pt", way)
    assert (out / "converted" / "valid 0.json").read_text() == '{"perplexity": Infinity, "loss": Infinity}\n'
    with pytest.raises(RecipeError, match="it failed"):
        measures.measure(out / "decay_m32", out / "decay_m32/checkpoint_best.pt", way)
    assert not (out / "decay_m32" / "valid 0.json").exists()
