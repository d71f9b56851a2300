"""Models of the papers' public code: the losses, token by token, what is written, the vocabulary, and refusals."""

import math
import re
from itertools import chain

import pytest
import torch
from support.command_server import run
from support.pairwise import looped
from support.refusals import refused
from support.small_text import write_split
from torch import nn

from checkpoints.convert.conftest import VECTORS, WORDS, Converter, build, load, read_vector, score, without
from fairseq_fwp.checkpoints.convert import checkpoint
from fairseq_fwp.checkpoints.convert.vocabulary import arrange, given_words
from fairseq_fwp.cli.convert import main
from fairseq_fwp.modules.dropout import Dropout

NAMES = sorted(str(path.relative_to(VECTORS).with_suffix("")) for path in VECTORS.glob("*/*.npz"))


def check_losses(vector, model, dictionary, tolerance):
    """Return the losses; a memory is carried."""
    losses = score(model, dictionary, vector.tokens, vector.segments, carry=vector.options.get("mem_len", 0) > 0)
    torch.testing.assert_close(losses, vector.losses, rtol=0, atol=tolerance)
    return losses


@looped("name", NAMES)
def test_losses_are_those_of_the_public_code(name):
    vector = read_vector(name)
    model, dictionary, _ = build(vector)
    losses = check_losses(vector, model, dictionary, 1e-9)
    if vector.carried is not None:
        carried = score(model, dictionary, vector.tokens, vector.segments, carry=True)
        torch.testing.assert_close(carried, vector.carried, rtol=0, atol=1e-9)
        assert (carried - losses).abs().max() > 1e-3


# What is written.


@looped("name", ["schlag-lm/type25", "transformer-xl/wt103_div_val"])
def test_a_written_checkpoint_is_the_model(convert, name, capsys):
    vector = read_vector(name)
    folder = convert.write(vector)
    flags = (folder / "flags.txt").read_text().strip()
    assert flags in capsys.readouterr().out
    assert sorted(file.name for file in folder.iterdir()) == ["checkpoint.pt", "dict.txt", "flags.txt"]
    assert sorted(file.name for file in folder.parent.iterdir()) == ["out", "state_dict.pt", "words.txt"]
    check_losses(vector, *load(folder), 1e-6)
    # Only the flags are needed for the same model.
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)["cfg"]["model"]
    cfg = checkpoint.fairseq_config(flags.split(), folder).model
    known = {key: getattr(cfg[key], "value", cfg[key]) for key in cfg if key != "activation_fn"}
    assert {key: saved[key] for key in known} == known


def test_options_are_read_from_the_log_of_the_training(convert):
    vector = read_vector("schlag-lm/type24_skip")
    more = {"d_head": 4, "dropout": 0.1, "not_known": "[None, 'x']", "clamp_len": -1, "no_pos": False}
    lines = (f"    - {name} : {value}" for name, value in {**vector.options, **more}.items())
    (convert.path.parent / "log.txt").write_text("\n".join(["=" * 100, *lines, "| epoch 1 step 200 |"]))
    model, dictionary = convert.convert(vector._replace(options={}))
    check_losses(vector, model, dictionary, 1e-6)
    assert model.decoder.dropout.p == 0.1
    # Given options override written ones.
    assert convert.convert(vector._replace(options={}), dropout=0.2)[0].decoder.dropout.p == 0.2


def test_random_features_that_were_not_exported_are_drawn():
    """The public code also draws again for such a state dict; in training both draw all the time."""
    vector = read_vector("schlag-lm/type35")
    bare = vector._replace(tensors=without("proj_matrix")(vector.tensors))
    (model, *_, conversion), (again, *_) = build(bare), build(bare)
    assert [note for note in conversion.notes if "lacks dec_attn.proj_matrix" in note]
    first, second = (layer.self_attn.feature_map.projection for layer in model.decoder.layers)
    assert not torch.equal(first, second)
    assert torch.equal(first, again.decoder.layers[0].self_attn.feature_map.projection)
    assert build(vector)[2].notes == []


