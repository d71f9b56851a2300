"""fairseq's own models: `--user-dir fairseq_fwp` trains and resumes them on today's stack."""

import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from command_server import shared
from small_text import write_text


def sizes(*stacks: str) -> list[str]:
    small = {"layers": "1", "embed-dim": "16", "ffn-embed-dim": "16", "attention-heads": "2"}
    return [word for stack in stacks for name, size in small.items() for word in (f"--{stack}-{name}", size)]


MODELS = {
    "translation": ["--arch", "transformer", *sizes("encoder", "decoder"), "--source-lang", "a", "--target-lang", "b"],
    "language_modeling": ["--arch", "transformer_lm", *sizes("decoder"), "--tokens-per-sample", "16"],
}
AUDIO = ["--task", "hubert_pretraining", "--labels", '["km"]', "--mask-length", "2"]
HUBERT = [*AUDIO, "--arch", "hubert", *sizes("encoder"), "--conv-feature-layers", "[(16, 10, 5)] + [(16, 8, 8)] * 2"]
HUBERT += ["--final-dim", "16", "--conv-pos", "4", "--conv-pos-groups", "2", "--label-rate", "50"]
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


@pytest.fixture
def train(tmp_path):
    """A function train(folder, updates, *flags) -> the last checkpoint; data and log are in tmp_path."""

    def train(folder, updates, *flags):
        log = tmp_path / "log"
        flags += ("--batch-size", "4", "--optimizer", "adam", "--lr", "1e-3", "--cpu", "--no-epoch-checkpoints")
        flags += ("--log-format", "simple", "--log-interval", "1", "--num-workers", "0")
        save = ["--save-dir", tmp_path / folder, "--max-update", updates]
        assert shared().run("fairseq-train", tmp_path, *flags, *save, log=log) == 0, log.read_text()
        return torch.load(tmp_path / folder / "checkpoint_last.pt", weights_only=True)

    return train


@pytest.mark.parametrize("task", ["translation", pytest.param("language_modeling", marks=pytest.mark.slow)])
def test_a_model_of_fairseq_trains_and_resumes(task, train, tmp_path):
    """A resumed run equals an uninterrupted one to the last bit. The corpus has the same lines on both sides."""
    write_text(tmp_path)
    for side in "ab":
        (tmp_path / f"dict.{side}.txt").symlink_to("dict.txt")
        for name in ("train.bin", "train.idx", "valid.bin", "valid.idx"):
            (tmp_path / name.replace(".", f".a-b.{side}.")).symlink_to(name)
    flags = ["--task", task, *MODELS[task]]
    begun, resumed = train("stopped", 3, *flags), train("stopped", 6, *flags)
    losses = re.findall(r" \d+ / \d+ loss=([\d.]+)", (tmp_path / "log").read_text())
    assert len(losses) == 6 and np.isfinite([*map(float, losses)]).all()
    assert resumed["optimizer_history"][-1]["num_updates"] == 6
    whole = train("whole", 6, *flags)
    assert all(torch.equal(whole["model"][name], weight) for name, weight in resumed["model"].items())
    assert not all(torch.equal(begun["model"][name], weight) for name, weight in resumed["model"].items())


@pytest.mark.slow
def test_hubert_is_fine_tuned(train, tmp_path):
    write_audio(tmp_path)
    (saved,) = train("before", 1, *HUBERT)["task_state"]["dictionaries"]
    assert saved.symbols[4:9] == list("01234")
    flags = [*AUDIO, "--fine-tuning", "--single-target", "--arch", "hubert_ctc", "--criterion", "ctc"]
    flags += ["--w2v-path", tmp_path / "before" / "checkpoint_last.pt", "--zero-infinity", "--disable-validation"]
    train("tuned", 1, *flags)
    resumed = train("tuned", 2, *flags)
    assert resumed["task_state"]["target_dictionary"].symbols[4:9] == list("01234")
    assert resumed["optimizer_history"][-1]["num_updates"] == 2 and "autoregressive" not in resumed["cfg"]["model"]
