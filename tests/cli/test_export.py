"""fwp-export: the graph computes what the model does, and the program without PyTorch writes what fairseq writes."""

import copy
import json
import math
import random
import re
import runpy
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils
from fairseq.sequence_generator import SequenceGenerator
from models.test_fwp_transformer import KINDS as TRANSLATIONS
from models.test_fwp_transformer import scores_of
from support.pairwise import looped
from support.refusals import refused
from support.small_models import (
    LANGUAGE_MODELS,
    SMALL_TRANSLATION,
    build,
    build_model,
    build_translation,
    make_dictionary,
    random_tokens,
)
from support.small_text import prepare_random_text, preprocess, train_model

from fairseq_fwp.checkpoints.convert import checkpoint, conversion
from fairseq_fwp.checkpoints.export.onnx import Graphs, to_onnx, translation_to_onnx
from fairseq_fwp.cli import eval_lm, export, loading

pytest.importorskip("onnxruntime")
GENERATE = Path(__file__).parents[2] / "recipes/onnx/generate.py"
PAGE = Path(__file__).parents[2] / "recipes/browser_demo/index.html"
PROGRAM = runpy.run_path(str(GENERATE))
Model, beam_search, sample, score = map(PROGRAM.get, ("Model", "beam_search", "sample", "score"))
ONE_TOKEN = (  # a call: the operator does not have these rules, and no loop over tokens
    "decay", "pre-norm", "rwkv7", "RWKV-7", "gdn2", "fwm", "delta_rnn", "softmax and recurrence", "local", "local last",
    "mlstm", "xLSTM", "hybrid", "recurrent_delta", "recurrent", "srwm",
)  # fmt: skip
# "compiled" differs from "rule-delta" in having no normalisation: in 60 tokens its random memory outgrows float32.
TRANSLATED = [kind for kind in TRANSLATIONS if kind != "compiled"]
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.export


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=() if x == "delta_dpfp" else pytest.mark.slow) for x in LANGUAGE_MODELS]
)
def test_a_graph_in_pieces_gives_the_log_probabilities_of_the_model(kind, tmp_path):
    length = 32 if kind == "learned positions" else 1000
    exact = build(kind, tokens_per_sample=32, fwp_backend="auto").eval()
    model = copy.deepcopy(exact).float()
    graphs = to_onnx(model.decoder)
    assert graphs.many == (kind not in ONE_TOKEN)
    graphs.step.save(str(tmp_path / "model.onnx"))
    tokens = random_tokens(3, length)
    pieces = tokens.split([7, 1, 1, length - 10, 1] if graphs.many else 1, dim=1)
    found = export.read_pieces(tmp_path, graphs.state, pieces)
    with torch.no_grad():
        truth, ours = (
            part.adaptive_softmax.get_log_prob(part.step(tokens, None, 0)[0], None)
            for part in (exact.decoder, model.decoder)
        )
    error, of_model = ((x - truth).abs().max().item() for x in (found, ours))
    # ONNX Runtime's kernel rounds more often. dpfp divides by small sums, so single scores of the model are off, too.
    assert error <= max(1e-4, 20 * of_model), (error, of_model)


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=() if x == "softmax" else pytest.mark.slow) for x in LANGUAGE_MODELS]
)
def test_a_graph_in_eight_bits_is_smaller_and_can_be_read(kind, tmp_path):
    graphs = to_onnx(build(kind, tokens_per_sample=32, fwp_backend="auto").float().eval().decoder)
    graphs.step.save(str(tmp_path / "model.onnx"))
    pieces = random_tokens(3, 12).split(6 if graphs.many else 1, dim=1)
    size, expected = (tmp_path / "model.onnx").stat().st_size, export.read_pieces(tmp_path, graphs.state, pieces)
    export.quantize(tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").stat().st_size < size
    found = export.read_pieces(tmp_path, graphs.state, pieces)
    assert torch.allclose(found.exp().sum(-1), torch.ones(3, 12), atol=1e-4)
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRANSLATED)
def test_a_step_of_translation_gives_the_log_probabilities_of_the_model(kind, tmp_path):
    """Also for a long translation, and a source and rows of other numbers than in the export."""
    import onnxruntime

    exact = build_translation(**{**TRANSLATIONS[kind], "fwp_backend": "auto"})
    model = copy.deepcopy(exact).float()
    graphs = translation_to_onnx(model)
    graphs.source.save(str(tmp_path / "source.onnx"))
    graphs.step.save(str(tmp_path / "model.onnx"))
    text, tokens = random_tokens(3, 7), random_tokens(3, 60)
    session = onnxruntime.InferenceSession(tmp_path / "source.onnx", providers=["CPUExecutionProvider"])
    kept = dict(zip((x.name for x in graphs.memory), session.run(None, {"tokens": text.numpy()}), strict=True))
    assert all(entry.grows is None for entry in graphs.memory) == (
        TRANSLATIONS[kind].get("cross_feature_map") != "softmax"
    )
    found = export.read_pieces(tmp_path, graphs.state, tokens.split(1, 1), kept)
    with torch.no_grad():
        truth, ours = scores_of(exact, text, tokens), model(text, None, tokens)[0].log_softmax(-1)
    error, of_model = ((x - truth).abs().max().item() for x in (found, ours))
    assert error <= max(1e-4, 20 * of_model), (error, of_model)


