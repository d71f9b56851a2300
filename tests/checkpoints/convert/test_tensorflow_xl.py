"""A Transformer-XL of the public TensorFlow code, as an .npz of its variables, has the losses of the PyTorch code.

The published weights are not available. The files have the weights of the vectors under TensorFlow's names.
"""

import io
import re
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.pairwise import looped

from checkpoints.convert.conftest import WORDS, Converter, read_vector, score, without
from fairseq_fwp.checkpoints.convert import tensorflow_xl

LAYERS, CUTOFFS = 2, (12, 20)
EMBED, SOFTMAX = "transformer/adaptive_embed", "transformer/adaptive_softmax"
# Names in a layer, there and here.
NAMES = {
    **{f"dec_attn.{name}_net.weight": f"rel_attn/{name}/kernel" for name in ("qkv", "r", "o")},
    **{f"pos_ff.CoreNet.{index}.{part}": f"ff/layer_{number}/{ours}" for index, number in ((0, 1), (3, 2))
       for part, ours in (("weight", "kernel"), ("bias", "bias"))},
    **{f"{block}.layer_norm.{part}": f"{ours}/LayerNorm/{name}"
       for block, ours in (("dec_attn", "rel_attn"), ("pos_ff", "ff"))
       for part, name in (("weight", "gamma"), ("bias", "beta"))},
}  # fmt: skip
OPTIONS = {"tgt_len": 5, "mem_len": 4}


def make_variables(name, untied=True):
    """Return the weights of a vector as TensorFlow's variables: kernels are (in, out), and biases split by cluster."""
    given = {key: x.numpy() for key, x in read_vector(f"transformer-xl/{name}").tensors.items()}
    found = {}
    for bias in ("r_w_bias", "r_r_bias"):
        found[f"transformer/{bias}"] = np.stack([given[bias]] * LAYERS) if untied else given[bias]
    for layer, (theirs, ours) in product(range(LAYERS), NAMES.items()):
        x = given[f"layers.{layer}.{theirs}"]
        found[f"transformer/layer_{layer}/{ours}"] = x.T if ours.endswith("kernel") else x
    biases = [given[f"crit.out_layers.{index}.bias"] for index in range(3) if f"crit.out_layers.{index}.bias" in given]
    if len(biases) == 1:
        found[f"{EMBED}/lookup_table"] = given["word_emb.emb_layers.0.weight"]
    else:
        for index in range(3):
            found[f"{EMBED}/cutoff_{index}/lookup_table"] = given[f"word_emb.emb_layers.{index}.weight"]
            found[f"{EMBED}/cutoff_{index}/proj_W"] = given[f"word_emb.emb_projs.{index}"].T
        found[f"{SOFTMAX}/cutoff_0/proj"] = given["crit.out_projs.0"].T  # the others are the input's
    if "crit.cluster_bias" not in given:
        return found | {f"{SOFTMAX}/bias": biases[0]}
    biases = np.split(biases[0], CUTOFFS) if len(biases) == 1 else biases
    found |= {f"{SOFTMAX}/cutoff_{index}/b": bias for index, bias in enumerate(biases)}
    for ours, theirs in (("W", "weight"), ("b", "bias")):  # the first column is of the second cluster, not of the last
        found[f"{SOFTMAX}/cutoff_0/cluster_{ours}"] = given[f"crit.cluster_{theirs}"][::-1].copy()
    return found


def packed(variables):
    file = io.BytesIO()
    np.savez(file, **variables)
    return file.getvalue()


class NpzConverter(Converter):
    """A converter of variables, or bytes."""

    def arguments(self, variables, **options):
        vector = read_vector("transformer-xl/wt103")._replace(options={**OPTIONS, **options})
        save = packed(variables) if isinstance(variables, dict) else variables
        return super().arguments(vector, vector.options.pop("words", WORDS), save=save, cutoffs=None)


@pytest.fixture
def convert_npz(tmp_path):
    return NpzConverter(tmp_path, "model.npz")


