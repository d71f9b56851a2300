"""Prepare text for fairseq, once: lines, subwords, fairseq-preprocess, and counts of the result."""

import gzip
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from commands import RecipeError, check_same, lock, run, whole, write

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Data:
    """The data of a recipe, in the folder `data` of its output `out`, which exists when they are complete."""

    out: Path

    @property
    def folder(self) -> Path:
        return self.out / "data"

    @property
    def bin(self) -> Path:
        """The folder that fairseq-preprocess writes."""
        return self.folder / "bin"

    @property
    def words(self) -> Path | None:
        """The folder of the files that fairseq-preprocess has read, whose words fwp-eval-lm must score, if any."""
        return None

    @property
    def converted(self) -> Path | None:
        """The folder of the softmax model that is called `source`, as fwp-convert wrote it, if there is one."""
        return None

    @property
    def results(self) -> Path | None:
        """The folder of the results of that model."""
        return self.converted

    @property
    def conversion(self) -> list[object]:
        """Flags of fwp-convert for models that are trained on the data."""
        return ["--source", "fwp-lm", "--vocabulary", self.bin / "dict.txt"]

    def settings(self) -> str:
        """Return the source of the data in words; empty if existing data are always used."""
        raise NotImplementedError

    def write(self, work: Path) -> None:
        """Write the data into a folder."""
        raise NotImplementedError

    def prepare(self, before_training: bool) -> None:
        """Write the data, unless they are there. Raises RecipeError if they are those of other settings."""
        settings = self.settings()
        if self.folder.is_dir():
            if settings:
                check_same(self.folder / "source.txt", settings)
            return
        lock(self.out)
        # Compile the kernels meanwhile: most of the preparation uses one core. If it fails, the training says why.
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        build = subprocess.Popen(["fwp-info", "--build"], **quiet) if before_training else None
        make(self.folder, self.write, settings)
        if build and build.poll() is None:
            print("The kernels are being compiled, once for this machine.", flush=True)

    def write_test(self, test: Path, work: Path) -> None:
        """Write a text of the user, --test, into a folder, in the words of the data."""
        raise NotImplementedError

    def own_test(self, name: str, test: Path, files: list[Path]) -> Path:
        """Return the folder of the text of --test, of these files; print its share of unknown tokens.

        Raises RecipeError for an empty text, and if that of other files was evaluated before under its name.
        """

        def write_text(work: Path) -> None:
            self.write_test(test, work)
            if ": 0 sents, " in (work / "preprocess.log").read_text(encoding="utf-8"):
                raise RecipeError(f"--test must be a text of at least one line, got {test}, which is empty.")

        folder, settings = self.out / "tests" / name, known_as(*files)
        lock(folder.parent)
        if not folder.is_dir():
            make(folder, write_text, settings)
        if (folder / "source.txt").read_text(encoding="utf-8").strip() != settings:
            raise RecipeError(
                f"{folder} holds another text of this name, which was evaluated before (see source.txt in it): rename "
                f"the new text, or remove {folder} and {name}*.json next to the models."
            )
        for file, tokens, share in unknown_shares(folder / "preprocess.log"):
            language = f", {file.suffix[1:]}" if file.suffix in (".en", ".de") else ""
            print(f"{test}{language}: {tokens:,} tokens, of which {share:g} % are not in the vocabulary (<unk>)")
        return folder


def make(folder: Path, prepare: Callable[[Path], None], settings: str) -> None:
    """Make a folder of data, with its source."""
    with whole(folder) as work:
        work.mkdir()
        prepare(work)
        write(work / "source.txt", settings + "\n")


def find(path: Path) -> Path | None:
    """Return the path of a text, which may be packed as PATH.gz; None without one."""
    return next(filter(Path.is_file, (path, path.with_name(path.name + ".gz"))), None)


