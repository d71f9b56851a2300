"""The output of the command fits fairseq's commands: a checkpoint, its dictionary and its flags."""

import math
import random
import re
import shutil

import pytest
import torch
from command_server import run
from pairwise import looped

from fairseq_fwp.convert import files
from fairseq_fwp.modules.layers import Dropout
from tests.convert.conftest import WORDS, Converter, build, load, read_vector, score


@pytest.mark.parametrize("name", ["schlag-lm/type25", "transformer-xl/wt103_div_val"])
def test_a_written_checkpoint_is_the_model(convert, name, capsys):
    vector = read_vector(name)
    folder = convert(vector)
    flags = (folder / "flags.txt").read_text().strip()
    assert flags in capsys.readouterr().out
    assert sorted(file.name for file in folder.iterdir()) == ["checkpoint.pt", "dict.txt", "flags.txt"]
    assert sorted(file.name for file in folder.parent.iterdir()) == ["out", "state_dict.pt", "words.txt"]
    model, dictionary = load(folder)
    losses = score(model, dictionary, vector.tokens, vector.segments, carry="mem_len" in vector.options)
    torch.testing.assert_close(losses, vector.losses, rtol=0, atol=1e-6)
    # Only the flags are needed for the same model.
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    cfg = files.configure(flags.split(), folder)
    assert {key: saved["cfg"]["model"][key] for key in cfg.model if key != "activation_fn"} == {
        key: getattr(cfg.model[key], "value", cfg.model[key]) for key in cfg.model if key != "activation_fn"
    }


def test_options_are_read_from_the_log_of_the_training(convert):
    vector = read_vector("schlag-lm/type24_skip")
    lines = {
        **vector.options,
        "d_head": 4,
        "dropout": 0.1,
        "not_known": "[None, 'x']",
        "clamp_len": -1,
        "no_pos": False,
    }
    log = "\n".join(["=" * 100, *(f"    - {name} : {value}" for name, value in lines.items()), "| epoch 1 step 200 |"])
    (convert.folder / "log.txt").write_text(log)
    folder = convert(vector._replace(options={}))
    model, dictionary = load(folder)
    losses = score(model, dictionary, vector.tokens, vector.segments, carry=False)
    torch.testing.assert_close(losses, vector.losses, rtol=0, atol=1e-6)
    assert model.decoder.dropout.p == 0.1
    # Given options override written ones.
    shutil.rmtree(convert.out)
    assert load(convert(vector._replace(options={}), dropout=0.2))[0].decoder.dropout.p == 0.2


def test_random_features_that_were_not_exported_are_drawn():
    """The public code also draws again for such a state dict; in training both draw all the time."""
    vector = read_vector("schlag-lm/type35")
    bare = vector._replace(tensors={key: x for key, x in vector.tensors.items() if "proj_matrix" not in key})
    (model, *_, conversion), (again, *_) = build(bare), build(bare)
    assert [note for note in conversion.notes if "lacks dec_attn.proj_matrix" in note]
    first, second = (layer.self_attn.feature_map.projection for layer in model.decoder.layers)
    assert not torch.equal(first, second)
    assert torch.equal(first, again.decoder.layers[0].self_attn.feature_map.projection)
    with_matrix = build(vector)[2]
    assert with_matrix.notes == []


def test_notes(convert, capsys):
    convert(read_vector("schlag-lm/type24_no_pos"), carry_over_fast_weight=True)
    (note,) = re.findall("^note: (.*)$", capsys.readouterr().out, re.M)
    assert "--carry-state on segments of 11 tokens" in note


@looped("name", ["schlag-lm/type24", "schlag-lm/type2", "transformer-xl/wt103"])
def test_dropout_is_where_the_public_code_has_it(name):
    """It is after embeddings, both blocks, the feed-forward activation and the last layer, and in fwp_xl_lm of R."""
    model, *_ = build(read_vector(name), dropout=0.25)
    calls = []
    for module in model.modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(lambda module, *_: calls.append(module.p))
    model(torch.ones(1, 3, dtype=torch.long))
    assert calls == [0.25] * (1 + 2 * (4 if "xl" in name else 3) + 1)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Return a converted model, a folder of binarised text in its words, and the loss (base 2) of the split valid."""
    tmp_path = tmp_path_factory.mktemp("converted")
    folder = Converter(tmp_path)(read_vector("schlag-lm/type24"))
    chooser = random.Random(1)
    texts = {split: [[chooser.choice(WORDS[1:]) for _ in range(9)] for _ in range(8)] for split in ("train", "valid")}
    arguments = ["--only-source", "--srcdict", folder / "dict.txt", "--destdir", tmp_path / "bin", "--workers", 1]
    for split, lines in texts.items():
        (tmp_path / f"{split}.txt").write_text("\n".join(map(" ".join, lines)) + "\n")
        arguments += [f"--{split}pref", tmp_path / f"{split}.txt"]
    run("fairseq-preprocess", *arguments)
    numbers = [number for line in texts["valid"] for number in (*map(WORDS.index, line), 0)]
    tokens = torch.tensor([0, *numbers])[:, None]  # fairseq scores the first token too, after the end of a line
    losses = score(*load(folder), tokens, [11] * 7 + [3], carry=False)
    return folder, tmp_path / "bin", losses.mean().item() / math.log(2)


@pytest.mark.slow
@looped("command", ["fairseq-eval-lm", "fwp-eval-lm"])
def test_it_is_scored(converted, command):
    folder, data, expected = converted
    arguments = ["--path", folder / "checkpoint.pt", "--gen-subset", "valid", "--tokens-per-sample", 11]
    log = run(command, data, *arguments, "--context-window", 0, "--cpu")
    assert "Evaluated 80 tokens" in log
    assert float(re.search(r"Loss \(base 2\): ([\d.]+)", log)[1]) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("option", ["--restore-file", pytest.param("--finetune-from-model", marks=pytest.mark.slow)])
def test_fairseq_trains_it(converted, tmp_path, option):
    folder, data, expected = converted
    flags = (folder / "flags.txt").read_text().split()
    # The loss stays the same, even if a weight of minus infinity would be multiplied by 0.
    training = ["--optimizer", "adam", "--lr", 0, "--weight-decay", 0.01]
    training += ["--batch-size", 4, "--max-update", 1, "--log-format", "simple"]
    files = ["--save-dir", tmp_path, "--no-epoch-checkpoints", option, folder / "checkpoint.pt"]
    log = run("fairseq-train", data, *flags, *training, *files, "--cpu")
    assert re.search(r"Loaded checkpoint .*checkpoint\.pt", log)
    assert float(re.search(r"valid on 'valid' subset \| loss ([\d.]+)", log)[1]) == pytest.approx(expected, abs=2e-3)
