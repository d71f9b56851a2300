"""fairseq_fwp.load: the model that fairseq has, to the bit, from a checkpoint or a folder."""

import json
import os
import re
import shutil
from argparse import Namespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY
from safetensors.torch import load_file, save_file
from support.refusals import refused
from support.small_models import MODELS, SMALL, build, log_probs, make_dictionary, random_tokens

import fairseq_fwp
from fairseq_fwp.cli.convert import main
from fairseq_fwp.patches.hooks import KEY, fingerprints

FAST = ("sum_favor", "delta", "Gated DeltaNet", "local last", "adaptive inputs", "same length", "XL, mapped")
LENGTH, VOCABULARY = 20, 50
ONE = torch.tensor([1])


def save(folder, kind, words=None, **changes):
    """Save a small model as fairseq does, with its dictionary, and return it and the path."""
    arch, own = MODELS[kind]
    backend = {"fwp_backend": "auto"} if arch not in ("fwp_xl_lm", "fwp_fwl_lm") else {}
    model = build(kind, tokens_per_sample=32, **backend).float()
    args = Namespace(**{"max_target_positions": None, "add_bos_token": False, "tokens_per_sample": 32, **SMALL, **own})
    ARCH_CONFIG_REGISTRY[arch](args)
    settings = {"model": {**vars(args), "arch": arch, **changes}, "task": {}}
    words = words or make_dictionary(VOCABULARY)
    known = {KEY: fingerprints(Namespace(source_dictionary=words, target_dictionary=words))}
    saved = {"args": None, "cfg": settings, "model": model.state_dict(), "task_state": known}
    torch.save(saved, folder / "checkpoint.pt")
    words.save(str(folder / "dict.txt"))
    return model, folder / "checkpoint.pt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("saved"), "softmax last")


@pytest.mark.parametrize("kind", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in MODELS])
def test_a_checkpoint_and_a_folder_are_the_model(kind, tmp_path):
    model, path = save(tmp_path, kind)
    folder = tmp_path / "folder"
    main(["--source", "fwp-lm", str(path), "--to", "safetensors", "--out", str(folder)])
    tokens = random_tokens(3, LENGTH)
    parts = tokens.split([7, 1, LENGTH - 8], 1)
    for loaded in (fairseq_fwp.load(path), fairseq_fwp.load(folder)):
        assert torch.equal(loaded(tokens)[0], log_probs(model, tokens))
        state = given = None
        for part in parts:
            found, state = loaded(part, state)
            features, extra = model(part, state=given)
            assert torch.equal(found, model.get_normalized_probs((features, extra), log_probs=True))
            given = extra["state"]
    back = tmp_path / "back"
    main(["--source", "fwp-lm", str(folder), "--out", str(back)])
    assert torch.equal(fairseq_fwp.load(back / "checkpoint.pt")(tokens)[0], log_probs(model, tokens))


def test_the_dictionary_may_be_elsewhere(saved, tmp_path):
    _, path = saved
    moved = shutil.copy(path, tmp_path / "moved.pt")
    for dictionary in (path.parent, str(path.parent / "dict.txt")):
        lm = fairseq_fwp.load(str(moved), dictionary=dictionary)
        assert lm.dictionary.symbols == make_dictionary(VOCABULARY).symbols and not lm.training


def test_plain_words_are_cut_by_the_codes_and_joined(tmp_path):
    words = make_dictionary(VOCABULARY - 2)
    for piece in ("me@@", "mory"):
        words.add_symbol(piece)
    _, path = save(tmp_path, "delta", words)
    (tmp_path / "codes").write_text("#version: 0.2\nm e\nm o\nr y</w>\nmo ry</w>\n")
    lm = fairseq_fwp.load(path)
    tokens = lm.encode("w1 memory")
    assert tokens.tolist() == [[2, 5, 48, 49]] and lm.decode(tokens[0]) == "w1 memory"


