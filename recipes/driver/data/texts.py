"""The texts of language models: made, downloaded or read from a folder, checked, and split into words."""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from arguments import ROOT
from commands import RecipeError

from data import peps, prepare, stdlib
from data.fetch import Archive, sha256
from data.prepare import SPLITS, Data, find, read_lines, write_lines, write_splits

FEWEST_WORDS = {"train": 1000, "valid": 100, "test": 100}


class Text(NamedTuple):
    """A text: write(folder, out, any_text) writes SPLIT.txt and returns the expected counts, if any.

    archives: files to download if no folder is given; make: (folder of these, out), writes SPLIT.txt from them or
    without input, instead of `write`. copy: one file of raw text as words. show: a sample in readable form.
    """

    write: Callable[[Path, Path, bool], dict[str, int]]
    archives: tuple[Archive, ...] = ()
    make: Callable[[Path, Path], None] | None = None
    copy: Callable[[Path, Path], None] = lambda file, out: write_lines(list(read_lines(file)), out)
    show: Callable[[str], str] = str


def checksum(folder: Path) -> str:
    """Return one checksum of the texts in a folder, independent of its name."""
    files = sorted(folder.glob("*.txt*"))
    if not files:
        return ""
    lines = sorted(subprocess.run(["cksum", *files], capture_output=True, text=True, check=True).stdout.splitlines())
    listed = "\n".join(lines) + "\n"
    return subprocess.run(["cksum"], input=listed, capture_output=True, text=True, check=True).stdout.strip()


# Any text, as lines of words.


def write_words(folder: Path, out: Path, any_text: bool = True) -> dict[str, int]:
    """Copy the three texts of a folder. Raises RecipeError if one is missing or too short to learn from."""
    splits = {}
    for name, fewest in FEWEST_WORDS.items():
        if not (path := find(folder / f"{name}.txt")):
            missing = f"{folder / name}.txt is missing: "
            raise RecipeError(missing + "the folder must have train, valid and test as .txt or .txt.gz.")
        splits[name] = list(read_lines(path))
        if (count := sum(len(line.split()) for line in splits[name])) < fewest:
            raise RecipeError(f"{path} must have at least {fewest} words, got {count}.")
    write_splits(splits, out)
    return {}


# WikiText-103, which is already split into words.


def write_wikitext(folder: Path, out: Path, any_text: bool) -> dict[str, int]:
    for split in SPLITS:
        names = (f"wiki.{split}.tokens", f"wikitext-103/wiki.{split}.tokens", f"{split}.txt")
        file = next((path for name in names if (path := folder / name).is_file()), None)
        if file is None:
            raise RecipeError(f"{folder} must have {names[0]} or {names[-1]}: give a folder that has WikiText-103.")
        (out / f"{split}.txt").write_bytes(file.read_bytes())
    # The paper's 267,735 words include the end of a line and <unk>.
    return {} if any_text else {"train": 103227021, "valid": 217646, "test": 245569, "words": 267733}


# enwik8, a word for each byte: a printable byte of ASCII is the word, a line feed ends a line, and any other byte b is
# the character U+0100 + b. So every word is one character, and the loss in bits is that of a byte.
BYTES = [chr(byte) if 0x21 <= byte <= 0x7E else chr(0x100 + byte) for byte in range(256)]
FEWEST_BYTES = 1000


