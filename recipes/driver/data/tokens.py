"""Raw text as numbers of a published model's tokens, a line or a document a line, and back, by the files of its folder.

In raw text a line <|endoftext|> separates two documents, as the model's own end token does anywhere. All else is text.
fairseq-preprocess ends each line of the result with </s>, which stands for that mark.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from commands import RecipeError, whole
from flags import shaped

from data.prepare import read_lines

NAMES, TOKENIZER, MARK = "vocab.txt", "tokenizer.json", "<|endoftext|>"
# GPT-2's vocabulary, as Hugging Face names it, or OpenAI and fairseq.
GPT2 = [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")]


class Tokenizer(NamedTuple):
    """A tokenizer: a text as numbers, and numbers as a text."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


def read(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a model's folder; None if it has none, so that a text is names or numbers of tokens."""
    if (folder / NAMES).is_file():
        return None
    if (file := folder / TOKENIZER).is_file():
        return read_tokenizer(file)
    return read_gpt2(folder) if any((folder / vocabulary).is_file() for vocabulary, _ in GPT2) else None


def read_tokenizer(file: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json. Raises RecipeError for any other file."""
    try:
        from tokenizers import Tokenizer as Loaded
    except ImportError:
        raise RecipeError(f"{file} needs the package tokenizers: pip install tokenizers.") from None
    try:
        loaded = Loaded.from_file(str(file))
    except Exception as error:  # it has no exception of its own
        raise RecipeError(f"{file} must be a tokenizer of the package tokenizers: {error}.") from error
    loaded.no_truncation()  # a text is read whole, whatever was saved with the tokenizer
    loaded.no_padding()
    return Tokenizer(lambda text: loaded.encode(text, add_special_tokens=False).ids, loaded.decode)


def read_gpt2(folder: Path) -> Tokenizer:
    """Return fairseq's tokenizer of GPT-2. Raises RecipeError without its files, or if its model has fewer tokens."""
    from fairseq.data.encoders.gpt2_bpe_utils import get_encoder  # here: --help must work without fairseq

    pairs = ([folder / name for name in pair] for pair in GPT2)
    vocabulary, merges = next((pair for pair in pairs if all(map(Path.is_file, pair))), (None, None))
    if vocabulary is None:
        raise RecipeError(f"{folder} must have {' and '.join(GPT2[0])}, or {' and '.join(GPT2[1])}")
    try:
        encoder = get_encoder(str(vocabulary), str(merges))
        last = max(encoder.encoder.values())
    except (ValueError, AttributeError, TypeError) as error:
        raise RecipeError(f"{vocabulary} and {merges.name} must be a vocabulary of GPT-2: {error}") from error
    config = folder / "config.json"
    with shaped(config, "the config.json of a published GPT-2"):
        words = int(json.loads(config.read_bytes())["vocab_size"]) if config.is_file() else last + 1
    if last >= words:
        raise RecipeError(f"tokens of {vocabulary} must have numbers below {words}, the words of {config}, got {last}")

    def encode(text: str) -> Sequence[int]:
        try:
            return encoder.encode(text)
        except KeyError as error:
            both = "take both files of one model"
            raise RecipeError(
                f"the merges in {folder} must make only words of its vocabulary, got {error}: {both}"
            ) from error

    return Tokenizer(encode, encoder.decode)


def write(text: Path, out: Path, tokenizer: Tokenizer | None, by_lines: bool, end: str | None = None) -> None:
    """Write a line of tokens for each line of a text, or for each of its documents. Raises RecipeError without text.

    end: the token that ends a text, in whose place a line ends: fairseq-preprocess puts </s> there.
    """
    count = 0
    with whole(out) as work:
        with work.open("w", encoding="utf-8", newline="\n") as file:
            for piece in pieces(text, tokenizer, by_lines):
                tokens = piece.split() if tokenizer is None else [str(number) for number in tokenizer.encode(piece)]
                for own in (list(text) for ends, text in groupby(tokens, lambda token: token == end) if not ends):
                    count += len(own)
                    file.write(" ".join(own) + "\n")
        if not count:
            raise RecipeError(f"{text} must have text, got none.")
    print(f"{out.name.removesuffix('.txt')}: {count:,} tokens")


def pieces(text: Path, tokenizer: Tokenizer | None, by_lines: bool) -> Iterator[str]:
    """Yield the lines of a text that are not empty, or its documents. Of tokens, a line is a document."""
    by_lines = by_lines or tokenizer is None
    yield from filter(None, read_lines(text)) if by_lines else documents(text)


def documents(text: Path) -> Iterator[str]:
    """Yield the documents of a raw text, without the line end before a mark."""
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
