"""The text of the Python standard library that runs this program, as train.txt, valid.txt and test.txt.

A real corpus that is already on every machine with Python: the sources, with their docstrings, and the reference
topics that `help()` shows. One line of the output is one block (a top-level function or class, or a run of statements
up to a blank line). Inside it, a line break before n levels of indentation (4 columns each) is the word
`\u23cen`. So a language model learns the layout, and `show` can print a sample as code.

A whole file goes to train, valid or test, by a hash of its path: the same on every machine, and no file is in two of
them. The files come in the order of that hash until `MAX_BYTES` are taken.
"""

import contextlib
import hashlib
import re
import sysconfig
from pathlib import Path

from data.prepare import SPLITS, split_of, write_splits

MAX_BYTES = 6_000_000  # about 1.8 million subwords; the quick start reads a sixth of them
HELD_OUT = 5  # per cent of the files for valid, and as many for test
BREAK = "\u23ce"
# Test suites, code that is not part of the library, generated tables, programs, and what is read as topics.
SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test", "testing", "site-packages", "dist-packages", "ensurepip", "encodings"),
    *("lib2to3", "msilib", "pydoc_data", "idlelib", "turtledemo", "__phello__"),
}


def standard_library() -> dict[str, str]:
    """Return the text of each usable file or topic by its path."""
    root, texts = Path(sysconfig.get_path("stdlib")), {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED_FOLDERS & {*name.split("/")[:-1]} or name.startswith(("config-", "_sysconfigdata")):
            continue
        with contextlib.suppress(UnicodeDecodeError):
            text = path.read_text(encoding="utf-8")
            # Files of digits and signs are tables.
            if len(text) >= 200 and sum(map(str.isalpha, text)) >= 0.5 * len("".join(text.split())):
                texts[name] = text
    with contextlib.suppress(ImportError):  # some distributions lack the topics
        from pydoc_data.topics import topics

        texts.update((f"topics/{name}", text) for name, text in topics.items() if len(text) >= 200)
    return texts


def blocks(text: str) -> list[str]:
    """Split a file at blank lines before unindented text; one output line per block."""
    found = []
    for block in re.split(r"\n\s*\n(?=\S)", text.expandtabs(4)):
        lines = [line for line in block.split("\n") if line.strip()]
        words = []
        for line in lines:
            levels = (len(line) - len(line.lstrip())) // 4
            words += [f"{BREAK}{levels}", *line.split()] if words else line.split()
        if words:
            found.append(" ".join(words))
    return found


def write(out: Path) -> None:
    """Write train.txt, valid.txt and test.txt into a folder, and print a summary."""
    texts, taken = standard_library(), 0
    splits: dict[str, list[str]] = {split: [] for split in SPLITS}
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        size = len(texts[name].encode())
        if taken + size <= MAX_BYTES:
            taken += size
            splits[split_of(name, HELD_OUT, HELD_OUT)] += blocks(texts[name])
    write_splits(splits, out)


def show(text: str) -> str:
    """Undo the line-break words of `blocks`, with an empty line between two blocks."""
    return re.sub(rf" ?{BREAK}(\d+) ?", lambda match: "\n" + "    " * int(match[1]), text.replace("\n", "\n\n"))
