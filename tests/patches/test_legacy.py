"""Older parts of fairseq: Huffman codes, and dictionaries for masked language models."""

import pytest
from fairseq.data.huffman import HuffmanCodeBuilder
from fairseq.data.legacy import BertDictionary, MaskedLMDictionary


def test_huffman_codes():
    builder, words = HuffmanCodeBuilder(), ["a", "b", "a", "c", "a"]
    builder.add_symbols(*words)
    coder = builder.build_code()
    assert [node.symbol for node in coder.decode(coder.encode(words))] == words


@pytest.mark.parametrize("kind", [MaskedLMDictionary, BertDictionary])
def test_dictionaries_of_masked_models(kind, tmp_path):
    dictionary = kind()
    dictionary.add_symbol("word", 3)
    dictionary.save(str(tmp_path / "dict.txt"))
    loaded = kind.load(str(tmp_path / "dict.txt"))
    assert loaded.symbols == dictionary.symbols and loaded.count[loaded.index("word")] == 3
