"""Flags of language models at random, through fairseq's own parser: a model that trains, or one sentence."""

import contextlib
import io
from argparse import Namespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_fwp.convert.files import configure
from fairseq_fwp.models.presets import PRESETS_OF_MODELS
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

FAMILIES = ("fwp_lm", "fwp_xl_lm", "fwp_fwl_lm")
ARCHITECTURES = [*FAMILIES, *(arch for family in FAMILIES for arch in PRESETS_OF_MODELS[family])]
SIZE = {"decoder-layers": "1", "decoder-embed-dim": "16", "decoder-ffn-embed-dim": "16", "decoder-attention-heads": "4"}
SIZE |= {"tokens-per-sample": "16"}
whole = st.sampled_from(["-1", "0", "1", "2", "3", "5", "8", "1.5", "x", ""])
real = st.sampled_from(["-0.5", "0", "1e-30", "0.1", "1", "2", "nan", "inf", "x"])
SWITCH = st.none()
FLAGS = {
    "decoder-update-rule": st.sampled_from([*UPDATE_RULES, "softmax", "hebb"]),
    "decoder-feature-map": st.sampled_from([*FEATURE_MAPS, "cosine"]),
    "fwp-backend": st.sampled_from(["auto", "reference", "kernel", "gpu"]),
    "decoder-positions": st.sampled_from(["relative", "shaw", "shaw_biased", "absolute", "layerwise", "none"]),
    "favor-draw": st.sampled_from(["orthogonal", "gaussian", "authors", "none"]),
    "output-layer": st.sampled_from(["biased", "tied", "untied", "none"]),
    "softmax-layers": st.sampled_from(["0", "0,1", "1", "1,0", "0,0", "-1", "x", ""]),
    "adaptive-softmax-cutoff": st.sampled_from(["", "10", "10,20", "20,10", "10,99999", "0", "-5", "a,b", "10,,20"]),
    **dict.fromkeys(
        ["decoder-key-dim", "dpfp-nu", "favor-features", "relu-features", "attention-window", "mem-len", "clamp-len",
         "div-val", "decoder-layers", "decoder-embed-dim", "decoder-ffn-embed-dim", "decoder-attention-heads",
         "tokens-per-sample", "max-target-positions"],
        whole,
    ),
    **dict.fromkeys(
        ["dropout", "attention-dropout", "activation-dropout", "final-dropout", "favor-offset", "normalization-epsilon",
         "sum-normalization-epsilon"],
        real,
    ),
    **dict.fromkeys(
        ["sum-normalization", "attention-normalization", "attention-normalization-read-out-only", "scale-read-out",
         "add-normalization-epsilon", "norm-read-out", "attention-bias", "no-token-positional-embeddings",
         "same-length", "decoder-learned-pos", "positions-from-end", "untie-biases", "half-loss",
         "decoder-normalize-before"],
        SWITCH,
    ),
}  # fmt: skip
chosen = st.lists(st.sampled_from(sorted(FLAGS)), max_size=6, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FLAGS[name] for name in names})
)


@pytest.fixture(scope="module")
def dictionary():
    words = Dictionary()
    for number in range(46):
        words.add_symbol(f"w{number}")
    return words


@settings(max_examples=settings().max_examples // 2)  # fairseq's parser takes its time
@given(arch=st.sampled_from(ARCHITECTURES), flags=chosen)
def test_a_model_that_trains_or_one_sentence(dictionary, tmp_path_factory, arch, flags):
    words = ["--task", "language_modeling", "--arch", arch]
    for name, value in (SIZE | flags).items():
        words += [f"--{name}"] if value is None else [f"--{name}={value}"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            cfg = configure(words, tmp_path_factory.getbasetemp())
        model = ARCH_MODEL_REGISTRY[arch].build_model(cfg.model, Namespace(target_dictionary=dictionary))
    except SystemExit as end:
        assert end.code == 2 and ": error: " in said.getvalue().splitlines()[-1]
        return
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) > 20
        return
    tokens = torch.randint(4, 50, (2, min(6, cfg.task.tokens_per_sample)))
    loss = model.get_normalized_probs(model(tokens), log_probs=True).square().sum()
    loss.backward()
