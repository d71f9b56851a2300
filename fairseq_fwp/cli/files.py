"""Files that the commands read besides checkpoints, plug-ins and binarised texts, and how they write files."""

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.data import data_utils

import fairseq_fwp
from fairseq_fwp.evaluation import Text, document_starts
from fairseq_fwp.tasks.text_blocks import BLANK_LINE


def import_plugin(folder: str | None) -> None:
    """Import the --user-dir, unless it is this package: fairseq would take it for another one of the same name.

    Raises ValueError where there is no such folder.
    """
    if folder is None or Path(folder).resolve() == Path(fairseq_fwp.__file__).resolve().parent:
        return
    if os.path.isfile(folder):
        raise ValueError(f"--user-dir must be the folder of a plug-in, got the file {folder}")
    try:
        utils.import_user_module(Namespace(user_dir=folder))
    except FileNotFoundError as error:
        raise ValueError(f"--user-dir must be the folder of a plug-in, got {error}, which does not exist") from error


def load_text(task: Any, data: str, subset: str, first: int, reset_after: str | None = None) -> Text:
    """Return a subset of the text, read after the symbol `first`; documents end with the symbol reset_after.

    Raises ValueError for a subset that is not there or empty, and for a symbol that is not in the dictionary.
    """
    folder, dictionary = utils.split_paths(data)[0], task.source_dictionary
    prefix = os.path.join(folder, subset)
    dataset = data_utils.load_indexed_dataset(prefix, dictionary)
    if dataset is None:
        found = sorted({file.stem for file in Path(folder).glob("*.idx")})
        raise ValueError(f"the text {subset!r} must exist in {folder}, got only {', '.join(found) or 'other files'}")
    tokens = torch.cat([dataset[index] for index in range(len(dataset))]).long()
    if reset_after is None:
        return Text.after(first, tokens)
    if reset_after != BLANK_LINE and reset_after not in dictionary:
        raise ValueError(f"--reset-after must be a symbol of the dictionary or {BLANK_LINE}, got {reset_after!r}")
    empty_lines = reset_after == BLANK_LINE
    separator = dictionary.eos() if empty_lines else dictionary.index(reset_after)
    return Text.after(first, tokens, document_starts(tokens, separator, empty_lines))


def refuse_inputs(data: str, checkpoint: str, outputs: dict[str, Path | None]) -> None:
    """Raise ValueError if an output, by its flag, is the checkpoint, or a dictionary or text in the data folder."""
    folders = {Path(folder).resolve() for folder in utils.split_paths(data)}
    for flag, path in outputs.items():
        if path is None:
            continue
        found = path.resolve()
        is_data = found.name.startswith("dict.") or found.suffix in (".bin", ".idx")
        if found == Path(checkpoint).resolve() or (found.parent in folders and is_data):
            raise ValueError(f"{flag} must be another file than those that are read, got {path}: give another name")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name first, so that a file of this name is always complete."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
