"""Llama, Mistral and Qwen of transformers: its logits, hybrid and recurrent models made of them, refusals by name."""

import json
import re
from argparse import Namespace

import pytest
import torch
from safetensors.torch import load_file
from support.pairwise import looped
from support.small_models import by_steps, log_probs, numbers_in, train

import fairseq_fwp
from checkpoints.convert.conftest import Folder, load, ones, without
from fairseq_fwp.checkpoints.convert import llama
from fairseq_fwp.cli.linearize import main as fwp_linearize
from fairseq_fwp.models.fwp_lm import FwpLanguageModel

transformers = pytest.importorskip("transformers", minversion="5.20")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers

WORDS, LENGTH, LAYERS = 30, 11, 3
SIZES = {
    "vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
SCALED = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    "llama": {"num_key_value_heads": 4},
    "llama, tied, biases": {
        "tie_word_embeddings": True, "attention_bias": True, "rms_norm_eps": 1e-3, "eos_token_id": None,
    },
    "llama, one head of keys": {"num_key_value_heads": 1, "head_dim": 8, "rope_parameters": {"rope_theta": 50.0}},
    "llama, scaled positions": {"rope_parameters": {**SCALED, "original_max_position_embeddings": 16}},
    "mistral": {"sliding_window": None, "head_dim": 10, "tie_word_embeddings": True},
    "mistral, window": {"sliding_window": 5},
    "qwen2": {"tie_word_embeddings": True, "eos_token_id": 29},
    "qwen2, window": {"num_key_value_heads": 4, **WINDOW},
    "qwen3": {"head_dim": 10, "tie_word_embeddings": True},
    "qwen3, biases, window": {"head_dim": 6, "attention_bias": True, "rms_norm_eps": 1e-3, **WINDOW},
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class Saved(Folder):
    """A folder with a random model of transformers."""

    def save_model(self, case, **settings):
        own = {**SIZES, **CASES[case], **settings}
        config = transformers.AutoConfig.for_model(case.split(",")[0], **own)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
        model.save_pretrained(self.path)
        return model

    @property
    def config(self):
        return json.loads((self.path / "config.json").read_text())

    @property
    def tensors(self):
        return load_file(self.path / "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    return Saved("llama", tmp_path)


def words_of(case):
    eos = {**SIZES, **CASES[case]}["eos_token_id"]
    return ["</s>" if number == eos else str(number) for number in range(WORDS)]


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(folder, case):
    """In one pass, token by token, and for a batch with padding on the left; of all words that the model has."""
    reference = folder.save_model(case)
    model, dictionary = folder.convert()
    model = model.float()
    ours, tokens = torch.tensor([*map(dictionary.index, words_of(case))]), torch.randint(WORDS, (3, LENGTH))
    assert dictionary.unk() not in ours
    expected = reference(tokens).logits.log_softmax(-1)
    assert expected.std() > 0.5
    padded = torch.full((3, LENGTH + 3), dictionary.pad())
    rows = [slice(0, LENGTH), slice(2, LENGTH + 2), slice(3, LENGTH + 3)]
    for row, place in enumerate(rows):
        padded[row, place] = ours[tokens[row]]
    whole, in_batch = (log_probs(model, given) for given in (ours[tokens], padded))
    in_batch = torch.stack([in_batch[row, place] for row, place in enumerate(rows)])
    stepped = by_steps(model, ours[tokens], [1] * (LENGTH - 3) + [3])
    loaded, _ = fairseq_fwp.load(folder.path, source="llama")(ours[tokens])
    for found in (whole, stepped, in_batch, loaded):
        torch.testing.assert_close(found[..., ours], expected, rtol=0, atol=1e-5)
    others = [index for index in range(len(dictionary)) if index not in ours]
    assert len(others) == 4 - ("</s>" in words_of(case)) and whole[..., others].eq(-torch.inf).all()


def test_a_folder_of_an_earlier_version_is_the_same_model(folder):
    """There rotary positions have other settings, frequencies are saved, and weights may be in several files."""
    for case in CASES:
        folder.save_model(case)
        tensors, config = folder.tensors, folder.config
        expected = llama.convert(*arguments(folder))
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope.pop("rope_type") == "default" else {"type": "llama3", **rope}
        config.pop("layer_types", None)
        tensors |= {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": torch.ones(3) for index in range(LAYERS)}
        if config["tie_word_embeddings"]:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        (folder.path / "model.safetensors").unlink()
        folder.save_parts(tensors)
        (folder.path / "config.json").write_text(json.dumps(config))
        found = llama.convert(*arguments(folder))
        assert (found.flags, found.words, found.notes) == (expected.flags, expected.words, expected.notes)
        assert found.weights.keys() == expected.weights.keys()
        assert all(torch.equal(found.weights[name], tensor) for name, tensor in expected.weights.items())
        (folder.path / "model.safetensors.index.json").unlink()


def arguments(folder):
    tensors, config = llama.read(folder.path)
    return tensors, llama.SOURCE.words(folder.path, None), llama.Options(config)


def test_settings_that_config_json_leaves_out_have_the_values_of_transformers(folder):
    kinds = {case.split(",")[0] for case in CASES}
    assert kinds == llama.MODELS.keys()
    for kind in kinds:
        theirs = transformers.AutoConfig.for_model(kind).to_dict()
        theirs |= {"rope_theta": theirs["rope_parameters"]["rope_theta"]}
        for name, value in {**llama.DEFAULTS, **llama.MODELS[kind]}.items():
            if name in ("rope_parameters", "layer_types") or value is None:  # None: from other settings
                continue
            used = name != "sliding_window" or kind == "mistral"  # Qwen's is not used
            assert theirs[name] == value or not used, (kind, name)
        theirs = transformers.AutoConfig.for_model(kind, hidden_size=512, num_attention_heads=32).to_dict()
        given = {**llama.DEFAULTS, **llama.MODELS[kind], **dict.fromkeys(llama.REQUIRED, 32)}
        ours = llama.complete({**given, "hidden_size": 512, "model_type": kind})
        size = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
        assert (ours["num_key_value_heads"], ours["head_dim"]) == (theirs["num_key_value_heads"], size)
        assert ours["eos_token_id"] == theirs["eos_token_id"]
        assert llama.window_of(ours) == theirs.get("sliding_window")


@looped("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays(folder, dtype):
    folder.save_model("qwen3")
    tensors = {name: tensor.to(dtype) for name, tensor in folder.tensors.items()}
    folder.save(folder.config, tensors)
    for more in ([], GATED_DELTA):
        model, _ = folder.convert(*more)
        saved = torch.load(folder.out / "checkpoint.pt", weights_only=True)["model"]
        assert {tensor.dtype for tensor in saved.values()} == {dtype}
        assert model(torch.randint(4, WORDS, (1, LENGTH)))[0].isfinite().all()
    assert torch.equal(saved["decoder.layers.0.fc2.weight"], tensors["model.layers.0.mlp.down_proj.weight"])


GATED_DELTA = ["--decoder-update-rule", "gated_delta", "--state-size", "5"]
CONVERSIONS = [
    GATED_DELTA,
    [*GATED_DELTA, "--keep-softmax-layers", "1"],
    ["--decoder-update-rule", "kda", "--keep-softmax-layers", "0,2"],
    ["--decoder-update-rule", "decay", "--state-size", "4", "--decoder-attention-heads", "1"],
    ["--decoder-update-rule", "delta", "--decoder-feature-map", "relu", "--state-size", "4", "--sum-normalization"],
    ["--decoder-update-rule", "sum", "--decoder-feature-map", "elu", "--attention-normalization"],
]


@pytest.mark.parametrize("case", CASES)
def test_hybrid_and_recurrent_models_learn_and_decode(folder, case):
    """All flags have an effect; token by token the scores are those of one pass. Qwen3 has all that is converted."""
    folder.save_model(case)
    tokens = torch.randint(4, WORDS, (2, LENGTH))
    windowed = "window" in case
    for flags in CONVERSIONS if case == "qwen3" else CONVERSIONS[:2]:
        model, _ = folder.convert(*flags)
        kept = flags[flags.index("--keep-softmax-layers") + 1].split(",") if "--keep-softmax-layers" in flags else []
        kinds = [type(layer.self_attn).__name__ for layer in model.decoder.layers]
        assert kinds == ["SoftmaxAttention" if str(index) in kept else "FastWeightAttention" for index in range(LAYERS)]
        assert model.decoder.carries_state == (windowed or not kept)
        saved = torch.load(folder.out / "checkpoint.pt", weights_only=True)["cfg"]["model"]
        assert FwpLanguageModel.unused_flags(Namespace(**saved)) == []
        torch.testing.assert_close(by_steps(model, tokens), log_probs(model, tokens))
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        losses, _ = train(model.train(), torch.optim.Adam(model.parameters(), lr=1e-2), [tokens] * 4)
        assert losses[-1] < losses[0]
        assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_layers_by_divergence(folder, tmp_path):
    folder.save_model("qwen2")
    (tmp_path / "text").write_text("1 2 3 4 5 6 7 8 9 10\n11 12 13\n")
    model, _ = folder.convert(*GATED_DELTA, "--keep-softmax-layers", "kl:1", "--kl-text", tmp_path / "text")
    kinds = [type(layer.self_attn).__name__ for layer in model.decoder.layers]
    assert sorted(kinds) == ["FastWeightAttention"] * 2 + ["SoftmaxAttention"]


@pytest.mark.slow
@looped("case, flags", [
    ("llama, one head of keys", GATED_DELTA), ("mistral, window", CONVERSIONS[1]), ("qwen3", CONVERSIONS[1]),
])  # fmt: skip
def test_a_converted_model_is_linearised_and_loaded_as_at_once(tmp_path_factory, case, flags):
    folder = Saved("llama", tmp_path_factory.mktemp("folder"))
    folder.save_model(case)
    expected, _ = folder.convert(*flags)
    softmax, linear = folder.out.with_name("softmax"), folder.out.with_name("linear")
    folder.write().rename(softmax)
    fwp_linearize([*map(str, [softmax / "checkpoint.pt", "--out", linear, *flags])])
    tokens = torch.randint(4, WORDS, (2, LENGTH))
    assert torch.equal(load(linear)[0](tokens)[0], expected(tokens)[0])
    loaded = fairseq_fwp.load(folder.write("--to", "safetensors", *flags))
    torch.testing.assert_close(loaded(tokens)[0].double(), log_probs(expected, tokens), rtol=0, atol=1e-5)
    state, sizes = None, set()
    for token in loaded.generate(tokens, 20).split(1, 1):
        _, state = loaded(token, state)
        sizes.add(numbers_in(state))
    assert len(sizes) == 1 or "softmax" in (linear / "flags.txt").read_text()


QWEN2 = {"model_type": "qwen2"}
ROPE = "config.json must have rope_theta"
MIXED = ["sliding_attention", "full_attention", "full_attention"]
# change of the tensors, of the configuration, words of the sentence
# fmt: off
REFUSALS = [
    *((dict, {"model_type": kind}, "model_type in config.json must be one of llama, mistral, qwen2, qwen3, got "
       f"{re.escape(repr(kind))}: no other") for kind in ("gemma", "qwen3_moe", "phi3", None, ["llama"])),
    (dict, {"hidden_act": "gelu"}, "hidden_act in config.json must be silu or swish, got 'gelu'"),
    (dict, {"mlp_bias": True}, "mlp_bias = True, which cannot be converted: its feed-forward blocks have biases"),
    *((dict, {"rope_parameters": {"rope_type": kind, "rope_theta": 9.0, "factor": 2.0}},
       f"rope_parameters of type '{kind}', which cannot be converted") for kind in ("linear", "dynamic", "yarn")),
    (dict, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear', which cannot be conv"),
    (dict, {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}},
     f"rope_parameters in {ROPE} with type default, got partial_rotary_factor, rope_theta"),
    (dict, {"rope_parameters": {"full_attention": {"rope_theta": 9.0}}}, f"{ROPE} .*, got full_attention, rope_theta"),
    (dict, {"rope_parameters": SCALED}, f"{ROPE}, factor, .*, original_max_position_embeddings with type llama3, got"),
    (dict, {"rope_parameters": {**SCALED, "original_max_position_embeddings": 0}},
     "original_max_position_embeddings in config.json must be a number above 0, got 0"),
    (dict, {"rope_parameters": {**SCALED, "original_max_position_embeddings": 16, "high_freq_factor": 1.0}},
     "--attention-rope-scaling must be a factor, two ascending numbers of turns, and tokens, got '4.0,1.0,1.0,16'"),
    (dict, {"rope_scaling": {**SCALED, llama.LENGTH: 16}, llama.LENGTH: 8},
     "original_max_position_embeddings in config.json must be 16 as in its rope_scaling, got 8"),
    (dict, {"model_type": "mistral", "sliding_window": 4, "layer_types": ["full_attention"] * 3},
     "layer_types in .* must be sliding_attention for all 3 layers with sliding_window = 4, got"),
    (dict, {"rope_parameters": "default"}, "rope_parameters in config.json must be settings .*, got 'default'"),
    (dict, {"rope_parameters": {"rope_theta": "x"}}, "rope_theta in config.json must be a number above 0, got 'x'"),
    (dict, {"head_dim": 5}, "q_proj.weight must have 20 rows"),
    (dict, {"head_dim": None, "num_attention_heads": 5}, "num_attention_heads in .* divide hidden_size = 24, got 5"),
    (dict, {"num_key_value_heads": 3}, "num_key_value_heads in .* must divide num_attention_heads = 4, got 3"),
    (dict, {"num_key_value_heads": 0}, "num_key_value_heads in .* must be a whole number of at least 1, got 0"),
    (dict, {"rope_parameters": {"rope_type": None}, "rope_theta": None}, f"{ROPE} with type default, got none"),
    *((dict, {name: None}, f"{name} in config.json must have a value, got null") for name in llama.NOT_NULL[:2]),
    (dict, {"rms_norm_eps": 0}, "rms_norm_eps in config.json must be a number above 0, got 0"),
    (dict, {"rms_norm_eps": 10**400}, "rms_norm_eps in config.json must be a number above 0, got 1000"),
    (dict, {"attention_bias": "yes"}, "attention_bias in config.json must be true or false, got 'yes'"),
    (dict, {"attention_dropout": 2}, "--attention-dropout must be in"),
    (dict, {**QWEN2, **WINDOW, "max_window_layers": -1}, "max_window_layers in .* must be a whole number, got -1"),
    (dict, {**QWEN2, **WINDOW, "max_window_layers": 2}, "layer_types in .* all 3 layers, got .*'full_attention', 's"),
    (dict, {**QWEN2, "layer_types": MIXED}, "layer_types in .* for all 3 layers, got .*: a window of some layers"),
    (dict, {**QWEN2, "layer_types": ["chunked_attention"] * 3}, "layer_types in .* for all 3 layers, got .*chunked"),
    (dict, {**QWEN2, "layer_types": ["full_attention"]}, "layer_types in .* for all 3 layers, got .'full_attention'.:"),
    (dict, {**QWEN2, "layer_types": ["sliding_attention"] * 3}, "use_sliding_window and sliding_window in .* given"),
    (dict, QWEN2, r"it lacks model\.layers\.0\.self_attn\.q_proj\.bias"),
    (dict, {"model_type": "qwen3"}, r"it lacks model\.layers\.0\.self_attn\.q_norm\.weight"),
    (dict, {"attention_bias": True}, r"it lacks model\.layers\.0\.self_attn\.q_proj\.bias"),
    (dict, {"num_hidden_layers": 2}, r"it has also model\.layers\.2\."),
    (dict, {"num_attention_heads": None}, "the configuration of a Llama, Mistral or Qwen, got one without num_at"),
    (without("layers.1.mlp.up"), {}, r"it lacks model\.layers\.1\.mlp\.up_proj\.weight"),
    (without("lm_head"), {}, r"it lacks lm_head\.weight"),
    (ones("model.layers.0.self_attn.k_proj.weight", 24, 24), {}, r"k_proj\.weight must have 12 rows"),
    (ones("model.layers.0.self_attn.k_proj.weight", 12, 23), {}, "must have rows of one shape, got .*k_proj"),
    (ones("model.layers.0.self_attn.o_proj.weight", 24, 23), {}, r"out_proj\.weight must be \(24, 24\), got \(24, 23"),
]
# fmt: on


@looped("change, config, says", REFUSALS)
def test_models_that_cannot_be_represented_are_refused_by_name(tmp_path_factory, change, config, says):
    """Those of attention also before another takes the place of softmax."""
    folder = Saved("llama", tmp_path_factory.mktemp("refusal"))
    folder.save_model("llama", num_key_value_heads=2)
    folder.save({**folder.config, **config}, change(folder.tensors))
    for more in ([], GATED_DELTA) if "proj" in says else ([],):
        folder.refuses(says, *more)


def test_what_all_folders_of_transformers_have(folder):
    """Pickled weights, names of tokens, and a token that ends a text in place of a list."""
    folder.save_model("llama")
    expected = llama.convert(*arguments(folder))
    torch.save(folder.tensors, folder.path / "pytorch_model.bin")
    (folder.path / "config.json").write_text(json.dumps({**folder.config, "eos_token_id": [2, 3]}))
    (folder.path / "model.safetensors").unlink()
    (folder.path / "vocab.txt").write_text("".join(f"w{number}\n" for number in range(WORDS)))
    model, dictionary = folder.convert("--end", "w2", "--line-start", "word")
    assert dictionary.symbols[4:] == [f"w{word}" for word in expected.words]
    words = model.decoder.embed_tokens.weight
    assert torch.equal(words, expected.weights["decoder.embed_tokens.weight"].double())
    assert "--task fwp_lines" in (folder.out / "flags.txt").read_text()


def test_settings_that_are_not_read_are_named(folder, capsys):
    folder.save_model("llama")
    folder.save({**folder.config, "sliding_window": 4, "residual_multiplier": 0.5}, folder.tensors)
    folder.convert()
    note = "note: config.json has settings that are not read: residual_multiplier, sliding_window; "
    assert note in capsys.readouterr().out
