"""A vocabulary in fairseq's order: the same words, probabilities and clusters."""

import pytest
import torch
from pairwise import looped

from fairseq_fwp.convert.files import arrange, given_words
from tests.convert.conftest import WORDS, build, read_vector


def test_words_of_their_own_take_the_places_of_specials():
    vocabulary = arrange(["<eos>", "the", "<unk>", "of"])
    assert (vocabulary.words, vocabulary.rows.tolist(), vocabulary.added) == (["the", "of"], [-1, -1, 0, 2, 1, 3], 2)
    assert vocabulary.place(torch.tensor([1.0, 2.0, 3.0, 4.0]), fill=9.0).tolist() == [9.0, 9.0, 1.0, 3.0, 2.0, 4.0]
    assert vocabulary.place(torch.ones(3, 2), fill=0.0).sum(1).tolist() == [
        0.0,
        0.0,
        2.0,
        2.0,
        2.0,
    ]  # the first cluster
    assert vocabulary.cutoffs([3]) == [5] and vocabulary.cutoffs([]) == []


def test_names_of_other_corpora():
    assert arrange(["<S>", "</S>", "<UNK>", "a"]).rows.tolist() == [-1, -1, 0, 2, 1, 3]  # LM1B
    assert arrange(["101", "32"]).rows.tolist() == [-1, -1, -1, -1, 0, 1]  # enwik8
    assert arrange(["<eos>", "<S>"]).rows.tolist() == [-1, -1, 0, -1, 1]  # the second is an ordinary word


@looped(
    ("words", "sentence"),
    [
        (["a", "b", "a"], "must hold each word once, got 'a' twice"),
        (["a", "<pad>"], "must not hold '<pad>', which fairseq reserves"),
        (["a", "<s>"], "must not hold '<s>', which fairseq reserves"),
    ],
)
def test_vocabularies_that_cannot_be(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        arrange(words)


def test_a_special_in_a_later_cluster():
    with pytest.raises(ValueError, match=r"the first 2 words, .* got one as word 3: give the vocabulary in"):
        arrange(["<eos>", "a", "<unk>"]).cutoffs([2])


def test_words_are_read_line_by_line(tmp_path):
    file = tmp_path / "words.txt"
    file.write_bytes("<eos>\ncafé 12\r\na\x0bb\n\n".encode())
    assert given_words(file, file) == ["<eos>", "café", "a"]
    file.write_bytes(b"a\n\nb\n")
    with pytest.raises(ValueError, match=r"line 2 of the vocabulary .* must hold a word, got an empty line"):
        given_words(file, file)
    for broken in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            given_words(broken, broken)


@looped("name", ["schlag-lm/type24", "schlag-lm/type24_div_val", "transformer-xl/enwik8"])
def test_what_the_source_does_not_have_has_no_probability(name):
    vector = read_vector(name)
    words = [f"w{number}" for number in range(31)]
    for known, dead in ((WORDS, ["<s>", "<pad>"]), (words, ["<s>", "<pad>", "</s>", "<unk>"])):
        model, dictionary, _ = build(vector, known)
        tokens = torch.randint(4, len(dictionary), (2, 9))
        probabilities = model.get_normalized_probs(model.decoder(tokens), log_probs=False)
        assert probabilities.shape[-1] == 31 + len(dead) == len(dictionary)
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 9, dtype=torch.float64))
        rows = torch.tensor([dictionary.index(word) for word in dead])
        assert (probabilities == 0).sum(-1).eq(len(dead)).all() and (probabilities[..., rows] == 0).all()


@looped("name", ["schlag-lm/type24", "schlag-lm/type2", "transformer-xl/enwik8"])
def test_a_vocabulary_without_line_ends_is_told(name):
    vector, words = read_vector(name), [f"w{number}" for number in range(31)]
    assert build(vector)[2].notes == []
    (note,) = build(vector, words)[2].notes
    assert note.startswith("the vocabulary has no symbol for the end of a line (</s>, <eos>, <S>), which fairseq-pre")
