"""The parallel texts of translation: downloaded or read from a folder, tokenised and checked."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from commands import RecipeError, write
from fetch import Archive
from parallel import copy

LANGUAGES = ("en", "de")


class Text(NamedTuple):
    """A parallel text.

    write: (folder, out, any_text) writes out/tok/SPLIT.LANGUAGE, or out/bpe/... if it has BPE already, and untokenised
    out/text/{valid,test}.LANGUAGE if there is such text. archives: files to download if no folder is given.
    """

    write: Callable[[Path, Path, bool], None]
    archives: tuple[Archive, ...] = ()


def write_multi30k(folder: Path, out: Path, any_text: bool) -> None:
    for split, name in {"train": "train", "valid": "val", "test": "test_2016_flickr"}.items():
        if any_text and any((folder / f"{split}.en{ending}").is_file() for ending in ("", ".gz")):
            name = split
        copy(out / "tok" / split, LANGUAGES, [folder / name], tokenized=True)
        if split != "train":
            copy(out / "text" / split, LANGUAGES, [folder / name])


# WMT14. For each split: its raw texts, the number of pairs, and its name in the public tokenised set.
WMT14 = {
    "train": (
        ("europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v9.de-en"),
        4520620,
        "train.tok.clean.bpe.32000",
    ),
    "valid": (("newstest2013",), 3000, "newstest2013.tok.bpe.32000"),
    "test": (("newstest2014",), 3003, "newstest2014.tok.bpe.32000"),
}


def write_wmt14(folder: Path, out: Path, any_text: bool) -> None:
    public = (folder / "train.tok.clean.bpe.32000.en").exists()
    for split, (names, pairs, name) in WMT14.items():
        expected = None if any_text else pairs
        if public:
            copy_public(split, folder, names[0], name, out, expected)
        else:
            tokenize_raw(split, folder, names, out, any_text, expected)


def copy_public(split: str, folder: Path, raw: str, name: str, out: Path, pairs: int | None) -> None:
    """Copy a split of the public set, which has BPE; its training text was cleaned, so it has fewer pairs."""
    copy(out / "bpe" / split, LANGUAGES, [folder / name], pairs=None if split == "train" else pairs)
    if split != "train" and (folder / f"{raw}.de").exists():
        copy(out / "text" / split, LANGUAGES, [folder / raw], pairs=pairs)


def tokenize_raw(
    split: str, folder: Path, names: tuple[str, ...], out: Path, any_text: bool, pairs: int | None
) -> None:
    if any_text and any((folder / f"{split}.en{ending}").exists() for ending in ("", ".gz")):
        names = (split,)
    prefixes = [from_sgm(folder, name, out / "raw") or locate(folder, name) for name in names]
    max_words = 80 if split == "train" else None
    copy(out / "tok" / split, LANGUAGES, prefixes, tokenized=True, max_words=max_words, pairs=pairs)
    if split != "train":
        copy(out / "text" / split, LANGUAGES, prefixes)


def below(folder: Path, *names: str) -> Path | None:
    """Return the first file of these names in a folder or the two levels below it."""
    for depth in ("", "*/", "*/*/"):
        for name in names:
            if found := sorted(folder.glob(depth + name)):
                return found[0]
    return None


def locate(folder: Path, name: str) -> Path:
    """Return the path of NAME.en and NAME.de without their endings. Raises RecipeError."""
    file = below(folder, f"{name}.en", f"{name}.en.gz")
    if file is None:
        raise RecipeError(
            f"{folder} must have {name}.en: give a folder that has it, or leave out --data to download it."
        )
    return file.with_name(name)


def from_sgm(folder: Path, name: str, out: Path) -> Path | None:
    """Write the plain text of NAME-*src.en.sgm and NAME-*ref.de.sgm below a folder, if any; return its prefix."""
    for side, language in (("src", "en"), ("ref", "de")):
        file = below(folder, f"{name}-deen-{side}.{language}.sgm", f"{name}-{side}.{language}.sgm")
        if file is None:
            return None
        text = file.read_text(encoding="utf-8")
        lines = re.findall(r"^<seg[^>]*> *(.*[^ ]) *</seg>", text, re.MULTILINE)
        write(out / f"{name}.{language}", "".join(line + "\n" for line in lines))
    return out / name


def wmt_archive(name: str, checksum: str, page: str, members: str) -> Archive:
    """An archive of the task's pages; checksums are those of TensorFlow Datasets."""
    at = f"{page}/{name}"
    urls = (f"https://{at}", f"http://{at}", f"https://web.archive.org/web/2023id_/http://{at}")
    return Archive(name, checksum, urls, (members,))


def multi30k_archive(name: str, checksum: str) -> Archive:
    commit, path = "a3d2e0d26b56f3846f66a952536ffed4e401d05a", f"data/task1/raw/{name}"
    urls = (
        f"https://raw.githubusercontent.com/multi30k/dataset/{commit}/{path}",
        f"https://cdn.jsdelivr.net/gh/multi30k/dataset@{commit}/{path}",
        f"https://github.com/multi30k/dataset/raw/{commit}/{path}",
    )
    return Archive(name, checksum, urls)


MULTI30K = {
    "train.en.gz": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "train.de.gz": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "val.en.gz": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "val.de.gz": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "test_2016_flickr.en.gz": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
    "test_2016_flickr.de.gz": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
}
PAIRS = {
    "multi30k": Text(write_multi30k, tuple(multi30k_archive(*one) for one in MULTI30K.items())),
    "wmt14_en_de": Text(
        write_wmt14,
        (
            wmt_archive(
                "training-parallel-europarl-v7.tgz",
                "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
                "www.statmt.org/wmt13",
                "*.de-en.??",
            ),
            wmt_archive(
                "training-parallel-commoncrawl.tgz",
                "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
                "www.statmt.org/wmt13",
                "*.de-en.??",
            ),
            wmt_archive(
                "training-parallel-nc-v9.tgz",
                "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
                "www.statmt.org/wmt14",
                "*.de-en.??",
            ),
            wmt_archive(
                "dev.tgz",
                "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
                "data.statmt.org/wmt19/translation-task",
                "*newstest201[34]*",
            ),
        ),
    ),
}
