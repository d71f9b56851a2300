"""Split a file as enwik8 is split, into text with a word for every byte.

    python recipes/enwik8/bytes.py FILE OUT [--sha256 CHECKSUM]

The first 90% of the bytes are OUT/train.txt, the next 5% OUT/valid.txt, the last 5% OUT/test.txt (Dai et al. 2019). A
printable byte of ASCII is itself, a line feed the end of a line, any other byte b the character U+0100 + b; so every
word is one character, and the loss in bits is that of a byte. Prints what lm_counts.py should find.
"""

import hashlib
import sys
from pathlib import Path

# How line ends are written is up to fairseq: it appends one to the last line too.
WORDS = [chr(byte) if 0x21 <= byte <= 0x7E else chr(0x100 + byte) for byte in range(256)]
SMALLEST = 1000  # bytes


def words(data: bytes) -> list[str]:
    """The lines of a piece of the file, as words separated by spaces."""
    lines = data.removesuffix(b"\n").split(b"\n")
    return [" ".join([WORDS[byte] for byte in line]) for line in lines]


def split(data: bytes) -> dict[str, bytes]:
    valid, test = len(data) * 90 // 100, len(data) * 95 // 100
    return {"train": data[:valid], "valid": data[valid:test], "test": data[test:]}


def write(file: Path, out: Path, checksum: str | None) -> dict[str, int]:
    """The number of tokens of each split; ValueError for a file that is not the one with the checksum."""
    if not file.is_file():
        raise ValueError(f"there is no file {file}: give a folder that holds it.")
    data = file.read_bytes()
    if len(data) < SMALLEST:
        raise ValueError(f"{file} has {len(data):,} bytes, but at least {SMALLEST:,} are needed.")
    if checksum and hashlib.sha256(data).hexdigest() != checksum:
        raise ValueError(
            f"{file}, {len(data):,} bytes, is not enwik8: its checksum differs. If it is meant, add --any-text."
        )
    tokens = {}
    for name, part in split(data).items():
        lines = words(part)
        (out / f"{name}.txt").write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")
        tokens[name] = len(part) + (not part.endswith(b"\n"))
    return tokens


if __name__ == "__main__":
    match sys.argv[1:]:
        case [file, out]:
            checksum = None
        case [file, out, "--sha256", checksum]:
            pass
        case _:
            sys.exit("usage: python recipes/enwik8/bytes.py FILE OUT [--sha256 CHECKSUM]")
    try:
        print(*(f"{name}={count}" for name, count in write(Path(file), Path(out), checksum).items()))
    except ValueError as error:
        sys.exit(f"bytes.py: {error}")
