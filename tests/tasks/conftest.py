"""Small binarised texts, and fairseq's tasks over them."""

from argparse import Namespace
from dataclasses import fields

import pytest
import torch
from fairseq.data import Dictionary, indexed_dataset

from fairseq_fwp.tasks.fwp_language_modeling import FwpLanguageModelingConfig, FwpLanguageModelingTask

WORDS = 40


def write_text(folder, split, lines):
    """lines: lists of token numbers, each with its </s>."""
    prefix = str(folder / split)
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=WORDS)
    for line in lines:
        builder.add_item(torch.tensor(line))
    builder.finalize(f"{prefix}.idx")


def random_lines(count, longest=11):
    """Return lines of random words, some empty, each ended by </s> (2)."""
    lengths = torch.randint(0, longest, (count,)).tolist()
    return [[*torch.randint(4, WORDS, (length,)).tolist(), 2] for length in lengths]


@pytest.fixture
def make_task(tmp_path):
    """A function make_task({"train": lines, ...}, **flags) -> a task that has loaded these texts."""

    def make(texts, **flags):
        dictionary = Dictionary()
        for word in range(WORDS - len(dictionary)):
            dictionary.add_symbol(f"w{word}")
        dictionary.save(str(tmp_path / "dict.txt"))
        for split, lines in texts.items():
            write_text(tmp_path, split, lines)
        defaults = {option.name: option.default for option in fields(FwpLanguageModelingConfig)}
        flags = {"data": str(tmp_path), "dataset_impl": None, **flags}
        task = FwpLanguageModelingTask.setup_task(Namespace(**{**defaults, **flags}))
        for split in texts:
            task.load_dataset(split)
        return task

    return make
