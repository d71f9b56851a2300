"""Parallel text: read, tokenised as in Moses, and checked that both sides have the same lines."""

import gzip
import multiprocessing
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from commands import RecipeError

Pair = tuple[str, str]
Languages = tuple[str, str]
LINES_A_PIECE = 2000


def copy(
    out: Path,
    languages: Languages,
    prefixes: Iterable[Path],
    *,
    tokenized: bool = False,
    max_words: int | None = None,
    pairs: int | None = None,
) -> None:
    """Copy PREFIX.LANGUAGE[.gz], one prefix after the other, to OUT.LANGUAGE, and tokenise it if asked.

    max_words: leave out pairs with an empty side or with more words; None: an empty side is an error.
    pairs: the number of pairs that the text must have. Raises RecipeError.
    """
    batches = pieces(read_pairs(prefixes, languages))
    if not tokenized:
        write(out, languages, batches, max_words, pairs)
        return
    with multiprocessing.Pool() as pool:
        write(out, languages, pool.imap(partial(tokenize, languages=languages), batches), max_words, pairs)


def read_lines(prefix: Path, language: str) -> Iterator[str]:
    """Yield the lines of PREFIX.LANGUAGE or PREFIX.LANGUAGE.gz. Raises RecipeError if they cannot be read."""
    names = [prefix.with_name(f"{prefix.name}.{language}{ending}") for ending in ("", ".gz")]
    path = next((name for name in names if name.is_file()), None)
    if path is None:
        raise RecipeError(f"{names[0]} or {names[1].name} must exist: give a folder that has it.")
    try:
        # Only \n ends a line: web text has many characters that Python takes for line ends.
        with (
            gzip.open(path, "rt", encoding="utf-8", newline="\n")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8", newline="\n") as file
        ):
            for line in file:
                yield " ".join(line.split())
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise RecipeError(f"{path} cannot be read as UTF-8 text: {error}.") from error


def read_pairs(prefixes: Iterable[Path], languages: Languages) -> Iterator[Pair]:
    """Yield the pairs of lines. Raises RecipeError if the sides have different numbers of lines."""
    for prefix in prefixes:
        sides = [read_lines(prefix, language) for language in languages]
        try:
            yield from zip(*sides, strict=True)
        except ValueError as error:  # of zip; a RecipeError has its own message
            raise RecipeError(
                f"{prefix}.{languages[0]} and {prefix}.{languages[1]} have different numbers of lines."
            ) from error


def tokenize(pairs: list[Pair], languages: Languages) -> list[Pair]:
    """Return the pairs, tokenised."""
    from sacremoses import MosesTokenizer

    tokenizers = [MosesTokenizer(language) for language in languages]
    return [
        tuple(one.tokenize(text, return_str=True) for one, text in zip(tokenizers, pair, strict=True)) for pair in pairs
    ]


def pieces(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    piece = []
    for pair in pairs:
        piece.append(pair)
        if len(piece) == LINES_A_PIECE:
            yield piece
            piece = []
    if piece:
        yield piece


def write(
    out: Path, languages: Languages, batches: Iterable[list[Pair]], max_words: int | None, pairs: int | None
) -> None:
    """Write OUT.SOURCE and OUT.TARGET, line by line."""
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = left_out = 0
    with (
        Path(f"{out}.{languages[0]}").open("w", encoding="utf-8") as source_file,
        Path(f"{out}.{languages[1]}").open("w", encoding="utf-8") as target_file,
    ):
        files = source_file, target_file
        for batch in batches:
            for pair in batch:
                lengths = [len(text.split()) for text in pair]
                if max_words is None and 0 in lengths:
                    raise RecipeError(f"pair {kept + 1:,} of {out.name} has an empty side.")
                if max_words is not None and not 0 < min(lengths) <= max(lengths) <= max_words:
                    left_out += 1
                    continue
                kept += 1
                for file, text in zip(files, pair, strict=True):
                    file.write(text + "\n")
    if pairs not in (None, kept + left_out):
        raise RecipeError(
            f"{out.name} has {kept + left_out:,} pairs in place of {pairs:,}: this is another text than the recipe's. "
            "If it is meant, add --any-text."
        )
    if not kept:
        raise RecipeError(f"{out.name} has no pairs" + (f": all {left_out:,} were left out." if left_out else "."))
    print(f"{out.name}: {kept:,} pairs" + (f", {left_out:,} left out" if left_out else ""))
