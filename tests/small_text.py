"""Binarised texts of random words, without fairseq-preprocess, and the arguments of a small training on one."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from fairseq.data import Dictionary, indexed_dataset

SIZE = ["--decoder-layers", 1, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16, "--tokens-per-sample", 16]
TASKS = {"samples": ["language_modeling"], "streams": ["fwp_language_modeling", "--carry-state"]}


def write_dictionary(folder: Path, words: int = 40) -> None:
    """Write dict.txt of so many words, special ones included."""
    dictionary = Dictionary()
    for word in range(words - len(dictionary)):
        dictionary.add_symbol(f"w{word}")
    folder.mkdir(exist_ok=True)
    dictionary.save(str(folder / "dict.txt"))


def write_split(path: Path, lines: Iterable[Sequence[int]], words: int = 40) -> None:
    """Write lines of token numbers, each with its </s>, to path.bin and path.idx."""
    builder = indexed_dataset.make_builder(f"{path}.bin", impl="mmap", vocab_size=words)
    for line in lines:
        builder.add_item(torch.tensor(line))
    builder.finalize(f"{path}.idx")


def write_text(folder: Path, words: int = 40, lines: int = 100, seed: int = 1) -> Path:
    """Write dict.txt, train and valid into a folder and return it; lines have up to 12 words, some none."""
    chooser = random.Random(seed)
    write_dictionary(folder, words)
    for split, count in (("train", lines), ("valid", 12)):
        drawn = ([*(chooser.randrange(4, words) for _ in range(chooser.randrange(12))), 2] for _ in range(count))
        write_split(folder / split, drawn, words)
    return folder


def training(data: Path, save_dir: Path, task: str, *flags: object) -> list[object]:
    """Return the arguments of fairseq-train for one of TASKS."""
    updates = ["--batch-size", 4, "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp", "--optimizer", "adam"]
    model = ["--arch", "delta_lm_wt103", *SIZE, "--lr", 1e-3, "--cpu", "--save-dir", save_dir]
    return [data, "--task", *TASKS[task], *model, *updates, *flags]
