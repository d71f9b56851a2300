"""A published model made recurrent by one command: its text, its choices and its table."""

import json

import made_up
import pytest
import recurrent
from commands import RecipeError
from data import tokens
from support.pairwise import looped

GPT2 = '{"model_type": "gpt2"}'
SCORES = "position\ttoken\tlog_prob\n" + "".join(
    f"{place}\t{token}\t{value}\n"
    for place, (token, value) in enumerate([("a", -9), ("b", -1), ("</s>", -2), ("c", -9), ("</s>", -6)])
)


@looped("scored, loss", [(True, 3.0), (False, 5.4)])
def test_the_first_word_of_a_line_does_not_count_where_it_is_scored(tmp_path, scored, loss):
    """(1 + 2 + 6) / 3 with the first words left out, or the mean of all."""
    (tmp_path / "scores.tsv").write_text(SCORES)
    assert recurrent.loss_after(1, tmp_path / "scores.tsv", scored) == pytest.approx(loss)
    assert recurrent.loss_after(2, tmp_path / "scores.tsv", scored) == pytest.approx(2 if scored else 3)
    assert recurrent.loss_after(9, tmp_path / "scores.tsv", scored) == 0


@pytest.fixture
def start(tmp_path):
    """A function start(*words) -> the recipe of a GPT-2, whose folder and text are there."""
    for name in ("model", "text"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text(GPT2)

    def compose(*words):
        folders = ["--model", tmp_path / "model", "--data", tmp_path / "text", "--out", tmp_path / "out"]
        recipe = made_up.RECIPES / "recurrent"
        return recurrent.compose([*map(str, ["--recipe", recipe, "--", *words, *folders])])

    return compose


def scored(folder, **losses):
    """Write results of evaluations on a split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, loss in losses.items():
        (folder / f"{split}.json").write_text(json.dumps({"loss": loss, "perplexity": 2**loss, "state_size": 7}))


@looped("adapted, teacher", [(None, "source"), (1.0, "source"), (0.995, "source"), (0.98, "adapted")])
def test_the_adapted_model_teaches_if_it_is_better(start, tmp_path, adapted, teacher):
    recipe = start()
    scored(tmp_path / "out" / "source", valid=1.0)
    (tmp_path / "out" / "adapted" / "valid.json").unlink(missing_ok=True)
    if adapted:
        scored(tmp_path / "out" / "adapted", valid=adapted)
    stages = recipe.models
    attention, distribution, words = (stages.named(name, None) for name in ("attention", "distribution", "words"))
    assert attention.origin == teacher == stages.teacher(attention) == stages.teacher(distribution)
    assert (distribution.origin, words.origin, stages.teacher(words)) == ("attention", "distribution", "")
    assert attention.convert == "--decoder-update-rule gated_delta --state-size 32"


def test_every_seed_has_all_trainings(start):
    models = start("--seeds", "2").chosen
    assert [(model.name, model.seed) for model in models] == [
        (name, seed) for seed in (1, 2) for name in recurrent.SHARES
    ]
    assert sum(recurrent.SHARES.values()) == pytest.approx(1)


def test_a_trial_decides_the_number_of_updates_once(start, tmp_path, monkeypatch):
    stages, rates = start("--minutes", "10").models, [2.0]
    monkeypatch.setattr(stages, "rate", lambda model, flags: rates.pop())
    model = stages.named("distribution", None)
    for _ in range(2):  # the second time the plan is read
        flags = stages.updates(model, [])
        assert flags[:4] == ["--max-update", "660", "--warmup-updates", "33"]
    with pytest.raises(RecipeError, match=r"was made with other settings .*, which differ in --minutes"):
        start("--minutes", "11").models.updates(model, [])
    assert start("--max-update", "3").models.updates(model, []) == []


def test_the_table_compares_with_the_source(start, tmp_path):
    recipe = start()
    scored(tmp_path / "out" / "source", test=1.0)
    scored(tmp_path / "out" / "attention" / "converted", test=3.0)
    rows = [row for model in [None, *recipe.chosen] for row in recurrent.rows_of(recipe.models.data, model)]
    lines = recurrent.table(rows)
    assert lines[2:] == [
        "| source | 7 | 1.0000 | 1.0000 | 2.000 | 100.0 % | - | - |",
        "| converted, not trained | 7 | 3.0000 | 3.0000 | 8.000 | 25.0 % | - | - |",
    ]
    scored(tmp_path / "out" / "distribution", valid=1.2)
    scored(tmp_path / "out" / "words", valid=1.1)
    assert recurrent.best_of(recipe.models.data, recipe.chosen).name == "words"


def test_tokens_that_the_source_cannot_know_choose_no_model(start, tmp_path):
    """The last stage has learned the tags, here the second word of a line, and lost some of the rest."""
    recipe, rows = start("--lines", "--unscored", "2"), {}
    for name, first, loss in (("distribution", 9.0, 1.1), ("words", 1.0, 1.2)):
        table = SCORES.splitlines()[0] + f"\n0\ttag\t{-first}\n1\t</s>\t{-loss}\n"
        scored(tmp_path / "out" / name, valid=first + loss, test=first + loss)
        for split in ("valid", "test"):
            (tmp_path / "out" / name / f"{split}.tsv").write_text(table)
        rows[name] = recurrent.rows_of(recipe.models.data, recipe.models.named(name, None))[0]
    assert recurrent.best_of(recipe.models.data, recipe.chosen).name == "distribution"
    assert (rows["words"]["loss"], rows["words"]["counted"]) == (2.2, 1.2)


def test_the_folder_holds_the_best_model(start, tmp_path, monkeypatch):
    """Also after more seeds, or another training: what it held before goes, unless the conversion fails."""

    def convert(*words):
        assert words[-2] == "--out" and not words[-1].exists()
        words[-1].mkdir(parents=True)
        (words[-1] / "of").write_text(str(words[-5].relative_to(tmp_path / "out")))

    def publish(*words):
        recipe = start(*words)
        folder = recurrent.publish(recipe.models.data, recurrent.best_of(recipe.models.data, recipe.chosen))
        return (folder / "of").read_text()

    monkeypatch.setattr(recurrent, "run", convert)
    for seed, loss in ((1, 1.2), (2, 1.1)):
        scored(tmp_path / "out" / "words" / f"seed_{seed}", valid=loss)
        (tmp_path / "out" / "words" / f"seed_{seed}" / "checkpoint_best.pt").write_text(f"{seed}")
    assert publish("--seeds", "1") == "words/seed_1/checkpoint_best.pt"
    monkeypatch.setattr(recurrent, "run", lambda *words: pytest.fail("it is there"))
    assert publish("--seeds", "1") == "words/seed_1/checkpoint_best.pt"
    with pytest.raises(pytest.fail.Exception):
        publish("--seeds", "2")
    assert (tmp_path / "out" / "recurrent" / "of").read_text() == "words/seed_1/checkpoint_best.pt"
    monkeypatch.setattr(recurrent, "run", convert)
    assert publish("--seeds", "2") == "words/seed_2/checkpoint_best.pt"
    (tmp_path / "out" / "words" / "seed_2" / "checkpoint_best.pt").write_text("another training")
    (tmp_path / "out" / "recurrent" / "of").unlink()
    assert publish("--seeds", "2") == "words/seed_2/checkpoint_best.pt"


def test_a_text_of_other_words_is_refused(tmp_path):
    said = "[None] Dictionary: 8 types\n[None] a/train.txt: 9 sents, 99 tokens, 60.5% replaced (by <unk>)\n"
    (tmp_path / "log").write_text(said)
    with pytest.raises(RecipeError, match=r"train\.txt must be text in tokens of"):
        recurrent.check_known(tmp_path / "log", tmp_path / "dict.txt")


@looped(
    "words, config, says",
    [
        ("--minutes 0", GPT2, "--minutes: it must be an integer above 0, got '0'"),
        ("--unscored 2", GPT2, "--lines must be given with --unscored, which leaves out the first tokens of each line"),
        ("evaluate", GPT2, "must have a source, got none: run the stage prepare first"),
        ("--rule nonsense", GPT2, "the new attention cannot be: "),
        ("--rule softmax", GPT2, "the new attention cannot be: "),
        ("all", "", "which has no config.json"),
        ("all", '{"model_type": "t5"}', "must be one of gpt2, llama, mistral, qwen2, qwen3, fwp_lm, got 't5'"),
    ],
)
def test_refusals(start, tmp_path, capsys, words, config, says):
    (tmp_path / "model" / "config.json").unlink(missing_ok=True)
    if config:
        (tmp_path / "model" / "config.json").write_text(config)
    with pytest.raises((RecipeError, SystemExit)) as stopped:
        start(*words.split()).check()
    assert says in f"{stopped.value}{capsys.readouterr().err}"


@looped(
    "names, end, found",
    [
        (None, None, "2"), (None, "02", "2"), ("<pad> 0 <end>", None, "<end>"), ("<pad> 0 <end>", "2", "<end>"),
        ("<pad> 0 <end>", "<end>", "<end>"), ("a b", None, None),
    ],
)  # fmt: skip
def test_the_end_of_a_text_as_the_text_has_it(tmp_path, names, end, found):
    """Of numbers it is the one that the dictionary lacks; of names that of --end or of eos_token_id."""
    model, converted = tmp_path / "model", tmp_path / "out/source/stream"
    model.mkdir(exist_ok=True), converted.mkdir(parents=True, exist_ok=True)
    (model / "vocab.txt").unlink(missing_ok=True)
    (model / "config.json").write_text("{}" if names == "a b" else '{"eos_token_id": 2}')
    (converted / "dict.txt").write_text("0 1\n1 1\n3 1\n")
    if names:
        (model / "vocab.txt").write_text("\n".join(names.split()) + "\n")
    source = recurrent.Published(tmp_path / "out", model, "gpt2", tmp_path, None, end, False, 0)
    assert source.end_of_text == found


@looped("by_lines, expected", [(True, ["a b", "c", "<|endoftext|>", "d"]), (False, ["a b\n\nc", "d"])])
def test_pieces_of_a_raw_text(tmp_path, by_lines, expected):
    """Lines that are not empty, or documents."""
    (tmp_path / "x.txt").write_text("a b\n\nc\n<|endoftext|>\nd\n")
    read = tokens.Tokenizer(lambda text: [ord(letter) for letter in text], lambda numbers: "".join(map(chr, numbers)))
    assert list(tokens.pieces(tmp_path / "x.txt", read, by_lines)) == expected
    tokens.write(tmp_path / "x.txt", tmp_path / "out.txt", read, by_lines)
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert [read.decode([int(number) for number in line.split()]) for line in lines] == expected
    tokens.write(tmp_path / "x.txt", tmp_path / "out.txt", None, by_lines, end="b")
    assert (tmp_path / "out.txt").read_text() == "a\nc\n<|endoftext|>\nd\n"
    (tmp_path / "y.txt").write_text("b a b b c b\nb\n")  # it may also stand before a text, and between two
    tokens.write(tmp_path / "y.txt", tmp_path / "out.txt", None, by_lines, end="b")
    assert (tmp_path / "out.txt").read_text() == "a\nc\n"
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(RecipeError, match="must have text, got none"):
        tokens.write(tmp_path / "empty.txt", tmp_path / "none.txt", read, by_lines)
    assert not (tmp_path / "none.txt").exists()


def test_tokenizers_of_folders(tmp_path):
    """A tokenizer.json, unless vocab.txt has names of tokens; without either the text is tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    assert tokens.read(tmp_path) is None
    made = Tokenizer(WordLevel({"[UNK]": 0, "ab": 1, "c": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    read = tokens.read(tmp_path)
    assert list(read.encode("c ab  ab")) == [2, 1, 1] and read.decode([2, 1]) == "c ab"
    made.enable_truncation(2)
    made.enable_padding(length=40)
    made.save(str(tmp_path / "tokenizer.json"))
    assert list(tokens.read(tmp_path).encode("c ab  ab")) == [2, 1, 1]
    (tmp_path / "vocab.txt").write_text("ab\n")
    assert tokens.read(tmp_path) is None
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RecipeError, match="must be a tokenizer of the package tokenizers"):
        tokens.read(tmp_path)


def test_a_conversion_is_that_of_its_settings(start, tmp_path, monkeypatch):
    """Other flags, other weights in the same folder and missing texts are refused before anything is converted."""
    converted = []
    monkeypatch.setattr(recurrent, "run", lambda *words: converted.append(words))
    with pytest.raises(RecipeError, match=r"train\.txt is missing: the folder must have train, valid and test"):
        start().models.data.convert()
    for split in ("train", "valid", "test"):
        (tmp_path / "text" / f"{split}.txt").write_text("1 2\n")
    for _ in range(2):
        start().models.data.convert()
    with pytest.raises(RecipeError, match="was made with other settings"):
        start("--end", "3").models.data.convert()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3}')
    with pytest.raises(RecipeError, match="was made with other settings"):
        start().models.data.convert()
    assert len(converted) == 2
