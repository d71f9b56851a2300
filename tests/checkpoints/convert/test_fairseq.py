"""A converted transformer_lm has the logits of fairseq's model; other settings are refused by name."""

import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from omegaconf import OmegaConf
from support.pairwise import looped
from support.small_models import SMALL, make_dictionary

from checkpoints.convert.conftest import Command, ones, without
from fairseq_fwp.patches.hooks import KEY, fingerprints

ADAPTIVE = {"adaptive_input_cutoff": "10,30", "adaptive_softmax_cutoff": "10,30"}
PLAIN = {"decoder_input_dim": 16, "decoder_output_dim": 16}
LENGTH = 20

# The main architectures, and other variants of fairseq's models.
SOURCES = {
    "wiki103": ("transformer_lm_wiki103", ADAPTIVE),
    "wiki103 of 50 words": ("transformer_lm_wiki103", dict.fromkeys(ADAPTIVE, "10,50")),
    "gpt2": ("transformer_lm_gpt2_small", {}),
    "gpt3": ("transformer_lm_gpt3_small", {}),
    "shared": ("transformer_lm_gpt2_big", {"share_decoder_input_output_embed": True, "no_scale_embedding": True}),
    "post-norm": ("transformer_lm", {**PLAIN, "activation_fn": "gelu_accurate"}),
    "no positions": ("transformer_lm_gpt2_small", {"no_token_positional_embeddings": True, "add_bos_token": True}),
}


