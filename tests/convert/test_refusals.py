"""Models of the papers' public code that cannot be represented are refused by name, before anything is written."""

import pytest
import torch
from pairwise import looped
from refusals import refused
from torch import nn

from fairseq_fwp.cli.convert import main
from tests.convert.conftest import build, read_vector


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if name not in key}


def replaced(name, *shape):
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


def shifted(name):
    return lambda tensors: {**tensors, name: tensors[name] + 1}


# vector, changed options, change of the state dict, words of the sentence
# fmt: off
REFUSALS = [
    ("type24", {}, without("layers.1.pos_ff.CoreNet.3.bias"), r"decoder\.layers\.1\.fc2\.bias is missing"),
    ("type24", {"attn_type": 34}, None, r"lacks layers\.0\.dec_attn\.qkv_net\.weight;"),
    ("type24", {"attn_type": None}, None, "--attn_type must be given, as in training: neither the state dict"),
    ("type2", {"n_head": None}, None, "--n_head must be given"),
    ("type2", {"tgt_len": None}, None, "--tgt_len must be given"),
    ("type2", {"tgt_len": 0}, None, "--tgt_len must be at least 1, got 0"),
    ("type0", {"n_head": 4}, None, "--n_head must be 2, as in the checkpoint, got 4"),
    ("type0", {"mem_len": None}, None, "--mem_len must be given"),
    ("type25", {"performer_proj_dim": None}, None, "--performer_proj_dim must be given"),
    ("type26", {"dpfp_n_roll": None}, None, "--dpfp_n_roll must be given"),
    ("type2", {"cutoffs": None}, None, "--dataset must be given"),
    ("type2", {"cutoffs": "12"}, None, "--cutoffs must be 2 numbers, as in the checkpoint, got 1"),
    ("type2", {"cutoffs": "a,b"}, None, "--cutoffs must be whole numbers"),
    ("type2", {"cutoffs": None, "dataset": "ptb"}, None, "--cutoffs must be given for --dataset ptb"),
    ("type25", {"performer_proj_dim": 4}, None, r"feature_map\.projection must be \(4, 4\), got \(3, 4\)"),
    ("type24", {"n_head": 4}, None, "qkvb_net must have 28 rows for 4 heads of 2, got 26: check --n_head"),
    ("type2", {"n_head": 3}, None, "--n_head must divide 8, the dimensions of all heads, got 3"),
    ("type2", {"d_head": 5}, None, "--d_head must be 4 = 8 dimensions / --n_head 2, got 5: check"),
    ("type2", {}, replaced("layers.0.dec_attn.o_net.weight", 8, 12), r"out_proj\.weight must be \(8, 8\), got"),
    ("type2", {"attn_type": 0}, None, "lacks r_w_bias"),
    ("type24", {"attn_type": 244}, None, "--attn_type must be one of 0, 2, 4, .*, got 244"),
    ("type24", {"attn_type": 36}, None, "--attn_type must be one of 0, 2, 4, 5, 6, 24, 25, 26.*, got 36"),
    ("../transformer-xl/wt103", {"attn_type": 24}, None, "--attn_type must be 0 or 2 for Transformer-XL, got 24"),
    ("type2", {"pre_lnorm": True}, None, "--pre_lnorm .* normalises keys, but not queries"),
    ("type4", {"pre_lnorm": True}, None, "--pre_lnorm .* normalises keys, but not queries"),
    ("type24", {"pre_lnorm": True}, None, "--pre_lnorm .* adds the normalised input"),
    ("type4", {"dropatt": 0.1}, None, "--dropatt must be 0 .*, got 0.1: give --dropatt 0"),
    ("type2", {"mem_len": 4}, None, "--mem_len must be left out with absolute positions"),
    ("type24", {"same_length": True}, None, "--same_length must be left out with absolute positions"),
    ("type2", {"clamp_len": 9}, None, "--clamp_len must be at least 10 with abs.*, or -1 .*, got 9: a sma"),
    ("type2", {"clamp_len": 1}, None, "--clamp_len must be at least 10 with abs.*, or -1 .*, got 1: a sma"),
    ("type24", {"remove_lnorm": True}, None, "--remove_lnorm must be off, got on"),
    ("type24", {}, without("pos_ff"), r"lacks layers\.0\.pos_ff\.CoreNet\.0\.weight"),
    ("type24", {}, shifted("crit.out_layers.0.weight"), "--not_tied cannot be converted"),
    ("type24_div_val", {}, shifted("crit.out_projs.1"), "untied projections, as of --dataset lm1b"),
    ("type2", {}, replaced("word_emb.emb_layers.0.weight", 31, 4), "--d_embed must be 8, .*, got 4"),
    ("type2", {}, without("word_emb.emb_layers.0.weight"), r"must have word_emb\.emb_layers"),
    ("type2", {}, shifted("pos_emb.inv_freq"), r"pos_emb\.inv_freq must hold the frequencies"),
]
# fmt: on


