"""The parts of the translation recipes: parallel text, scores, means of checkpoints."""

import gzip
import random
import re
import signal
from argparse import Namespace
from pathlib import Path

import made_up
import pytest
import torch
import translation
from commands import RecipeError
from data import pairs
from sacrebleu.metrics import BLEU
from support.pairwise import looped

BOTH = ("en", "de")


@pytest.mark.parametrize("packed", [False, True])
def test_text_is_tokenised_pair_by_pair(tmp_path, packed, capsys):
    made_up.write_pairs(tmp_path / "a", 5, packed)
    ending = ".gz" if packed else ""
    write = gzip.compress if packed else bytes
    # Characters besides \n that Python takes for line ends; an empty side; a long one.
    (tmp_path / f"b.en{ending}").write_bytes(write(("It's\u2028one \x0b line.\n\n" + "many " * 50 + "\n").encode()))
    (tmp_path / f"b.de{ending}").write_bytes(write("Eine Zeile\x85.\nleer\nzu lang\n".encode()))
    out = tmp_path / "new" / "both"
    pairs.copy(out, [tmp_path / "a", tmp_path / "b"], tokenized=True, max_words=40)
    assert capsys.readouterr().out == "both: 6 pairs, 2 left out\n"
    english, german = (Path(f"{out}.{language}").read_text().split("\n") for language in ("en", "de"))
    assert len(english) == len(german) == 7 and "It &apos;s one line ." in english
    with pytest.raises(RecipeError, match="both has no pairs: all 3 were left out"):
        pairs.copy(out, [tmp_path / "b"], tokenized=True, max_words=3)
    pairs.copy(out, [tmp_path / "a"], pairs=5)
    assert Path(f"{out}.de").read_text().count("\n") == 5


def handler(found):
    return [(repr(signal.getsignal(signal.SIGTERM)),) * 2 for _ in found]


