"""The dictionary of a trained language model: fairseq's dict.txt, and the check that it is that of the training."""

from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from fairseq.data import Dictionary

from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.data import check_file
from fairseq_fwp.patches.hooks import other_words

DICTIONARY = "dict.txt"
MOST_WORDS = 2**28  # bytes of a dictionary or a vocabulary
REMEDY = "give the dict.txt of the training, with --vocabulary, or as dictionary in Python and in --model_args"


def dictionary_words(checkpoint: Path, vocabulary: Path | None) -> list[str]:
    """Return the words of a checkpoint of fairseq: from the given dict.txt or folder, or else the one next to it."""
    path = vocabulary or (checkpoint if checkpoint.is_dir() else checkpoint.parent)
    path = path / DICTIONARY if path.is_dir() else path
    check(vocabulary or path.exists(), f"{path} does not exist: {REMEDY}")
    return read_words(path)


def read_words(path: Path) -> list[str]:
    """Return the words of fairseq's dict.txt, without its specials. Raises ValueError for any other file."""
    dictionary = read_dictionary(path)
    words: list[str] = dictionary.symbols[dictionary.nspecial :]
    return words


def read_dictionary(path: Path) -> Dictionary:
    """Return fairseq's dictionary of a dict.txt, with its counts. Raises ValueError for any other file."""
    check_file(path, MOST_WORDS)
    try:
        return Dictionary.load(str(path))
    except Exception as error:  # fairseq raises a plain Exception for another encoding
        raise ValueError(f"the dictionary {path} cannot be read: {' '.join(str(error).split())}") from error


def make_dictionary(words: Iterable[str]) -> Dictionary:
    """Return fairseq's dictionary of these words after its special symbols; counts are unknown, set to 1."""
    dictionary = Dictionary()
    for word in words:  # the same word may come again, or be a special symbol: fairseq then reads the last one
        dictionary.add_symbol(word, overwrite=True)
    return dictionary


def check_words(task: Namespace, fingerprints: dict[str, str]) -> None:
    """Raise ValueError if a checkpoint tells that its training had other words than the dictionaries of a task."""
    if difference := other_words(task, fingerprints):
        raise ValueError(f"the vocabulary must be {difference}: {REMEDY}")
