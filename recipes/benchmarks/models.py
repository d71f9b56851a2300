"""Models as fairseq builds them for a command line, and made-up words that follow Zipf's law."""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

# The package of this Python, which may be another version (before.py). fairseq refuses any other path to it.
OURS = ("--user-dir", find_spec("fairseq_fwp").submodule_search_locations[0])
SPECIAL = 4  # symbols of fairseq's dictionary


class Built(NamedTuple):
    cfg: Any
    task: Any
    model: Any
    criterion: Any


def write_dictionary(folder, words, name="dict.txt"):
    """Write a dictionary of that many words, fairseq's symbols included."""
    Path(folder, name).write_text("".join(f"w{word} 1\n" for word in range(words - SPECIAL)))


def build(words, *flags, task="language_modeling", criterion="adaptive_loss"):
    """Build the model of `fairseq-train --arch NAME ...` with its initial weights."""
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    with tempfile.TemporaryDirectory() as folder:
        sides = ("--source-lang", "a", "--target-lang", "b") if task == "translation" else ()
        for name in ("dict.a.txt", "dict.b.txt") if sides else ("dict.txt",):
            write_dictionary(folder, words, name)
        command = [
            *(folder, *OURS, "--task", task, *sides, "--criterion", criterion, "--ddp-backend", "legacy_ddp"),
            *("--optimizer", "adam", "--lr", "0.00025", "--clip-norm", "0.25", "--seed", "1"),
            *map(str, flags),
        ]
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command))
        made = tasks.setup_task(cfg.task)
        torch.manual_seed(1)
        return Built(cfg, made, made.build_model(cfg.model), made.build_criterion(cfg.criterion))


def draw_words(words, count):
    """Return indices of `count` random words of a dictionary of that size."""
    frequencies = 1 / torch.arange(1, words - SPECIAL + 1)
    generator = torch.Generator().manual_seed(1)
    return torch.multinomial(frequencies, count, replacement=True, generator=generator) + SPECIAL


def sample(words, sequences, length):
    """Return a batch as fairseq's task for language models makes it. As in a text, word r has a share of 1 / r."""
    exponents = torch.rand(sequences, length + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tokens = SPECIAL - 1 + ((words - SPECIAL) ** exponents).long()
    return {
        "id": torch.arange(sequences),
        "nsentences": sequences,
        "ntokens": sequences * length,
        "net_input": {"src_tokens": tokens[:, :-1], "src_lengths": torch.full((sequences,), length)},
        "target": tokens[:, 1:].contiguous(),
    }
