"""The Python Enhancement Proposals as running text, from the sources in their repository.

A document starts with `= PEP n : title =`, a section with `= = heading = =`; a line is one paragraph. Other parts are
left out: the header except its title, blocks of code, tables, directives, comments, targets of links. A whole document
goes to train, valid or test, by a hash of its number.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from commands import RecipeError

from data.prepare import SPLITS, split_of, write_splits

# SHA-256 of train.txt, valid.txt and test.txt of the commit that texts.py names.
CHECKSUM = "f9a047bf643156c149eea2cbf99a572254b396149cff0359cc95cabbbea4c132"
UNDERLINE = re.compile(r"([=\-~^\"'`#*+.:_])\1{2,}")
TABLE = re.compile(r"[=+|-][=+| -]*[=+|-]?$|\+[-=]|\|")
MARKUP = (
    (re.compile(r":pep:`(?:[^`<]*<)?(\d+)[^`]*`"), r"PEP \1"),
    (re.compile(r":[\w:+.-]+:`~?([^`<]*?)(?: <[^`]*>)?`"), r"\1"),  # a role
    (re.compile(r"`([^`<]+?)\s*<[^`]*>`__?"), r"\1"),  # a link
    (re.compile(r"``([^`]*)``"), r"\1"),
    (re.compile(r"`([^`]*)`__?"), r"\1"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"\1"),
    (re.compile(r"(?<!\w)\*([^*\s][^*]*)\*(?!\w)"), r"\1"),
    (re.compile(r"\s*\[[\w#*-]+\]_"), ""),  # a footnote
)


def write(folder: Path, out: Path) -> None:
    """Write train.txt, valid.txt and test.txt from the folder of the sources. Raises RecipeError for other PEPs."""
    splits: dict[str, list[str]] = {split: [] for split in SPLITS}
    for path in sorted(folder.rglob("pep-[0-9][0-9][0-9][0-9].rst")):
        number = int(path.stem.removeprefix("pep-"))
        splits[split_of(str(number), valid=4, test=5)] += document(number, path.read_text(encoding="utf-8"))
    write_splits(splits, out)
    found = hashlib.sha256(b"".join((out / f"{split}.txt").read_bytes() for split in SPLITS)).hexdigest()
    if found != CHECKSUM:
        raise RecipeError(
            f"{folder} has other PEPs than the recipe's: the text's SHA-256 is {found}. Remove {folder} to download "
            "them again, or give another text with --data."
        )


def document(number: int, source: str) -> list[str]:
    """Return the lines of a document."""
    header, _, body = source.partition("\n\n")
    title = re.search(r"^Title:((?:.|\n(?=\s))*)", header, re.MULTILINE)
    name = plain(title[1]) if title else ""
    return [f"= PEP {number} : {name} =", *filter(None, map(plain, paragraphs(body)))]


def plain(text: str) -> str:
    """Return text without markup, its words separated by single spaces."""
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())


def paragraphs(body: str) -> Iterator[str]:
    """Yield headings and paragraphs of running text; items of a list are paragraphs."""
    skip_deeper: int | None = None  # lines indented deeper than this are left out
    for block in re.split(r"\n\s*\n", body.expandtabs(8)):
        lines = [line.rstrip() for line in block.split("\n") if line.strip()]
        if not lines:
            continue
        indent = len(lines[0]) - len(lines[0].lstrip())
        if skip_deeper is not None and indent > skip_deeper:
            continue
        skip_deeper = None
        first = lines[0].lstrip()
        if first.startswith(("..", "__ ", ">>>")) or TABLE.match(first):
            skip_deeper = indent if first.startswith("..") else None
        elif len(lines) > 1 and UNDERLINE.fullmatch(lines[1].strip()):
            yield f"= = {lines[0].strip()} = ="
            yield from items(lines[2:])
        else:
            if block.rstrip().endswith("::"):
                skip_deeper = indent
            yield from items(lines)


def items(lines: list[str]) -> Iterator[str]:
    """Yield a block as one paragraph, or each item of its list as one."""
    item: list[str] = []
    for line in lines:
        if re.match(r"\s*(?:[-*+]|\d+\.|\(?[a-z]\))\s", line) and item:
            yield ended(item)
            item = []
        item.append(line)
    if item:
        yield ended(item)


def ended(lines: list[str]) -> str:
    """Return the words of a paragraph; of two colons before a block of code one stays."""
    text = " ".join(line.strip() for line in lines)
    return text[:-1].removesuffix(":").rstrip() + ":" * (text != "::") if text.endswith("::") else text
