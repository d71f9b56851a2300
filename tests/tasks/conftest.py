"""fairseq's tasks over small binarised texts."""

import tempfile
from argparse import Namespace
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from support.small_text import write_dictionary, write_split

from fairseq_fwp.tasks.fwp_language_modeling import FwpLanguageModelingConfig, FwpLanguageModelingTask

WORDS = 40


@pytest.fixture
def random_lines():
    """A function random_lines(count, longest=11) -> lines of random words, some empty, each ended by </s> (2)."""

    def draw(count, longest=11):
        lengths = torch.randint(0, longest, (count,)).tolist()
        return [[*torch.randint(4, WORDS, (length,)).tolist(), 2] for length in lengths]

    return draw


@pytest.fixture
def load_task(tmp_path):
    """A function load_task(kind, config, {"train": lines, ...}, **flags) -> a task that has loaded these texts."""

    def load(kind, config, texts, **flags):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        write_dictionary(folder, WORDS)
        for split, lines in texts.items():
            write_split(folder / split, lines, WORDS)
        defaults = {option.name: option.default for option in fields(config)}
        flags = {"data": str(folder), "dataset_impl": None, **flags}
        task = kind.setup_task(Namespace(**{**defaults, **flags}))
        for split in texts:
            task.load_dataset(split)
        return task

    return load


@pytest.fixture
def make_task(load_task):
    """A function make_task({"train": lines, ...}, **flags) -> a task of streams that has loaded these texts."""
    return partial(load_task, FwpLanguageModelingTask, FwpLanguageModelingConfig)
