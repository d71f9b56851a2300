"""Models that cannot be represented are refused by name, in one sentence, before anything is written."""

import re

import pytest
import torch
from pairwise import looped
from torch import nn

from tests.convert.conftest import build, read_vector


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def replaced(**others):
    return lambda tensors: {**tensors, **{key.replace("__", "."): value for key, value in others.items()}}


def shifted(name):
    return lambda tensors: {**tensors, name: tensors[name] + 1}


# vector, changed options, change of the state dict, the sentence
REFUSALS = {
    "missing": ("type24", {}, without("layers.1.pos_ff.CoreNet.3.bias"), r"decoder\.layers\.1\.fc2\.bias is missing"),
    "other type": ("type24", {"attn_type": 34}, None, r"lacks layers\.0\.dec_attn\.qkv_net\.weight;"),
    "no type": (
        "type24",
        {"attn_type": None},
        None,
        r"--attn_type must be given, as in training: neither the state dict",
    ),
    "no heads": ("type2", {"n_head": None}, None, r"--n_head must be given"),
    "no length": ("type2", {"tgt_len": None}, None, r"--tgt_len must be given"),
    "empty samples": ("type2", {"tgt_len": 0}, None, r"--tgt_len must be at least 1, got 0"),
    "heads of another": ("type0", {"n_head": 4}, None, r"--n_head must be 2, as in the checkpoint, got 4"),
    "no memory": ("type0", {"mem_len": None}, None, r"--mem_len must be given"),
    "no features": ("type25", {"performer_proj_dim": None}, None, r"--performer_proj_dim must be given"),
    "no nu": ("type26", {"dpfp_n_roll": None}, None, r"--dpfp_n_roll must be given"),
    "no data set": ("type2", {"cutoffs": None}, None, r"--dataset must be given"),
    "cutoffs": ("type2", {"cutoffs": "12"}, None, r"--cutoffs must be 2 numbers, as in the checkpoint, got 1"),
    "cutoffs of words": ("type2", {"cutoffs": "a,b"}, None, r"--cutoffs must be whole numbers"),
    "data set": ("type2", {"cutoffs": None, "dataset": "ptb"}, None, r"--cutoffs must be given for --dataset ptb"),
    "features": (
        "type25",
        {"performer_proj_dim": 4},
        None,
        r"feature_map\.projection must be \(4, 4\), got \(3, 4\)",
    ),
    "heads": ("type24", {"n_head": 4}, None, r"qkvb_net must have 28 rows for 4 heads of 2, got 26: check --n_head"),
    "no divisor": ("type2", {"n_head": 3}, None, r"--n_head must divide 8, the dimensions of all heads, got 3"),
    "d_head": ("type2", {"d_head": 5}, None, r"--d_head must be 4 = 8 dimensions / --n_head 2, got 5: check"),
    "d_head 2": (
        "type2",
        {},
        replaced(layers__0__dec_attn__o_net__weight=torch.zeros(8, 12)),
        r"self_attn\.out_proj\.weight must be \(8, 8\), got \(8, 12\)",
    ),
    "other type 2": ("type2", {"attn_type": 0}, None, r"lacks r_w_bias"),
    "Delta LSTM": ("type24", {"attn_type": 244}, None, r"--attn_type must be one of 0, 2, 4, .*, got 244"),
    "never built": (
        "type24",
        {"attn_type": 36},
        None,
        r"--attn_type must be one of 0, 2, 4, 5, 6, 24, 25, 26.*, got 36",
    ),
    "pre-norm": ("type2", {"pre_lnorm": True}, None, r"--pre_lnorm .* normalises keys, but not queries"),
    "pre-norm 4": ("type4", {"pre_lnorm": True}, None, r"--pre_lnorm .* normalises keys, but not queries"),
    "pre-norm 24": ("type24", {"pre_lnorm": True}, None, r"--pre_lnorm .* adds the normalised input"),
    "dropatt": ("type4", {"dropatt": 0.1}, None, r"--dropatt must be 0 .*, got 0\.1: give --dropatt 0"),
    "memory": ("type2", {"mem_len": 4}, None, r"--mem_len must be left out with absolute positions"),
    "same length": ("type24", {"same_length": True}, None, r"--same_length must be left out with absolute positions"),
    "clamp": ("type2", {"clamp_len": 9}, None, r"--clamp_len must be at least 10 with abs.*, or -1 .*, got 9: a sma"),
    "remove": ("type24", {"remove_lnorm": True}, None, r"--remove_lnorm must be off, got on"),
    "no feed-forward": (
        "type24",
        {},
        lambda tensors: {name: tensor for name, tensor in tensors.items() if "pos_ff" not in name},
        r"lacks layers\.0\.pos_ff\.CoreNet\.0\.weight",
    ),
    "untied": ("type24", {}, shifted("crit.out_layers.0.weight"), r"--not_tied cannot be converted"),
    "untied projections": (
        "type24_div_val",
        {},
        shifted("crit.out_projs.1"),
        r"untied projections, as of --dataset lm1b",
    ),
    "embeddings": (
        "type2",
        {},
        replaced(word_emb__emb_layers__0__weight=torch.zeros(31, 4)),
        r"--d_embed must be 8, .*, got 4",
    ),
    "no embeddings": ("type2", {}, without("word_emb.emb_layers.0.weight"), r"must have word_emb\.emb_layers"),
    "frequencies": ("type2", {}, shifted("pos_emb.inv_freq"), r"pos_emb\.inv_freq must hold the frequencies"),
}