@looped("name, options, change, says", REFUSALS)
def test_refusal(name, options, change, says):
    vector = read_vector(f"schlag-lm/{name}".replace("schlag-lm/../", ""))
    vector = vector._replace(tensors=change(vector.tensors) if change else vector.tensors)
    with pytest.raises(ValueError, match=says) as refusal:
        build(vector, **options)
    assert "\n" not in str(refusal.value)


@looped("name", ["schlag-lm/type24_div_val", "transformer-xl/wt103_div_val"])
def test_every_tensor_is_used_once(name):
    """A model is not converted if a tensor is missing, or if there is another one."""
    vector, sentence = read_vector(name), "lacks|has also|is missing|is not a weight of this model|must"
    for key, tensor in vector.tensors.items():
        rest = {other: x for other, x in vector.tensors.items() if other != key}
        for tensors in (rest, {**vector.tensors, f"{key}.more": tensor}):
            with pytest.raises(ValueError, match=sentence):
                build(vector._replace(tensors=tensors))


def test_a_limit_that_no_distance_exceeds():
    """The smallest one that the error names, and both forms of no limit."""
    vector = read_vector("schlag-lm/type2")
    assert vector.options["tgt_len"] == 11
    for clamp_len in (10, 0, -1):
        build(vector, clamp_len=clamp_len)


class Pickled(nn.Module):
    """A stand-in for a model of the public code."""


EXPORT = r": export one in the folder of .*m\.state_dict\(\).*'state_dict\.pt'\)\"$"
WHOLE = r"state_dict\.pt must be a complete checkpoint, got a truncated or different file"


@looped(
    "saved, says",
    [
        (Pickled(), "holds pickled objects, which could run any code, next to its weights" + EXPORT),
        ({"epoch": 3}, "must be a state dict of named tensors, got other objects: export one"),
        ([torch.ones(2)], "got other objects"),
        (b"", WHOLE),
        (b"PK\x03\x04" + bytes(999), WHOLE),
        (None, "cannot be read: No such file"),
    ],
)
def test_files_that_are_no_state_dicts(convert, saved, says):
    refused(main, *convert.arguments(read_vector("schlag-lm/type2"), save=saved), says=says, out=convert.out)


def test_what_the_command_is_given(convert):
    vector = read_vector("schlag-lm/type2")
    arguments = convert.arguments(vector, words=["<eos>", *map(str, range(29))])
    refused(main, *arguments, says="the vocabulary must have the 31 words of the checkpoint, got 30", out=convert.out)
    other = convert.arguments(read_vector("transformer-xl/absolute"), no_pos=True)
    refused(main, *other, says="--no_pos cannot be used with --source transformer-xl", out=convert.out)
    convert.out.mkdir()
    (convert.out / "mine").write_text("")
    refused(main, *convert.arguments(vector), says=r"--out must be a new or empty folder, got .*, which holds files")
    assert [file.name for file in convert.out.iterdir()] == ["mine"]
