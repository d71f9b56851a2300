"""fairseq's models of audio train and are resumed on today's stack; test_commands.py has those of text."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from support.command_server import run

AUDIO = ["--task", "hubert_pretraining", "--labels", '["km"]', "--mask-length", "2"]
HUBERT = [*AUDIO, "--arch", "hubert", "--conv-feature-layers", "[(16, 10, 5)] + [(16, 8, 8)] * 2", "--final-dim", "16"]
HUBERT += ["--encoder-layers", 1, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16]
HUBERT += ["--encoder-attention-heads", 2, "--conv-pos", 4, "--conv-pos-groups", 2, "--label-rate", 50]
HUBERT += ["--criterion", "hubert", "--loss-weights", "[10]"]


def write_audio(folder: Path) -> None:
    """Write files with half a second of noise, and a label for each fiftieth of a second."""
    noise, rate, length = np.random.default_rng(1), 16000, 8000
    (folder / "audio").mkdir()
    (folder / "dict.km.txt").write_text("".join(f"{label} 1\n" for label in range(5)))
    for split, count in (("train", 24), ("valid", 5)):
        names = [f"{split}{number}.wav" for number in range(count)]
        for name in names:
            soundfile.write(folder / "audio" / name, noise.uniform(-1, 1, length), rate)
        (folder / f"{split}.tsv").write_text("\n".join([f"{folder}/audio", *(f"{name}\t{length}" for name in names)]))
        labels = (" ".join(map(str, noise.integers(0, 5, 50 * length // rate))) for _ in names)
        (folder / f"{split}.km").write_text("\n".join(labels))


@pytest.mark.slow
def test_hubert_is_fine_tuned(tmp_path):
    write_audio(tmp_path)

    def train(folder, updates, *flags):
        """Return the last checkpoint."""
        given = ["--batch-size", 4, "--optimizer", "adam", "--lr", 1e-3, "--cpu", "--no-epoch-checkpoints"]
        given += ["--num-workers", 0, "--save-dir", tmp_path / folder, "--max-update", updates, *flags]
        run("fairseq-train", tmp_path, *given)
        return torch.load(tmp_path / folder / "checkpoint_last.pt", weights_only=True)

    (saved,) = train("before", 1, *HUBERT)["task_state"]["dictionaries"]
    assert saved.symbols[4:9] == list("01234")
    flags = [*AUDIO, "--fine-tuning", "--single-target", "--arch", "hubert_ctc", "--criterion", "ctc"]
    flags += ["--w2v-path", tmp_path / "before" / "checkpoint_last.pt", "--zero-infinity", "--disable-validation"]
    train("tuned", 1, *flags)
    resumed = train("tuned", 2, *flags)
    assert resumed["task_state"]["target_dictionary"].symbols[4:9] == list("01234")
    assert resumed["optimizer_history"][-1]["num_updates"] == 2 and "autoregressive" not in resumed["cfg"]["model"]
