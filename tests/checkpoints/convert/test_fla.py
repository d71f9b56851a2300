"""flash-linear-attention's models: the logits of the papers' equations, both directions, and refusals by name."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from support.attentions import memories
from support.pairwise import looped
from support.small_models import by_steps, log_probs

import fairseq_fwp
from checkpoints.convert.conftest import Folder, ones, without
from fairseq_fwp import ops
from fairseq_fwp.checkpoints.convert import fla
from fairseq_fwp.checkpoints.convert.conversion import Options
from fairseq_fwp.cli.convert import main

WORDS, DIM, LAYERS, LENGTH = 30, 16, 2, 11
PARTS = ("weight", "bias")
SHARED = {
    "hidden_size": DIM, "num_hidden_layers": LAYERS, "vocab_size": WORDS, "eos_token_id": 2, "bos_token_id": 1,
    "max_position_embeddings": 64, "norm_eps": 1e-3, "hidden_act": "swish", "intermediate_size": 24, "attn": None,
}  # fmt: skip
# Settings, and sizes that follow from them: heads, heads of values, sizes of a key and of a value.
CASES = {
    "delta_net": ({"model_type": "delta_net", "num_heads": 4}, (4, 4, 4, 4)),
    "delta_net, other options": (
        {"model_type": "delta_net", "num_heads": 2, "expand_k": 0.5, "expand_v": 2.0, "use_gate": True,
         "allow_neg_eigval": True, "tie_word_embeddings": True, "conv_size": 2, "intermediate_size": None},
        (2, 2, 4, 16),
    ),
    "gated_deltanet": ({"model_type": "gated_deltanet", "num_heads": 3, "head_dim": 6}, (3, 3, 6, 12)),
    "gated_deltanet, other options": (
        {"model_type": "gated_deltanet", "num_heads": 3, "head_dim": 6, "num_v_heads": 6, "expand_v": 0.5,
         "use_gate": False, "allow_neg_eigval": True, "eos_token_id": None},
        (3, 6, 6, 3),
    ),
    "gated_deltanet, other gate": (
        {"model_type": "gated_deltanet", "num_heads": 2, "head_dim": 4, "output_gate_activation": "sigmoid"},
        (2, 2, 4, 8),
    ),
    "kda": ({"model_type": "kda", "num_heads": 2, "head_dim": 5, "eos_token_id": 29}, (2, 2, 5, 5)),
    "kda, other options": (
        {"model_type": "kda", "num_heads": 2, "head_dim": 4, "num_v_heads": 4, "expand_v": 1.5, "safe_gate": True,
         "lower_bound": -5.0, "tie_word_embeddings": True},
        (2, 4, 4, 6),
    ),
    "delta_net with softmax": (
        {"model_type": "delta_net", "num_heads": 4, "attn": {
            "layers": [1], "num_heads": 2, "num_kv_heads": 1, "qkv_bias": True, "window_size": 5, "rope_theta": 50.0}},
        (4, 4, 4, 4),
    ),
    "gated_deltanet with softmax": (  # heads of fast weights do not divide the width
        {"model_type": "gated_deltanet", "num_heads": 3, "head_dim": 6, "attn": {"layers": [1], "num_heads": 2}},
        (3, 3, 6, 12),
    ),
    "kda with softmax": (
        {"model_type": "kda", "num_heads": 2, "head_dim": 4, "attn": {"layers": [0], "num_heads": 4}},
        (2, 2, 4, 4),
    ),
    "rwkv7": (
        {"model_type": "rwkv7", "head_dim": 4, "norm_eps": 1e-4, "hidden_act": "sqrelu", "fuse_norm": False,
         "decay_low_rank_dim": 3, "a_low_rank_dim": 5, "v_low_rank_dim": 2, "gate_low_rank_dim": 7},
        (4, 4, 4, 4),
    ),
    "rwkv7, other options": (
        {"model_type": "rwkv7", "head_dim": None, "num_heads": 2, "norm_eps": 1e-3, "hidden_act": "sqrelu",
         "intermediate_size": None, "tie_word_embeddings": True, "decay_low_rank_dim": 2,
         "a_low_rank_dim": 2, "v_low_rank_dim": 2, "gate_low_rank_dim": 2, "value_dim": [DIM] * LAYERS},
        (2, 2, 8, 8),
    ),
}  # fmt: skip
every_model = pytest.mark.parametrize("case", CASES)


def in_softmax(config, index):
    return bool(config["attn"]) and index in config["attn"]["layers"]


# fmt: off
def make(case):
    """Return config.json and random tensors of a model."""
    own, (heads, value_heads, key, value) = CASES[case]
    config = {**SHARED, **own}
    kind, keys, values = config["model_type"], heads * key, value_heads * value
    if kind == "rwkv7":
        layer, first = shapes_of_rwkv7(config, heads, key)
    else:
        gated = kind != "kda" and config.get("use_gate", kind == "gated_deltanet")
        ffn, conv = config["intermediate_size"] or 256, config.get("conv_size", 4)
        first, layer = {}, {
            "attn_norm.weight": (DIM,), "mlp_norm.weight": (DIM,), "attn.o_norm.weight": (value,),
            "attn.q_proj.weight": (keys, DIM), "attn.k_proj.weight": (keys, DIM), "attn.v_proj.weight": (values, DIM),
            "attn.q_conv1d.weight": (keys, 1, conv), "attn.k_conv1d.weight": (keys, 1, conv),
            "attn.v_conv1d.weight": (values, 1, conv), "attn.b_proj.weight": (value_heads, DIM),
            "attn.o_proj.weight": (DIM, values), "mlp.gate_proj.weight": (ffn, DIM), "mlp.up_proj.weight": (ffn, DIM),
            "mlp.down_proj.weight": (DIM, ffn),
            **({"attn.g_proj.weight": (values, DIM)} if gated else {}),
            **({"attn.a_proj.weight": (value_heads, DIM)} if kind == "gated_deltanet" else {}),
        }
        if kind == "kda":
            layer |= {
                "attn.f_proj.0.weight": (value, DIM), "attn.f_proj.1.weight": (value_heads * key, value),
                "attn.g_proj.0.weight": (value, DIM), "attn.g_proj.1.weight": (values, value),
                "attn.g_proj.1.bias": (values,),
            }
        if kind != "delta_net":
            layer |= {"attn.A_log": (value_heads,), "attn.dt_bias": (value_heads * (key if kind == "kda" else 1),)}
    shapes = {"model.embeddings.weight": (WORDS, DIM), "model.norm.weight": (DIM,), **first}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (WORDS, DIM)
    for index in range(LAYERS):
        of_layer = layer if index or kind != "rwkv7" else without("attn.v_lora")(layer)
        if in_softmax(config, index):
            given = config["attn"]
            few = DIM // given["num_heads"] * given.get("num_kv_heads", given["num_heads"])
            of_layer = {name: shape for name, shape in layer.items() if not name.startswith("attn.")}
            rows = {"q": DIM, "k": few, "v": few, "o": DIM}
            of_layer |= {f"attn.{letter}_proj.weight": (size, DIM) for letter, size in rows.items()}
            of_layer |= {f"attn.{letter}_proj.bias": (rows[letter],) for letter in "qkv" if given.get("qkv_bias")}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in of_layer.items()}
    return config, {name: torch.randn(shape) / 2 for name, shape in shapes.items()}


def shapes_of_rwkv7(config, heads, size):
    """Return those of a layer, and others."""
    ffn, ranks = config["intermediate_size"] or 4 * DIM, {"w": "decay", "a": "a", "v": "v", "g": "gate"}
    layer = {f"{norm}.{part}": (DIM,) for norm in ("attn_norm", "ffn_norm", "attn.g_norm") for part in PARTS}
    layer |= {f"attn.x_{letter}": (1, 1, DIM) for letter in "rwkvag"}
    layer |= {f"attn.{letter}_proj.weight": (DIM, DIM) for letter in "rkvo"}
    layer |= {"attn.k_k": (DIM,), "attn.k_a": (DIM,), "attn.r_k": (heads, size), "ffn.x_k": (DIM,)}
    layer |= {"ffn.key.weight": (ffn, DIM), "ffn.value.weight": (DIM, ffn)}
    for letter, name in ranks.items():
        lora, rank = f"attn.{letter}_lora.lora", config[f"{name}_low_rank_dim"]
        layer |= {f"{lora}.0.weight": (rank, DIM), f"{lora}.2.weight": (DIM, rank)}
        layer |= {f"{lora}.2.bias": (DIM,)} if letter != "g" else {}
    return layer, {"model.norm.bias": (DIM,), **{f"model.layers.0.pre_norm.{part}": (DIM,) for part in PARTS}}
# fmt: on


def remember(rule, q, k, v, *gates):
    """Return what q reads of a memory, all with tokens before heads."""
    k, v, *gates = (x.transpose(1, 2) for x in (k, v, *gates))
    return torch.stack([ops.retrieve(q[:, t], memory) for t, (memory, _) in enumerate(memories(rule, k, v, gates))], 1)


def equations_of_rwkv7(config, tensors, tokens, heads):
    """Return the logits of tokens (B, L): Peng et al. 2025, Secs. 4.1 and 4.2."""
    size, epsilon, sigmoid, first_values = DIM // heads, config["norm_eps"], torch.sigmoid, []

    def normal(x, name, epsilon=epsilon):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
        return x.flatten(2) * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)

    def low_rank(x, name, function=lambda y: y):
        return linear(function(linear(x, f"{name}_lora.lora.0")), f"{name}_lora.lora.2")

    def mixed(x, name, letters):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return [x + (before - x) * tensors[f"{name}.x_{letter}"].flatten() for letter in letters]

    def attend(x, name):
        x_r, x_w, x_k, x_v, x_a, x_g = mixed(x, name, "rwkvag")
        r, k, v = linear(x_r, f"{name}.r_proj"), linear(x_k, f"{name}.k_proj"), linear(x_v, f"{name}.v_proj")
        w = (-sigmoid(low_rank(x_w, f"{name}.w", torch.tanh)) / math.e**0.5).exp()
        a = sigmoid(low_rank(x_a, f"{name}.a"))
        if first_values:
            share = sigmoid(low_rank(x_v, f"{name}.v"))
            v = (1 - share) * v + share * first_values[0]
        first_values.append(v)
        removed = k * tensors[f"{name}.k_k"]
        k = k * (1 - tensors[f"{name}.k_a"] + a * tensors[f"{name}.k_a"])
        r, w, k, v, a, removed = (y.unflatten(-1, (heads, size)) for y in (r, w, k, v, a, removed))
        fused = 1e-6 if config.get("fuse_norm", True) else 0
        removed = removed / (removed.square().sum(-1, keepdim=True) + fused).sqrt()
        outs = remember("rwkv7", r, k, v, w, removed, a)
        bonus = (r * k * tensors[f"{name}.r_k"]).sum(-1, keepdim=True) * v
        out = normal(outs, f"{name}.g_norm", size * epsilon) + bonus.flatten(2)
        return linear(out * low_rank(x_g, f"{name}.g", sigmoid), f"{name}.o_proj")

    x = normal(tensors["model.embeddings.weight"][tokens], "model.layers.0.pre_norm")
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        x = x + attend(normal(x, f"{layer}.attn_norm"), f"{layer}.attn")
        (y,) = mixed(normal(x, f"{layer}.ffn_norm"), f"{layer}.ffn", "k")
        x = x + linear(linear(y, f"{layer}.ffn.key").clamp(min=0) ** 2, f"{layer}.ffn.value")
    return normal(x, "model.norm") @ tensors.get("lm_head.weight", tensors["model.embeddings.weight"]).T


def equations(case, config, tensors, tokens):
    """Return the logits of tokens (B, L), token by token, from the equations of the papers, with the names of fla."""
    heads, value_heads, key, value = CASES[case][1]
    if config["model_type"] == "rwkv7":
        return equations_of_rwkv7(config, tensors, tokens, heads)
    kind, epsilon = config["model_type"], config["norm_eps"]

    def normal(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)

    def attend(x, name):
        def mixed(letter, size):
            y, weight = linear(x, f"{name}.{letter}_proj"), tensors[f"{name}.{letter}_conv1d.weight"][:, 0]
            padded = F.pad(y, (0, 0, weight.shape[1] - 1, 0))
            y = sum(padded[:, w : w + y.shape[1]] * weight[:, w] for w in range(weight.shape[1]))
            return (y * y.sigmoid()).unflatten(-1, (-1, size))

        q, k, v = mixed("q", key), mixed("k", key), mixed("v", value)
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        shared = torch.arange(value_heads) // (value_heads // heads)
        q, k = q[:, :, shared] / key**0.5, k[:, :, shared]
        gates = [linear(x, f"{name}.b_proj").sigmoid() * (2 if config.get("allow_neg_eigval") else 1)]
        if kind != "delta_net":
            at = linear(x, f"{name}.{'a_proj' if kind == 'gated_deltanet' else 'f_proj.0'}")
            at = linear(at, f"{name}.f_proj.1") if kind == "kda" else at
            at = (at + tensors[f"{name}.dt_bias"]).unflatten(-1, (value_heads, -1))
            rate = tensors[f"{name}.A_log"].exp().unsqueeze(-1)
            bound = config.get("lower_bound")
            log = -rate * (1 + at.exp()).log() if bound is None else bound / (1 + (-rate * at).exp())
            gates.insert(0, log.exp())
        out = remember("delta" if kind == "delta_net" else "kda", q, k, v, *gates)
        out = normal(out, tensors[f"{name}.o_norm.weight"]).flatten(2)
        if kind == "kda":
            out = out * linear(linear(x, f"{name}.g_proj.0"), f"{name}.g_proj.1").sigmoid()
        elif f"{name}.g_proj.weight" in tensors:
            gate = linear(x, f"{name}.g_proj")
            out = out * (1 if config.get("output_gate_activation") == "sigmoid" else gate) * gate.sigmoid()
        return linear(out, f"{name}.o_proj")

    def softmax(x, name):
        """Softmax attention; a pair of numbers of q and k is a complex number, turned by its place."""
        shared = {"num_kv_heads": config["attn"]["num_heads"], "window_size": LENGTH, "rope_theta": 10000.0}
        given = shared | config["attn"]
        size = DIM // given["num_heads"]
        q, k, v = (linear(x, f"{name}.{letter}_proj").unflatten(-1, (-1, size)) for letter in "qkv")
        k, v = (y.repeat_interleave(given["num_heads"] // given["num_kv_heads"], 2) for y in (k, v))
        powers = given["rope_theta"] ** -(torch.arange(0, size, 2).to(x.dtype) / size)
        angles = torch.outer(torch.arange(x.shape[1]).to(x.dtype), powers)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (torch.complex(*y.chunk(2, -1)) * turn for y in (q, k))
        scores = torch.einsum("bthd,bshd->bhts", q, k.conj()).real / size**0.5
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        scores = scores.masked_fill((distance < 0) | (distance >= given["window_size"]), -torch.inf)
        out = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
        return linear(out.flatten(2), f"{name}.o_proj")

    x = tensors["model.embeddings.weight"][tokens]
    for index, layer in enumerate(f"model.layers.{index}" for index in range(LAYERS)):
        mix = softmax if in_softmax(config, index) else attend
        x = x + mix(normal(x, tensors[f"{layer}.attn_norm.weight"]), f"{layer}.attn")
        y = normal(x, tensors[f"{layer}.mlp_norm.weight"])
        gate, up = linear(y, f"{layer}.mlp.gate_proj"), linear(y, f"{layer}.mlp.up_proj")
        x = x + linear(gate * gate.sigmoid() * up, f"{layer}.mlp.down_proj")
    head = tensors.get("lm_head.weight", tensors["model.embeddings.weight"])
    return normal(x, tensors["model.norm.weight"]) @ head.T


@pytest.fixture
def folder(tmp_path):
    return Folder("fla", tmp_path)


def words_of(config):
    return ["</s>" if number == config["eos_token_id"] else str(number) for number in range(WORDS)]


@every_model
def test_logits_in_one_pass_and_token_by_token(folder, case):
    """In float64 and float32, and for a batch with padding on the left."""
    config, tensors = make(case)
    folder.save(config, tensors)
    model, dictionary = folder.convert()
    ours, tokens = torch.tensor([*map(dictionary.index, words_of(config))]), torch.randint(WORDS, (3, LENGTH))
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    expected = equations(case, config, wide, tokens).log_softmax(-1)
    assert expected.std() > 0.5 and expected.dtype == torch.float64
    padded = torch.full((3, LENGTH + 3), dictionary.pad())
    rows = [slice(0, LENGTH), slice(2, LENGTH + 2), slice(3, LENGTH + 3)]
    for row, place in enumerate(rows):
        padded[row, place] = ours[tokens[row]]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = model.to(dtype)
        whole, in_batch = (log_probs(model, given) for given in (ours[tokens], padded))
        assert whole.dtype == dtype
        in_batch = torch.stack([in_batch[row, place] for row, place in enumerate(rows)])
        stepped = by_steps(model, ours[tokens], [1] * (LENGTH - 3) + [3])
        for found in (whole, stepped, in_batch):
            torch.testing.assert_close(found[..., ours].double(), expected, rtol=tolerance, atol=tolerance)
    loaded, _ = fairseq_fwp.load(folder.path, source="fla")(ours[tokens])
    torch.testing.assert_close(loaded[..., ours].double(), expected, rtol=1e-5, atol=1e-5)
    rest = [index for index in range(len(dictionary)) if index not in ours]
    assert whole[..., rest].eq(-torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@looped("case", CASES)
def test_there_and_back_again(tmp_path_factory, case, dtype):
    """Every bit of the weights, in their dtype; what is written converts to the same model."""
    out = tmp_path_factory.mktemp("back") / "out"
    config, tensors = make(case)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    once = fla.convert(tensors, words_of(config), Options(config))
    fla.write(once, out)
    written, found = fla.read(out)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) and written[name].dtype == dtype for name, tensor in tensors.items())
    told = {name: value for name, value in config.items() if value is not None}
    told = {name: value for name, value in told.items() if name not in ("bos_token_id", "value_dim")}
    attn = told.pop("attn", {})
    assert found | told == found and (found["attn"] or {}) | attn == (found["attn"] or {})
    again = fla.convert(written, words_of(config), Options(found))
    assert (again.flags, again.words) == (once.flags, once.words)
    assert again.weights.keys() == once.weights.keys()
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in once.weights.items())


def test_settings_that_are_not_read_are_named():
    config, tensors = make("gated_deltanet")
    more = {**config, "use_cache": True, "z": 1, "a": [2]}
    usual, (note, *others) = (fla.convert(tensors, words_of(config), Options(given)).notes for given in (config, more))
    assert others == usual and "settings that are not read: a, z;" in note


def test_earlier_names_of_rwkv7():
    """All mixtures are one tensor, and the ranks are those of the weights."""
    config, tensors = make("rwkv7")
    expected = fla.convert(tensors, words_of(config), Options(config))
    for name in (f"model.layers.{index}.attn.x_" for index in range(LAYERS)):
        tensors[f"{name}x"] = torch.cat([tensors.pop(f"{name}{letter}").view(1, DIM) for letter in "rwkvag"])
    config = {name: value for name, value in config.items() if "low_rank" not in name}
    found = fla.convert(tensors, words_of(config), Options(config))
    assert found.flags == expected.flags and found.weights.keys() == expected.weights.keys()
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in expected.weights.items())


def test_a_checkpoint_is_written_for_fla(folder, capsys):
    """The command writes what was converted, from a checkpoint of this plugin."""
    config, tensors = make("kda, other options")
    folder.save(config, tensors)
    folder.convert()
    capsys.readouterr()
    back = folder.out.with_name("back")
    arguments = ["--source", "fwp-lm", folder.out / "checkpoint.pt", "--to", "fla", "--out", back]
    main([*map(str, arguments)])
    assert "config.json and model.safetensors; the tokenizer's files are those of the source" in capsys.readouterr().out
    written, found = fla.read(back)
    assert (found["architectures"], found["torch_dtype"], found["safe_gate"]) == (["KDAForCausalLM"], "float32", True)
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


RWKV7 = {"model_type": "rwkv7", "hidden_act": "sqrelu", "head_dim": 4}
# Settings that are not of a kind: see `fla.KINDS`.
WRONG = {
    "a whole number of at least 1": (0, -5, True, "2", 2.0, [2]),
    "a number above 0": (0, -1.0, True, "2", math.inf, math.nan),
    "a number below 0": (0, 1.0, True, "-2"),
    "true or false": (1, "true"),
}
ATTN = "attn in config.json must have layers and num_heads, "
QUERIES, LARGE = "model.layers.0.attn.q_proj.weight", "config.json must give heads with values of a whole size, got"


def attn(**settings):
    return {"attn": {"layers": [1], "num_heads": 2, **settings}}


# change of the tensors, of the configuration, words of the sentence
# fmt: off
FIXED = (  # settings, and others with a value that there is not here
    ({}, {"hidden_act": "powlu", "qk_norm": "sum", "qk_activation": "elu", "use_beta": False, "use_short_conv": False,
          "attnres_block_size": 4, "use_output_norm": False}),
    (RWKV7, {"hidden_act": "relu", "norm_bias": False, "norm_first": False, "value_dim": [16, 32], **attn()}),
)
REFUSALS = [
    (dict, {"model_type": "kimi_linear"}, "model_type in config.json must be one of delta_net, .*, got 'kimi_linear'"),
    (dict, {"model_type": "bitnet"}, "model_type in config.json must be .*, got 'bitnet': no other can be loaded"),
    (dict, {"model_type": ["kda"]}, r"model_type in config.json must be one of delta_net, .*, got \['kda'\]"),
    (dict, {"attn": {"layers": [1]}}, f"{ATTN}.*, got {{'layers'"),
    (dict, {"attn": [attn()["attn"]]}, rf"{ATTN}.*, got \["),
    (dict, {"attn": {}}, f"{ATTN}.*, got {{}}$"),
    (dict, attn(qk_norm=True), f"{ATTN}and nothing else but num_kv_heads, .*theta, got qk_norm$"),
    *((dict, attn(layers=layers), f"attn.layers in .* a list of numbers of layers, got {re.escape(repr(layers))}$")
      for layers in ([], 1, [0, "x"], ["1"], [True], [-1])),
    (dict, attn(num_heads=3), "attn.num_heads in .* must divide hidden_size = 16, got 3$"),
    (dict, attn(layers=[2]), "--softmax-layers must be ascending .* 0 to 1, .* got '2'"),
    (dict, {"output_gate_activation": "relu"}, "output_gate_activation .* must be swish, silu or sigmoid, got 'relu'"),
    *((dict, known | {name: value}, re.escape(f"{name} = {value!r}, which cannot be converted: "))
      for known, others in FIXED for name, value in others.items()),
    (dict, {"expand_v": 0.3}, f"{LARGE} 1.2"),
    (dict, {"expand_v": 1e308}, f"{LARGE} inf"),
    (dict, {"vocab_size": 31}, r"model\.embeddings\.weight must have 31 rows as config\.json says, got \(30, 16\)"),
    (dict, {"num_heads": 2}, r"layers\.0\.attn\.b_proj\.weight must have 2 rows as config\.json says, got \(4, 16\)"),
    (dict, {"num_hidden_layers": 1}, r"it has also model\.layers\.1\.attn"),
    (dict, {"num_heads": None}, "must be the configuration of a flash-linear-attention, got one without num_heads"),
    (dict, {"tie_word_embeddings": True}, "lm_head cannot be converted: .* has two that differ"),
    (dict, {"eos_token_id": True}, r"eos_token_id in .* must be one number in \[0, 30\), the vocabulary, got True"),
    (dict, {**RWKV7, "head_dim": 6}, "head_dim in config.json must divide hidden_size = 16, got 6$"),
    *((dict, attn(**{name[5:]: value}) if name.startswith("attn.") else {name: value},
       f"^fwp-convert: {name} in config.json must be {kind.words}, got {re.escape(repr(value))}$")
      for kind, names in fla.KINDS.items() for name in names if name not in fla.REQUIRED
      for value in WRONG.get(kind.words, ())),
    (ones(QUERIES, 16), {}, r"in_proj\.weight must have rows of one shape, got .*q_p"),
    (ones(QUERIES, 16, 15), {}, r"must have rows of one shape, got .*q_p.* \(16, 15\)"),
    (ones("model.layers.1.attn.k_conv1d.weight", 16, 4), {}, r"rows of one shape, got .*k_conv1d.* \(16, 4\)"),
    *((ones(name), {}, rf"{re.escape(name)} must have \d+ rows as config.json says, got \(\)$")
      for name in (QUERIES, "model.embeddings.weight", "lm_head.weight")),
    (ones("lm_head.weight", 29, 16), {}, r"lm_head\.weight must have 30 rows as config\.json says, got \(29, 16\)"),
    (ones("model.layers.0.attn.x_x", 5, 16), RWKV7, r"attn\.x_x must have 6 rows .*, got \(5, 16\)"),
    (ones("model.layers.0.mlp.up_proj.weight", 24, 16, dtype=torch.float8_e4m3fn), {},
     r"up_proj\.weight must be floating-point, got torch.float8_e4m3fn: quantised"),
    (without("layers.1.mlp.up"), {}, r"lacks model\.layers\.1\.mlp\.up_proj\.weight"),
]
# fmt: on


@looped("change, config, says", REFUSALS)
def test_models_that_cannot_be_represented_are_refused_by_name(tmp_path_factory, change, config, says):
    folder = Folder("fla", tmp_path_factory.mktemp("refusal"))
    own, tensors = make("delta_net")
    folder.save({**own, **config}, change(tensors))
    folder.refuses(says)


# flags of a model of ours, words of the sentence
NOT_THEIRS = [
    ({"decoder_update_rule": "sum"}, "--decoder-update-rule must be one of delta, .*, time_mix for .*, got sum"),
    ({"decoder_update_rule": "time_mix"}, r"the model must have the parts of rwkv7 .*, --swiglu True \(there False\)"),
    ({"swiglu": False}, r"the model must have the parts of delta_net .*, got --swiglu False \(there True\)"),
    ({"decoder_value_heads": 8}, r"got --decoder-value-heads 8 \(there 4\)"),
    ({"output_layer": "biased"}, r"got --output-layer biased \(there untied\)"),
    ({"softmax_layers": "1"}, r"got .*--attention-rope-theta None \(there 10000.0\)"),
    (
        {"softmax_layers": "1", "attention_rope_theta": 9.0, "attention_qk_norm": True, "attention_head_dim": 6},
        r"got --attention-head-dim 6 \(there None\), --attention-qk-norm True \(there False\)$",
    ),
]


@looped("flags, says", NOT_THEIRS)
def test_models_of_ours_that_they_do_not_have(folder, flags, says):
    known = {"decoder_embed_dim": 16, "decoder_attention_heads": 4, "decoder_layers": 2, **fla.MODERN}
    with pytest.raises(ValueError, match=says):
        fla.config_of({**known, "decoder_update_rule": "delta", **flags}, WORDS, 2)


@looped("words", [["1", "a"], ["0", "2"], ["0", "1", "3", "4"], {"de": ["0"], "en": ["0"]}])
def test_a_dictionary_must_hold_numbers_of_tokens(words):
    with pytest.raises(ValueError, match=re.escape("the dictionary must hold the numbers of tokens and </s>")):
        fla.rows_of_tokens(words, True)