SIZES = [
    "--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 24, "--decoder-attention-heads", 2,
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with data (binarised), the checkpoint NAME/checkpoint_last.pt, and the exported model."""
    folder = tmp_path_factory.mktemp("export")
    prepare_random_text(folder)
    train(folder, "gated_delta_lm_wt103")
    run(folder, "exported")
    return folder


def train(folder, arch, *flags):
    train_model(
        folder / "data", "--arch", arch, "--cpu", "--tokens-per-sample", 16, "--batch-size", 4, "--optimizer", "adam",
        "--lr", 0.01, "--max-update", 20, "--disable-validation", "--no-epoch-checkpoints", "--save-dir",
        folder / arch, "--log-format", "none", "--num-workers", 0, "--task", "fwp_language_modeling", *SIZES, *flags,
    )  # fmt: skip


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
    found = beam_search(ours, *ours.begin(text), 12, size)
    longest = 12 + prompt.shape[1] - 1
    generator = SequenceGenerator([model], dictionary, beam_size=size, max_len_a=0, max_len_b=longest)
    start = torch.full((1, 1), dictionary.eos())
    given = {"net_input": {"src_tokens": start, "src_lengths": torch.tensor([1])}}
    (expected,) = generator.generate([model], given, prefix_tokens=torch.from_numpy(prompt[:, 1:]))
    assert len(found) == len(expected)
    for (points, tokens), hypothesis in zip(found, expected, strict=True):
        assert [*prompt[0, 1:], *tokens, dictionary.eos()] == hypothesis["tokens"].tolist()
        assert points == pytest.approx(hypothesis["score"].item(), abs=1e-5)


@pytest.mark.slow
def test_greedy_search_scores_and_eight_bits(models, folder, capsys):
    ours, _, _ = models
    given = ours.begin("w1")
    best = list(sample(ours, *given, 12, 1, 1.0, 1))
    assert best == beam_search(ours, *given, len(best), 1)[0][1]
    drawn = [list(sample(ours, *given, 12, 9, 1.0, seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    perplexity, out = score(ours, folder / "test.txt"), folder / "score.json"
    path = str(folder / "gated_delta_lm_wt103/checkpoint_last.pt")
    eval_lm.main([str(folder / "data"), "--path", path, "--cpu", "--carry-state", "--json", str(out)])
    assert perplexity == pytest.approx(json.loads(out.read_text())["perplexity"], rel=1e-4)
    run(folder, "smaller", "--quantize", "int8")
    assert re.search(r"log-probabilities differ by \S+, in 8 bits by \S+$", capsys.readouterr().out.strip())
    sizes = [(folder / name / "model.onnx").stat().st_size for name in ("smaller", "exported")]
    assert sizes[0] < sizes[1]
    assert score(Model(folder / "smaller"), folder / "test.txt") == pytest.approx(perplexity, rel=0.05)


def write_codes(path, words, version):
    """Write merges of subword-nmt; in version 0.1 the end of a word is a symbol apart. The first pair comes twice."""
    from subword_nmt.learn_bpe import learn_bpe

    with path.open("w", encoding="utf-8") as codes:
        learn_bpe(words, codes, 40)
    header, *pairs = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if version == "0.1":
        pairs = ["a </w>", *(pair for pair in pairs if "</w>" not in pair), "ab </w>", "\u2028 </w>"]
    lines = [header] * (version == "0.2") + [*pairs, pairs[0]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_by_fairseq(folder, version):
    """Return a text, codes or None, the dictionary of the text, and the tokens of its lines, by fairseq-preprocess.

    The letters in words are others than those that Python and JavaScript take for white space or ends of lines.
    """
    from subword_nmt.apply_bpe import BPE

    chooser, text, split, codes = random.Random(1), folder / "text", folder / "split", folder / "codes"
    words = ["".join(chooser.choices("aabcé\u00a0\u3000\u2028\x85", k=chooser.randrange(1, 9))) for _ in range(300)]
    lines = [" ".join(words[n : n + chooser.randrange(12)]) for n in range(0, 300, 10)]
    text.write_text("\n".join(lines) + "\r\nlast", encoding="utf-8", newline="")
    if version:
        write_codes(codes, words[:200], version)
        with codes.open(encoding="utf-8") as file:
            BPE(file).process_lines(str(text), str(split))
    preprocess(*[split if version else text] * 2, folder / "data")
    dictionary = Dictionary.load(str(folder / "data/dict.txt"))
    found = data_utils.load_indexed_dataset(str(folder / "data/test"), dictionary)
    return text, codes if version else None, dictionary, [line.tolist() for line in found]


@looped("version", [None, "0.1", "0.2"])
def test_a_text_is_read_as_in_training(models, version, tmp_path):
    ours = models[0]
    (folder := tmp_path / str(version)).mkdir()
    text, codes, dictionary, expected = read_by_fairseq(folder, version)
    ours.ranks, ours.end_apart = PROGRAM["read_codes"](codes) if codes else (None, False)
    ours.words, ours.numbers = PROGRAM["read_words"](folder / "data/dict.txt"), dictionary.indices
    found = [[*ours.encode(line)[0, 1:], ours.eos] for line in PROGRAM["read_lines"](text)]
    assert ours.words == dictionary.symbols and len(expected) == 31
    assert found == expected
    assert [ours.decode(line[:-1]) for line in expected] == [
        dictionary.string(torch.tensor(line), "@@ ").rstrip() for line in expected
    ]


@pytest.mark.skipif(shutil.which("node") is None, reason="JavaScript runs in node here")
@looped("version", [None, "0.1", "0.2"])
def test_the_page_reads_a_text_as_in_training(version, tmp_path):
    (folder := tmp_path / str(version)).mkdir()
    text, codes, dictionary, expected = read_by_fairseq(folder, version)
    page = PAGE.read_text(encoding="utf-8")
    program = f"""
const EOS = "</s>", END = "</w>";
{page[page.index("// Lines and words") : page.index("function choose")]}
const given = JSON.parse(require("fs").readFileSync(0, "utf8")), model = new Model();
[model.about, model.numbers] = [{{ eos: 2, unk: 3 }}, new Map(Object.entries(given.numbers))];
if (given.codes) model.learn(linesOf(given.codes));
console.log(JSON.stringify(given.lines.map(line => model.encode(line))));
"""
    lines = PROGRAM["read_lines"](text)
    given = {"lines": lines, "numbers": dictionary.indices, "codes": codes and codes.read_text(encoding="utf-8")}
    said = subprocess.run(["node", "-e", program], input=json.dumps(given), capture_output=True, text=True, check=True)
    assert [[*line[1:], 2] for line in json.loads(said.stdout)] == expected


def test_a_line_is_written_for_each_line(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "lines").write_text("w1\u2028w2\nw3\x85\x1c\n\nw4\fw5", encoding="utf-8")
    given = ["generate.py", str(folder / "exported"), "--lines", str(tmp_path / "lines"), "--tokens", "2"]
    monkeypatch.setattr(sys, "argv", given)
    PROGRAM["main"]()
    assert capsys.readouterr().out.count("\n") == 4


@pytest.mark.slow
@looped("cross", ["elu", "softmax"])
def test_translations_are_those_of_fairseq(cross, tmp_path):
    """By beam and greedy search, of sources of different lengths and unknown words."""
    folder = tmp_path / cross
    flags = {**SMALL_TRANSLATION, "share_all_embeddings": True, "cross_feature_map": cross, "sum_normalization": True}
    model = build_translation(**flags).float()
    with torch.no_grad():
        model.decoder.embed_tokens.weight.normal_(std=0.5)  # so that its sentences differ
    weights = {name: x for name, x in model.state_dict().items() if "version" not in name and "_float" not in name}
    words = dict.fromkeys(("en", "de"), make_dictionary(50).symbols[4:])
    checkpoint.write(conversion.Conversion("fwp_transformer", flags, weights, words, []), folder)
    path, out = str(folder / "checkpoint.pt"), tmp_path / f"{cross}-onnx"
    export.main([str(folder), "--path", path, "--out", str(out)])
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([path], {"data": str(folder)})
    ours, dictionary, lines = Model(out), task.target_dictionary, ["w3 w4 w5 unknown", "w9", "w7 w7 w8 w20 w21 w1"]
    (tmp_path / "lines").write_text("\n".join(lines), encoding="utf-8")
    for size in (1, 4):
        generator = SequenceGenerator([model.eval()], dictionary, beam_size=size, max_len_b=12)
        best = []
        for line in lines:
            source = task.source_dictionary.encode_line(line, add_if_not_exist=False).long().unsqueeze(0)
            given = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([source.shape[1]])}}
            (expected,) = generator.generate([model], given)
            found = beam_search(ours, *ours.begin(line), 12, size)
            assert [[*tokens, 2] for _, tokens in found] == [x["tokens"].tolist() for x in expected]
            assert [points for points, _ in found] == pytest.approx([x["score"].item() for x in expected], abs=1e-5)
            best.append(ours.decode(found[0][1]))
        command = [sys.executable, GENERATE, out, "--lines", tmp_path / "lines", "--beam", size, "--tokens", 12]
        said = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout
        assert [line.split("\t")[1] for line in said.splitlines()] == best


@pytest.mark.slow
def test_a_text_ends_where_learned_positions_do(folder):
    train(folder, "softmax_lm_wt103", "--decoder-learned-pos")
    run(folder, "learned", arch="softmax_lm_wt103")
    model, most = Model(folder / "learned"), 16
    assert model.about["most_tokens"] == most and Model(folder / "exported").about["most_tokens"] is None
    tokens = np.full((2, most), 5)
    _, state = model.read(tokens[:, 1:], model.start(2))
    model.read(tokens[:, :1], state)
    for piece, before in ((tokens[:, :2], state), (np.full((1, most + 1), 5), model.start())):
        with pytest.raises(ValueError, match=f"at most {most} tokens, the learned positions, got {most + 1}: give"):
            model.read(piece, before)


def test_a_state_of_the_wrong_shape(models):
    ours, (tokens, state) = models[0], models[0].begin("w1")
    wrong = [state[0][:, :1], *state[1:]]
    with pytest.raises(ValueError, match=r"layers\[0\].weights of the state must have the shape \[1, 2, 8, 8\], got"):
        ours.read(tokens, wrong)
    with pytest.raises(ValueError, match="of the state must have the shape"):
        ours.read(np.repeat(tokens, 2, 0), state)


def test_files_that_cannot_be_read(folder, tmp_path):
    """The program without PyTorch ends with one sentence: without a file, of another opset, and of a damaged graph.

    So it does for texts and settings that it cannot use.
    """
    import onnx

    def says(*given):
        found = subprocess.run([sys.executable, str(GENERATE), *map(str, given)], capture_output=True, text=True)
        *usage, sentence = found.stderr.splitlines()
        assert found.returncode and sentence.startswith("generate.py: "), found.stderr
        assert usage == [] or (found.returncode == 2 and usage[0].startswith("usage:")), found.stderr
        return sentence

    assert "one of fwp-export, got" in says(tmp_path)
    (tmp_path / "empty").write_text("")
    (tmp_path / "padded").write_text("w1\nw2 <pad>\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    padding = "words of a text must not be <pad>, which is padding, got"
    for sentence, given in (
        ("text must be a file", ["--lines", tmp_path / "none"]),
        ("text must be a file", ["--score", tmp_path / "none"]),
        ("text must be a file", ["--score", tmp_path]),
        (f"text must have at least a line, got {tmp_path / 'empty'}, which is empty", ["--score", tmp_path / "empty"]),
        ("can't decode byte", ["--score", tmp_path / "binary"]),
        (f"{padding} 'w1 <pad>'", ["w1 <pad>"]),
        (f"{padding} 'w2 <pad>'", ["--score", tmp_path / "padded"]),
        ("--temperature must be finite and above 0, got nan", ["--temperature", "nan"]),
        ("--temperature must be finite and above 0, got 0.0", ["--temperature", 0]),
    ):
        assert sentence in says(folder / "exported", *given)
    shutil.copytree(folder / "exported", tmp_path / "other")
    graph = onnx.load(tmp_path / "other/model.onnx")
    for part in graph.opset_import:
        part.version = 99
    onnx.save(graph, tmp_path / "other/model.onnx")
    assert "model.onnx must be a graph that onnxruntime" in says(tmp_path / "other", "w1")
    for codes, sentence in (
        ("#version: 0.3\na b\n", "of subword-nmt's version 0.1 or 0.2, got 0.3"),
        ("a b c\n", "two parts in"),
    ):
        (tmp_path / "other/codes").write_text(codes)
        assert f"{tmp_path / 'other/codes'} must have " in (said := says(tmp_path / "other", "w1")) and sentence in said
    (tmp_path / "other/codes").unlink()
    (tmp_path / "other/model.onnx").write_bytes(b"0123")
    assert "model.onnx must be a graph that onnxruntime" in says(tmp_path / "other", "w1")
    (tmp_path / "other/dict.txt").unlink()
    assert "without dict.txt" in says(tmp_path / "other", "w1")


def test_words_that_a_model_cannot_predict_do_not_differ(models, folder, monkeypatch):
    """Both scores are minus infinity, as in converted models whose source lacks a symbol of fairseq."""
    _, model, _ = models
    softmax = model.decoder.adaptive_softmax
    exact = softmax.get_log_prob
    monkeypatch.setattr(
        softmax, "get_log_prob", lambda x, _: exact(x, None).index_fill(-1, torch.tensor([1]), -math.inf)
    )
    tokens = torch.randint(2, len(model.decoder.dictionary), (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        log_probs = softmax.get_log_prob(model.decoder.step(tokens, None, 0)[0], None)
    for found, difference in ((log_probs, 0), (log_probs + 0.5, 0.5), (log_probs.clamp(min=-99), math.inf)):
        monkeypatch.setattr(export, "read_pieces", lambda *_, found=found: found)
        assert export.compare(model, folder / "exported", Graphs(None, [], many=True)) == pytest.approx(
            difference, abs=1e-5
        )


def test_refusals(folder, tmp_path, monkeypatch):
    trained = folder / "gated_delta_lm_wt103/checkpoint_last.pt"

    def refuses(says, path=trained, out="new"):
        refused(export.main, folder / "data", "--path", path, "--out", tmp_path / out, says=says)

    refuses("--out must be a new folder, got .*, which exists", out="")
    refuses("cannot be read: No such", path=tmp_path / "no.pt")
    refuses("in a folder that exists", out="no/new")
    odd, task = build_model("softmax_lm_wt103"), Namespace(target_dictionary=make_dictionary(50))
    odd.decoder.layers[0].fc1.forward = lambda x: x * float(x.sum())
    for model, says in ((build_model("fwp_xl_lm"), "must be an fwp_lm or fwp_tr"), (odd, "a part without a form")):
        monkeypatch.setattr(loading, "load_model", lambda *_, model=model: (model, task))
        refuses(says)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    refuses("pip install")
    assert not list(tmp_path.iterdir())
