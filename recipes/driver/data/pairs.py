"""The parallel texts of translation: downloaded or read from a folder, tokenised as in Moses, and checked."""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from commands import RecipeError, write

from data.fetch import Archive
from data.prepare import SPLITS, Data, apply_bpe, find, learn_bpe, preprocess, read_lines, remove

LANGUAGES = SOURCE, TARGET = "en", "de"
OF_LANGUAGES = ("--source-lang", SOURCE, "--target-lang", TARGET)
LINES_A_PIECE = 2000


# Pairs of lines.


def copy(
    out: Path,
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
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = left_out = 0
    with contextlib.ExitStack() as stack:
        found = read = read_pairs(prefixes)
        if tokenized:
            pieces = iter(lambda: list(itertools.islice(read, LINES_A_PIECE)), [])
            # Not forks: SIGTERM would be an exception in them too, which one that begins to wait may never see.
            pool = stack.enter_context(get_context("forkserver").Pool())
            found = itertools.chain.from_iterable(pool.imap(tokenize, pieces))
        files = [stack.enter_context(open(f"{out}.{language}", "w", encoding="utf-8")) for language in LANGUAGES]
        for pair in found:
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


def sides(prefix: Path) -> list[Path]:
    """Return PREFIX.LANGUAGE or PREFIX.LANGUAGE.gz of both languages. Raises RecipeError without one."""
    paths = [prefix.with_name(f"{prefix.name}.{language}") for language in LANGUAGES]
    for path in paths:
        if not find(path):
            raise RecipeError(f"{path} or {path.name}.gz must exist: give a folder that has it.")
    return [*map(find, paths)]


def read_pairs(prefixes: Iterable[Path]) -> Iterator[tuple[str, ...]]:
    """Yield the pairs of lines. Raises RecipeError if the sides have different numbers of lines."""
    for prefix in prefixes:
        # Only \n ends a line: web text has many characters that Python takes for line ends.
        lines = [read_lines(path, newline="\n") for path in sides(prefix)]
        try:
            yield from zip(*lines, strict=True)
        except ValueError as error:  # of zip; a RecipeError has its own message
            files = " and ".join(f"{prefix}.{language}" for language in LANGUAGES)
            raise RecipeError(f"{files} have different numbers of lines.") from error


def tokenize(pairs: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    from sacremoses import MosesTokenizer

    tokenizers = [MosesTokenizer(language) for language in LANGUAGES]
    return [
        tuple(one.tokenize(text, return_str=True) for one, text in zip(tokenizers, pair, strict=True)) for pair in pairs
    ]


# The texts.


class Text(NamedTuple):
    """A parallel text.

    write: (folder, out, any_text) writes out/tok/SPLIT.LANGUAGE, or out/bpe/... if it has BPE already, and untokenised
    out/text/{valid,test}.LANGUAGE if there is such text. archives: files to download if no folder is given.
    """

    write: Callable[[Path, Path, bool], None]
    archives: tuple[Archive, ...] = ()


def write_multi30k(folder: Path, out: Path, any_text: bool) -> None:
    for split, name in {"train": "train", "valid": "val", "test": "test_2016_flickr"}.items():
        prefix = folder / (split if any_text and find(folder / f"{split}.en") else name)
        copy(out / "tok" / split, [prefix], tokenized=True)
        if split != "train":
            copy(out / "text" / split, [prefix])


# WMT14. For each split: its raw texts, the number of pairs, and its name in the public tokenised set.
TRAINING_TEXTS = ("europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v9.de-en")
WMT14 = {
    "train": (TRAINING_TEXTS, 4520620, "train.tok.clean.bpe.32000"),
    "valid": (("newstest2013",), 3000, "newstest2013.tok.bpe.32000"),
    "test": (("newstest2014",), 3003, "newstest2014.tok.bpe.32000"),
}


def write_wmt14(folder: Path, out: Path, any_text: bool) -> None:
    public = (folder / "train.tok.clean.bpe.32000.en").exists()
    for split, (names, number, name) in WMT14.items():
        train, pairs = split == "train", None if any_text else number
        if public:  # it has BPE; its training text was cleaned, so it has fewer pairs
            copy(out / "bpe" / split, [folder / name], pairs=None if train else pairs)
            if not train and (folder / f"{names[0]}.de").exists():
                copy(out / "text" / split, [folder / names[0]], pairs=pairs)
            continue
        names = (split,) if any_text and find(folder / f"{split}.en") else names
        prefixes = [from_sgm(folder, name, out / "raw") or locate(folder, name) for name in names]
        copy(out / "tok" / split, prefixes, tokenized=True, max_words=80 if train else None, pairs=pairs)
        if not train:
            copy(out / "text" / split, prefixes)


def below(folder: Path, *names: str) -> Path | None:
    """Return the first file of these names in a folder or the two levels below it."""
    places = (folder.glob(depth + name) for depth in ("", "*/", "*/*/") for name in names)
    return next((found[0] for found in map(sorted, places) if found), None)


def locate(folder: Path, name: str) -> Path:
    """Return the path of NAME.en and NAME.de without their endings. Raises RecipeError."""
    if file := below(folder, f"{name}.en", f"{name}.en.gz"):
        return file.with_name(name)
    raise RecipeError(f"{folder} must have {name}.en: give a folder that has it, or leave out --data to download it.")


def from_sgm(folder: Path, name: str, out: Path) -> Path | None:
    """Write the plain text of NAME-*src.en.sgm and NAME-*ref.de.sgm below a folder, if any; return its prefix."""
    for side, language in (("src", "en"), ("ref", "de")):
        file = below(folder, f"{name}-deen-{side}.{language}.sgm", f"{name}-{side}.{language}.sgm")
        if file is None:
            return None
        lines = re.findall(r"^<seg[^>]*> *(.*[^ ]) *</seg>", file.read_text(encoding="utf-8"), re.MULTILINE)
        write(out / f"{name}.{language}", "".join(line + "\n" for line in lines))
    return out / name


def multi30k_archive(name: str, checksum: str) -> Archive:
    commit, path = "a3d2e0d26b56f3846f66a952536ffed4e401d05a", f"data/task1/raw/{name}"
    urls = (
        f"https://raw.githubusercontent.com/multi30k/dataset/{commit}/{path}",
        f"https://cdn.jsdelivr.net/gh/multi30k/dataset@{commit}/{path}",
        f"https://github.com/multi30k/dataset/raw/{commit}/{path}",
    )
    return Archive(name, checksum, urls)


def wmt_archive(at: str, checksum: str, members: str = "*.de-en.??") -> Archive:
    """An archive of the task's pages; checksums are those of TensorFlow Datasets."""
    urls = (f"https://{at}", f"http://{at}", f"https://web.archive.org/web/2023id_/http://{at}")
    return Archive(at.rpartition("/")[2], checksum, urls, (members,))


MULTI30K = (
    ("train.en.gz", "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f"),
    ("train.de.gz", "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6"),
    ("val.en.gz", "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28"),
    ("val.de.gz", "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a"),
    ("test_2016_flickr.en.gz", "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9"),
    ("test_2016_flickr.de.gz", "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8"),
)
OF_2013, OF_2014, OF_2019 = "www.statmt.org/wmt13", "www.statmt.org/wmt14", "data.statmt.org/wmt19/translation-task"
EUROPARL = "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7"
WEB = "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5"
NEWS = "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485"
TESTS = "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7"
WMT14_ARCHIVES = (
    wmt_archive(f"{OF_2013}/training-parallel-europarl-v7.tgz", EUROPARL),
    wmt_archive(f"{OF_2013}/training-parallel-commoncrawl.tgz", WEB),
    wmt_archive(f"{OF_2014}/training-parallel-nc-v9.tgz", NEWS),
    wmt_archive(f"{OF_2019}/dev.tgz", TESTS, "*newstest201[34]*"),
)
PAIRS = {
    "multi30k": Text(write_multi30k, tuple(multi30k_archive(*one) for one in MULTI30K)),
    "wmt14_en_de": Text(write_wmt14, WMT14_ARCHIVES),
}


@dataclass(frozen=True)
class PairData(Data):
    """The data of a recipe of translation.

    name: that of its text; own_folder: that of --data, if any; merges: of BPE; vocabulary: flags of fairseq-preprocess;
    any_text: accept another text than the recipe's.
    """

    name: str
    own_folder: Path | None
    merges: int
    vocabulary: str
    any_text: bool

    @property
    def conversion(self) -> list[object]:
        return ["--source", "fairseq-mt", "--vocabulary", self.bin]

    def settings(self) -> str:
        if not self.own_folder and self.folder.is_dir():
            return ""
        kind = " any text;" if self.any_text else ""
        return f"{self.merges} merges;{kind} {self.own_folder.resolve() if self.own_folder else 'downloaded'}"

    def write(self, work: Path) -> None:
        text, source = PAIRS[self.name], self.own_folder or self.out / "download"
        for archive in text.archives if not self.own_folder else ():
            archive.fetch(source)
        text.write(source, work, self.any_text)
        if not (work / "bpe").is_dir():
            self.cut_into_pieces(work)
        prefixes = [word for split in SPLITS for word in (f"--{split}pref", work / "bpe" / split)]
        words = ("--joined-dictionary", *prefixes, "--workers", os.cpu_count(), *self.vocabulary.split())
        preprocess(work / "bin", *OF_LANGUAGES, *words)
        for split in ("valid", "test"):  # scores are of words: undo BPE
            pieces = (work / "bpe" / f"{split}.{TARGET}").read_text(encoding="utf-8")
            write(work / "tok" / f"{split}.{TARGET}", re.sub(r"@@( |$)", "", pieces, flags=re.MULTILINE))
        for folder in (work / "tok", work / "bpe"):
            for language in LANGUAGES:
                remove(folder / f"train.{language}")

    def cut_into_pieces(self, work: Path) -> None:
        """Split all texts into subwords: one vocabulary for both languages, learned only on the training text."""
        both, codes = work / "both", work / "bpe" / "codes"
        with both.open("wb") as file:
            for language in LANGUAGES:
                file.write((work / "tok" / f"train.{language}").read_bytes())
        learn_bpe(both, self.merges, codes)
        both.unlink()
        for name in (f"{split}.{language}" for split in SPLITS for language in LANGUAGES):
            apply_bpe(codes, work / "tok" / name, work / "bpe" / name)

    def write_test(self, test: Path, work: Path) -> None:
        codes = self.folder / "bpe" / "codes"
        if not codes.exists():
            raise RecipeError(
                f"--test needs the BPE codes of the training, but {self.folder} was made from text with BPE: prepare "
                "raw text in another --out."
            )
        copy(work / "tok" / "test", [test], tokenized=True)
        copy(work / "text" / "test", [test])
        for language in LANGUAGES:
            apply_bpe(codes, work / "tok" / f"test.{language}", work / "bpe" / f"test.{language}")
        words = ["--srcdict", self.bin / f"dict.{SOURCE}.txt", "--tgtdict", self.bin / f"dict.{TARGET}.txt"]
        preprocess(work / "bin", *OF_LANGUAGES, *words, "--testpref", work / "bpe" / "test")