def test_processes_that_tokenise_end_at_once(tmp_path, monkeypatch):
    """SIGTERM ends them, whatever it does in the recipe: as an exception it can come too late for a waiting process."""
    made_up.write_pairs(tmp_path / "a", 5)
    monkeypatch.setattr(pairs, "tokenize", handler)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        pairs.copy(tmp_path / "out", [tmp_path / "a"], tokenized=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert {*(tmp_path / "out.en").read_text().splitlines()} == {repr(signal.SIG_DFL)}


PACKED = gzip.compress(random.Random(0).randbytes(500).hex().encode() + b"\n")


@looped(
    ("english", "german", "ending", "said"),
    [
        (None, b"a\n", "", "must exist"),
        (b"a\n", b"b\nc\n", "", "have different numbers of lines"),
        (b"a\n\nc\n", b"a\nb\nc\n", "", "pair 2 of out has an empty side"),
        (b"", b"", "", "out has no pairs"),
        (b"a\nb\nc\n", b"a\nb\nc\n", "", "out has 3 pairs in place of 4"),
        (b"\xff\xfe\n", b"a\n", "", "cannot be read as UTF-8 text"),
        (PACKED[:-30], b"a\n", ".gz", "a.en.gz cannot be read as UTF-8 text"),
        (PACKED[:99] + bytes(99) + PACKED[198:], b"a\n", ".gz", "a.en.gz cannot be read as UTF-8 text"),
    ],
)
def test_text_that_does_not_belong_together_is_refused(tmp_path, english, german, ending, said):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    (folder / "a.de").write_bytes(german)
    if english is not None:
        (folder / f"a.en{ending}").write_bytes(english)
    with pytest.raises(RecipeError, match=said):
        pairs.copy(folder / "out", [folder / "a"], pairs=4 if "place" in said else None)


HYPOTHESES = ["ein well-known Haus steht dort .", "die Erinnerung liest einmal &amp; mehr ."]
REFERENCES = ["ein well-known Haus steht hier .", "die Erinnerung liest einmal &amp; mehr ."]


def generated(folder, lines):
    """Write the output of fairseq-generate, and the references; return the path of the first."""
    log, end = folder / "generate.log", "Translated 2 sentences (1,234 tokens) in 2.5s (...)\n"
    found = "".join(f"H-{number}\t-0.5\t{text}\nD-{number}\t-0.5\tx\n" for number, text in lines)
    log.write_text(f"S-0\tsource\n{found}INFO:fairseq_cli.generate:{end}")
    (folder / "tok.de").write_text("\n".join(REFERENCES) + "\n")
    return log


def test_scores_are_read_in_any_order(tmp_path):
    """Three kinds of BLEU of the same sentences, printed in any order."""
    log = generated(tmp_path, [(1, HYPOTHESES[1]), (0, HYPOTHESES[0])])
    raw = ["Ein well-known Haus steht hier.", "die Erinnerung liest einmal & mehr."]
    (tmp_path / "raw.de").write_text("\n".join(raw) + "\n")
    result = translation.score(log, tmp_path / "tok.de", tmp_path / "raw.de", "de")
    assert (result["sentences"], result["tokens"], result["seconds"]) == (2, 1234, 2.5)
    detokenized = ["ein well-known Haus steht dort.", "die Erinnerung liest einmal & mehr."]
    assert result["sacrebleu"] == BLEU().corpus_score(detokenized, [raw]).score
    for kind, precisions in {
        # One word of the first sentence is wrong: n-grams of 6 and 7 tokens. The hyphen makes two more tokens.
        "tokenised": [(5 + 7) / (6 + 7), (3 + 6) / (5 + 6), (2 + 5) / (4 + 5), (1 + 4) / (3 + 4)],
        "compound_split": [(7 + 7) / (8 + 7), (5 + 6) / (7 + 6), (4 + 5) / (6 + 5), (3 + 4) / (5 + 4)],
    }.items():
        assert result[kind] == pytest.approx(100 * torch.tensor(precisions).log().mean().exp().item())
    assert "sacrebleu" not in translation.score(log, tmp_path / "tok.de", None, "de")
    # Only standard output: fairseq-generate logs its last line to standard error.
    log.write_text("".join(line for line in log.read_text().splitlines(True) if "Translated" not in line))
    without = translation.score(log, tmp_path / "tok.de", tmp_path / "raw.de", "de")
    assert without == {name: value for name, value in result.items() if name not in ("tokens", "seconds")}


def test_words_are_split_at_hyphens_as_the_literature_does():
    """Matches do not overlap: of two hyphens with one letter or nothing in between, only one is split."""
    split = translation.split_compounds
    assert split("state-of-the-art") == " ##AT##-##AT## ".join(["state", "of", "the", "art"])
    assert split("a-b-c x--y - -d e-") == "a ##AT##-##AT## b-c x ##AT##-##AT## -y - -d e-"


@looped(
    ("numbers", "message"),
    [
        ([0], "1 sentences were translated, but .* has 2"),
        ([0, 2, 3], "3 sentences were translated, but .* has 2"),
        ([0, 0], "several hypotheses of sentence 0"),
    ],
)
def test_scores_of_other_sentences_are_refused(tmp_path, numbers, message):
    log = generated(tmp_path, [(number, "a") for number in numbers])
    with pytest.raises(RecipeError, match=message):
        translation.score(log, tmp_path / "tok.de", None, "de")


def test_the_mean_of_the_last_checkpoints(tmp_path):
    for epoch, update in ((1, 5), (1, 90), (2, 100)):
        model = {"weight": torch.full((2,), float(update)), "half": torch.ones(1).half(), "draws": torch.tensor(update)}
        torch.save({"model": model, "args": Namespace(lr=1), "cfg": {}}, tmp_path / f"checkpoint_{epoch}_{update}.pt")
    torch.save({}, tmp_path / "checkpoint_best.pt")
    translation.write_mean(tmp_path, 2, tmp_path / "mean.pt")
    model = torch.load(tmp_path / "mean.pt", weights_only=False)["model"]
    assert model["weight"].tolist() == [95.0, 95.0] and model["half"].dtype == torch.float16 and model["draws"] == 100
    with pytest.raises(RecipeError, match="must be from 1 to 3"):
        translation.write_mean(tmp_path, 4, tmp_path / "mean.pt")


# The texts.


@pytest.fixture
def wmt14(tmp_path):
    """A folder like the unpacked archives: corpora one folder deeper, and a test set in SGML."""
    folder = tmp_path / "wmt14"
    (folder / "training").mkdir(parents=True)
    for name, count in (("europarl-v7", 12), ("commoncrawl", 9), ("news-commentary-v9", 3)):
        made_up.write_pairs(folder / "training" / f"{name}.de-en", count)
    made_up.write_pairs(folder / "newstest2013", 21)
    made_up.write_pairs(tmp_path / "test", 23)
    for language, side in (("en", "src"), ("de", "ref")):
        lines = (tmp_path / f"test.{language}").read_text().splitlines()
        segments = "".join(f'<seg id="{number}"> {line} </seg>\n' for number, line in enumerate(lines))
        sgm = f'<doc docid="a">\n<p>\n{segments}</p>\n</doc>\n'
        (folder / f"newstest2014-deen-{side}.{language}.sgm").write_text(sgm)
    return folder


def test_wmt14_from_raw_text(wmt14, tmp_path):
    with pytest.raises(RecipeError, match=r"train has 24 pairs in place of 4,520,620: .* add --any-text"):
        pairs.write_wmt14(wmt14, tmp_path / "out", False)
    pairs.write_wmt14(wmt14, tmp_path / "out", True)
    assert (tmp_path / "out" / "text" / "test.de").read_text() == (tmp_path / "test.de").read_text()
    assert (tmp_path / "out" / "tok" / "train.en").read_text().count("\n") == 24
    (wmt14 / "newstest2013.en").unlink()
    with pytest.raises(RecipeError, match=r"must have newstest2013.en: .*, or leave out --data to download it"):
        pairs.write_wmt14(wmt14, tmp_path / "out", True)


def prepared(tmp_path, *words):
    arguments = ["--recipe", str(made_up.RECIPES / "multi30k"), "--pairs", "multi30k", "--merges", "30"]
    arguments += ["--models", "sum", "--search", "--beam 2", "--", *map(str, words), "--out", str(tmp_path / "out")]
    return translation.compose(arguments)


def test_multi30k_is_prepared_once_and_a_test_set_of_ones_own_is_scored(tmp_path, monkeypatch, capsys):
    folder, out = tmp_path / "multi30k", tmp_path / "out"
    folder.mkdir()
    for name, count in (("train", 60), ("val", 9), ("test_2016_flickr", 8)):
        made_up.write_pairs(folder / name, count, packed=True)
    prepared(tmp_path, "prepare", "--data", folder).run()
    assert not (out / "data/tok/train.de").exists() and "@@" not in (out / "data/tok/test.de").read_text()
    assert (out / "data/text/test.de").read_text().count("\n") == 8
    prepared(tmp_path, "prepare").run()
    with pytest.raises(RecipeError, match="was made with other settings"):
        prepared(tmp_path, "prepare", "--data", tmp_path).run()
    made_up.write_pairs(tmp_path / "mine", 5)
    made = prepared(tmp_path, "evaluate", "--test", tmp_path / "mine", "--lenpen", "2", "--cpu")
    made_up.trained(made.chosen[0].folder)
    ran, run = [], translation.run

    def generate(*words, log=None):
        if words[0] != "fairseq-generate":
            return run(*words, log=log)
        ran.append(words)
        translated = (out / "tests/own_mine/tok/test.de").read_text().splitlines()
        return log.write_text("".join(f"H-{i}\t-1\t{line}\n" for i, line in enumerate(translated)))

    monkeypatch.setattr(translation, "run", generate)
    capsys.readouterr()
    for _ in range(2):  # the second finds it there
        made.run()
    assert len(ran) == 1 and ran[0][-5:] == ("--beam", "2", "--lenpen", "2", "--cpu")
    found, shown = (out / "sum" / "own_mine lenpen 2.json").read_text(), capsys.readouterr().out
    for language in BOTH:
        unknown = r"\d+ tokens, of which [\d.]+ % are not in the vocabulary \(<unk>\)"
        assert re.search(rf"/mine, {language}: {unknown}", shown)
    assert '"tokenised": 100' in found and '"sacrebleu": 100' in found
