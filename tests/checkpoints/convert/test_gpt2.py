"""GPT-2 in Hugging Face's format: the logits of a GPT-2 defined here, and refusals by name."""

import math
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from support.pairwise import looped

import fairseq_fwp
from checkpoints.convert.conftest import Folder, ones, without
from fairseq_fwp.checkpoints.convert import gpt2
from fairseq_fwp.cli import export
from fairseq_fwp.cli.convert import main

WORDS, POSITIONS, DIM, HEADS, LAYERS = 30, 12, 16, 4, 2
# As saved by transformers, without settings that conversion does not read.
CONFIG = {
    "activation_function": "gelu_new", "attn_pdrop": 0.2, "embd_pdrop": 0.3, "eos_token_id": 29,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": POSITIONS, "n_embd": DIM, "n_head": HEADS, "n_inner": None, "n_layer": LAYERS,
    "n_positions": POSITIONS, "resid_pdrop": 0.1, "vocab_size": WORDS,
}  # fmt: skip


def make_tensors():
    shapes = {"wte.weight": (WORDS, DIM), "wpe.weight": (POSITIONS, DIM), "ln_f.weight": (DIM,), "ln_f.bias": (DIM,)}
    for index in range(LAYERS):
        sizes = {
            "attn.c_attn": (DIM, 3 * DIM),
            "attn.c_proj": (DIM, DIM),
            "mlp.c_fc": (DIM, 4 * DIM),
            "mlp.c_proj": (4 * DIM, DIM),
        }
        for name, shape in sizes.items():
            shapes |= {f"h.{index}.{name}.weight": shape, f"h.{index}.{name}.bias": shape[1:]}
        shapes |= {f"h.{index}.{norm}.{part}": (DIM,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
    return {name: 0.4 * torch.randn(shape) for name, shape in shapes.items()}


def reference_logits(tensors, tokens):
    """Compute GPT-2 (Radford et al. 2019) as in OpenAI's code: tokens (B, L) -> logits (B, L, V)."""

    def linear(x, name):
        return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def norm(x, name):
        return F.layer_norm(x, (DIM,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-5)

    def gelu(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    length = tokens.shape[1]
    x = tensors["wte.weight"][tokens] + tensors["wpe.weight"][:length]
    for index in range(LAYERS):
        name = f"h.{index}"
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in linear(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn").split(DIM, -1)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(DIM // HEADS)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + linear(y.transpose(1, 2).flatten(2), f"{name}.attn.c_proj")
        x = x + linear(gelu(linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")), f"{name}.mlp.c_proj")
    return norm(x, "ln_f") @ tensors["wte.weight"].T


class Gpt2(Folder):
    def save(self, tensors, **config):
        super().save({**CONFIG, **config}, tensors)


@pytest.fixture
def folder(tmp_path):
    return Gpt2("gpt2", tmp_path)


def assert_same(folder, tensors, dtype, tolerance):
    model, dictionary = folder.convert()
    model = model.to(dtype)
    tokens = torch.randint(WORDS - 1, (3, POSITIONS))
    numbers = [*map(str, range(WORDS - 1)), "</s>"]
    ours = torch.tensor([dictionary.index(word) for word in numbers])
    assert dictionary.unk() not in ours and dictionary.eos() == ours[-1]
    output = model(ours[tokens])
    expected = reference_logits({name: tensor.to(dtype) for name, tensor in tensors.items()}, tokens).log_softmax(-1)
    assert expected.std() > 1
    log_probs = model.get_normalized_probs(output, log_probs=True)
    torch.testing.assert_close(log_probs[..., ours], expected, rtol=0, atol=tolerance)
    # Words of fairseq's dictionary that GPT-2 lacks are never generated.
    rest = [index for index in range(len(dictionary)) if index not in ours]
    assert [dictionary[index] for index in rest] == ["<s>", "<pad>", "<unk>"]
    assert log_probs[..., rest].eq(-torch.inf).all()


@looped("dtype, tolerance", [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_logits_are_those_of_gpt2(folder, dtype, tolerance):
    tensors = make_tensors()
    folder.save(tensors)
    assert_same(folder, tensors, dtype, tolerance)


def test_what_transformers_saves_with_the_weights(folder):
    """Files may have a prefix, causal masks, the tied output, and weights in several files."""
    tensors = make_tensors()
    whole = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    whole["lm_head.weight"] = tensors["wte.weight"]
    for name in (f"transformer.h.{index}.attn" for index in range(LAYERS)):
        whole[f"{name}.bias"] = torch.ones(1, 1, POSITIONS, POSITIONS, dtype=torch.uint8).tril()
        whole[f"{name}.masked_bias"] = torch.tensor(-1e4)
    folder.save({})
    (folder.path / "model.safetensors").unlink()
    folder.save_parts(whole)
    assert_same(folder, tensors, torch.float32, 2e-5)


def test_config_json_sets_no_option_of_the_command(folder):
    tensors = make_tensors()
    folder.save(tensors, end=[1], line_start="end")
    assert_same(folder, tensors, torch.float32, 2e-5)
    assert fairseq_fwp.load(folder.path, source="gpt2").line_start is None


def test_settings_of_the_training(folder, capsys):
    """The end of a text may be the first word."""
    folder.save(make_tensors(), eos_token_id=0)
    model, _ = folder.convert()
    assert model.decoder.dropout.p == 0.1 and model.decoder.layers[0].self_attn.dropout == 0.2
    assert "note: dropout of embeddings is 0.1 here, as in blocks, and was 0.3 (embd_pdrop)" in capsys.readouterr().out
    assert model.max_positions() == model.max_decoder_positions() == POSITIONS
    with pytest.raises(ValueError, match=r"must have at most 12 tokens, .*, got 13"):
        model(torch.full((1, POSITIONS + 1), 5))


DECAY = ["--decoder-update-rule", "decay", "--state-size", 4]
# change of the tensors, of the configuration, words of the sentence
# fmt: off
REFUSALS = [
    (ones("wte.weight", WORDS, DIM, fill=float("nan")), {}, r"wte\.weight must have finite numbers, got NaN or inf"),
    (ones("h.0.ln_1.bias", DIM, fill=float("inf")), {}, r"h\.0\.ln_1\.bias must have finite numbers, got NaN or"),
    *((dict, {name: 2**40}, rf"{name} in .*config\.json must be at most \d+, the greatest size of the weights, got 1,")
      for name in ("n_embd", "n_head", "n_layer", "vocab_size")),
    *((dict, {alias: 3}, f"{alias} and {name} in config.json must be equal, two names of one setting, got 3 and ")
      for alias, name in gpt2.ALIASES.items()),
    (dict, {"n_positions": 11}, r"wpe\.weight must have 11 rows, n_positions of config\.json, got 12"),
    (dict, {"is_causal": False}, "is_causal = False, which cannot be converted: its tokens see later ones"),
    (dict, {"text_config": {"n_head": 2}}, "text_config = .* its language model is a part of another model"),
    (dict, {"quantization_config": {}}, "quantization_config = .* its weights are quantised"),
    (dict, {"transformers_weights": "a.safetensors"}, "transformers_weights in .* must be left out or name model.safe"),
    (dict, {"n_inner": 2**62}, "the model that the options describe cannot be built|a model of the .* numbers of the"),
    (without("h.1.attn.c_proj.weight"), {}, r"decoder\.layers\.1\.self_attn\.out_proj\.weight is missing"),
    (ones("h.1.attn.gate", DIM), {}, r"it has also h\.1\.attn\.gate;"),
    (ones("lm_head.weight", WORDS, DIM), {}, "lm_head cannot be converted: .* has two that differ"),
    (ones("transformer.wte.weight", WORDS, DIM), {}, "must have each name once, got wte.weight and transformer.wte"),
    (ones("wpe.weight", 0, DIM), {}, r"wpe\.weight must be a matrix, got the shape \(0, 16\)"),
    (ones("h.0.attn.c_attn.weight", DIM, DIM, 3), {}, r"c_attn\.weight must be a matrix, got the shape \(16, 16, 3\)"),
    (ones("h.0.ln_1.bias", 3), {}, r"self_attn_layer_norm\.bias must be \(16,\), got \(3,\)"),
    (ones("h.1.attn.c_attn.weight", DIM, 47), {}, r"1\.self_attn\.in_proj\.weight must be \(48, 16\), got \(47,"),
    (ones("h.0.mlp.c_fc.weight", DIM, 64, dtype=torch.int8), {}, r"c_fc\.weight must be floating-point, got .*int8"),
    (dict, {"vocab_size": 31}, r"wte\.weight must have 31 rows as config\.json says, got \(30, 16\)"),
    (dict, {"n_layer": 1}, r"decoder\.layers\.1\.fc1\.bias is not a weight of this model"),
    (dict, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = 1e-06, which cannot be converted: its layer norm"),
    (dict, {"scale_attn_by_inverse_layer_idx": True}, "its attention is scaled by the layer"),
    (dict, {"activation_function": "silu"}, "activation_function in config.json must be one of gelu, .*, got 'silu'"),
    (dict, {"model_type": "gpt_neo"}, "model_type = 'gpt_neo', which cannot be converted: it is another model"),
    (dict, {"n_head": None}, r"config\.json must be the configuration of a GPT-2, got one without n_head"),
    (dict, {"n_inner": "wide"}, "refuses the settings .*--decoder-ffn-embed-dim: invalid int value: 'wide'"),
    (dict, {"vocab_size": 29}, r"eos_token_id in .* must be one number in \[0, 29\), the vocabulary, got 29"),
    (dict, {"eos_token_id": [29]}, r"eos_token_id in .* must be one number in .*, got \[29\]: give the token .* --end"),
]
# fmt: on


@looped("change, config, says", REFUSALS)
def test_refusals(folder, change, config, says):
    """Attention of other shapes is named also before another takes its place."""
    folder.save(change(make_tensors()), **config)
    for more in ([], DECAY) if "attn" in says else ([],):
        folder.refuses(says, *more)


NAMES = ["[PAD]", "[UNK]", "[CLS]", "<unk>", "<s>", "<pad>", *"ABCDEFGHIJKLMNOPQRSTUVWX"]


@looped("names", ["", "vocab.txt", "--vocabulary"])
@looped("shards", [1, 2])
def test_a_folder_as_it_is_published(folder, shards, names):
    """Weights of torch.save in one or two files, eos_token_id beyond the vocabulary, and names of the tokens."""
    tensors, arguments = make_tensors(), ["--end", "[CLS]" if names else 2]
    folder.save({}, eos_token_id=50256)
    for file in (*folder.path.glob("*model*"), *folder.path.glob("part*")):  # also of the case before
        file.unlink()
    whole = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    if shards == 2:
        folder.save_parts(whole, "pytorch_model.bin")
    else:
        torch.save(whole, folder.path / "pytorch_model.bin")
    if names:
        file = folder.path / ("vocab.txt" if names == "vocab.txt" else "names.txt")
        file.write_text("\n".join(NAMES) + "\n")
        arguments += ["--vocabulary", file] * (names == "--vocabulary")
    model, dictionary = folder.convert(*arguments)
    words = NAMES if names else [str(number) for number in range(WORDS)]
    ours = torch.tensor([dictionary.index("</s>" if number == 2 else word) for number, word in enumerate(words)])
    if names:
        assert {dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk()} <= set(ours.tolist())
    assert len(set(ours.tolist())) == WORDS
    tokens = torch.randint(6, WORDS, (3, POSITIONS))
    expected = reference_logits({name: x.double() for name, x in tensors.items()}, tokens).log_softmax(-1)
    log_probs = model.get_normalized_probs(model(ours[tokens]), log_probs=True)
    torch.testing.assert_close(log_probs[..., ours], expected, rtol=0, atol=1e-12)


def test_its_texts_may_be_lines(folder):
    """--line-start goes into the flags of the training, and into the folder and the checkpoint that are loaded."""
    folder.save(make_tensors())
    out = folder.write("--line-start", "word", *DECAY)
    assert (out / "flags.txt").read_text().startswith("--task fwp_lines --line-start word --arch fwp_lm ")
    model = fairseq_fwp.load(out / "checkpoint.pt")
    assert model.line_start == "word" and model.encode("5 7").tolist() == [[*map(model.dictionary.index, ("5", "7"))]]
    again = folder.path.parent / "again"
    main([*map(str, ["--source", "fwp-lm", out / "checkpoint.pt", "--to", "safetensors", "--out", again])])
    loaded = fairseq_fwp.load(again)
    found, expected = (lm(torch.tensor([[5, 6]]))[0] for lm in (loaded, model))
    assert loaded.line_start == "word" and torch.equal(found, expected)
    assert fairseq_fwp.load(folder.path, source="gpt2").encode("5")[0, 0] == model.dictionary.eos()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.export
def test_words_that_a_model_cannot_predict_are_exported(folder, capsys):
    """The source lacks fairseq's <pad> and others: minus infinity in the graph, and in the model."""
    pytest.importorskip("onnxruntime")
    folder.save(make_tensors())
    out, exported = folder.write(*DECAY), folder.path.parent / "exported"
    export.main([*map(str, [out, "--path", out / "checkpoint.pt", "--out", exported, "--quantize", "int8"])])
    told = re.search(r"log-probabilities differ by (\S+), in 8 bits by (\S+)$", capsys.readouterr().out.strip())
    assert float(told[1]) < 1e-4 and float(told[2]) < 10


def test_options_of_a_source_are_given_to_load(folder):
    """As to the command: the end of a text and what is read first."""
    folder.save(make_tensors())
    out = folder.write("--line-start", "word", "--end", "3")
    expected = fairseq_fwp.load(out / "checkpoint.pt")
    loaded = fairseq_fwp.load(folder.path, source="gpt2", end=3, line_start="word")
    assert loaded.dictionary.symbols == expected.dictionary.symbols and loaded.line_start == "word"
    tokens = loaded.encode("5 7 </s>")
    assert tokens.shape == (1, 3) and torch.equal(loaded(tokens)[0], expected(tokens)[0])
    for source, given, says in (
        ("gpt2", {"ending": "3"}, "options must be among end, line_start, got ending"),
        ("gpt2", {"line_start": "first"}, "line_start must be a value of this option, got 'first'"),
        ("fwp-lm", {"end": "3"}, "options must be left out with this source, got end"),
        ("schlag-lm", {"n_head": "x"}, "n_head must be a value of this option, got 'x'"),
        ("schlag-lm", {"no_pos": 1}, "no_pos must be a value of this option, got 1: it is true or false"),
    ):
        with pytest.raises(ValueError, match=says):
            fairseq_fwp.load(folder.path, source=source, **given)


def test_rows_that_fill_the_table_have_names_of_their_own(folder):
    """Words of a vocabulary may be digits, and fairseq's own names of such rows."""
    folder.save(make_tensors())
    (folder.path / "vocab.txt").write_text("\n".join(["<s>", "27", "madeupword27", "28", "w"]) + "\n")
    with pytest.raises(ValueError, match="'28', the number of 'madeupword28' and the name of token 3: give the other"):
        fairseq_fwp.load(folder.path, source="gpt2", end="28")
    assert "27" in fairseq_fwp.load(folder.path, source="gpt2", end=27).dictionary.indices
    words = fairseq_fwp.load(folder.path, source="gpt2").dictionary
    fillers = {*map(str, range(5, 27)), "madeupwordmadeupword27", "madeupword28"}
    assert len(words) == WORDS + 2 and words.indices.keys() >= {"27", "madeupword27", "28", *fillers}


def test_a_model_without_an_end(folder, capsys):
    folder.save(make_tensors(), eos_token_id=None)
    folder.convert()
    assert "note: the vocabulary has no symbol for the end of a line" in capsys.readouterr().out


class Code:
    def __reduce__(self):
        return print, ("code ran",)


class Unwritten:
    """A tensor of 32 GB in a storage of one number, which loading would enlarge."""

    def __reduce__(self):
        storage = torch.TypedStorage(wrap_storage=torch.zeros(1).untyped_storage(), dtype=torch.float, _internal=True)
        return torch._utils._rebuild_tensor_v2, (storage, 0, (2**33,), (1,), False, {})


NO_NUMBERS = r"must hold a number for every place of its tensors, got one of .* needs 34,359,738,\d+ bytes, in a file"


@looped(
    "content, says",
    [
        ({"wte.weight": Code()}, "must hold tensors only, got other objects, which could run any code: ask its author"),
        (b"PK not a file of torch", "must be a complete file of torch.save, got a truncated or different file"),
        ([torch.zeros(3)], "must hold a tensor for every name, got other objects"),
        ({"wte.weight": 3}, "must hold a tensor for every name, got other objects"),
        ({1: torch.zeros(3)}, "must hold a tensor for every name, got other objects"),
        ({"wte.weight": torch.eye(3).to_sparse()}, "must hold a tensor for every name, got other objects"),
        ({"wte.weight": torch.zeros(1).expand(2**33, 1)}, NO_NUMBERS),
        ({"wte.weight": torch.zeros(3).as_strided((2**33,), (0,))}, NO_NUMBERS),
        ({"wte.weight": Unwritten()}, NO_NUMBERS),
        ({"wte.weight": torch.nested.nested_tensor([torch.zeros(3)], layout=torch.jagged)}, "sparse, nested or quant"),
        (None, "must hold model.safetensors or pytorch_model.bin, whole or in the files of an index, got"),
    ],
)
def test_damaged_weights_of_torch(folder, capsys, content, says):
    """None of them runs code."""
    folder.save({})
    (folder.path / "model.safetensors").unlink()
    file = folder.path / "pytorch_model.bin"
    file.unlink(missing_ok=True)
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    folder.refuses(says)
    assert "code ran" not in capsys.readouterr().out


@looped(
    "lines, end, says",
    [
        (NAMES, "[SEP]", r"--end must be a token: a word of the vocabulary, or its number, got '\[SEP\]'"),
        (NAMES, "30", "--end must be a token: .* got '30'"),
        ([*NAMES, "Y"], "2", r"vocab\.txt must have at most 30 words, vocab_size in .*config\.json, got 31"),
    ],
)
def test_vocabularies_that_are_refused(folder, lines, end, says):
    folder.save(make_tensors())
    (folder.path / "vocab.txt").write_text("\n".join(lines) + "\n")
    folder.refuses(says, "--end", end)


def test_encodings_of_vocabularies(folder):
    """A mark at the start of UTF-8 is not a part of the first word; other encodings are refused."""
    folder.save(make_tensors())
    names = "\n".join(NAMES) + "\n"
    (folder.path / "vocab.txt").write_bytes(names.encode("utf-8-sig"))
    assert folder.convert()[1].symbols[4] == "[PAD]"
    shutil.rmtree(folder.out)
    (folder.path / "vocab.txt").write_bytes(names.encode("utf-16-le"))
    folder.refuses(r"the vocabulary .*vocab\.txt must be text in UTF-8, got another encoding")


def test_a_table_may_have_more_rows_than_the_vocabulary_has_words(folder):
    """The rows that only fill it are numbers."""
    folder.save(make_tensors())
    (folder.path / "vocab.txt").write_text("\n".join(NAMES[:-2]) + "\n")
    _, dictionary = folder.convert()
    assert dictionary.symbols[-2:] == ["V", "28"] and dictionary.eos_word == "</s>"


@pytest.mark.slow
@looped("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_unless_some_weights_have_more(folder, dtype):
    """A softmax model of half-precision weights has their logits; test_llama.py has their dtype, also of others."""
    tensors = {name: tensor.to(dtype) for name, tensor in make_tensors().items()}
    folder.save(tensors)
    assert_same(folder, tensors, torch.float32, 2e-5)
    mixed = {name: tensor.float() if "wpe" in name else tensor for name, tensor in tensors.items()}
    mixed["wpe.weight"] += 1e-5 * torch.randn(POSITIONS, DIM)
    folder.save(mixed)
    assert_same(folder, mixed, torch.float64, 1e-12)


def test_files_that_are_not_there_or_not_whole(folder):
    index, weights = folder.path / "model.safetensors.index.json", folder.path / "model.safetensors"

    folder.refuses(r"config\.json cannot be read")
    folder.save(make_tensors())
    folder.refuses("the vocabulary x cannot be read", "--vocabulary", "x")
    for content in ("{}", '{"weight_map": {"a": 1}}', "[]"):
        index.write_text(content)
        folder.refuses("must hold a JSON object" if content == "[]" else "must have a weight_map")
    index.write_text('{"weight_map": {"wte.weight": "other.safetensors"}}')
    folder.refuses(r"must hold its weights once, got both model\.safetensors and model\.safetensors\.index\.json")
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    weights.rename(folder.path / "one.safetensors")
    shutil.copy(folder.path / "one.safetensors", folder.path / "two.safetensors")
    folder.refuses(r"must hold h\.0\.attn\.c_attn\.bias once, got it in one\.safetensors and in two\.safetensors")
    index.unlink()
    (folder.path / "one.safetensors").rename(weights)
    whole = weights.read_bytes()
    for content in (b"", whole[:5], whole[:100], whole[:-4], b"x" * 100):
        weights.write_bytes(content)
        folder.refuses(r"model\.safetensors must be a complete safetensors file")
    weights.unlink()
    folder.refuses("must hold model.safetensors or pytorch_model.bin, whole or in the files of an index, got neither")
    index.write_text('{"weight_map": {"a": "part.safetensors"}}')
    folder.refuses(r"the weights .*part\.safetensors cannot be read: No such file")
    folder.path = weights
    folder.refuses(r"must be a folder with config\.json and model.safetensors of GPT-2, got")


def test_a_training_on_a_word_of_probability_0_is_refused(folder):
    """Its loss would be infinite, without an infinite gradient: fairseq would go on, and save that as the best."""
    folder.save(make_tensors(), eos_token_id=None)
    model, dictionary = folder.convert()
    tokens = torch.tensor([[dictionary.index("3"), dictionary.index("4")]])
    net_output = model(tokens)
    targets = torch.tensor([[dictionary.index("4"), dictionary.pad()]])
    assert model.get_targets({"target": targets}, net_output) is targets
    targets[0, 1] = dictionary.eos()
    with pytest.raises(ValueError, match="only words that the model can predict, got '</s>', whose probability is"):
        model.get_targets({"target": targets}, net_output)
