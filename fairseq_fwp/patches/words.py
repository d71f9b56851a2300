"""Words of a typed text that a dictionary lacks: cut by the codes next to it, or told of once."""

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_fwp.patches.patch import patch

if TYPE_CHECKING:
    from fairseq.data import Dictionary

logger = logging.getLogger(__name__)


class Pieces:
    """A function that cuts the words of a line that a dictionary lacks into its pieces.

    codes: of subword-nmt, which leave the other words as they are; None: nothing is cut. A word that the dictionary
    still lacks is told of, once.
    """

    def __init__(self, dictionary: "Dictionary", codes: Path | None) -> None:
        self.dictionary, self.codes, self.warned = dictionary, "", False
        self.cut: Callable[[str], str] = str
        if codes is not None:
            from subword_nmt.apply_bpe import BPE

            self.codes = codes.read_text(encoding="utf-8")
            self.cut = BPE(io.StringIO(self.codes)).process_line

    def __call__(self, line: str) -> str:
        cut = " ".join(word if word in self.dictionary else self.cut(word) for word in line.strip().split(" "))
        words = cut.split()
        lacking = [word for word in words if word not in self.dictionary]
        if lacking and not self.warned:
            remedy = "" if self.codes else ". If it is one of subwords, put their codes next to dict.txt, as `codes`"
            count = f"{len(lacking)} of {len(words)}, such as {lacking[0]!r}"
            logger.warning(f"the dictionary lacks {count}: they are read as {self.dictionary.unk_word}{remedy}")
            self.warned = True
        return cut


def find_codes(path: Path) -> Path | None:
    """Return the codes next to a dictionary (its file or folder), there or where the recipes write them, if any."""
    folder = path if path.is_dir() else path.parent
    return next(filter(Path.is_file, (folder / "codes", folder.parent / "bpe" / "codes")), None)


def _pieces_of(task: Any) -> Pieces:
    if not hasattr(task, "pieces"):
        data = getattr(task.cfg or task.args, "data", None)
        task.pieces = Pieces(task.source_dictionary, data and find_codes(Path(data.split(":")[0])))
    pieces: Pieces = task.pieces
    return pieces


@patch("fairseq.tasks.FairseqTask.get_interactive_tokens_and_lengths")
def cut_typed_words(encode, self, lines, encode_fn):
    """Cut typed words by the codes next to the dictionary that lacks them, or warn: fairseq silently reads `<unk>`."""
    return encode(self, lines, lambda line: _pieces_of(self)(encode_fn(line)))


@patch("fairseq.hub_utils.GeneratorHubInterface.binarize")
def cut_given_words(binarize, self, sentence):
    """Cut the words of `from_pretrained(...).encode` in the same way."""
    return binarize(self, _pieces_of(self.task)(sentence))
