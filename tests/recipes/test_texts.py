"""The texts of language models: made, converted, read from folders; downloads that stand for the network."""

import gzip
import hashlib
import io
import json
import re
import sys
import tarfile
import zipfile

import pytest
import zstandard
from commands import RecipeError
from data import peps, pile, stdlib, texts, tokens
from data.fetch import Archive
from data.prepare import SPLITS
from made_up import LINE

CODE = '''def read(self, size=-1):
    """Read up to size bytes."""
    if size < 0:
        return self.readall()
    return self._read(size)'''


def test_layout_survives_the_line_break_words():
    assert [stdlib.show(block) for block in stdlib.blocks(CODE + "\n\n\nX = 1\n")] == [CODE, "X = 1"]


def test_standard_library_is_split_by_file_and_always_alike(tmp_path):
    found = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        stdlib.write(folder)
        found.append([(folder / f"{split}.txt").read_bytes() for split in SPLITS])
    assert found[0] == found[1] and all(found[0]) and found[0][0] != found[0][1]


PEP = """\
PEP: 7
Title: A Style
 Guide
Author: X <x@y.z>

.. highlight:: rst

   hidden

Abstract
========

See :pep:`8` and :pep:`the *other* <9>`, ``code``, `a link <http://x>`_ [1]_ and :func:`~os.path`::

    hidden()

    hidden()

- One thing
  goes on.
- Another **bold** thing.

====  ====
a     b
====  ====

.. [1] hidden

The end.
"""
PLAIN = [
    "= PEP 7 : A Style Guide =",
    "= = Abstract = =",
    "See PEP 8 and PEP 9, code, a link and os.path:",
    "- One thing goes on.",
    "- Another bold thing.",
    "The end.",
]


def test_peps_are_running_text_split_by_document_and_known_by_their_checksum(tmp_path, monkeypatch):
    assert peps.document(7, PEP) == PLAIN
    folder = tmp_path / "peps-1" / "peps"
    folder.mkdir(parents=True)
    for number in range(60):
        (folder / f"pep-{number:04}.rst").write_text(PEP)
    with pytest.raises(RecipeError, match=r"other PEPs than the recipe's: the text's SHA-256 is ([0-9a-f]+)") as error:
        peps.write(tmp_path, tmp_path)
    monkeypatch.setattr(peps, "CHECKSUM", re.search(r"SHA-256 is ([0-9a-f]+)\. Remove ", str(error.value))[1])
    peps.write(tmp_path, tmp_path)
    found = [(tmp_path / f"{split}.txt").read_text() for split in SPLITS]
    counts = [text.count("= PEP ") for text in found]
    assert sum(counts) == 60 and min(counts) > 0 and counts[0] > 45
    assert hashlib.sha256("".join(found).encode()).hexdigest() == peps.CHECKSUM


def test_text_is_copied_with_single_spaces(text, tmp_path):
    (text / "test.txt").unlink()
    (text / "test.txt.gz").write_bytes(gzip.compress(("a\u3000b \t c\n\n" * 100).encode()))
    texts.write_words(text, tmp_path)
    assert (tmp_path / "test.txt").read_text() == "a b c\n\n" * 100
    assert (tmp_path / "train.txt").read_text() == LINE * 200


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\xfe" * 500, "UTF-8"), (b"", "must have at least 100 words, got 0"), (None, r"valid\.txt is missing")],
)
def test_bad_text_is_refused_before_anything_is_written(text, tmp_path, content, said):
    path = text / "valid.txt"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(RecipeError, match=said):
        texts.write_words(text, tmp_path)
    assert not (tmp_path / "train.txt").exists()


def test_a_text_is_known_by_what_it_holds(text, tmp_path):
    before = texts.checksum(text)
    (text / "notes").write_text("x")
    assert texts.checksum(text) == before
    (text / "test.txt").write_text(LINE)
    assert texts.checksum(text) != before and texts.checksum(tmp_path / "none") == ""


def test_wikitext_is_read_by_either_of_its_names(text, tmp_path):
    (text / "wiki.valid.tokens").write_text("other\n")
    expected = texts.write_wikitext(text, tmp_path, False)
    assert expected["words"] == 267733 and texts.write_wikitext(text, tmp_path, True) == {}
    assert (tmp_path / "valid.txt").read_text() == "other\n" and (tmp_path / "test.txt").read_text() == LINE * 20
    (text / "test.txt").unlink()
    with pytest.raises(RecipeError, match=r"must have wiki.test.tokens or test.txt"):
        texts.write_wikitext(text, tmp_path, False)