def test_words_that_come_again(tmp_path):
    """A second `<s>`, as RoBERTa's dictionary has it, and a word that replaces another: the last ones are read."""
    words = make_dictionary(VOCABULARY - 3)
    for word in ("<s>", "w1", "w50"):
        words.add_symbol(word, overwrite=True)
    model, path = save(tmp_path, "delta", words)
    out = {kind: tmp_path / kind for kind in ("fairseq", "safetensors")}
    for kind, folder in out.items():
        main(["--source", "fwp-lm", str(path), "--to", kind, "--out", str(folder)])
    tokens = random_tokens(3, LENGTH)
    for found in (path, out["fairseq"] / "checkpoint.pt", out["safetensors"]):
        lm = fairseq_fwp.load(found)
        assert (lm.dictionary.symbols, lm.dictionary.indices) == (words.symbols, words.indices)
        assert lm.encode("<s> w0 w1 w50").tolist() == [[2, 47, 4, 48, 49]]
        assert torch.equal(lm(tokens)[0], log_probs(model, tokens))


@pytest.mark.parametrize("kind", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in MODELS])
def test_padding_anywhere_does_not_change_what_is_written(kind, tmp_path):
    lm = fairseq_fwp.load(save(tmp_path, kind)[1])
    row, pad = random_tokens(1, 6), torch.ones(1, 3, dtype=torch.long)
    prompts = [torch.cat(parts, 1) for parts in ((pad, row), (row, pad), (row[:, :2], pad, row[:, 2:]))]
    expected = lm.generate(row, 8)
    for prompt in prompts:
        assert torch.equal(lm.generate(prompt, 8), expected)
    together = lm.generate(torch.cat([*prompts, random_tokens(1, 9)]), 8)[:3, : expected.shape[1]]
    assert torch.equal(together, expected.expand(3, -1))