@looped("untied", [True, False])
@looped("name, mem_len", [("wt103", 6), ("wt103_div_val", 13), ("enwik8", 12)])
def test_losses_are_those_of_the_public_code(convert_npz, name, mem_len, untied):
    """With --same_length, as of enwik8, a token sees mem_len others there, and in the PyTorch code one less."""
    vector = read_vector(f"transformer-xl/{name}")
    converted = convert_npz.convert(make_variables(name, untied), **{**vector.options, "mem_len": mem_len})
    losses = score(*converted, vector.tokens, vector.segments, carry=True)
    torch.testing.assert_close(losses, vector.losses, rtol=0, atol=1e-9)


def test_each_layer_has_its_own_biases(convert_npz):
    variables = make_variables("wt103")
    drawn = {name: np.random.default_rng(1).random((LAYERS, 2, 4), np.float32) for name in (R_W, R_R)}
    drawn[R_R] += 1
    model, _ = convert_npz.convert(variables | drawn)
    for layer, of_w, of_r in zip(model.decoder.layers, drawn[R_W], drawn[R_R], strict=True):
        positions = layer.self_attn.positions
        for bias, expected in ((positions.content_bias, of_w), (positions.position_bias, of_r)):
            assert torch.equal(bias.float(), torch.from_numpy(expected))


def test_the_flags_that_are_written(convert_npz, capsys):
    options = {"clamp_len": 3, "same_length": True, "mem_len": 6}
    flags = (convert_npz.write(make_variables("wt103_div_val"), **options) / "flags.txt").read_text()
    # Two words more: <s> and <pad>. A token sees itself and 6 others.
    for flag in ("--untie-biases", "--adaptive-softmax-cutoff 14,22", "--div-val 2", "--mem-len 7", "--same-length"):
        assert flag in flags
    notes = re.findall("^note: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [note[:20] for note in notes] == ["the TensorFlow code ", "layer normalisation ", "--mem-len is 7 for -"]
    flags = (convert_npz.write(make_variables("wt103", untied=False)) / "flags.txt").read_text()
    assert "--untie-biases" not in flags and "--mem-len 4" in flags
    assert "--mem-len is" not in capsys.readouterr().out


def test_other_dtypes_and_what_the_optimizer_keeps(convert_npz):
    plain = make_variables("wt103_div_val", untied=False)
    expected = torch.load(convert_npz.write(plain) / "checkpoint.pt")["model"]
    for dtype, numbers in ((np.float64, torch.float64), (np.float16, torch.float16)):
        variables = {name: value.astype(dtype) for name, value in plain.items()}
        slots = {f"{name}/{slot}": value for name, value in variables.items() for slot in ("Adam", "Adam_1")}
        steps = {"beta1_power": np.float32(0.5), "beta2_power": np.float32(0.5), "global_step": np.int64(7)}
        found = torch.load(convert_npz.write({**variables, **slots, **steps}) / "checkpoint.pt")["model"]
        assert found.keys() == expected.keys() and numbers in {x.dtype for x in found.values()}
        assert all(torch.equal(x, expected[name].to(x.dtype)) for name, x in found.items())


def test_the_command_that_exports(convert_npz, monkeypatch):
    """The command of the guide runs, with a stand-in for TensorFlow."""
    variables = make_variables("wt103_div_val")
    saved = {**variables, "transformer/r_w_bias/Adam": variables["transformer/r_w_bias"], "global_step": np.int64(7)}
    reader = SimpleNamespace(get_variable_to_shape_map=lambda: dict.fromkeys(saved), get_tensor=saved.__getitem__)
    stub = SimpleNamespace(load_checkpoint=lambda path: reader if path == "model.ckpt-0" else None)
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(train=stub))
    monkeypatch.chdir(convert_npz.out.parent)
    command = re.search(r'python -c "(.*)"$', tensorflow_xl.EXPORT)
    exec(command[1], {})
    with np.load("model.npz") as file:
        assert sorted(file.files) == sorted(variables)
    page = Path(tensorflow_xl.__file__).parents[3] / "docs" / "checkpoints.md"
    assert command[0] in page.read_text(encoding="utf-8")


def replaced(name, change):
    return lambda variables: {**variables, name: change(variables[name])}