def test_enwik8_is_split_by_bytes_and_loses_none(tmp_path):
    data = (bytes(range(256)) + b"\n") * 40
    (tmp_path / "enwik8").write_bytes(data)
    counts = texts.write_bytes(tmp_path, tmp_path, True)
    back = {word: bytes([byte]) for byte, word in enumerate(texts.BYTES)}
    for split, start, end in (("train", 0, 90), ("valid", 90, 95), ("test", 95, 100)):
        part = data[len(data) * start // 100 : len(data) * end // 100]
        lines = (tmp_path / f"{split}.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        found = b"\n".join(b"".join(back[word] for word in line.split(" ") if word) for line in lines)
        assert found == part.removesuffix(b"\n") and counts[split] == len(part) + (not part.endswith(b"\n"))
    with pytest.raises(RecipeError, match=r"is not enwik8: its checksum differs. If it is meant, add --any-text"):
        texts.write_bytes(tmp_path, tmp_path, False)
    (tmp_path / "enwik8").write_bytes(b"few")
    with pytest.raises(RecipeError, match="must have at least 1,000 bytes, got 3"):
        texts.write_bytes(tmp_path, tmp_path, True)


def test_archives_are_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "source.zip", "w") as archive:
        archive.writestr("wiki/a.txt", "zipped")
    with tarfile.open(tmp_path / "source.tgz", "w:gz") as archive:
        for name in ("x/keep.de", "x/leave.fr"):
            member = tarfile.TarInfo(name)
            member.size = 6
            archive.addfile(member, io.BytesIO(b"packed"))
    out = tmp_path / "out"
    for name, members in (("source.zip", ()), ("source.tgz", ("*.de",))):
        source = tmp_path / name
        checksum = hashlib.sha256(source.read_bytes()).hexdigest()
        Archive(f"got.{source.suffix[1:]}", checksum, (source.as_uri(),), members).fetch(out)
    assert (out / "wiki" / "a.txt").read_text() == "zipped"
    assert (out / "x" / "keep.de").read_text() == "packed" and not (out / "x" / "leave.fr").exists()


# GPT-2's tokens.

LETTERS = {letter: number for number, letter in enumerate("abcdeĠ\u010a<|>")}
VOCABULARY = LETTERS | {"ab": len(LETTERS), "Ġab": len(LETTERS) + 1}
MERGES = "#version: 0.2\na b\nĠ ab\n"


def write_vocabulary(folder, names=("vocab.json", "merges.txt"), vocabulary=VOCABULARY, config=None):
    folder.mkdir(exist_ok=True)
    (folder / names[0]).write_text(json.dumps(vocabulary))
    (folder / names[1]).write_text(MERGES)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tokens(model, folder):
    tokens.write(folder / "raw.txt", folder / "out", tokens.read_gpt2(model), by_lines=False)


@pytest.mark.parametrize("names", tokens.GPT2)
def test_raw_text_becomes_tokens_a_document_a_line(tmp_path, names):
    folder = write_vocabulary(tmp_path / "model", names)
    (tmp_path / "raw.txt").write_text("ab ab\nc\n<|endoftext|>\nab\n")
    write_tokens(folder, tmp_path)
    first = [VOCABULARY[piece] for piece in ("ab", "Ġab", "\u010a", "c")]
    assert (tmp_path / "out").read_text() == f"{' '.join(map(str, first))}\n{VOCABULARY['ab']}\n"


@pytest.mark.parametrize(
    ("more", "text", "said"),
    [
        ({"config": {}}, "ab\n", r"config\.json must be like .*, got KeyError: 'vocab_size'"),
        ({"config": {"vocab_size": 3}}, "ab\n", "must have numbers below 3, the words of .*, got 11"),
        ({}, "", "must have text, got none"),
        ({"vocabulary": LETTERS}, "ab\n", "the merges in .* must make only words of its vocabulary, got 'ab'"),
    ],
)
def test_a_vocabulary_of_another_model_is_refused(tmp_path, more, text, said):
    folder = write_vocabulary(tmp_path / "model", **more)
    (tmp_path / "raw.txt").write_text(text)
    with pytest.raises(RecipeError, match=said):
        write_tokens(folder, tmp_path)
    assert not (tmp_path / "out").exists()
    with pytest.raises(RecipeError, match=r"must have vocab.json and merges.txt, or encoder.json and vocab.bpe"):
        tokens.read_gpt2(tmp_path)


# The Pile.


def pack(path, *frames):
    """Write texts as frames of one file, as programs that pack in parallel do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(frame.encode()) for frame in frames))


def test_the_pile_is_read_as_it_is_distributed(tmp_path):
    documents = ["a b\nc\u2028d", "", "é\n", "last"]
    lines = [json.dumps({"text": text, "meta": {"pile_set_name": "X"}}) + "\n" for text in documents]
    pack(tmp_path / "train" / "01.jsonl.zst", "".join(lines[2:]))
    pack(tmp_path / "train" / "00.jsonl.zst", lines[0], lines[1])
    pack(tmp_path / "val.jsonl.zst", lines[3])
    assert [len(pile.files(tmp_path, split)) for split in ("train", "valid", "test")] == [2, 1, 0]
    pile.write(pile.files(tmp_path, "train"), tmp_path / "train.txt")
    assert list(tokens.documents(tmp_path / "train.txt")) == documents


@pytest.mark.parametrize("text", ["no JSON\n", '{"body": "a"}\n', "[1]\n"])
def test_a_file_that_is_not_of_the_pile_is_refused(tmp_path, text, monkeypatch):
    pack(tmp_path / "val.jsonl.zst", '{"text": "a"}\n' + text)
    with pytest.raises(RecipeError, match=r"val\.jsonl\.zst, line 2: it must be a document of the Pile, got "):
        pile.write([tmp_path / "val.jsonl.zst"], tmp_path / "out")
    (tmp_path / "val.jsonl.zst").write_bytes(b"not packed")
    with pytest.raises(RecipeError, match=r"val\.jsonl\.zst cannot be unpacked: "):
        pile.write([tmp_path / "val.jsonl.zst"], tmp_path / "out")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(RecipeError, match=r"needs zstandard: pip install 'fairseq_fwp\[pile\]'"):
        pile.write([tmp_path / "val.jsonl.zst"], tmp_path / "out")
