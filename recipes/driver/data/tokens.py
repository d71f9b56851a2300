"""Raw text as numbers of a published model's tokens, and back, by the files of its folder."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from commands import RecipeError, whole

from data import gpt2_bpe
from data.prepare import read_lines

NAMES, TOKENIZER = "vocab.txt", "tokenizer.json"


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
    if any((folder / vocabulary).is_file() for vocabulary, _ in gpt2_bpe.NAMES):
        encoder = gpt2_bpe.read_encoder(folder)
        return Tokenizer(encoder.encode, encoder.decode)
    return None


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


def write(text: Path, out: Path, tokenizer: Tokenizer | None, by_lines: bool, end: str | None = None) -> None:
    """Write a line of tokens for each line of a text, or for each of its documents. Raises RecipeError without text.

    end: the token that ends a text, which is left out at the end of a line: fairseq-preprocess puts </s> there.
    """
    count = 0
    with whole(out) as work:
        with work.open("w", encoding="utf-8", newline="\n") as file:
            for piece in pieces(text, tokenizer, by_lines):
                tokens = piece.split() if tokenizer is None else [str(number) for number in tokenizer.encode(piece)]
                tokens = tokens[:-1] if end is not None and tokens[-1:] == [end] else tokens
                count += len(tokens)
                file.write(" ".join(tokens) + "\n")
        if not count:
            raise RecipeError(f"{text} must have text, got none.")
    print(f"{out.name.removesuffix('.txt')}: {count:,} tokens")


def pieces(text: Path, tokenizer: Tokenizer | None, by_lines: bool) -> Iterator[str]:
    """Yield the lines of a text that are not empty, or its documents. Of tokens, a line is a document."""
    if by_lines or tokenizer is None:
        yield from filter(None, read_lines(text))
    else:
        yield from gpt2_bpe.documents(text)