def added(name, *shape):
    return lambda variables: {**variables, name: np.ones(shape, np.float32)}


def seventh(variables):
    return {name.replace("transformer/layer_1/", "transformer/layer_7/"): value for name, value in variables.items()}


R_W, R_R, QKV = "transformer/r_w_bias", "transformer/r_r_bias", "transformer/layer_1/rel_attn/qkv/kernel"
ELSEWHERE = "--attn_type and --pre_lnorm must be left out: the TensorFlow code"
# changed options, change of the variables, words of the sentence
# fmt: off
REFUSALS = [
    ({}, without(QKV), r"decoder\.layers\.1\.self_attn\.in_proj\.weight is missing"),
    ({}, without("/layer_"), r"lacks layers\.0\.dec_attn\.o_net\.weight;"),
    ({}, seventh, r"r_w_bias must have the biases of 8 layers, got the shape \(2, 2, 4\)"),
    ({}, added("transformer/more", 2), "has also transformer/more"),
    ({}, without(R_W), rf"model\.npz must be a checkpoint .* without {R_W}: make one where TensorFlow"),
    ({}, replaced(QKV, lambda x: x.astype(np.int8)), rf"{QKV} must be floating-point, got torch\.int8"),
    ({}, replaced(QKV, lambda x: x.astype(str)), f"{QKV} must be an array of numbers, got none"),
    ({}, replaced(QKV, lambda x: x.astype(object)), f"{QKV} must be an array of numbers, got none"),
    ({}, replaced(QKV, lambda x: x[0]), rf"{QKV} must have 2 dimensions, .*, got the shape \(24,\)"),
    ({}, replaced(QKV, lambda x: x[:0]), rf"{QKV} must have 2 dimensions, .*, got the shape \(0,"),
    ({}, replaced(R_W, lambda x: x[0, 0]), rf"{R_W} must have 2 or 3 dimensions, .* \(4,\)"),
    ({}, replaced(R_R, lambda x: np.concatenate([x, x])), r"r_r_bias must .* 2 layers, got .* \(4, 2, 4\)"),
    ({}, replaced(R_R, lambda x: x[0]), r"r_r_bias must have the biases of 2 layers, got .* \(2, 4\)"),
    ({}, replaced(f"{SOFTMAX}/cutoff_1/b", lambda x: x[1:]), "got 31 words and 30 biases"),
    ({}, replaced(f"{SOFTMAX}/cutoff_0/cluster_W", lambda x: x[1:]), r"clusters\.weight must be \(2, 8\)"),
    ({}, without(f"{EMBED}/cutoff_0/proj_W"), "--proj_same_dim must be True"),
    ({}, added(f"{SOFTMAX}/cutoff_2/proj", 2, 8), "untied projections, as of --dataset lm1b"),
    ({}, added(f"{EMBED}/proj_W", 8, 8), "--d_embed must equal --d_model"),
    ({"mem_len": None}, dict, "--mem_len must be given, as in training"),
    ({"tgt_len": None}, dict, "--tgt_len must be given"),
    ({"n_head": 4}, dict, "--n_head must be 2, as in the checkpoint, got 4"),
    ({"attn_type": 1}, dict, ELSEWHERE),
    ({"pre_lnorm": True}, dict, ELSEWHERE),
    ({"words": WORDS[:-1]}, dict, "the vocabulary must have the 31 words of the checkpoint, got 30"),
]
# fmt: on


@looped("options, change, says", REFUSALS)
def test_refusals(convert_npz, options, change, says):
    convert_npz.refuses(says, change(make_variables("wt103_div_val")), **options)


def test_files_that_are_no_npz(convert_npz):
    whole, array = packed(make_variables("wt103")), io.BytesIO()
    np.save(array, np.ones(3))
    damaged = bytearray(whole)
    damaged[len(whole) // 3] ^= 255
    for content in (b"", b"no archive", whole[: len(whole) // 2], array.getvalue(), bytes(damaged), None):
        says = "cannot be read: No such file" if content is None else "must be a complete .npz, got a (trunc|damaged)"
        convert_npz.refuses(says, content)