def write_bytes(folder: Path, out: Path, any_text: bool) -> dict[str, int]:
    """Write the first 90% of the bytes as train.txt, the next 5% as valid.txt, the last as test.txt (Dai et al. 2019).

    Returns the number of tokens of each. Raises RecipeError for another file.
    """
    file = folder / "enwik8"
    if not file.is_file():
        raise RecipeError(f"{file} must exist: give a folder that has it.")
    data = file.read_bytes()
    if len(data) < FEWEST_BYTES:
        raise RecipeError(f"{file} must have at least {FEWEST_BYTES:,} bytes, got {len(data):,}.")
    if not any_text and sha256(file) != "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8":
        raise RecipeError(
            f"{file}, {len(data):,} bytes, is not enwik8: its checksum differs. If it is meant, add --any-text."
        )
    ends = [len(data) * per_cent // 100 for per_cent in (0, 90, 95, 100)]
    parts = {name: data[start:end] for name, (start, end) in zip(SPLITS, pairwise(ends), strict=True)}
    for name, part in parts.items():
        copy_bytes(part, out / f"{name}.txt")
    # fairseq writes line ends: it appends one to the last line too.
    return {name: len(part) + (not part.endswith(b"\n")) for name, part in parts.items()}


def copy_bytes(data: bytes, out: Path) -> None:
    """Write the lines of a part of the file, as words separated by spaces."""
    lines = (" ".join([BYTES[byte] for byte in line]) for line in data.removesuffix(b"\n").split(b"\n"))
    out.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")


WIKITEXT = "s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip"
WIKITEXT_URLS = (
    "https://wikitext.smerity.com/wikitext-103-v1.zip",
    f"https://{WIKITEXT}",
    f"https://web.archive.org/web/2022id_/https://{WIKITEXT}",
)
# The checksum of the archive that Salesforce Research published.
WIKITEXT_SUM = "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"
ENWIK8_URLS = (
    "http://mattmahoney.net/dc/enwik8.zip",
    "https://data.deepai.org/enwik8.zip",
    "https://web.archive.org/web/2022id_/http://mattmahoney.net/dc/enwik8.zip",
)
ENWIK8_SUM = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
# The archive of a commit may change, so the checksum is that of the text.
PEPS_COMMIT = "ba4deeb7969588d937da609008d05bb83a47b1ab"
PEPS_URLS = (
    f"https://codeload.github.com/python/peps/tar.gz/{PEPS_COMMIT}",
    f"https://github.com/python/peps/archive/{PEPS_COMMIT}.tar.gz",
)
TEXTS = {
    "stdlib": Text(write_words, make=lambda _, out: stdlib.write(out), show=stdlib.show),
    "peps": Text(write_words, (Archive("peps.tar.gz", None, PEPS_URLS),), make=peps.write),
    "wikitext103": Text(write_wikitext, (Archive("wikitext-103-v1.zip", WIKITEXT_SUM, WIKITEXT_URLS),)),
    "enwik8": Text(
        write_bytes,
        (Archive("enwik8.zip", ENWIK8_SUM, ENWIK8_URLS),),
        copy=lambda file, out: copy_bytes(file.read_bytes(), out),
    ),
}


@dataclass(frozen=True)
class TextData(Data):
    """The data of a recipe of language models.

    name: that of its text; own_folder: that of --data, if any; merges: of BPE, 0: whole words; lines: how many of
    valid and test are used, None: all; any_text: accept another text than the recipe's.
    """

    name: str
    own_folder: Path | None
    merges: int
    lines: int | None
    any_text: bool

    @property
    def text(self) -> Text:
        return TEXTS[self.name]

    @property
    def words(self) -> Path:
        """The folder of the files that fairseq-preprocess has read."""
        return self.folder / ("bpe" if self.merges else "text")

    @property
    def codes(self) -> Path:
        return self.folder / "bpe" / "codes"

    @property
    def source(self) -> Path | None:
        """The folder that the text is read from: the given one, or the one of its name in data/."""
        here = ROOT / "data" / self.name
        return self.own_folder.absolute() if self.own_folder else here if here.is_dir() else None

    def settings(self) -> str:
        source = self.source if self.merges else self.own_folder
        if self.folder.is_dir() and not source and self.text.archives:
            return ""
        if not self.merges:
            return f"any text of {self.own_folder.absolute()}" if self.own_folder and self.any_text else "the corpus"
        if not source and self.text.archives:
            return f"{self.merges} merges; downloaded"
        lines = f"; {self.lines} lines of valid and test" if self.lines else ""
        sum_of_files = f" {checksum(self.source)}" if self.source else ""
        return f"{self.merges} merges; {self.source or 'own text'}{lines}{sum_of_files}"

    def write(self, work: Path) -> None:
        text = work / "text"
        text.mkdir()
        expected = self.write_text(text)
        if self.lines:
            prepare.cut(text, self.lines)
        if self.merges:
            prepare.learn_bpe(text / "train.txt", self.merges, work / "bpe" / "codes")
            for split in SPLITS:
                prepare.apply_bpe(work / "bpe" / "codes", text / f"{split}.txt", work / "bpe" / f"{split}.txt")
            text = work / "bpe"
        prepare.preprocess_text(text, work / "bin")
        prepare.check_counts(work / "bin", expected)
        if not self.merges:
            prepare.remove(text / "train.txt")

    def write_text(self, out: Path) -> dict[str, int]:
        """Write SPLIT.txt; return the expected counts."""
        if self.source:
            return self.text.write(self.source, out, self.any_text)
        for archive in self.text.archives:
            archive.fetch(self.out / "download")
        if self.text.make:
            self.text.make(self.out / "download", out)
            return {}
        return self.text.write(self.out / "download", out, False)

    def write_test(self, test: Path, work: Path) -> None:
        self.text.copy(test, work / "test.txt")
        if self.merges:
            raw = (work / "test.txt").replace(work / "raw.txt")
            prepare.apply_bpe(self.codes, raw, work / "test.txt")
        words = ("--srcdict", self.bin / "dict.txt", "--testpref", work / "test.txt")
        prepare.preprocess(work / "bin", "--only-source", *words)