def test_a_state_to_carry_is_told(convert, capsys):
    convert.write(read_vector("schlag-lm/type24_no_pos"), carry_over_fast_weight=True)
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
    """Return the folder of a converted model, with a binarised text, and the loss (base 2) of the split valid."""
    folder = Converter(tmp_path_factory.mktemp("converted")).write(read_vector("schlag-lm/type24"))
    lines = [[*line, 0] for line in (7 * torch.arange(72) % 30 + 1).view(8, 9).tolist()]  # line ends have number 0
    model, dictionary = load(folder)
    numbers = [dictionary.eos(), *map(dictionary.index, WORDS[1:])]
    for split in ("train", "valid"):
        write_split(folder / split, [[numbers[word] for word in line] for line in lines], len(dictionary))
    tokens = torch.tensor([0, *chain(*lines)])[:, None]  # fairseq scores the first token too, after the end of a line
    losses = score(model, dictionary, tokens, [11] * 7 + [3], carry=False)
    return folder, losses.mean().item() / math.log(2)


@pytest.mark.slow
@looped("command", ["fairseq-eval-lm", "fwp-eval-lm"])
def test_it_is_scored(converted, command):
    folder, expected = converted
    arguments = ["--path", folder / "checkpoint.pt", "--gen-subset", "valid", "--tokens-per-sample", 11]
    log = run(command, folder, *arguments, "--context-window", 0, "--cpu")
    assert "Evaluated 80 tokens" in log
    assert float(re.search(r"Loss \(base 2\): ([\d.]+)", log)[1]) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("option", ["--restore-file", pytest.param("--finetune-from-model", marks=pytest.mark.slow)])
def test_fairseq_trains_it(converted, tmp_path, option):
    folder, expected = converted
    flags = (folder / "flags.txt").read_text().split()
    # The loss stays the same, even if a weight of minus infinity would be multiplied by 0.
    flags += ["--optimizer", "adam", "--lr", 0, "--weight-decay", 0.01, "--batch-size", 4, "--max-update", 1]
    flags += ["--log-format", "simple", "--save-dir", tmp_path, "--no-epoch-checkpoints", "--cpu"]
    log = run("fairseq-train", folder, *flags, option, folder / "checkpoint.pt")
    assert re.search(r"Loaded checkpoint .*checkpoint\.pt", log)
    assert float(re.search(r"valid on 'valid' subset \| loss ([\d.]+)", log)[1]) == pytest.approx(expected, abs=2e-3)


# The vocabulary: in fairseq's order, with the same words, probabilities and clusters.


def test_words_of_their_own_take_the_places_of_specials():
    vocabulary = arrange(["<eos>", "the", "<unk>", "of"])
    assert (vocabulary.words, vocabulary.rows.tolist(), vocabulary.added) == (["the", "of"], [-1, -1, 0, 2, 1, 3], 2)
    assert vocabulary.place(torch.tensor([1.0, 2.0, 3.0, 4.0]), fill=9.0).tolist() == [9.0, 9.0, 1.0, 3.0, 2.0, 4.0]
    first_cluster = vocabulary.place(torch.ones(3, 2), fill=0.0)
    assert first_cluster.tolist() == 2 * [[0.0] * 2] + 3 * [[1.0] * 2]
    assert vocabulary.cutoffs([3]) == [5] and vocabulary.cutoffs([]) == []
    assert arrange(["<S>", "</S>", "<UNK>", "a"]).rows.tolist() == [-1, -1, 0, 2, 1, 3]  # LM1B
    assert arrange(["101", "32"]).rows.tolist() == [-1, -1, -1, -1, 0, 1]  # enwik8
    assert arrange(["a", "<pad>", "</s>", "<s>"]).rows.tolist() == [3, 1, 2, -1, 0]
    assert arrange(["<eos>", "<S>"]).rows.tolist() == [-1, -1, 0, -1, 1]  # the second is an ordinary word


