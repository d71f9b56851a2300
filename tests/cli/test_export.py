"""fwp-export: the graph computes what the model does, and the program without PyTorch writes what fairseq writes."""

import copy
import json
import random
import runpy
import sys
from pathlib import Path

import pytest
import torch
from cli.test_eval_lm import prepare_random_text, train_model
from fairseq import checkpoint_utils
from fairseq.sequence_generator import SequenceGenerator
from pairwise import looped
from refusals import refused
from small_models import LANGUAGE_MODELS, build, random_tokens

from fairseq_fwp.cli import eval_lm, export
from fairseq_fwp.interop.onnx import to_onnx

pytest.importorskip("onnxruntime")
GENERATE = Path(__file__).parents[2] / "recipes/onnx/generate.py"
Model, beam_search, sample, score = map(runpy.run_path(str(GENERATE)).get, ("Model", "beam_search", "sample", "score"))
FAST = ("delta_dpfp", "decay")
WINDOWS = ("local", "local last")
KINDS = [kind for kind in LANGUAGE_MODELS if kind not in WINDOWS]
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.export


@pytest.mark.parametrize("kind", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in KINDS])
def test_a_graph_in_pieces_gives_the_log_probabilities_of_the_model(kind, tmp_path):
    length = 32 if kind == "learned positions" else 1000 if kind in FAST else 40
    exact = build(kind, tokens_per_sample=32, fwp_backend="auto").eval()
    model = copy.deepcopy(exact).float()
    program, entries, many = to_onnx(model.decoder)
    one = ("decay", "pre-norm", "rwkv7", "RWKV-7", "gdn2", "fwm", "delta_rnn", "softmax and recurrence")
    assert many == (kind not in one)
    program.save(str(tmp_path / "model.onnx"))
    tokens = random_tokens(3, length)
    pieces = tokens.split([7, 1, 1, length - 10, 1] if many else 1, dim=1)
    found = export.read_pieces(tmp_path, entries, pieces)
    with torch.no_grad():
        truth, ours = (
            part.adaptive_softmax.get_log_prob(part.step(tokens, None, 0)[0], None)
            for part in (exact.decoder, model.decoder)
        )
    error, of_model = ((x - truth).abs().max().item() for x in (found, ours))
    # ONNX Runtime's kernel rounds more often. dpfp divides by small sums, so single scores of the model are off, too.
    assert error <= max(1e-4, 20 * of_model), (error, of_model)


SIZES = [
    "--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 24, "--decoder-attention-heads", 2,
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with data (binarised), the checkpoints NAME/checkpoint_last.pt, and the exported model."""
    folder = tmp_path_factory.mktemp("export")
    prepare_random_text(folder)
    for name in ("gated_delta_lm_wt103", "fwp_xl_lm"):
        train_model(
            folder / "data", "--arch", name, "--cpu", "--tokens-per-sample", 16, "--batch-size", 4, "--optimizer",
            "adam", "--lr", 0.01, "--max-update", 20, "--disable-validation", "--no-epoch-checkpoints", "--save-dir",
            folder / name, "--log-format", "none", "--num-workers", 0, "--task", "fwp_language_modeling", *SIZES,
        )  # fmt: skip
    run(folder, "exported")
    return folder


def run(folder, name, *flags, arch="gated_delta_lm_wt103"):
    path = folder / arch / "checkpoint_last.pt"
    export.main([str(folder / "data"), "--path", str(path), "--out", str(folder / name), *flags])


@pytest.fixture
def models(folder):
    """The exported model, the model, and the dictionary."""
    path = str(folder / "gated_delta_lm_wt103/checkpoint_last.pt")
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([path], {"data": str(folder / "data")})
    return Model(folder / "exported"), model.eval(), task.source_dictionary


@looped("text", ["", "w3 w4 unknown"])
@looped("size", [1, 4])
def test_beam_search_is_that_of_fairseq(models, text, size):
    ours, model, dictionary = models
    prompt = ours.encode(text)
    assert ours.words[: len(dictionary)] == dictionary.symbols
    found = beam_search(ours, prompt, 12, size)
    longest = 12 + prompt.shape[1] - 1
    generator = SequenceGenerator([model], dictionary, beam_size=size, max_len_a=0, max_len_b=longest)
    start = torch.full((1, 1), dictionary.eos())
    given = {"net_input": {"src_tokens": start, "src_lengths": torch.tensor([1])}}
    (expected,) = generator.generate([model], given, prefix_tokens=torch.from_numpy(prompt[:, 1:]))
    assert len(found) == len(expected)
    for (points, tokens), hypothesis in zip(found, expected, strict=True):
        assert [*prompt[0, 1:], *tokens, dictionary.eos()] == hypothesis["tokens"].tolist()
        assert points == pytest.approx(hypothesis["score"].item(), abs=1e-5)


def test_greedy_search_scores_and_eight_bits(models, folder):
    ours, _, _ = models
    best = list(sample(ours, ours.encode("w1"), 12, 1, 1.0, 1))
    assert best == beam_search(ours, ours.encode("w1"), len(best), 1)[0][1]
    drawn = [list(sample(ours, ours.encode("w1"), 12, 9, 1.0, seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    perplexity, out = score(ours, folder / "test.txt"), folder / "score.json"
    path = str(folder / "gated_delta_lm_wt103/checkpoint_last.pt")
    eval_lm.main([str(folder / "data"), "--path", path, "--cpu", "--carry-state", "--json", str(out)])
    assert perplexity == pytest.approx(json.loads(out.read_text())["perplexity"], rel=1e-4)
    run(folder, "smaller", "--quantize", "int8")
    sizes = [(folder / name / "model.onnx").stat().st_size for name in ("smaller", "exported")]
    assert sizes[0] < sizes[1]
    assert score(Model(folder / "smaller"), folder / "test.txt") == pytest.approx(perplexity, rel=0.05)


def test_words_are_split_as_by_subword_nmt(models, tmp_path):
    from subword_nmt.apply_bpe import BPE
    from subword_nmt.learn_bpe import learn_bpe

    ours, chooser = models[0], random.Random(1)
    words = ["".join(chooser.choices("aabcé", k=chooser.randrange(1, 9))) for _ in range(300)]
    with (tmp_path / "codes").open("w", encoding="utf-8") as codes:
        learn_bpe(words[:200], codes, 40)
    pairs = (tmp_path / "codes").read_text(encoding="utf-8").splitlines()[1:]
    ours.ranks = {tuple(pair.split()): rank for rank, pair in enumerate(pairs)}
    with (tmp_path / "codes").open(encoding="utf-8") as codes:
        expected = BPE(codes)
        assert [" ".join(ours.split(word)) for word in words] == [expected.process_line(word) for word in words]


def test_refusals(folder, tmp_path, monkeypatch):
    path = folder / "gated_delta_lm_wt103/checkpoint_last.pt"
    says = "--out must be a new folder, got .*, which exists"
    refused(export.main, folder / "data", "--path", path, "--out", tmp_path, says=says)
    xl = folder / "fwp_xl_lm/checkpoint_last.pt"
    refused(export.main, folder / "data", "--path", xl, "--out", tmp_path / "new", says="must be an fwp_lm")
    refused(export.main, folder / "data", "--path", path, "--out", tmp_path / "no/new", says="in a folder that exists")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    refused(export.main, folder / "data", "--path", path, "--out", tmp_path / "new", says="pip install")
    assert not list(tmp_path.iterdir())
