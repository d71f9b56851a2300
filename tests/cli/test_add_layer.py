"""fwp-add-layer: the model keeps its scores, the layer is in the basis of the text, and refusals."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from support.pairwise import looped
from support.refusals import refused
from support.small_models import build_model
from support.small_text import prepare_random_text, train_model

from fairseq_fwp.cli import add_layer, eval_lm
from fairseq_fwp.models.fast_weight_layer.initialization import STREAMS, read_moments

LENGTH = 8
slow = partial(pytest.param, marks=pytest.mark.slow)
XL = ["--task", "fwp_language_modeling", "--carry-state", "--arch", "fwp_xl_lm", "--mem-len", "4"]
BASES = {
    "Transformer-XL": [*XL, "--decoder-normalize-before"],
    "local": ["--task", "language_modeling", "--arch", "softmax_lm_wt103", "--attention-window", "3"],
    "no last norm": [*XL, "--decoder-normalize-before", "--no-decoder-final-norm"],
    "layer": [*XL, "--arch", "fwp_fwl_lm", "--fwl-base", "fwp_xl_lm"],
}


SIZES = ["--decoder-layers", 1, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 24]
SIZES += ["--decoder-attention-heads", 2]


def train(folder, name, *flags):
    train_model(
        folder / "data", "--cpu", "--tokens-per-sample", LENGTH, "--batch-size", 4, "--optimizer", "adam", "--lr", 0.01,
        "--max-update", 3, "--disable-validation", "--no-epoch-checkpoints", "--save-dir", folder / name,
        "--log-format", "none", "--num-workers", 0, *flags,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with data (binarised), and a checkpoint NAME/checkpoint_last.pt of every base."""
    folder = tmp_path_factory.mktemp("add_layer")
    prepare_random_text(folder)
    for name, flags in BASES.items():
        train(folder, name, *flags, *SIZES)
    return folder


def loss(folder, path, *flags):
    out = folder / "result.json"
    given = [folder / "data", "--path", path, "--cpu", "--json", out, "--context-window", 0, *flags]
    eval_lm.main([*map(str, given)])
    return json.loads(out.read_text())["loss"]


def run(folder, name, *flags):
    out = folder / f"{name}.pt"
    path = folder / name / "checkpoint_last.pt"
    out.unlink(missing_ok=True)
    add_layer.main([str(folder / "data"), "--path", str(path), "--out", str(out), *flags])
    return path, out


@looped("name", ["Transformer-XL", "local"])
def test_the_model_is_as_good_and_learns_by_reading(folder, name):
    path, out = run(folder, name, "--fwl-hidden-dim", "40", "--tokens", "300")
    before = loss(folder, path)
    assert loss(folder, out) == pytest.approx(before, abs=1e-4)
    fast = "{'fwl_fast_weights': 'first', 'fwl_step_size': 1.0, 'fwl_decay': 0.5}"
    assert abs(loss(folder, out, "--model-overrides", fast) - before) > 1e-4


@looped("carry", [False, True])
def test_moments_are_those_of_the_text(carry):
    """Compute them for the first two segments of each stream: features by one pass, gradients by autograd."""
    model = build_model("fwp_fwl_lm", fwl_base="fwp_xl_lm", mem_len=6, tokens_per_sample=5, fwl_fast_weights="none")
    decoder, tokens = model.decoder, torch.randint(4, 50, (STREAMS * 17 + 3,))
    mean, covariance, of_gradients = read_moments(model, tokens, STREAMS * 14, carry)
    features, gradients = [], []
    for start in range(STREAMS):
        state = None
        for segment in tokens[17 * start : 17 * start + 10].view(2, 1, 5):
            x, base = decoder.extract_inputs(segment, state)
            state = base if carry else None
            x = x.detach().requires_grad_()
            log_probs = decoder.adaptive_softmax.get_log_prob(decoder.fast_weight_layer.norm(x), None)
            total = -log_probs[:, :-1].gather(2, segment[:, 1:, None]).sum()
            features.append(x[0].detach())
            gradients.append(torch.autograd.grad(total, x)[0][0, :-1])
    x, of_x = torch.cat(features), torch.cat(gradients)
    torch.testing.assert_close(mean, x.mean(0).float())
    torch.testing.assert_close(covariance, (x - x.mean(0)).mT @ (x - x.mean(0)) / (len(x) - 1))
    torch.testing.assert_close(of_gradients, of_x.mT @ of_x / len(of_x))


