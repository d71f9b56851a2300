"""Checkpoints and texts that are cut short, changed or of another kind are refused in one sentence that names them."""

import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils, indexed_dataset
from fairseq.file_io import PathManager
from hypothesis import given
from hypothesis import strategies as st
from support.command_server import PLUGIN, shared
from support.pairwise import looped
from support.small_text import training, write_text

from fairseq_fwp.cli import eval_lm

NO_INDEX, FALSE = "must be a complete index", "must have the true length and place of each sentence, got "
# By format: statements that change an index, and words of the error. `head` is bytes; count[0], the sentences, is 100.
LIES = {
    "mmap": {
        "head[0] = 0": NO_INDEX,
        "head[9] = 2": NO_INDEX,  # the version
        "head[17] = 11": NO_INDEX,  # the type of a word
        "head[17] = 6": FALSE + "words of the type float64",
        "count[0] = 0": FALSE + "1,226 bytes where its sentences need 26",
        "count[0] = 99": FALSE + "1,226 bytes where its sentences need 1,214",
        "count[0] = 101": NO_INDEX,
        "count[0] = 2**40": NO_INDEX,
        "count[0] = 2**64 - 1": NO_INDEX,
        "sizes[:2] += [100, -100]": FALSE + r"the length -\d+",
        "sizes[:2] += [1, -1]": FALSE + "a place that is not the sum of the lengths before it",
        "places += 2": FALSE + "a place",
        "places[:] = 0": FALSE + "a place",
        "places[3] += 1": FALSE + "a place",
        "places[-1] += 2**20": FALSE + "a place",
        "places[1] = -2": FALSE + "a place",
    },
    "cached": {  # of fairseq 0.8 and earlier; its places are in words, and the last one is the end
        "head[0] = 0": NO_INDEX,
        "head[16] = 6": FALSE + "words of the type float64",
        "head[24] = 2": FALSE + "the form of other data than text",  # the bytes of a word
        "count[:] = 99": FALSE + "2,464 bytes where its sentences need 2,440",
        "count[:] = 2**60": NO_INDEX,
        "count[:] = 2**64 - 1": NO_INDEX,
        "dims[1:] += 1": FALSE + "the form of other data than text",
        "sizes[:2] += [100, -100]": FALSE + r"the length -\d+",
        "places += 1": FALSE + "a place",
        "places[:] = 0": FALSE + "a place",
        "places[-1] += 2**20": FALSE + "a place",
    },
}
PARTS = {
    "mmap": {"head": ("u1", 18, 0), "count": ("u8", 1, 18), "sizes": ("i4", 100, 26), "places": ("i8", 100, 426)},
    "cached": {"head": ("u1", 32, 0), "count": ("u8", 2, 32), "dims": ("i8", 101, 48)}
    | {"places": ("i8", 101, 856), "sizes": ("i8", 100, 1664)},
}
COUNTED = r"train.bin must have the [\d,]+ bytes that its index counts, got [\d,]+: .*"
WORDS = r"words in \S+train.bin must have numbers from 0 below \d+, the size of the dictionary next to it, got \d+"


