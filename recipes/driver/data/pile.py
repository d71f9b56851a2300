"""The Pile (Gao et al. 2020) as it is distributed: JSON lines packed by Zstandard, each a document under "text".

The names are the Pile's: train/*.jsonl.zst or train.jsonl.zst, val.jsonl.zst and test.jsonl.zst. Any part of the
training files will do.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path

from commands import RecipeError

from data.tokens import MARK

NAMES = {"train": ("train/*.jsonl.zst", "train.jsonl.zst"), "valid": ("val.jsonl.zst",), "test": ("test.jsonl.zst",)}


def files(folder: Path, split: str) -> list[Path]:
    """Return the packed files of a split, in order; none if there is no such file."""
    return [path for name in NAMES[split] for path in sorted(folder.glob(name))]


def write(packed: list[Path], out: Path) -> None:
    """Write the documents as text, with a line <|endoftext|> after each."""
    with out.open("w", encoding="utf-8", newline="") as file:
        for path in packed:
            file.writelines(f"{document}\n{MARK}\n" for document in documents(path))


def documents(path: Path) -> Iterator[str]:
    """Yield the documents of a file. Raises RecipeError without zstandard, and for a file of another kind."""
    try:
        import zstandard
    except ImportError as error:
        raise RecipeError(f"{path} needs zstandard: pip install 'fairseq_fwp[pile]'.") from error
    try:
        with path.open("rb") as packed:
            lines = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
            for number, line in enumerate(io.TextIOWrapper(lines, encoding="utf-8", newline="\n"), 1):
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError):
                    words = f"it must be a document of the Pile, got {line[:60]!r}"
                    raise RecipeError(f"{path}, line {number}: {words}.") from None
                yield text
    except (zstandard.ZstdError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be unpacked: {error}.") from error
