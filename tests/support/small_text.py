"""Binarised texts of random words, the arguments of a small training on one, and trainings in this process."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from fairseq import options
from fairseq.data import Dictionary, indexed_dataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import preprocess as fairseq_preprocess
from fairseq_cli import train as fairseq_train

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


def train_model(*arguments: object) -> None:
    """Run fairseq-train in this process."""
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=[*map(str, arguments)])
    fairseq_train.main(convert_namespace_to_omegaconf(args))


def preprocess(train: Path, test: Path, out: Path) -> None:
    """Run fairseq-preprocess in this process."""
    arguments = ["--only-source", "--trainpref", train, "--testpref", test, "--destdir", out]
    fairseq_preprocess.main(options.get_preprocessing_parser().parse_args([*map(str, arguments)]))


def write_lines(path: Path, lines: int, words: int, chooser: random.Random) -> None:
    text = (" ".join(f"w{chooser.randrange(words)}" for _ in range(chooser.randrange(3, 20))) for _ in range(lines))
    path.write_text("\n".join(text) + "\n")


def prepare_random_text(folder: Path) -> None:
    """Write train.txt and test.txt of 30 words into a folder, and their data into its folder `data`."""
    chooser = random.Random(1)
    for split, lines in (("train", 60), ("test", 10)):
        write_lines(folder / f"{split}.txt", lines, 30, chooser)
    preprocess(folder / "train.txt", folder / "test.txt", folder / "data")