def half(lines):
    return "".join(lines.splitlines(keepends=True)[: lines.count("\n") // 2])


# Changes of the text `train`, and words of the error.
DAMAGES = {
    "cut short": (lambda text, index, words: os.truncate(text, text.stat().st_size - 2), COUNTED + "is truncated"),
    "longer": (lambda text, index, words: text.write_bytes(text.read_bytes() + b"\0\0"), COUNTED + "another index"),
    "empty": (lambda text, index, words: text.write_bytes(b""), r"train.bin\)? must have at least one token"),
    "half an index": (lambda text, index, words: os.truncate(index, 99), "train.idx " + NO_INDEX),
    "index of zeros": (lambda text, index, words: index.write_bytes(bytes(999)), "train.idx " + NO_INDEX),
    "another dictionary": (lambda text, index, words: words.write_text(half(words.read_text())), WORDS),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return the bytes of a small checkpoint of fairseq."""
    path = tmp_path_factory.mktemp("checkpoint") / "whole.pt"
    state = {"args": None, "cfg": {"model": {"_name": "fwp_lm"}}, "model": {"weight": torch.randn(50, 20)}}
    history = {"criterion_name": "c", "optimizer_name": "o", "lr_scheduler_state": {}, "num_updates": 3}
    iterator = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 2}}
    state |= {"optimizer_history": [history], "extra_state": iterator, "last_optimizer_state": None, "task_state": {}}
    torch.save(state, path)
    return path.read_bytes()


def load(path, content):
    """Return the weights of a file with that content, None if it calls them otherwise, or the error that refuses it."""
    path.write_bytes(content)
    try:
        return checkpoint_utils.load_checkpoint_to_cpu(str(path))["model"].get("weight")
    except RuntimeError as error:
        assert str(path) in str(error) and "\n" not in str(error) and ": " in str(error)
        return str(error)


@given(length=st.floats(0, 1, exclude_max=True))
def test_a_checkpoint_cut_anywhere(checkpoint, tmp_path_factory, length):
    path = tmp_path_factory.getbasetemp() / "cut.pt"
    said = load(path, checkpoint[: int(length * len(checkpoint))])
    assert re.search(rf"cut.pt must be a complete checkpoint, got .* of {path.stat().st_size:,} bytes", said)


@given(damage=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_checkpoint_changed_anywhere_is_loaded_or_refused(checkpoint, tmp_path_factory, damage):
    """It is loaded if only numbers of the weights are changed, and all others are right then."""
    path, content = tmp_path_factory.getbasetemp() / "changed.pt", bytearray(checkpoint)
    whole = load(path, checkpoint)
    begin = checkpoint.find(whole.numpy().tobytes())
    places = [int(place * len(content)) for place, _ in damage]
    for place, (_, value) in zip(places, damage, strict=True):
        content[place] = value
    found = load(path, content)
    if all(begin <= place < begin + whole.nbytes for place in places):
        assert (found != whole).sum() <= len(damage)


FOREIGN = {
    "state dict": lambda path: torch.save({"weight": torch.ones(2)}, path),
    "model alone": lambda path: torch.save({"model": {}}, path),
    "tensor": lambda path: torch.save(torch.ones(2), path),
    "list": lambda path: torch.save([1, 2], path),
    "module": lambda path: torch.save(torch.nn.Linear(2, 2), path),
    "arrays": lambda path: np.savez(path.open("wb"), a=np.ones(2)),
    "text": lambda path: path.write_text("not a checkpoint\n"),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"model": {}})),
    "folder": lambda path: path.mkdir(),
}


@looped("kind", FOREIGN)
def test_other_kinds_of_files(tmp_path, kind):
    path = tmp_path / f"{kind}.pt"
    FOREIGN[kind](path)
    with pytest.raises(RuntimeError, match=rf"^{path} [^\n]*: [^\n]*$"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def change_index(folder, impl, statement):
    """Change the index of the text `train`, which is written again in the old format if impl is "cached"."""
    prefix = str(folder / "train")
    if impl == "cached":
        lines = list(data_utils.load_indexed_dataset(prefix))
        builder = indexed_dataset.make_builder(f"{prefix}.bin", impl)
        for line in lines:
            builder.add_item(line)
        builder.finalize(f"{prefix}.idx")
    content = bytearray((folder / "train.idx").read_bytes())
    exec(statement, {name: np.frombuffer(content, *part) for name, part in PARTS[impl].items()})
    (folder / "train.idx").write_bytes(content)


def damage_text(folder, damage):
    """Damage the text `train`; return words of the expected error."""
    if damage in DAMAGES:
        change, sentence = DAMAGES[damage]
        change(folder / "train.bin", folder / "train.idx", folder / "dict.txt")
        return sentence
    impl, lie = damage.split(": ")
    change_index(folder, impl, lie)
    return f"train.idx {LIES[impl][lie]}"


def read_text(folder):
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    return [line.tolist() for line in data_utils.load_indexed_dataset(str(folder / "train"), dictionary)]


@looped("damage", [*DAMAGES, *(f"{impl}: {lie}" for impl in LIES for lie in LIES[impl])])
def test_a_damaged_text_is_refused(tmp_path, damage):
    sentence = damage_text(write_text(tmp_path), damage)
    with pytest.raises(ValueError, match=sentence) as error:
        read_text(tmp_path)
    assert "\n" not in str(error.value)


def test_an_index_of_nothing_and_the_widest_dictionary(tmp_path):
    """A text is accepted if it has the last word of a dictionary, or empty lines."""
    expected = read_text(write_text(tmp_path, words=6))
    assert max(map(max, expected)) == 5
    change_index(tmp_path, "cached", "")
    assert read_text(tmp_path) == expected


@pytest.fixture(scope="module", params=["samples", "streams"])
def trained(request, tmp_path_factory):
    """The task, and a folder with data and save, the checkpoints of two updates."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_text(folder / "data")
    flags = training(data, folder / "save", request.param, "--max-update", 2)
    assert shared().run("fairseq-train", *flags, log=folder / "log") == 0
    return request.param, folder


def refuse_to_train(log, *arguments, **how):
    """Return the last line of a training that ends with an error."""
    assert shared().run("fairseq-train", *arguments, log=log, **how) == 1
    return log.read_text().strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("damage", [*DAMAGES, "mmap: count[0] = 99", "mmap: places += 2"])
def test_a_damaged_text_is_neither_trained_on_nor_scored(trained, tmp_path, damage):
    """Both commands end at once, in one sentence, and leave what was saved."""
    task, folder = trained
    data, save_dir = (Path(shutil.copytree(folder / name, tmp_path / name)) for name in ("data", "save"))
    saved = {path: path.read_bytes() for path in save_dir.iterdir()}
    sentence = damage_text(data, damage)
    scored = [str(data), "--path", str(save_dir / "checkpoint_last.pt"), "--gen-subset", "train", "--cpu"]
    with pytest.raises(SystemExit, match=rf"fwp-eval-lm: .*({sentence}|must have the target dictionary)"):
        eval_lm.main(scored)
    said = refuse_to_train(tmp_path / "log", *training(data, save_dir, task, "--max-update", 4))
    assert re.search(sentence.replace("train.bin must have numbers", "valid.bin must have numbers"), said), said
    assert {path: path.read_bytes() for path in save_dir.iterdir()} == saved


@pytest.mark.slow
def test_a_disk_that_is_full(trained, tmp_path):
    """A limit on file sizes simulates a full disk: the system refuses a write in the middle of a checkpoint."""
    task, begun = trained
    save = Path(shutil.copytree(begun / "save", tmp_path / "save"))
    flags = ["--save-interval-updates", 2, "--log-format", "simple", "--max-update", 6]
    saved = {path: path.read_bytes() for path in save.iterdir()}
    size = (save / "checkpoint_last.pt").stat().st_size
    for limit in (size // 2, size - 1):
        said = refuse_to_train(tmp_path / "log", *training(begun / "data", save, task, *flags), file_size=limit)
        assert "could not be saved (File too large); earlier checkpoints are complete" in said
        assert {path: path.read_bytes() for path in save.iterdir()} == saved
    for folder in (save, tmp_path / "whole"):
        assert shared().run("fairseq-train", *training(begun / "data", folder, task, *flags), log=tmp_path / "log") == 0
    one, other = (torch.load(folder / "checkpoint_last.pt")["model"] for folder in (save, tmp_path / "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_log_on_a_full_disk_ends_a_training(tmp_path):
    """In one sentence, not in a traceback for each of its lines; it is resumed by the same command."""
    flags = training(write_text(tmp_path / "data"), tmp_path / "save", "samples", "--max-update", 2)
    said = refuse_to_train(tmp_path / "log", *flags, "--log-file", "/dev/full")
    assert said.startswith("OSError: the log cannot be written to /dev/full (No space left on device): free some space")
    assert (tmp_path / "log").read_text().count("Traceback") == 1


def test_a_copy_on_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "last").write_bytes(b"old")

    def no_room(source, target):
        Path(target).write_bytes(b"n")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", no_room)
    with pytest.raises(OSError, match=r"last could not be saved \(No space left on device\)"):
        PathManager.copy(str(tmp_path / "new"), str(tmp_path / "last"), overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"last": b"old", "new": b"new"}


def test_a_save_is_tried_again_from_its_beginning(tmp_path, monkeypatch):
    save, calls = torch.save, []

    def fail_twice(obj, file):
        calls.append(file)
        file.write(b"half of it")
        if len(calls) < 3:
            raise OSError(5, "Input/output error")
        file.seek(0)
        file.truncate()
        save(obj, file)

    monkeypatch.setattr(torch, "save", fail_twice)
    monkeypatch.setattr("fairseq_fwp.patches.training.PAUSE", 0)
    checkpoint_utils.torch_persistent_save({"a": 1}, str(tmp_path / "checkpoint.pt"))
    assert len(set(map(id, calls))) == 3 and torch.load(tmp_path / "checkpoint.pt") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() == 0 and not shutil.which("setpriv"), reason="root writes into read-only folders")
def test_a_folder_that_cannot_be_written(tmp_path):
    """It is refused before the first update; a read-only text can be trained on."""
    data, save_dir = write_text(tmp_path / "data"), tmp_path / "save"
    save_dir.mkdir()
    for folder in (data, save_dir):
        folder.chmod(0o500)
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []
    program = [*drop, Path(sys.executable).with_name("fairseq-train"), "--user-dir", PLUGIN]
    for folder, status in ((save_dir, 1), (tmp_path / "other", 0)):
        command = [*program, *training(data, folder, "samples", "--max-update", 1)]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == status and (f"Permission denied: '{save_dir}/" in done.stderr) == bool(status)
