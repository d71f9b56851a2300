"""Tokenise parallel text as Moses does, and check that its sides belong together.

    python recipes/mt_text.py tokenize OUT SOURCE TARGET PREFIX... [--max-words N]    # PREFIX.SOURCE[.gz] -> OUT.SOURCE
    python recipes/mt_text.py copy OUT SOURCE TARGET PREFIX...    # the same, but the text as it is

Several prefixes are read one after the other. SOURCE and TARGET are languages. --max-words leaves out pairs of which a
side is empty or has more words; without it an empty line is refused. --pairs N refuses text that has another number of
pairs. They are counted on standard output.
"""

import argparse
import gzip
import multiprocessing
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from sacremoses import MosesTokenizer

LINES_A_PIECE = 2000


def read_lines(prefix: Path, language: str) -> Iterator[str]:
    """The lines of PREFIX.LANGUAGE or PREFIX.LANGUAGE.gz; ValueError says what is wrong with it."""
    names = [prefix.with_name(f"{prefix.name}.{language}{ending}") for ending in ("", ".gz")]
    path = next((name for name in names if name.is_file()), None)
    if path is None:
        raise ValueError(f"there is neither {names[0]} nor {names[1].name}: give a folder that has it.")
    try:
        # Only \n ends a line: web text is full of what Python takes for other ends.
        with (
            gzip.open(path, "rt", encoding="utf-8", newline="\n")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8", newline="\n") as file
        ):
            for line in file:
                yield " ".join(line.split())
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}.") from error


def read_pairs(prefixes: list[Path], source: str, target: str) -> Iterator[tuple[str, str]]:
    """The pairs of lines; ValueError where the sides do not have as many."""
    for prefix in prefixes:
        sides = [read_lines(prefix, language) for language in (source, target)]
        try:
            yield from zip(*sides, strict=True)
        except ValueError as error:
            if "zip()" not in str(error):
                raise
            raise ValueError(f"{prefix}.{source} and {prefix}.{target} have different numbers of lines.") from error


def tokenize(pairs: list[tuple[str, str]], languages: tuple[str, str]) -> list[tuple[str, str]]:
    """The pairs, tokenised."""
    tokenizers = [MosesTokenizer(language) for language in languages]
    return [
        tuple(one.tokenize(text, return_str=True) for one, text in zip(tokenizers, pair, strict=True)) for pair in pairs
    ]


def pieces(pairs: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    piece = []
    for pair in pairs:
        piece.append(pair)
        if len(piece) == LINES_A_PIECE:
            yield piece
            piece = []
    if piece:
        yield piece


def write(
    out: Path,
    source: str,
    target: str,
    batches: Iterator[list[tuple[str, str]]],
    max_words: int | None,
    pairs: int | None,
) -> None:
    """Writes OUT.SOURCE and OUT.TARGET, line by line in step."""
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = left_out = 0
    with (
        Path(f"{out}.{source}").open("w", encoding="utf-8") as source_file,
        Path(f"{out}.{target}").open("w", encoding="utf-8") as target_file,
    ):
        files = source_file, target_file
        for batch in batches:
            for pair in batch:
                lengths = [len(text.split()) for text in pair]
                if max_words is None and 0 in lengths:
                    raise ValueError(f"pair {kept + 1:,} of {out.name} has an empty side.")
                if max_words is not None and not 0 < min(lengths) <= max(lengths) <= max_words:
                    left_out += 1
                    continue
                kept += 1
                for file, text in zip(files, pair, strict=True):
                    file.write(text + "\n")
    if pairs not in (None, kept + left_out):
        raise ValueError(
            f"{out.name} has {kept + left_out:,} pairs in place of {pairs:,}: this is another text than the recipe's. "
            "If it is meant, add --any-text."
        )
    if not kept:
        raise ValueError(f"{out.name} has no pairs" + (f": all {left_out:,} were left out." if left_out else "."))
    print(f"{out.name}: {kept:,} pairs" + (f", {left_out:,} left out" if left_out else ""))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tokenize", "copy"])
    parser.add_argument("out", type=Path)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("prefixes", type=Path, nargs="+", metavar="PREFIX")
    parser.add_argument("--max-words", type=int)
    parser.add_argument("--pairs", type=int)
    args = parser.parse_args(arguments)
    batches = pieces(read_pairs(args.prefixes, args.source, args.target))
    if args.stage == "copy":
        write(args.out, args.source, args.target, batches, args.max_words, args.pairs)
        return
    with multiprocessing.Pool() as pool:
        tokenized = pool.imap(partial(tokenize, languages=(args.source, args.target)), batches)
        write(args.out, args.source, args.target, tokenized, args.max_words, args.pairs)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"mt_text.py: {error}")