def test_words_are_read_line_by_line(tmp_path):
    file = tmp_path / "words.txt"
    file.write_bytes("<eos>\ncafé 12\r\na\x0bb\n\n".encode())
    assert given_words(file, file) == ["<eos>", "café", "a"]
    file.write_bytes(b"a\n\nb\n")
    for says, read in {
        "must hold each word once, got 'a' twice": lambda: arrange(["a", "b", "a"]),
        "the first 2 words, .* got one as word 3: give the": lambda: arrange(["<eos>", "a", "<unk>"]).cutoffs([2]),
        r"line 2 of the vocabulary .* must hold a word, got an empty line": lambda: given_words(file, file),
        "none cannot be read": lambda: given_words(file, tmp_path / "none"),
        "cannot be read": lambda: given_words(file, tmp_path),
    }.items():
        with pytest.raises(ValueError, match=says):
            read()


@looped("name", ["schlag-lm/type24", "schlag-lm/type24_div_val", "schlag-lm/type2", "transformer-xl/enwik8"])
def test_what_the_source_does_not_have_has_no_probability(name):
    """A vocabulary without line ends is told of."""
    vector = read_vector(name)
    words = [f"w{number}" for number in range(31)]
    for known, dead in ((WORDS, ["<s>", "<pad>"]), (words, ["<s>", "<pad>", "</s>", "<unk>"])):
        model, dictionary, conversion = build(vector, known)
        tokens = torch.randint(4, len(dictionary), (2, 9))
        probabilities = model.get_normalized_probs(model.decoder(tokens), log_probs=False)
        assert probabilities.shape[-1] == 31 + len(dead) == len(dictionary)
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 9, dtype=torch.float64))
        rows = torch.tensor([dictionary.index(word) for word in dead])
        assert (probabilities == 0).sum(-1).eq(len(dead)).all() and (probabilities[..., rows] == 0).all()
        told = "the vocabulary has no symbol for the end of a line (</s>, <eos>, <S>), which fairseq-pre"
        assert [note[: len(told)] for note in conversion.notes] == ([told] if known is words else [])


# Refusals, before anything is written.


def zeros(name, *shape):
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


def shifted(name):
    return lambda tensors: {**tensors, name: tensors[name] + 1}


# vector, changed options, change of the state dict, words of the sentence
# fmt: off
REFUSALS = [
    ("type24", {}, without("layers.1.pos_ff.CoreNet.3.bias"), r"decoder\.layers\.1\.fc2\.bias is missing"),
    ("type24", {"attn_type": 34}, dict, r"lacks layers\.0\.dec_attn\.qkv_net\.weight;"),
    *((name, {option: None}, dict, f"--{option} must be given, as in training: neither the state dict nor its log")
      for name, options in {"type24": ["attn_type"], "type2": ["n_head", "tgt_len"], "type0": ["mem_len"],
                            "type25": ["performer_proj_dim"], "type26": ["dpfp_n_roll"]}.items() for option in options),
    ("type2", {"tgt_len": 0}, dict, "--tgt_len must be at least 1, got 0"),
    ("type0", {"n_head": 4}, dict, "--n_head must be 2, as in the checkpoint, got 4"),
    ("type2", {"cutoffs": None}, dict, "--dataset must be given"),
    ("type2", {"cutoffs": "12"}, dict, "--cutoffs must be 2 numbers, as in the checkpoint, got 1"),
    ("type2", {"cutoffs": "a,b"}, dict, "--cutoffs must be whole numbers"),
    ("type2", {"cutoffs": None, "dataset": "ptb"}, dict, "--cutoffs must be given for --dataset ptb"),
    ("type25", {"performer_proj_dim": 4}, dict, r"feature_map\.projection must be \(4, 4\), got \(3, 4\)"),
    ("type24", {"n_head": 4}, dict, "qkvb_net must have 28 rows for 4 heads of 2, got 26: check --n_head"),
    ("type2", {"n_head": 3}, dict, "--n_head must divide 8, the dimensions of all heads, got 3"),
    ("type2", {"d_head": 5}, dict, "--d_head must be 4 = 8 dimensions / --n_head 2, got 5: check"),
    ("type2", {}, zeros("layers.0.dec_attn.o_net.weight", 8, 12), r"out_proj\.weight must be \(8, 8\), got"),
    ("type2", {"attn_type": 0}, dict, "lacks r_w_bias"),
    ("type24", {"attn_type": 36}, dict, "--attn_type must be one of 0, 1, 2, 4, 5, 6, 24, 25, 26.*, got 36"),
    ("../transformer-xl/wt103", {"attn_type": 24}, dict, "--attn_type must be 0, 1, 2 or 3 for Transformer-XL, got 24"),
    ("type2", {"pre_lnorm": True}, dict, "--pre_lnorm .* normalises keys, but not queries"),
    ("type4", {"pre_lnorm": True}, dict, "--pre_lnorm .* normalises keys, but not queries"),
    ("type24", {"pre_lnorm": True}, dict, "--pre_lnorm .* adds the normalised input"),
    ("type4", {"dropatt": 0.1}, dict, "--dropatt must be 0 .*, got 0.1: give --dropatt 0"),
    ("type2", {"mem_len": 4}, dict, "--mem_len must be left out with absolute positions"),
    ("type24", {"same_length": True}, dict, "--same_length must be left out with absolute positions"),
    ("type2", {"clamp_len": 9}, dict, "--clamp_len must be at least 10 with abs.*, or -1 .*, got 9: a sma"),
    ("type2", {"clamp_len": 1}, dict, "--clamp_len must be at least 10 with abs.*, or -1 .*, got 1: a sma"),
    ("type24", {"remove_lnorm": True}, dict, "--remove_lnorm must be off, got on"),
    ("type24", {}, without("pos_ff"), r"lacks layers\.0\.pos_ff\.CoreNet\.0\.weight"),
    ("type24", {}, shifted("crit.out_layers.0.weight"), "--not_tied cannot be converted"),
    ("type24_div_val", {}, shifted("crit.out_projs.1"), "untied projections, as of --dataset lm1b"),
    ("type2", {}, zeros("word_emb.emb_layers.0.weight", 31, 4), "--d_embed must be 8, .*, got 4"),
    ("type2", {}, without("word_emb.emb_layers.0.weight"), r"must have word_emb\.emb_layers"),
    ("type2", {}, shifted("pos_emb.inv_freq"), r"pos_emb\.inv_freq must hold the frequencies"),
]
# fmt: on


