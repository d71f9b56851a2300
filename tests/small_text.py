"""A binarised text of random words, without fairseq-preprocess."""

import random
from pathlib import Path

import torch
from fairseq.data import Dictionary, indexed_dataset


def write_text(folder: Path, words: int = 40, lines: int = 100, seed: int = 1) -> Path:
    """Write dict.txt, train and valid into a folder and return it; lines have up to 12 words, some none."""
    dictionary, chooser = Dictionary(), random.Random(seed)
    for word in range(words - len(dictionary)):
        dictionary.add_symbol(f"w{word}")
    dictionary.save(str(folder / "dict.txt"))
    for split, count in (("train", lines), ("valid", 12)):
        builder = indexed_dataset.make_builder(f"{folder / split}.bin", impl="mmap", vocab_size=words)
        for _ in range(count):
            builder.add_item(torch.tensor([*(chooser.randrange(4, words) for _ in range(chooser.randrange(12))), 2]))
        builder.finalize(f"{folder / split}.idx")
    return folder
