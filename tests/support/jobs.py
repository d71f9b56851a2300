"""Small trainings by fairseq's commands: their flags, and what their logs and checkpoints say."""

import random
import re
import shutil
from pathlib import Path

import torch
from support.command_server import run

SIZE = ["--decoder-layers", "2", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "48"]
BATCH = ["--tokens-per-sample", "32", "--batch-size", "4", "--required-batch-size-multiple", "1"]
OPTIMIZATION = ["--optimizer", "adam", "--lr", "1e-3", "--log-format", "simple", "--log-interval", "1"]
ADAPTIVE = ["--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp"]
BLOCKS = ["--task", "language_modeling", *BATCH, *OPTIMIZATION, *ADAPTIVE]
STREAMS = ["--task", "fwp_language_modeling", "--carry-state", "--tokens-per-sample", 8, "--batch-size", 8]
STREAMS += [*OPTIMIZATION, *ADAPTIVE]
TRANSLATION_SIZE = [
    word
    for side in ("encoder", "decoder")
    for size, value in (("layers", 2), ("embed-dim", 16), ("ffn-embed-dim", 24), ("attention-heads", 2))
    for word in (f"--{side}-{size}", str(value))
]
TRANSLATION = ["--task", "translation", "--arch", "delta_favor_mt_wmt14_en_de", "--share-all-embeddings"]
TRANSLATION += [*TRANSLATION_SIZE, "--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"]
TRANSLATION += ["--optimizer", "adam", "--lr", "0.01", "--max-tokens", "200"]
SENTENCES = {"train": 60, "valid": 11, "test": 13}  # no multiples of 8


def train(data, save_dir, *flags, updates=6, **options):
    """Train on a CPU and return the log. data: a folder, or folders of shards joined by ":"."""
    return run("fairseq-train", data, *flags, "--cpu", "--save-dir", save_dir, "--max-update", updates, **options)


def losses(log):
    """Return (loss, update) of every update."""
    return re.findall(r"train_inner .* loss=([\d.e+-]+).* num_updates=(\d+)", log)


def validations(log):
    return re.findall(r"valid on 'valid' subset \| loss ([\d.e+-]+)", log)


def last(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)


def check_same_bits(one, other):
    """Parameters, averages and the optimizer's moments are equal: one different bit of a loss would change them."""

    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value]
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return [tensor for part in values for tensor in tensors(part)]

    ours, theirs = (
        [(name, tensors(part)) for name, part in sorted(last(folder)["model"].items())]
        + [(name, tensors(last(folder)[name])) for name in ("last_optimizer_state",)]
        + [("ema", tensors(last(folder)["extra_state"].get("ema", {})))]
        for folder in (one, other)
    )
    for (name, found), (_, expected) in zip(ours, theirs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), name


def write_words(path: Path, lines: int, words: int, lengths: tuple[int, int], seed: int, prefix: str = "w") -> None:
    """Write lines of random words."""
    chooser = random.Random(seed)
    text = (
        " ".join(f"{prefix}{chooser.randrange(words)}" for _ in range(chooser.randrange(*lengths)))
        for _ in range(lines)
    )
    path.write_text("\n".join(text) + "\n")


def binarise_text(folder: Path) -> Path:
    """Write a text of 40 words and return its binarised folder; no split is a multiple of a block."""
    preprocess = ["--only-source", "--destdir", folder / "bin", "--workers", "1"]
    for number, (split, lines) in enumerate((("train", 90), ("valid", 17), ("test", 23))):
        write_words(folder / f"{split}.txt", lines, 40, (3, 20), number)
        preprocess += [f"--{split}pref", folder / f"{split}.txt"]
    run("fairseq-preprocess", *preprocess)
    return folder / "bin"


def shards(data: Path, folder: Path) -> str:
    """Return two shards of a training text: that of the data, and its text for tests."""
    shutil.copytree(data, folder)
    for suffix in ("bin", "idx"):
        shutil.copy(data / f"test.{suffix}", folder / f"train.{suffix}")
    return f"{data}:{folder}"


def binarise_pairs(folder: Path) -> Path:
    """Write invented pairs of sentences and return their binarised folder."""
    for number, (split, count) in enumerate(SENTENCES.items()):
        for language in ("en", "de"):
            seed = 2 * number + (language == "de")
            write_words(folder / f"{split}.{language}", count, 20, (1, 12), seed, language)
    prefixes = [word for split in SENTENCES for word in (f"--{split}pref", folder / split)]
    languages = ["--source-lang", "en", "--target-lang", "de", "--joined-dictionary"]
    run("fairseq-preprocess", *languages, *prefixes, "--destdir", folder / "bin", "--workers", "1")
    return folder / "bin"


def count_tokens(data: Path, split: str) -> int:
    with (data.parent / f"{split}.txt").open() as text:
        return sum(len(line.split()) + 1 for line in text)


def hypotheses(log):
    """Return (number of the sentence, words) of each hypothesis printed."""
    return [(int(number), text.split()) for number, text in re.findall(r"^H-(\d+)\t\S+\t(.*)$", log, re.MULTILINE)]
