"""Translation models of fairseq's Transformer: the same logits, and linear attention in place of softmax."""

import math
import re
from argparse import Namespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from support.pairwise import looped

from checkpoints.convert.conftest import Command
from fairseq_fwp.checkpoints.convert import SOURCES
from fairseq_fwp.checkpoints.convert.checkpoint import build_converted
from fairseq_fwp.checkpoints.convert.conversion import Options
from fairseq_fwp.checkpoints.linearize import linearize
from fairseq_fwp.checkpoints.linearize.options import Method
from fairseq_fwp.cli.linearize import main as fwp_linearize
from fairseq_fwp.models.translation_layers import CausalAttention
from fairseq_fwp.modules.attention import LinearAttention
from fairseq_fwp.modules.update_rules import UPDATE_RULES

DIM, HEADS = 16, 2
HEAD = DIM // HEADS
LINEAR = ["--encoder-feature-map", "elu", "--cross-feature-map", "elu"]
SUM = ["--decoder-update-rule", "sum", "--decoder-feature-map", "elu", "--attention-normalization"]


def dictionary(language):
    made = Dictionary()
    for index in range(30):
        made.add_symbol(f"{language}{index}")
    return made


class Saved(Command):
    """A checkpoint as fairseq saves it, its model, and its conversion by the command."""

    def __init__(self, folder, arch="transformer", shared=False, **settings):
        super().__init__("fairseq-mt", folder / "model.pt", folder / "out")
        words = {language: dictionary("w" if shared else language) for language in ("en", "de")}
        for language, known in words.items():
            known.save(str(folder / f"dict.{language}.txt"))
        sizes = {"layers": 2, "embed_dim": DIM, "ffn_embed_dim": 24, "attention_heads": HEADS}
        sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()}
        args = Namespace(
            **{**sides, **settings},
            arch=arch, share_all_embeddings=shared, max_source_positions=64, max_target_positions=64, dropout=0.2,
        )  # fmt: skip
        ARCH_CONFIG_REGISTRY[arch](args)
        task = Namespace(source_dictionary=words["en"], target_dictionary=words["de"])
        self.model = ARCH_MODEL_REGISTRY[arch].build_model(args, task)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        self.model.eval()
        self.settings, self.languages = args, {"_name": "translation", "source_lang": "en", "target_lang": "de"}
        self.save()

    def save(self):
        cfg = {"model": self.settings, "task": self.languages}
        torch.save({"args": None, "cfg": cfg, "model": self.model.state_dict()}, self.path)

    def convert(self, *more):
        return super().convert(*more)[0].float()

    def check_same(self, *more):
        """Check that the converted model has the same logits."""
        sample = batch()
        torch.testing.assert_close(logits(self.convert(*more), sample), logits(self.model, sample))

    def linearize(self, state_size=None, **flags):
        """Return the model of `convert`, without the command's files."""
        source = SOURCES["fairseq-mt"]
        tensors, settings = source.read(self.path)
        conversion = source.convert(tensors, source.words(self.path, None), Options(settings))
        return build_converted(linearize(conversion, flags, Method(state_size))).eval()


@pytest.fixture
def saved(tmp_path):
    return Saved(tmp_path)


def batch():
    source, before = torch.randint(4, 34, (3, 7)), torch.randint(4, 34, (3, 5))
    source[0, :2] = 1
    return {"src_tokens": source, "src_lengths": torch.tensor([5, 7, 7]), "prev_output_tokens": before}


@torch.no_grad()
def logits(model, sample):
    return model(**sample)[0]


