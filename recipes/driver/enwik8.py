"""Split a file as enwik8 is split, into text with a word for every byte.

The first 90% of the bytes are train.txt, the next 5% valid.txt, the last 5% test.txt (Dai et al. 2019). A printable
byte of ASCII is the word, a line feed ends a line, and any other byte b is the character U+0100 + b. So every word is
one character, and the loss in bits is that of a byte.
"""

import hashlib
from pathlib import Path

from commands import RecipeError

WORDS = [chr(byte) if 0x21 <= byte <= 0x7E else chr(0x100 + byte) for byte in range(256)]
SMALLEST = 1000  # bytes


def split(data: bytes) -> dict[str, bytes]:
    valid, test = len(data) * 90 // 100, len(data) * 95 // 100
    return {"train": data[:valid], "valid": data[valid:test], "test": data[test:]}


def write(file: Path, out: Path, checksum: str | None) -> dict[str, int]:
    """Write the splits; return the number of tokens of each. Raises RecipeError for another checksum."""
    if not file.is_file():
        raise RecipeError(f"{file} must exist: give a folder that has it.")
    data = file.read_bytes()
    if len(data) < SMALLEST:
        raise RecipeError(f"{file} must have at least {SMALLEST:,} bytes, got {len(data):,}.")
    if checksum and hashlib.sha256(data).hexdigest() != checksum:
        raise RecipeError(
            f"{file}, {len(data):,} bytes, is not enwik8: its checksum differs. If it is meant, add --any-text."
        )
    parts = split(data)
    for name, part in parts.items():
        write_words(part, out / f"{name}.txt")
    # fairseq writes line ends: it appends one to the last line too.
    return {name: len(part) + (not part.endswith(b"\n")) for name, part in parts.items()}


def write_words(data: bytes, out: Path) -> None:
    """Write the lines of a part of the file, as words separated by spaces."""
    lines = (" ".join([WORDS[byte] for byte in line]) for line in data.removesuffix(b"\n").split(b"\n"))
    out.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")
