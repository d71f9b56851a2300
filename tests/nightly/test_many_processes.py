"""Two and four processes on a CPU train the same model as one process with all batches."""

import random
import re

import pytest
import torch
from fairseq.data import Dictionary, indexed_dataset
from support.command_server import shared
from support.small_text import write_text

SIZE = ["--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16, "--decoder-attention-heads", 2]
ADAPTIVE = ["--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp"]
SAMPLES = ["--task", "language_modeling", "--tokens-per-sample", 16, *ADAPTIVE, *SIZE]
STREAMS = ["--task", "fwp_language_modeling", "--carry-state", "--tokens-per-sample", 8, *ADAPTIVE, *SIZE]
TRANSLATION = ["--task", "translation", "--source-lang", "en", "--target-lang", "de", "--ddp-backend", "legacy_ddp"]
TRANSLATION += ["--criterion", "label_smoothed_cross_entropy", "--share-all-embeddings", *SIZE]
TRANSLATION += ["--encoder-layers", 1, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16]
TRANSLATION += ["--encoder-attention-heads", 2]
# One process that accumulates several batches draws FAVOR+'s features for each; with streams it has one batch.
FAMILIES = {
    "fast weights": [*SAMPLES, "--arch", "delta_lm_wt103"],
    "softmax": [*SAMPLES, "--arch", "softmax_lm_wt103"],
    "Transformer-XL": [*STREAMS, "--arch", "xl_lm_wt103_medium", "--mem-len", 8, "--activation-dropout", 0],
    "carried fast weights": [*STREAMS, "--arch", "delta_favor_lm_wt103"],
    "fast weight layer": [*SAMPLES, "--arch", "fwp_fwl_lm"],
    "translation": [*TRANSLATION, "--arch", "delta_dpfp_mt_wmt14_en_de"],
}

UPDATES, LR = 6, 1e-3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write a text and pairs of sentences, all with the words of one dictionary."""
    folder, chooser = write_text(tmp_path_factory.mktemp("text"), lines=200), random.Random(2)
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    for language in ("en", "de"):
        dictionary.save(str(folder / f"dict.{language}.txt"))
        for split in ("train", "valid"):
            path = f"{folder / split}.en-de.{language}"
            builder = indexed_dataset.make_builder(f"{path}.bin", impl="mmap", vocab_size=len(dictionary))
            for _ in range(64):
                length = chooser.randrange(1, 9)
                builder.add_item(torch.tensor([*(chooser.randrange(4, 40) for _ in range(length)), 2]))
            builder.finalize(f"{path}.idx")
    return folder


def train(data, folder, family, processes, updates=UPDATES, batch=2, together=1, status=0, flags=()):
    """Return the losses of each update; together: batches that this process accumulates, instead of other processes."""
    folder.mkdir(exist_ok=True)
    streams = "--carry-state" in FAMILIES[family]
    size = ["--batch-size", batch * together if streams else batch, "--update-freq", 1 if streams else together]
    arguments = [
        data, *FAMILIES[family], *size, "--optimizer", "adam", "--lr", LR, "--cpu", "--dropout", 0,
        "--save-dir", folder, "--max-update", updates, "--required-batch-size-multiple", 1, "--log-format", "simple",
        "--log-interval", 1, *flags,
    ]  # fmt: skip
    assert shared().run("fairseq-train", *arguments, log=folder / "log", processes=processes) == status
    return [float(loss) for loss in re.findall(r"train_inner.* loss=([\d.]+)", (folder / "log").read_text())]


def model(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_learn_what_one_learns(data, tmp_path, family, processes):
    """They agree up to rounding errors, which Adam enlarges for gradients near zero."""
    found = train(data, tmp_path / "many", family, processes)
    expected = train(data, tmp_path / "one", family, 1, together=processes)
    assert len(found) == len(expected) == UPDATES and found == pytest.approx(expected, abs=2e-3)
    assert_same(tmp_path / "many", tmp_path / "one")


def assert_same(*folders):
    many, one = map(model, folders)
    differences = torch.cat([(many[name].double() - one[name].double()).flatten() for name in one])
    assert differences.square().mean().sqrt() < LR / 100


@pytest.mark.parametrize("stage", ["attention", "distribution"])
def test_they_learn_from_a_teacher_what_one_learns(data, tmp_path, stage):
    train(data, tmp_path / "teacher", "softmax", 1)
    flags = ["--criterion", "fwp_distillation", "--distillation", stage]
    flags += ["--teacher", tmp_path / "teacher" / "checkpoint_last.pt"]
    train(data, tmp_path / "many", "fast weights", 2, flags=flags)
    train(data, tmp_path / "one", "fast weights", 1, together=2, flags=flags)
    assert_same(tmp_path / "many", tmp_path / "one")


@pytest.mark.parametrize("before, now", [(2, 4), (2, 1), (1, 2)])
def test_states_in_mid_epoch_are_of_their_number_of_processes(data, tmp_path, before, now):
    train(data, tmp_path, "carried fast weights", before, updates=2)
    saved = (tmp_path / "checkpoint_last.pt").read_bytes()
    train(data, tmp_path, "carried fast weights", now, status=1)
    sentence = rf"in mid-epoch must be .*, got one with processes {before} \(now {now}\).*: give the same settings"
    assert re.search(sentence, (tmp_path / "log").read_text())
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == saved
    found = train(data, tmp_path, "carried fast weights", now, updates=3, flags=["--reset-dataloader"])
    assert len(found) == 3


def test_samples_in_mid_epoch_are_of_their_number_of_processes(data, tmp_path):
    train(data, tmp_path, "fast weights", 2, updates=2)
    train(data, tmp_path, "fast weights", 4, status=1)
    assert re.search(r"in mid-epoch must be .* processes 2, .* got .* processes 4, ", (tmp_path / "log").read_text())
    assert len(train(data, tmp_path, "fast weights", 4, flags=["--reset-dataloader"])) == UPDATES