def build_theirs(arch, flags):
    """Return fairseq's model with large random weights, in evaluation, and its settings."""
    task = {"tokens_per_sample": LENGTH, "max_target_positions": LENGTH, "add_bos_token": False}
    args = Namespace(**SMALL, **{**task, **flags}, tpu=False)
    ARCH_CONFIG_REGISTRY[arch](args)
    args.base_shuffle = 1  # fairseq's architectures have False, which its configuration refuses
    cfg = OmegaConf.merge(OmegaConf.structured(TransformerLanguageModelConfig), vars(args))
    dictionary = make_dictionary(50)
    model = TransformerLanguageModel.build_model(
        cfg, Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval(), {**OmegaConf.to_container(cfg, enum_to_str=True), "_name": arch}


class Checkpoint(Command):
    """A file as fairseq saves it, with its dict.txt, and its conversion by the command."""

    def __init__(self, folder: Path) -> None:
        super().__init__("fairseq-lm", folder / "model.pt", folder / "out")
        make_dictionary(50).save(str(folder / "dict.txt"))

    def save(self, tensors, settings, **other):
        torch.save({"args": None, "cfg": {"model": settings, "task": {}}, "model": tensors, **other}, self.path)


@pytest.fixture
def checkpoint(tmp_path):
    return Checkpoint(tmp_path)


@torch.no_grad()
def log_probs(model, tokens):
    return model.get_normalized_probs(model(tokens), log_probs=True)


def assert_same(ours, theirs):
    tokens = torch.randint(4, 50, (3, LENGTH))
    expected = log_probs(theirs, tokens)
    assert expected.std() > 0.2  # weights that change the outputs
    torch.testing.assert_close(log_probs(ours.float(), tokens), expected, rtol=0, atol=5e-6)


@looped("name", SOURCES)
def test_logits_are_those_of_fairseqs_model(checkpoint, name):
    theirs, settings = build_theirs(*SOURCES[name])
    checkpoint.save(theirs.state_dict(), settings)
    ours, dictionary = checkpoint.convert()
    assert dictionary == make_dictionary(50)
    assert_same(ours, theirs)
    count = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
    # fairseq's table of positions has unused rows.
    assert count[1] - count[0] == (2 * SMALL["decoder_embed_dim"] if name == "gpt3" else 0)
    state = {}
    tokens = torch.randint(4, 50, (2, 6))
    steps = [ours.get_normalized_probs(ours(tokens[:, :end], incremental_state=state), True) for end in range(1, 7)]
    torch.testing.assert_close(torch.cat(steps, 1), log_probs(ours, tokens), rtol=0, atol=5e-6)


def test_dropouts_are_those_of_the_training(checkpoint):
    theirs, settings = build_theirs("transformer_lm_wiki103", ADAPTIVE)
    checkpoint.save(theirs.state_dict(), settings)
    decoder = checkpoint.convert()[0].decoder
    layer = decoder.layers[0]
    found = decoder.dropout.p, layer.dropout.p, layer.activation_dropout.p, layer.self_attn.dropout
    assert found == (0.3, 0.3, 0.1, 0.1) and decoder.adaptive_softmax.dropout.p == 0.2


def test_checkpoints_of_earlier_versions(checkpoint):
    """An old checkpoint has settings in `args`, q, k and v in one tensor, numbered norms, and no final norm."""
    theirs, settings = build_theirs("transformer_lm_gpt2_small", {"share_decoder_input_output_embed": True})
    theirs.decoder.layer_norm = None
    old = {
        name: tensor for name, tensor in theirs.state_dict().items() if "layer_norm" not in name and "_proj" not in name
    }
    old["decoder.version"] = torch.ones(1)
    for index, layer in enumerate(theirs.decoder.layers):
        prefix = f"decoder.layers.{index}"
        attention = layer.self_attn
        for part in ("weight", "bias"):
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            old[f"{prefix}.self_attn.in_proj_{part}"] = torch.cat([getattr(of, part) for of in projections])
            old[f"{prefix}.self_attn.out_proj.{part}"] = getattr(attention.out_proj, part)
            old[f"{prefix}.layer_norms.0.{part}"] = getattr(layer.self_attn_layer_norm, part)
            old[f"{prefix}.layer_norms.1.{part}"] = getattr(layer.final_layer_norm, part)
    known = {name: value for name, value in settings.items() if not name.startswith(("scale_", "base_", "_"))}
    checkpoint.save(old, None, cfg=None, args=Namespace(arch="transformer_lm_gpt2_small", **known))
    assert_same(checkpoint.convert()[0], theirs)


TAIL = "decoder.adaptive_softmax.tail.0.0.weight"
# change of the tensors, of the settings, words of the sentence
# fmt: off
REFUSALS = [
    (without("decoder.layers.1.fc2.bias"), {}, r"decoder\.layers\.1\.fc2\.bias is missing"),
    (ones("decoder.layers.0.attn_ln.weight", 16), {}, r"has also decoder\.layers\.0\.attn_ln\.weight;"),
    (ones(TAIL, 16, 4), {}, "an adaptive softmax of its own cannot be converted: .* has two that differ"),
    (ones("decoder.layers.0.fc1.bias", 25), {}, r"decoder\.layers\.0\.fc1\.bias must be \(24,\), got \(25,\)"),
    (dict, {"layernorm_embedding": True}, "--layernorm-embedding cannot be converted: it normalises its embeddings"),
    (dict, {"scale_heads": True}, "--scale-heads cannot be converted: its heads have scales"),
    (dict, {"decoder_input_dim": 8}, "--decoder-input-dim must be 16, as --decoder-embed-dim, got 8"),
    (dict, {"tie_adaptive_proj": False}, "--tie-adaptive-proj must be on to convert an adaptive softmax, got off"),
    (dict, {"adaptive_softmax_cutoff": None}, "--adaptive-input without --adaptive-softmax-cutoff cannot be converted"),
    (dict, {"adaptive_input_factor": 2.5}, "--adaptive-input-factor must be a whole number of at least 2, got 2.5"),
    (dict, {"adaptive_softmax_cutoff": "10,x"}, "--adaptive-softmax-cutoff must be whole numbers .*, got '10,x'"),
    (dict, {"_name": "transformer"}, "the architecture in .* must be transformer_lm, got 'transformer'"),
]
# fmt: on


@looped("change, settings, says", REFUSALS)
def test_refusals(checkpoint, change, settings, says):
    theirs, known = build_theirs("transformer_lm_wiki103", ADAPTIVE)
    checkpoint.save(change(theirs.state_dict()), {**known, **settings})
    checkpoint.refuses(says)


def test_the_dictionary_of_another_model(checkpoint, tmp_path):
    theirs, settings = build_theirs("transformer_lm_wiki103", ADAPTIVE)
    checkpoint.save(theirs.state_dict(), settings)
    other, own = tmp_path / "other.txt", tmp_path / "dict.txt"
    other.write_text("a 1\nb 1\n")
    says = "the dictionary must have the 50 words of the checkpoint, got 6 .*: give the dict.txt of its training"
    checkpoint.refuses(says, "--vocabulary", other)
    other.write_text("\n".join(reversed(own.read_text().splitlines())) + "\n")
    words = make_dictionary(50)
    known = {KEY: fingerprints(Namespace(source_dictionary=words, target_dictionary=words))}
    checkpoint.save(theirs.state_dict(), settings, task_state=known)
    says = "the vocabulary must be the target dictionary of the model's training .*, got another .*: give the dict.txt"
    checkpoint.refuses(says, "--vocabulary", other)
    own.write_bytes(b"\xff\xfe 1\n")
    says = r"the dictionary .*dict\.txt cannot be read: Incorrect encoding"
    checkpoint.refuses(says)
    own.unlink()
    says = r"dict\.txt does not exist: give the dict\.txt of the training, with --vocabulary, or as dictionary"
    checkpoint.refuses(says)


def test_files_that_are_no_checkpoints(checkpoint):
    for saved, says in (
        ([1], "must be a checkpoint of fairseq, got a file without a model"),
        ({"model": {"a": torch.ones(1)}}, "got a file without the settings of its model"),
        ({"model": {"a": torch.ones(1)}, "cfg": [1]}, "got a file without the settings of its model"),
        ({"model": {"a": 1}}, "got a model with objects that are not tensors"),
        ({"model": {}, "cfg": {"model": {}, "task": 3}}, "got a file without the settings of its model"),
        ({"model": {}, "args": re.compile("x")}, "holds pickled objects, .*: export what is needed with: python"),
    ):
        torch.save(saved, checkpoint.path)
        checkpoint.refuses(says)


def test_damaged_pickles(checkpoint):
    """The unpickler raises IndexError for these, and other errors for others."""
    for damaged in (b"\x80\x09abc", b"\x80\x02}q\x00(X\x05\x00\x00\x00modelq"):
        checkpoint.path.write_bytes(damaged)
        checkpoint.refuses("must be a complete checkpoint, got a truncated or different file")