@looped("case", REFUSALS)
def test_refusal(case):
    name, options, change, sentence = REFUSALS[case]
    vector = read_vector(f"schlag-lm/{name}")
    vector = vector._replace(tensors=change(vector.tensors) if change else vector.tensors)
    with pytest.raises(ValueError, match=sentence) as refusal:
        build(vector, **options)
    assert "\n" not in str(refusal.value)


@looped("name", ["schlag-lm/type24_div_val", "transformer-xl/wt103_div_val"])
def test_every_tensor_is_used_once(name):
    """A model is not converted if a tensor is missing, or if there is another one."""
    vector, sentence = read_vector(name), "lacks|has also|is missing|is not a weight of this model|must"
    for key, tensor in vector.tensors.items():
        with pytest.raises(ValueError, match=sentence):
            build(vector._replace(tensors=without(key)(vector.tensors)))
        with pytest.raises(ValueError, match=sentence):
            build(vector._replace(tensors={**vector.tensors, f"{key}.more": tensor}))


def test_a_limit_that_no_distance_exceeds():
    """The smallest one that the error names, and both forms of no limit."""
    vector = read_vector("schlag-lm/type2")
    assert vector.options["tgt_len"] == 11
    for clamp_len in (10, 0, -1):
        build(vector, clamp_len=clamp_len)


def test_types_that_transformer_xl_does_not_have():
    with pytest.raises(ValueError, match="--attn_type must be 0 or 2 for Transformer-XL, got 24"):
        build(read_vector("transformer-xl/wt103"), attn_type=24)


def test_the_vocabulary_of_another_model(convert):
    with pytest.raises(SystemExit, match="the vocabulary must have the 31 words of the checkpoint, got 30"):
        convert(read_vector("schlag-lm/type2"), words=["<eos>", *map(str, range(29))])
    assert not convert.out.exists()


class Pickled(nn.Module):
    """A stand-in for a model of the public code."""


def test_a_pickled_model_is_not_loaded(convert):
    vector = read_vector("schlag-lm/type2")
    for saved, sentence in (
        (
            Pickled(),
            "holds pickled objects, which could run any code, next to its weights: export one in the folder of",
        ),
        ({"epoch": 3}, "must be a state dict of named tensors, got other objects: export one"),
        ([torch.ones(2)], "got other objects"),
    ):
        with pytest.raises(SystemExit, match=sentence) as refusal:
            convert(vector, save=saved)
        assert re.match(r"fwp-convert: .*m\.state_dict\(\).*'state_dict\.pt'\)\"$", str(refusal.value))


def test_files_that_are_no_checkpoints(convert, tmp_path):
    vector = read_vector("schlag-lm/type2")
    whole = tmp_path / "whole.pt"
    torch.save(vector.tensors, whole)
    for content in (b"", b"no checkpoint", whole.read_bytes()[:1000]):
        with pytest.raises(
            SystemExit, match=r"state_dict\.pt must be a complete checkpoint, got a truncated or different file"
        ):
            convert(vector, save=content)
    with pytest.raises(SystemExit, match="cannot be read: No such file"):
        convert(vector, save=None)


def test_a_folder_that_is_there_is_left_alone(convert):
    vector = read_vector("schlag-lm/type2")
    convert.out.mkdir()
    (convert.out / "mine").write_text("")
    with pytest.raises(SystemExit, match=r"--out must be a new or empty folder, got .*, which holds files"):
        convert(vector)
    assert [file.name for file in convert.out.iterdir()] == ["mine"]


def test_options_of_the_other_source(convert, capsys):
    with pytest.raises(SystemExit):
        convert(read_vector("transformer-xl/absolute"), no_pos=True)
    assert "--no_pos cannot be used with --source transformer-xl" in capsys.readouterr().err
