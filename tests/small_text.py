"""A binarised text of random words, without fairseq-preprocess, and the arguments of a small training on it."""

import random
from pathlib import Path

import torch
from fairseq.data import Dictionary, indexed_dataset

SIZE = ["--decoder-layers", 1, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16, "--tokens-per-sample", 16]
TASKS = {"samples": ["language_modeling"], "streams": ["fwp_language_modeling", "--carry-state"]}


def write_text(folder: Path, words: int = 40, lines: int = 100, seed: int = 1) -> Path:
    """Write dict.txt, train and valid into a folder and return it; lines have up to 12 words, some none."""
    dictionary, chooser = Dictionary(), random.Random(seed)
    for word in range(words - len(dictionary)):
        dictionary.add_symbol(f"w{word}")
    folder.mkdir(exist_ok=True)
    dictionary.save(str(folder / "dict.txt"))
    for split, count in (("train", lines), ("valid", 12)):
        builder = indexed_dataset.make_builder(f"{folder / split}.bin", impl="mmap", vocab_size=words)
        for _ in range(count):
            builder.add_item(torch.tensor([*(chooser.randrange(4, words) for _ in range(chooser.randrange(12))), 2]))
        builder.finalize(f"{folder / split}.idx")
    return folder


def training(data: Path, save_dir: Path, task: str, *flags: object) -> list[object]:
    """Return the arguments of fairseq-train for one of TASKS."""
    updates = ["--batch-size", 4, "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp", "--optimizer", "adam"]
    model = ["--arch", "delta_lm_wt103", *SIZE, "--lr", 1e-3, "--cpu", "--save-dir", save_dir]
    return [data, "--task", *TASKS[task], *model, *updates, *flags]