FINE_TUNING = [*XL, "--arch", "fwp_fwl_lm", "--decoder-normalize-before"]
# The base, the map and a size.
FORGOTTEN = [
    ("--finetune-from-model", ["--fwl-map-inputs", *SIZES],
     r"holds .*--fwl-base fwp_xl_lm.*, but this model has .*--fwl-base fwp_lm.*, which its weights do not fit"),
    ("--restore-file", ["--fwl-base", "fwp_xl_lm", *SIZES],
     r"holds .*--fwl-map-inputs.*, but this model has .*no --fwl-map-inputs.*, which its"),
    ("--finetune-from-model", ["--fwl-base", "fwp_xl_lm", "--fwl-map-inputs", *SIZES[2:], "--decoder-layers", 2],
     r"holds .*--decoder-layers 1.*, but this model has .*--decoder-layers 2.*, which its"),
]  # fmt: skip


@looped("option, flags, sentence", FORGOTTEN)
def test_flags_that_were_forgotten_are_named(folder, tmp_path, option, flags, sentence):
    """The error is one sentence with all other differing options, in place of fairseq's names of all weights."""
    _, out = run(folder, "Transformer-XL")
    with pytest.raises(ValueError, match=rf"^\S+/Transformer-XL\.pt {sentence}") as error:
        train(folder, tmp_path, *FINE_TUNING, option, out, *flags)
    assert "\n" not in str(error.value) and error.value.__cause__ is None and error.value.__suppress_context__
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("way", ["--finetune-from-model", *map(slow, ("--restore-file", "resumed"))])
def test_weights_that_compute_something_else_are_told_of(folder, tmp_path, caplog, way):
    """One warning names them by their flags; with the same flags there is none."""
    for changed in ([], ["--attention-window", 5]):
        save_dir, path = tmp_path / f"{way}{len(changed)}", folder / "local" / "checkpoint_last.pt"
        save_dir.mkdir()
        path, start = (Path(shutil.copy(path, save_dir)), []) if way == "resumed" else (path, [way, path])
        train(folder, save_dir, *BASES["local"], *SIZES, *start, "--dropout", 0.3, "--max-update", 5, *changed)
        told = [record for record in caplog.records if "was trained with" in record.message]
        assert len(told) == len(changed) / 2
    assert told[0].levelname == "WARNING" and told[0].message.startswith(
        f"{path} was trained with --attention-window 3, but is loaded with --attention-window 5: "
    )


# The checkpoint, the data, words of the sentence
REFUSALS = [
    ("no last norm", "data", "the model must end with a layer normalisation, got --no-decoder-final-norm: train"),
    ("layer", "data", "must be fwp_lm or fwp_xl_lm, got fwp_fwl_lm"),
    ("nothing", "data", "checkpoint_last.pt cannot be read: No such file"),
    ("local", "empty", "^fwp-add-layer: the text .*must have at least one token, got none"),
    ("local", "untrained", "^fwp-add-layer: the text .*'train' must exist in .*, got only"),
]


def test_refusals(folder, tmp_path):
    """A file that exists is kept."""
    for name in ("data", "empty", "untrained"):
        shutil.copytree(folder / "data", tmp_path / name)
    for file in tmp_path.glob("[eu]*/train.*"):
        file.unlink()
        if file.parent.name == "empty":
            file.touch()
    for name, data, says in REFUSALS:
        arguments = [tmp_path / data, "--path", folder / name / "checkpoint_last.pt", "--out", tmp_path / "start.pt"]
        refused(add_layer.main, *arguments, says=says, out=tmp_path / "start.pt")
    path = folder / "local" / "checkpoint_last.pt"
    before, says = path.read_bytes(), r"--out must be a new file, got .*checkpoint_last\.pt, which exists"
    refused(add_layer.main, folder / "data", "--path", path, "--out", path, says=says)
    assert path.read_bytes() == before


def test_a_short_text_is_refused():
    with pytest.raises(ValueError, match="the training text must have at least 32 tokens, got "):
        read_moments(build_model("fwp_fwl_lm"), torch.arange(4, 28), 100, False)