@looped(
    ("arch", "shared", "settings"),
    [
        ("transformer", False, {}),
        ("transformer_iwslt_de_en", True, {"encoder_normalize_before": True, "decoder_normalize_before": True}),
        ("transformer_wmt_en_de_big", True, {"activation_fn": "gelu", "no_token_positional_embeddings": True}),
        ("softmax_mt_wmt14_en_de", False, {"decoder_learned_pos": True}),
    ],
)
def test_without_another_attention_the_logits_are_the_same(tmp_path_factory, arch, shared, settings):
    saved = Saved(tmp_path_factory.mktemp("saved"), arch, shared, **settings)
    saved.check_same()
    written = (saved.out / "flags.txt").read_text()
    assert written.startswith("--task translation --source-lang en --target-lang de --arch fwp_transformer --")
    assert "--dropout 0.2" in written and (saved.out / "dict.en.txt").exists()


def kinds(model):
    """Return which of encoder, decoder and attention to the source are not fairseq's own."""
    places = {
        "encoder": model.encoder.layers[1].self_attn,
        "decoder": model.decoder.layers[1].self_attn,
        "cross": model.decoder.layers[1].encoder_attn,
    }
    return {name for name, module in places.items() if isinstance(module, LinearAttention | CausalAttention)}


@looped(
    ("flags", "converted"),
    [
        ({"encoder_feature_map": "elu"}, {"encoder"}),
        ({"encoder_feature_map": "softmax", "decoder_update_rule": "sum"}, {"decoder"}),
        ({"cross_feature_map": "elu"}, {"cross"}),
        (dict.fromkeys(("encoder_feature_map", "cross_feature_map"), "elu") | {"decoder_update_rule": "sum"},
         {"encoder", "decoder", "cross"}),
    ],
)  # fmt: skip
def test_each_place_is_converted_or_kept(saved, flags, converted):
    model = saved.linearize(**flags)
    assert kinds(model) == converted
    theirs = saved.model.state_dict()
    kept = [name for name in theirs.keys() & model.state_dict().keys() if not re.search("_attn\\.|version", name)]
    assert len(kept) > 20 and all(torch.equal(model.state_dict()[name], theirs[name]) for name in kept)
    assert logits(model, batch()).isfinite().all()


def test_projections_are_those_of_softmax(saved):
    """Each attention follows its formula, with softmax's queries and keys; the factor is in the queries."""
    model = saved.convert(*LINEAR, *SUM)
    x, source = torch.randn(2, 5, DIM), torch.randn(2, 6, DIM)
    places = ("encoder", "self_attn", x), ("decoder", "encoder_attn", source), ("decoder", "self_attn", x)
    for side, name, given in places:
        theirs, ours = (getattr(getattr(of, side).layers[1], name) for of in (saved.model, model))
        pairs = (theirs.q_proj, x), (theirs.k_proj, given), (theirs.v_proj, given)
        q, k, v = (projection(y).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for projection, y in pairs)
        q, k = (torch.nn.functional.elu(part) + 1 for part in (q / math.sqrt(HEAD), k))
        scores = q @ k.transpose(-1, -2)
        if name == "self_attn" and side == "decoder":
            scores = scores.tril()
        y = (scores / scores.sum(-1, keepdim=True)) @ v
        expected = theirs.out_proj(y.transpose(1, 2).flatten(2))
        time_first = (part.transpose(0, 1) for part in (x, given, given))
        torch.testing.assert_close(ours(*time_first)[0].transpose(0, 1), expected, rtol=1e-4, atol=1e-5)


def test_favor_estimates_the_attention_of_softmax(saved):
    """With many features and moderate scores it is close to exp(q . k / sqrt(d))."""
    for layer in saved.model.encoder.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            torch.nn.init.normal_(projection.weight, std=0.1)
    saved.save()
    errors = []
    for size in (16, 8192):
        model = saved.linearize(size, encoder_feature_map="favor")
        ours, theirs = (of.encoder.layers[1].self_attn for of in (model, saved.model))
        assert ours.feature_map.feature_dim == size
        x = torch.randn(9, 2, DIM)
        expected = theirs(x, x, x)[0]
        errors.append(((ours(x, x, x)[0] - expected).norm() / expected.norm()).item())
    assert errors[1] < 0.05 and errors[1] < errors[0] / 3