@looped("name, options, change, says", REFUSALS)
def test_refusals(name, options, change, says):
    vector = read_vector(f"schlag-lm/{name}".replace("schlag-lm/../", ""))
    with pytest.raises(ValueError, match=says) as refusal:
        build(vector._replace(tensors=change(vector.tensors)), **options)
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


@looped("clamp_len", [10, 0, -1])
def test_a_limit_that_no_distance_exceeds(clamp_len):
    """The smallest one that the error names, and both forms of no limit."""
    vector = read_vector("schlag-lm/type2")
    assert vector.options["tgt_len"] == 11
    build(vector, clamp_len=clamp_len)


class Pickled(nn.Module):
    """A stand-in for a model of the public code."""


EXPORT = r": export one in the folder of .*m\.state_dict\(\).*'state_dict\.pt'\)\"$"
WHOLE = r"state_dict\.pt must be a complete checkpoint, got a truncated or different file"
# What the file has, further arguments, words of the sentence
GIVEN = [
    (Pickled(), {}, "holds pickled objects, which could run any code, next to its weights" + EXPORT),
    ({"epoch": 3}, {}, "must be a state dict of named tensors, got other objects: export one"),
    ([torch.ones(2)], {}, "got other objects"),
    (b"", {}, WHOLE),
    (b"PK\x03\x04" + bytes(999), {}, WHOLE),
    (None, {}, "cannot be read: No such file"),
    (..., {"words": WORDS[:-1]}, "the vocabulary must have the 31 words of the checkpoint, got 30"),
]


@looped("save, more, says", GIVEN)
def test_what_the_command_is_given(convert, save, more, says):
    convert.refuses(says, read_vector("schlag-lm/type2"), save=save, **more)


def test_other_options_and_folders_with_files(convert):
    says = "--no_pos cannot be used with --source transformer-xl"
    convert.refuses(says, read_vector("transformer-xl/absolute"), no_pos=True)
    convert.out.mkdir()
    (convert.out / "mine").write_text("")
    arguments = convert.arguments(read_vector("schlag-lm/type2"))
    refused(main, *arguments, says="--out must be a new or empty folder, got .*, which holds files")
    assert [file.name for file in convert.out.iterdir()] == ["mine"]
