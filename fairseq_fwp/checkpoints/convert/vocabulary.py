"""The words of a source in the order of fairseq's dictionary."""

from pathlib import Path
from typing import NamedTuple

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_fwp.checkpoints.convert.conversion import Tensors
from fairseq_fwp.checkpoints.pretrained.dictionary import MOST_WORDS
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.data import check_file

# Names of fairseq's special symbols in vocabularies; the first one in a vocabulary counts. <S> and <UNK> are LM1B's.
START, PADDING = ("<s>",), ("<pad>",)
END_OF_LINE = ("</s>", "<eos>", "<S>")
UNKNOWN = ("<unk>", "<UNK>")


class Vocabulary(NamedTuple):
    """A vocabulary in fairseq's order, with the same probabilities.

    words: without fairseq's special symbols; rows: of each symbol and word in the source, or -1. Symbols without a
    counterpart have an embedding of zero and a bias of minus infinity, which the output layer reads as a mask. An
    adaptive softmax keeps its clusters; the first one holds these symbols, and grows by their number.
    """

    words: list[str]
    rows: Tensor

    @property
    def added(self) -> int:
        """The number of symbols that the source does not have."""
        return int((self.rows < 0).sum())

    @property
    def notes(self) -> list[str]:
        """Notes for evaluating the model, a sentence each."""
        if self.rows[Dictionary().eos()] >= 0:
            return []
        return [
            f"the vocabulary has no symbol for the end of a line ({', '.join(END_OF_LINE)}), which fairseq-preprocess "
            "adds to every line: the model gives it probability 0, and a loss that counts it is infinite"
        ]

    def place(self, tensor: Tensor, fill: float) -> Tensor:
        """Return a tensor whose rows are words of the source, or of its first cluster, in our order; new rows: fill."""
        rows = self.rows[: len(tensor) + self.added]
        placed = tensor.new_full((len(rows), *tensor.shape[1:]), fill)
        placed[rows >= 0] = tensor[rows[rows >= 0]]
        return placed

    def cutoffs(self, cutoffs: list[int]) -> list[int]:
        """The cutoffs of the same clusters. Raises ValueError if a special symbol is not in the first cluster."""
        last = int(self.rows[: len(self.rows) - len(self.words)].max())
        first = cutoffs[0] if cutoffs else len(self.rows)
        expected = f"among the first {first} words, the first cluster, got one as word {last + 1}"
        remedy = "give the vocabulary in the order of the training"
        check(last < first, f"the words for the end of a line and for unknown words must be {expected}: {remedy}")
        return [cutoff + self.added for cutoff in cutoffs]


def arrange(words: list[str]) -> Vocabulary:
    """Return the vocabulary of words in the order of the source. Raises ValueError for repeated words."""
    specials = Dictionary()
    numbers = {word: number for number, word in enumerate(words)}
    for number, word in enumerate(words):
        check(numbers[word] == number, f"the vocabulary must hold each word once, got {word!r} twice")
    names = {specials.bos(): START, specials.pad(): PADDING, specials.eos(): END_OF_LINE, specials.unk(): UNKNOWN}
    rows = [next((numbers[name] for name in names[index] if name in numbers), -1) for index in range(len(specials))]
    others = [word for number, word in enumerate(words) if number not in rows]
    return Vocabulary(others, torch.tensor(rows + [numbers[word] for word in others]))


def take_tables(tensors: Tensors, vocabulary: Vocabulary, embeddings: str, tied: bool) -> dict[str, Tensor]:
    """Take the vectors of words, and of the output those of lm_head, which are the same if they are tied."""
    words, head = int((vocabulary.rows >= 0).sum()), "lm_head.weight"
    table = tensors.take_rows(embeddings, words)
    weights = {"decoder.embed_tokens.weight": vocabulary.place(table, fill=0.0)}
    if not tied:
        output = tensors.take_rows(head, words)
        weights["decoder.adaptive_softmax.words.weight"] = vocabulary.place(output, fill=0.0)
    elif head in tensors:
        tensors.take_equal(head, table, "lm_head")
    # Symbols of fairseq's dictionary that the model lacks get probability 0, and are not learned.
    weights["decoder.adaptive_softmax.bias"] = vocabulary.place(table.new_zeros(words), fill=-torch.inf)
    return weights


def given_words(checkpoint: Path, vocabulary: Path | None) -> list[str]:
    """Return the words of a checkpoint that does not hold them: the first word of each line of the given file."""
    if vocabulary is None:
        raise ValueError(f"--vocabulary must be given: {checkpoint} does not hold its words")
    check_file(vocabulary, MOST_WORDS)
    try:
        lines = vocabulary.read_bytes().decode("utf-8-sig").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the vocabulary {vocabulary} cannot be read: {error}") from error
    if any("\0" in line for line in lines):
        raise ValueError(f"the vocabulary {vocabulary} must be text in UTF-8, got another encoding")
    for number, line in enumerate(lines, 1):
        check(line.strip(), f"line {number} of the vocabulary {vocabulary} must hold a word, got an empty line")
    return [line.split()[0] for line in lines]