@looped("rule", list(UPDATE_RULES))
def test_every_rule_gives_finite_logits(saved, rule):
    model = saved.linearize(decoder_update_rule=rule, decoder_feature_map="elu", sum_normalization=True)
    assert kinds(model) == {"decoder"} and logits(model, batch()).isfinite().all()


def test_fwp_linearize_finds_that_it_is_translation(saved):
    flags, out = ["--encoder-feature-map", "elu", "--cross-feature-map", "elu"], saved.out.with_name("linear")
    saved.write(*flags)
    fwp_linearize([str(saved.path), "--out", str(out), *flags])
    weights, expected = (torch.load(folder / "checkpoint.pt")["model"] for folder in (out, saved.out))
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)


# fmt: off
REFUSALS = [
    ("--encoder-feature-map dpfp --state-size 24", "--state-size must be 16 for the map dpfp, got 24"),
    ("--encoder-feature-map dpfp --state-size 0", "--dpfp-nu must be from 1 to .*, got 0"),
    ("--encoder-feature-map favor --state-size 5", "--state-size must be 4 for the map favor, got 5"),
    ("--encoder-feature-map relu --state-size 0", "--relu-features must be at least 1, got 0"),
    ("--encoder-feature-map elu --state-size 4", "--state-size must be 8 for the map elu, got 4"),
    # Before anything is read.
    ("--decoder-update-rule decay --decay-spans 4", "--decay-spans must be left out for translation"),
    ("--cross-feature-map elu --attention-window 4", "--attention-window must be left out: only options"),
    ("--cross-feature-map elu --decoder-attention-heads 1", "--decoder-attention-heads must be left out: only opt"),
    ("--cross-feature-map elu --attention-normalization", "--decoder-update-rule must be given with --attention-n"),
    ("--encoder-feature-map softmax --state-size 4", "--decoder-update-rule must be other than softmax, got"),
    ("--source gpt2 --cross-feature-map elu", "--cross-feature-map must be left out: only options"),
    ("--source gpt2 --decoder-update-rule sum --no-scale-embedding", "unrecognized arguments: --no-scale-embedding"),
]
# fmt: on


@looped("arguments, says", REFUSALS)
def test_refusals(saved, arguments, says):
    saved.refuses(says, *arguments.split())


def test_files_that_do_not_fit(saved):
    """fairseq-train finds the languages in the names of the data, if the flags do not say them."""
    folder, known = saved.path.parent, saved.languages
    saved.settings.arch = "transformer_lm"
    saved.save()
    saved.refuses(r"must be transformer or fwp_transformer, got .*: fwp-convert --help lists")
    saved.settings.arch, saved.languages = "transformer", known | dict.fromkeys(("source_lang", "target_lang"))
    saved.save()
    saved.refuses("names no languages: give --source-lang, one of de, en")
    saved.check_same("--source-lang", "en", "--target-lang", "de")
    saved.languages, saved.out = known, folder / "again"
    saved.save()
    with (folder / "dict.de.txt").open("a") as file:
        file.write("more 1\n")
    saved.refuses(r"dict.de.txt must have the 34 words of the checkpoint, got 35 .*: give the fo")
    (folder / "dict.de.txt").unlink()
    saved.refuses(r"dict.de.txt is missing: give the folder that holds it with --vocabulary")


def test_linear_attention_is_not_converted_again(saved):
    assert kinds(saved.convert(*LINEAR)) == {"encoder", "cross"}
    saved.path = saved.out.rename(saved.out.with_name("linear")) / "checkpoint.pt"
    saved.refuses("got linear attention in some places", *SUM)


def test_sizes_that_are_not_the_encoders(tmp_path):
    saved = Saved(tmp_path, decoder_ffn_embed_dim=2048, encoder_attention_heads=4)
    saved.refuses(  # of other heads
        "--state-size must be 16 for the map dpfp, got 32",
        *["--encoder-feature-map", "dpfp", "--cross-feature-map", "dpfp", "--state-size", "32"],
    )
    saved.check_same()