def read_lines(path: Path, newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a text, its words separated by single spaces: programs define white space differently.

    newline: as for `open`. Raises RecipeError for a file that is not UTF-8 text.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", newline=newline) as file:
            for line in file:
                yield " ".join(line.split())
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise RecipeError(f"{path} cannot be read as UTF-8 text: {error}.") from error


def write_lines(lines: list[str], out: Path) -> None:
    out.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")


def write_splits(splits: dict[str, list[str]], out: Path) -> None:
    """Write SPLIT.txt of each split into a folder, and print its size."""
    for split, lines in splits.items():
        write_lines(lines, out / f"{split}.txt")
        print(f"{split}: {len(lines):,} lines, {sum(len(line.split()) for line in lines):,} words")


def split_of(name: str, valid: int, test: int) -> str:
    """Return the split of a document by a hash of its name; valid, test: their shares in per cent."""
    per_cent = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 100
    return "valid" if per_cent < valid else "test" if per_cent < valid + test else "train"


def cut(folder: Path, lines: int) -> None:
    """Keep the first lines of valid and test, for a trial."""
    for split in ("valid", "test"):
        path = folder / f"{split}.txt"
        with path.open(encoding="utf-8") as file:
            kept = "".join(itertools.islice(file, lines))
        path.write_text(kept, encoding="utf-8")


def learn_bpe(text: Path, merges: int, codes: Path) -> None:
    """Learn merges of byte-pair encoding from one text."""
    codes.parent.mkdir(parents=True, exist_ok=True)
    run("subword-nmt", "learn-bpe", "-s", merges, "-i", text, "-o", codes)


def apply_bpe(codes: Path, text: Path, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    run("subword-nmt", "apply-bpe", "-c", codes, "--num-workers", os.cpu_count(), "-i", text, "-o", out)


def preprocess(out: Path, *flags: object) -> None:
    """Run fairseq-preprocess into the folder `out`; its output goes to preprocess.log next to it."""
    run("fairseq-preprocess", "--destdir", out, *flags, log=out.parent / "preprocess.log")


def preprocess_text(folder: Path, out: Path, *flags: object) -> None:
    """Run fairseq-preprocess on SPLIT.txt of a folder."""
    prefixes = [word for split in SPLITS for word in (f"--{split}pref", folder / f"{split}.txt")]
    preprocess(out, "--only-source", *prefixes, "--workers", os.cpu_count(), *flags)


def known_as(*files: Path) -> str:
    """Return an identity of files of the user, such as a text: the path and a checksum of each."""
    return " ".join(f"{file.absolute()} {zlib.crc32(file.read_bytes())}" for file in files)


def unknown_shares(log: Path) -> list[tuple[Path, int, float]]:
    """Return the files in a log of fairseq-preprocess, each with its tokens and the per cent that are unknown."""
    found = re.findall(r"(\S+): \d+ sents, (\d+) tokens, (\S+)% replaced", log.read_text(encoding="utf-8"))
    return [(Path(file), int(tokens), float(share)) for file, tokens, share in found]


def count(text: Path) -> int:
    """Return the number of words and line ends of a text, as fairseq counts them."""
    with text.open(encoding="utf-8") as file:
        return sum(len(line.split()) + 1 for line in file)


def check_counts(folder: Path, expected: dict[str, int]) -> None:
    """Print the tokens of each split, line ends included, and the words of the dictionary, from fairseq-preprocess.

    Raises RecipeError unless they are the expected ones, and for a split without tokens.
    """
    found = {file.stem: tokens for file, tokens, _ in unknown_shares(folder.parent / "preprocess.log")}
    for split in SPLITS:
        if not found.get(split):
            raise RecipeError(f"{split}.txt must have at least one line of text, got none.")
    found["words"] = sum(not line.startswith("madeupword") for line in read_lines(folder / "dict.txt"))
    print(", ".join(f"{name} {number:,}" for name, number in found.items()))
    wrong = [f"{name} {found[name]:,} in place of {n:,}" for name, n in expected.items() if found[name] != n]
    if wrong:
        raise RecipeError(
            f"this is another text than the recipe's: {', '.join(wrong)}. If it is meant, add --any-text."
        )


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
