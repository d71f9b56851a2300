"""Raw text as GPT-2's tokens, a document a line.

A vocabulary is vocab.json and merges.txt, as Hugging Face names them, or encoder.json and vocab.bpe, as OpenAI and
fairseq do. fairseq's own code splits the text. A line <|endoftext|> separates two documents; everything else is text,
line ends included. fairseq-preprocess ends each line of the result with </s>, which stands for that mark.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from commands import RecipeError, whole

if TYPE_CHECKING:
    from fairseq.data.encoders.gpt2_bpe_utils import Encoder

NAMES = [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")]
MARK = "<|endoftext|>"


def read_encoder(folder: Path) -> "Encoder":
    """Return fairseq's encoder of a folder. Raises RecipeError without one, or if its model has fewer tokens."""
    from fairseq.data.encoders.gpt2_bpe_utils import get_encoder  # here: --help must work without fairseq

    pairs = ([folder / name for name in pair] for pair in NAMES)
    vocabulary, merges = next((pair for pair in pairs if all(map(Path.is_file, pair))), (None, None))
    if vocabulary is None:
        raise RecipeError(f"{folder} must have {' and '.join(NAMES[0])}, or {' and '.join(NAMES[1])}")
    try:
        encoder = get_encoder(str(vocabulary), str(merges))
        last = max(encoder.encoder.values())
    except (ValueError, AttributeError, TypeError) as error:
        raise RecipeError(f"{vocabulary} and {merges.name} must be a vocabulary of GPT-2: {error}") from error
    config = folder / "config.json"
    words = json.loads(config.read_text(encoding="utf-8"))["vocab_size"] if config.is_file() else last + 1
    if last >= words:
        raise RecipeError(f"tokens of {vocabulary} must have numbers below {words}, the words of {config}, got {last}")
    return encoder


def documents(text: Path) -> Iterator[str]:
    """Yield the documents of a text, without the line end before a mark."""
    lines: list[str] = []
    with text.open(encoding="utf-8", newline="") as file:
        for line in file:
            if line.rstrip("\r\n") == MARK:
                yield "".join(lines).removesuffix("\n")
                lines = []
            else:
                lines.append(line)
    if lines:
        yield "".join(lines).removesuffix("\n")


def encode(folder: Path, text: Path, out: Path) -> int:
    """Write the numbers of the tokens; return their count. Raises RecipeError for a text without tokens."""
    encoder, count = read_encoder(folder), 0
    try:
        with whole(out) as work:
            with work.open("w", encoding="utf-8") as file:
                for document in documents(text):
                    tokens = encoder.encode(document)
                    count += len(tokens)
                    file.write(" ".join(map(str, tokens)) + "\n")
            if not count:
                raise RecipeError(f"{text} must have text, got none")
    except KeyError as error:
        raise RecipeError(
            f"the merges in {folder} must make only words of its vocabulary, got {error}: take both files of one model"
        ) from error
    return count
