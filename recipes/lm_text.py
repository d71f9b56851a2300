"""Check a folder's train, valid and test text and copy it for tokenisation: `python recipes/lm_text.py FOLDER OUT`.

Each of the three is NAME.txt or NAME.txt.gz in UTF-8, one sentence or paragraph per line. The words of the copy
are separated by single spaces, so that subword-nmt and fairseq, which differ in what white space is to them,
count the same words.
"""

import gzip
import sys
from pathlib import Path

FEWEST_WORDS = {"train": 1000, "valid": 100, "test": 100}


def read_words(folder: Path, name: str) -> list[list[str]]:
    """The words of each line; ValueError says in one sentence what is wrong."""
    path = next((path for ending in (".txt", ".txt.gz") if (path := folder / (name + ending)).is_file()), None)
    if path is None:
        raise ValueError(f"{folder / name}.txt is missing: the folder needs train, valid and test as .txt or .txt.gz.")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            lines = [line.split() for line in file]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}.") from error
    words = sum(map(len, lines))
    if words < FEWEST_WORDS[name]:
        raise ValueError(f"{path} has {words} words, but at least {FEWEST_WORDS[name]} are needed: give it more text.")
    return lines


def copy(folder: Path, out: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"the folder {folder} does not exist: give one that holds train.txt, valid.txt and test.txt.")
    splits = {name: read_words(folder, name) for name in FEWEST_WORDS}
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in splits.items():
        (out / f"{name}.txt").write_text("".join(" ".join(line) + "\n" for line in lines), encoding="utf-8")
        print(f"{name}: {len(lines):,} lines, {sum(map(len, lines)):,} words")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python recipes/lm_text.py FOLDER OUT")
    try:
        copy(Path(sys.argv[1]), Path(sys.argv[2]))
    except ValueError as error:
        sys.exit(f"lm_text.py: {error}")