def test_it_writes_as_the_most_probable_tokens_say(saved):
    model, path = saved
    lm = fairseq_fwp.load(path)
    prompt = lm.encode("w1 w2 unknown")
    assert prompt.tolist() == [[2, 5, 6, 3]] and lm.decode(prompt[0, 1:3]) == "w1 w2"
    prompts = torch.cat([prompt, random_tokens(1, 4)])
    for row, written in zip(prompts, lm.generate(prompts, 12), strict=True):
        read = row.unsqueeze(0)
        for token in written[written != 1]:
            scores = log_probs(model, read)[0, -1]
            scores[1] = -torch.inf
            assert token == scores.argmax() and 2 not in read[0, 4:]
            read = torch.cat([read, token.view(1, 1)], 1)
        assert written.shape == (12,) or written[-1] in (1, 2)
    drawn = [lm.generate(prompts, 12, top=9, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(*drawn[:2]) and not torch.equal(*drawn[1:])
    # At almost no temperature, the most probable is drawn; without it all are as likely.
    assert torch.equal(lm.generate(prompts, 12, top=9, temperature=1e-6), lm.generate(prompts, 12))


def test_states_that_are_refused(saved, tmp_path):
    lm, tokens = fairseq_fwp.load(saved[1]), random_tokens(2, 3)
    state = lm(tokens)[1]
    other = fairseq_fwp.load(save(tmp_path, "delta_dpfp")[1])(tokens)[1]
    for says, given in {
        "as many rows as the tokens, 2, got 1": state.reorder(torch.tensor([0])),
        "what this model returned, got list": [],
        r"what this model returned: layers\[0\].weights must be \(B, 4, 4, 4\), got \(2, 4, 8, 4\)": other,
    }.items():
        with pytest.raises(ValueError, match=says):
            lm(tokens, given)


def test_files_that_are_refused(saved, tmp_path):
    """A dictionary of other words, too, for a checkpoint, a folder and in a conversion."""
    path, unknown = saved[1], save(tmp_path, "delta", arch="lstm_lm")[1]
    folder, others = tmp_path / "folder", tmp_path / "others"
    convert = ["--source", "fwp-lm", str(path), "--vocabulary"]
    main([*convert, str(path.parent), "--to", "safetensors", "--out", str(folder)])
    others.mkdir()
    lines = (path.parent / "dict.txt").read_text().splitlines()
    (others / "dict.txt").write_text("\n".join(lines[::-1]) + "\n")
    size = r"\(50 words, \w{12}\)"
    foreign = rf"the vocabulary must be the target dictionary of the model's training {size}, got another {size}: give"
    refused(main, *convert, others, "--out", tmp_path / "no", says=foreign)
    arch = f"architecture in {re.escape(str(unknown))} must be fwp_lm or fwp_xl_lm or fwp_fwl_lm, got 'lstm_lm'"
    for file, options, says in (
        ("nothing.pt", {}, "checkpoint nothing.pt cannot be read: No such file"),
        (unknown, {}, arch),
        (tmp_path, {}, "config.json cannot be read"),
        (path, {"source": "nothing"}, "source must be one of .*, got 'nothing'"),
        (path, {"dictionary": tmp_path / "no/dict.txt"}, "dict.txt cannot be read"),
        (path, {"dictionary": others}, foreign),
        (folder, {"dictionary": others / "dict.txt"}, f"{foreign} the dict.txt of the training"),
    ):
        with pytest.raises(ValueError, match=says) as raised:
            fairseq_fwp.load(file, **options)
        assert "\n" not in str(raised.value)


def test_hostile_folders_are_refused_before_they_take_memory(tmp_path):
    """A pipe would block, /dev/zero never ends, and 2**40 features are drawn without a weight that has their size."""
    path, folder = save(tmp_path, "sum_favor")[1], tmp_path / "folder"
    main(["--source", "fwp-lm", str(path), "--to", "safetensors", "--out", str(folder)])
    config = folder / "config.json"
    settings = json.loads(config.read_text())
    for says, changes in {
        "vocab_size in .* must be at most 50, the greatest size": {"vocab_size": 2**40},
        r"decoder_layers in the settings must be at most \d+ with these weights, got 1,0": {"decoder_layers": 2**40},
        "favor_features in the settings must be at most": {"favor_features": 2**40},
        "model of the .* numbers of the weights, got one of": {"decoder_ffn_embed_dim": 2**40},
        "the model that the options describe cannot be built": {"decoder_ffn_embed_dim": 2**62},
        "the settings of the model cannot be read": {"activation_fn": json.loads("[" * 500 + "]" * 500)},
    }.items():
        config.write_text(json.dumps(settings | changes))
        with pytest.raises(ValueError, match=says) as raised:
            fairseq_fwp.load(folder)
        assert "\n" not in str(raised.value)
    config.write_text("[" * 10**5)
    with pytest.raises(ValueError, match=r"config\.json cannot be read: maximum recursion depth"):
        fairseq_fwp.load(folder)
    config.write_text(json.dumps(settings))
    for file in (folder / "dict.txt", config, folder / "model.safetensors", path):
        file.unlink()
        for make in (os.mkfifo, lambda file: file.symlink_to("/dev/zero")):
            make(file)
            with pytest.raises(ValueError, match=rf"{file.name} must be a regular file, got a device or a pipe"):
                fairseq_fwp.load(path if file == path else folder)
            file.unlink()
        file.write_text(json.dumps(settings) if file == config else "w0 1\n")


@pytest.mark.parametrize("to", ["fairseq", "safetensors"])
def test_weights_and_buffers_that_are_not_of_the_model(tmp_path, to):
    """A lost seed of random features is not drawn again, and a lost mask not taken for none."""
    path, out = save(tmp_path, "sum_favor")[1], tmp_path / "out"
    main(["--source", "fwp-lm", str(path), "--to", to, "--out", str(out)])
    file = out / ("checkpoint.pt" if to == "fairseq" else "model.safetensors")
    saved = torch.load(file, weights_only=False) if to == "fairseq" else {"model": load_file(file)}
    seed, bias = "decoder.layers.1.self_attn.feature_map.seed", "decoder.adaptive_softmax.bias"
    for name, change, says in (
        (seed, None, "is missing"),
        (bias, None, "is missing"),
        (seed, torch.Tensor.float, "must be torch.int64, got torch.float32"),
        (bias, torch.Tensor.int, "must be floating-point of 16 bits or more, got torch.int32"),
        (bias, lambda x: x.fill_(torch.inf), "must have finite numbers, got NaN or infinity"),
        ("decoder.layers.0.fc1.weight", lambda x: x.log(), "must have finite numbers, got NaN or infinity"),
    ):
        weights = {key: x.clone() for key, x in saved["model"].items()}
        given = weights.pop(name)
        weights |= {} if change is None else {name: change(given)}
        if to == "fairseq":
            torch.save(saved | {"model": weights}, file)
        else:
            save_file(weights, file)
        with pytest.raises(ValueError, match=f"{re.escape(name)} {says}"):
            fairseq_fwp.load(file if to == "fairseq" else out)
        refused(main, "--source", "fwp-lm", file if to == "fairseq" else out, "--out", tmp_path / "no", says=says)
        if to == "fairseq" and "finite" not in says:
            with pytest.raises((RuntimeError, ValueError), match=re.escape(name)):
                checkpoint_utils.load_model_ensemble_and_task([str(file)], {"data": str(out)})


def test_weights_in_several_files(saved, tmp_path):
    """They can be read by whoever reads config.json; an index names files of its folder, and which of two counts."""
    model, path = saved
    folder, name = tmp_path / "folder", "decoder.embed_tokens.weight"
    main(["--source", "fwp-lm", str(path), "--to", "safetensors", "--out", str(folder)])
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({name: weights[name] + 1}, folder / "b.safetensors")
    index, tokens = folder / "model.safetensors.index.json", random_tokens(2, 5)

    def place(file):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "a.safetensors") | file}))

    place({"unused": "b.safetensors"})
    assert torch.equal(fairseq_fwp.load(folder)(tokens)[0], log_probs(model, tokens))
    place({name: "b.safetensors"})
    assert not torch.equal(fairseq_fwp.load(folder)(tokens)[0], log_probs(model, tokens))
    (folder / "b.safetensors").rename(tmp_path / "b.safetensors")
    for outside in ("../b.safetensors", str(tmp_path / "b.safetensors")):
        place({name: outside})
        with pytest.raises(ValueError, match=f"must name files of its own folder, got '{re.escape(outside)}'"):
            fairseq_fwp.load(folder)
    place({})
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, folder / "a.safetensors")
    with pytest.raises(ValueError, match=rf"{name} must be floating-point of 16 bits or more, got torch\.float8_e4"):
        fairseq_fwp.load(folder)
    (folder / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"got a truncated or different file: .*header too large"):
        fairseq_fwp.load(folder)


def test_generations_that_are_refused(saved):
    lm, tokens = fairseq_fwp.load(saved[1]), random_tokens(2, 3)
    for says, given in {
        r"tokens must be \(B, L\) with at least one token each, got \(2, 0\)": {"tokens": tokens[:, :0]},
        r"at least one token each, got \(0, 3\)": {"tokens": tokens[:0]},
        r"at least one token each, got \(3,\)": {"tokens": tokens[0]},
        "tokens must be numbers from 0 to 49, the dictionary's, got 50": {"tokens": tokens + 50 - tokens.max()},
        "tokens must be numbers .*, got -1": {"tokens": tokens - 1 - tokens.min()},
        "each row of tokens must have one that is not padding, got a row": {"tokens": tokens.index_fill(0, ONE, 1)},
        "length must be at least 0, got -1": {"length": -1},
        "top must be from 1 to 50, the dictionary's size, got 0": {"top": 0},
        "top must be .*, got 51": {"top": 51},
        "temperature must be finite and above 0, got 0": {"temperature": 0.0},
        "temperature must be .*, got nan": {"temperature": float("nan")},
        "temperature must be .*, got inf": {"temperature": float("inf")},
    }.items():
        with pytest.raises(ValueError, match=says):
            lm.generate(**{"tokens": tokens, "length": 2, **given})
    assert lm.generate(tokens, 0).shape == (2, 0) and lm.generate(tokens, 1, top=50).shape == (2, 1)
