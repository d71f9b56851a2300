"""A Transformer-XL of the public TensorFlow code, as an .npz of its variables, keeps its probabilities.

The files are made up here, and evaluated by the equations of the model in plain PyTorch: the published
weights are not available.
"""

import io
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from pairwise import looped
from refusals import refused

from fairseq_fwp.cli.convert import main
from fairseq_fwp.convert import tensorflow_xl
from fairseq_fwp.models.decoder import DecoderState
from fairseq_fwp.modules.attention.relative import Memory
from tests.convert.conftest import WORDS, Converter, Vector, load

LAYERS, DIM, HEADS, HIDDEN, BATCH, SEGMENTS = 2, 8, 2, 12, 2, (5, 5, 3)
EMBED, SOFTMAX = "transformer/adaptive_embed", "transformer/adaptive_softmax"


class Case(NamedTuple):
    """A model and its options; epsilon: of the layer normalisations, 1e-5 in ours and 1e-12 in theirs."""

    cutoffs: tuple = (12, 20)
    div_val: int = 2
    untied: bool = True
    mem_len: int = 4
    clamp_len: int = -1
    same_length: bool = False
    epsilon: float = 1e-5

    @property
    def options(self):
        return {
            "tgt_len": SEGMENTS[0],
            "mem_len": self.mem_len,
            "clamp_len": self.clamp_len,
            "same_length": self.same_length,
        }

    @property
    def ends(self):
        return [0, *self.cutoffs, len(WORDS)]


def make_variables(case, seed=1):
    """Return random variables by their names in the checkpoint."""
    draw = np.random.default_rng(seed)

    def weights(*shape):
        return draw.normal(0, 0.5, shape).astype(np.float32)

    found = {f"transformer/r_{kind}_bias": weights(*[LAYERS] * case.untied, HEADS, DIM // HEADS) for kind in "wr"}
    for layer in range(LAYERS):
        attention, feed_forward = f"transformer/layer_{layer}/rel_attn", f"transformer/layer_{layer}/ff"
        found[f"{attention}/qkv/kernel"] = weights(DIM, 3 * DIM)
        found[f"{attention}/r/kernel"] = weights(DIM, DIM)
        found[f"{attention}/o/kernel"] = weights(DIM, DIM)
        found[f"{feed_forward}/layer_1/kernel"] = weights(DIM, HIDDEN)
        found[f"{feed_forward}/layer_1/bias"] = weights(HIDDEN)
        found[f"{feed_forward}/layer_2/kernel"] = weights(HIDDEN, DIM)
        found[f"{feed_forward}/layer_2/bias"] = weights(DIM)
        for block in (attention, feed_forward):
            found[f"{block}/LayerNorm/gamma"] = 1 + weights(DIM)
            found[f"{block}/LayerNorm/beta"] = weights(DIM)
    sizes = np.diff(case.ends)
    if case.div_val == 1:
        found[f"{EMBED}/lookup_table"] = weights(len(WORDS), DIM)
    for index, size in enumerate(sizes if case.div_val > 1 else ()):
        found[f"{EMBED}/cutoff_{index}/lookup_table"] = weights(size, DIM // case.div_val**index)
        found[f"{EMBED}/cutoff_{index}/proj_W"] = weights(DIM // case.div_val**index, DIM)
    if not case.cutoffs:
        found[f"{SOFTMAX}/bias"] = weights(len(WORDS))
        return found
    for index, size in enumerate(sizes):
        found[f"{SOFTMAX}/cutoff_{index}/b"] = weights(size)
    if case.div_val > 1:  # all except the first are the input's
        found[f"{SOFTMAX}/cutoff_0/proj"] = weights(DIM, DIM)
    found[f"{SOFTMAX}/cutoff_0/cluster_W"] = weights(len(case.cutoffs), DIM)
    found[f"{SOFTMAX}/cutoff_0/cluster_b"] = weights(len(case.cutoffs))
    return found


class Reference:
    """The model by its equations (Dai et al. 2019, Sec. 3), pair by pair, in float64."""

    def __init__(self, variables, case):
        self.case = case
        self.variables = {name: torch.from_numpy(value).double() for name, value in variables.items()}

    def __call__(self, tokens):
        """Return log-probabilities (T, B, V) after each of tokens (T, B), by segments; the memory starts as zeros."""
        memories = [torch.zeros(self.case.mem_len, BATCH, DIM, dtype=torch.float64)] * LAYERS
        found = []
        for segment in tokens.split(SEGMENTS):
            x = self.embed(segment) * DIM**0.5
            for layer, memory in enumerate(memories):
                known = torch.cat([memory, x])
                memories[layer] = known[len(known) - self.case.mem_len :]
                x = self.feed_forward(layer, self.attend(layer, x, known))
            found.append(self.log_probs(x))
        return torch.cat(found)

    def get(self, layer, name):
        return self.variables[f"transformer/layer_{layer}/{name}"]

    def embed(self, tokens):
        if self.case.div_val == 1:
            return self.variables[f"{EMBED}/lookup_table"][tokens]
        tables = [
            self.variables[f"{EMBED}/cutoff_{index}/lookup_table"] @ self.variables[f"{EMBED}/cutoff_{index}/proj_W"]
            for index in range(len(self.case.ends) - 1)
        ]
        return torch.cat(tables)[tokens]

    def normalize(self, layer, block, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        scale, shift = (self.get(layer, f"{block}/LayerNorm/{name}") for name in ("gamma", "beta"))
        return (x - mean) / (variance + self.case.epsilon).sqrt() * scale + shift

    def feed_forward(self, layer, x):
        hidden = (x @ self.get(layer, "ff/layer_1/kernel") + self.get(layer, "ff/layer_1/bias")).clamp(min=0)
        out = hidden @ self.get(layer, "ff/layer_2/kernel") + self.get(layer, "ff/layer_2/bias")
        return self.normalize(layer, "ff", x + out)

    def attend(self, layer, x, known):
        """Compute the attention of a layer for x (L, B, D); known (S, B, D): the memory followed by x."""
        heads = (HEADS, DIM // HEADS)
        u, v = (self.variables[f"transformer/r_{kind}_bias"] for kind in "wr")
        if self.case.untied:
            u, v = u[layer], v[layer]
        q, k, values = (known @ self.get(layer, "rel_attn/qkv/kernel")).unflatten(-1, (3, *heads)).unbind(2)
        rows = []
        for place in range(len(known) - len(x), len(known)):
            first = max(place - self.case.mem_len, 0) if self.case.same_length else 0
            scores = []
            for other in range(first, place + 1):
                distance = place - other if self.case.clamp_len <= 0 else min(place - other, self.case.clamp_len)
                angles = distance / 10000 ** (torch.arange(0, DIM, 2).double() / DIM)
                vector = torch.cat([angles.sin(), angles.cos()]) @ self.get(layer, "rel_attn/r/kernel")
                pair = (q[place] + u) * k[other] + (q[place] + v) * vector.unflatten(0, heads)
                scores.append(pair.sum(-1) / math.sqrt(heads[1]))
            weights = torch.stack(scores).softmax(0)
            rows.append((weights.unsqueeze(-1) * values[first : place + 1]).sum(0).flatten(1))
        return self.normalize(layer, "rel_attn", x + torch.stack(rows) @ self.get(layer, "rel_attn/o/kernel"))

    def output(self, x, index):
        """Return the logits of a cluster's words, and the vectors that its table was multiplied with."""
        start, stop = self.case.ends[index : index + 2]
        if self.case.div_val == 1:
            table = self.variables[f"{EMBED}/lookup_table"][start:stop]
        else:
            table = self.variables[f"{EMBED}/cutoff_{index}/lookup_table"]
            own = f"{SOFTMAX}/cutoff_{index}/proj"
            x = x @ self.variables[own if own in self.variables else f"{EMBED}/cutoff_{index}/proj_W"].T
        bias = self.variables[f"{SOFTMAX}/cutoff_{index}/b" if self.case.cutoffs else f"{SOFTMAX}/bias"]
        return x @ table.T + bias, x

    def log_probs(self, x):
        words, projected = self.output(x, 0)
        if not self.case.cutoffs:
            return words.log_softmax(-1)
        first = f"{SOFTMAX}/cutoff_0/cluster"
        clusters = projected @ self.variables[f"{first}_W"].T + self.variables[f"{first}_b"]
        head = torch.cat([words, clusters], dim=-1).log_softmax(-1)
        size = self.case.cutoffs[0]
        found = [head[..., :size]]
        for index in range(1, len(self.case.ends) - 1):
            # The cluster after the first has the first of the columns after its words.
            inside = self.output(x, index)[0].log_softmax(-1)
            found.append(head[..., size + index - 1].unsqueeze(-1) + inside)
        return torch.cat(found, dim=-1)


def packed(variables):
    file = io.BytesIO()
    np.savez(file, **variables)
    return file.getvalue()


class NpzConverter(Converter):
    """A function (variables or bytes, case, **options) -> the folder that the command writes."""

    def __init__(self, folder):
        super().__init__(folder)
        self.state_dict = folder / "model.npz"

    def arguments(self, variables, case, **options):
        vector = Vector("transformer-xl", {}, case.options, torch.empty(0), [], torch.empty(0), None)
        save = packed(variables) if isinstance(variables, dict) else variables
        if self.out.exists():
            self.out.rename(self.out.with_name(f"out{len(list(self.folder.iterdir()))}"))
        return super().arguments(vector, save=save, **{"cutoffs": None, **options})


@pytest.fixture
def convert_npz(tmp_path):
    return NpzConverter(tmp_path)


@torch.no_grad()
def converted_log_probs(folder, case, tokens):
    """Return those of the converted model, with a memory of zeros as in the TensorFlow code."""
    model, dictionary = load(folder)
    ours = torch.tensor([dictionary.index("</s>" if word == "<eos>" else word) for word in WORDS])
    zeros = Memory(torch.zeros(BATCH, case.mem_len, DIM, dtype=torch.float64))
    state = DecoderState((zeros,) * LAYERS, torch.zeros(BATCH, dtype=torch.long))
    found = []
    for segment in ours[tokens].T.split(SEGMENTS, dim=1):
        output = model.decoder(segment, state=state)
        state = output[1]["state"].detach()
        found.append(model.get_normalized_probs(output, log_probs=True)[..., ours])
    return torch.cat(found, dim=1).transpose(0, 1)


def make_tokens():
    return torch.randint(len(WORDS), (sum(SEGMENTS), BATCH), generator=torch.Generator().manual_seed(3))


CASES = {
    "wt103": Case(),
    "wt103 as it is evaluated": Case(clamp_len=3, same_length=True, mem_len=6),
    "short memory": Case(same_length=True, mem_len=3),
    "tied": Case(untied=False),
    "div_val 1": Case(div_val=1),
    "three cutoffs": Case(cutoffs=(12, 17, 25), div_val=1, untied=False),
    "enwik8": Case(cutoffs=(), div_val=1),
    "enwik8, tied": Case(cutoffs=(), div_val=1, untied=False, mem_len=6, same_length=True, clamp_len=4),
}


def test_probabilities(convert_npz):
    tokens = make_tokens()
    for name, case in CASES.items():
        variables = make_variables(case)
        expected = Reference(variables, case)(tokens)
        torch.testing.assert_close(expected.exp().sum(-1), torch.ones_like(expected[..., 0]))
        found = converted_log_probs(convert_npz(variables, case), case, tokens)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
        # The normalisations of the TensorFlow code, which have another epsilon.
        there = Reference(variables, case._replace(epsilon=1e-12))(tokens)
        assert 0 < (found - there).abs().max() < 1e-3, name


def test_the_order_of_clusters_and_of_u_and_v_matters(convert_npz):
    """Otherwise the test above would find nothing."""
    case, tokens = CASES["wt103"], make_tokens()
    variables = make_variables(case)
    found = converted_log_probs(convert_npz(variables, case), case, tokens)
    first = f"{SOFTMAX}/cutoff_0/cluster"
    u, v = (f"transformer/r_{kind}_bias" for kind in "wr")
    for other in (
        {f"{first}_W": variables[f"{first}_W"][::-1].copy(), f"{first}_b": variables[f"{first}_b"][::-1].copy()},
        {u: variables[v], v: variables[u]},
        {u: variables[u][::-1].copy(), v: variables[v][::-1].copy()},  # of the other layer
        {f"{SOFTMAX}/cutoff_0/proj": variables[f"{EMBED}/cutoff_0/proj_W"]},
    ):
        assert (Reference({**variables, **other}, case)(tokens) - found).abs().max() > 1e-2, list(other)


def test_the_flags_that_are_written(convert_npz, capsys):
    case = CASES["wt103 as it is evaluated"]
    flags = (convert_npz(make_variables(case), case) / "flags.txt").read_text()
    # Two words more: <s> and <pad>. A token sees itself and 6 others.
    for flag in ("--untie-biases", "--adaptive-softmax-cutoff 14,22", "--div-val 2", "--mem-len 7", "--same-length"):
        assert flag in flags
    notes = re.findall("^note: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [note[:20] for note in notes] == ["the TensorFlow code ", "layer normalisation ", "--mem-len is 7 for -"]
    case = CASES["tied"]
    flags = (convert_npz(make_variables(case), case) / "flags.txt").read_text()
    assert "--untie-biases" not in flags and "--mem-len 4" in flags
    assert "--mem-len is" not in capsys.readouterr().out


def test_other_dtypes_and_what_the_optimizer_keeps(convert_npz):
    case, tokens = CASES["tied"], make_tokens()
    for dtype in (np.float64, np.float16):
        variables = {name: value.astype(dtype) for name, value in make_variables(case).items()}
        slots = {f"{name}/{slot}": value for name, value in variables.items() for slot in ("Adam", "Adam_1")}
        steps = {"beta1_power": np.float32(0.5), "beta2_power": np.float32(0.5), "global_step": np.int64(7)}
        folder = convert_npz({**variables, **slots, **steps}, case)
        assert {x.dtype for x in torch.load(folder / "checkpoint.pt")["model"].values()} >= {
            torch.float64 if dtype is np.float64 else torch.float16
        }
        found = converted_log_probs(folder, case, tokens)
        torch.testing.assert_close(found, Reference(variables, case)(tokens), rtol=0, atol=1e-9)


def test_the_command_that_exports(convert_npz, monkeypatch):
    """The command of the guide runs, with a stand-in for TensorFlow."""
    case = CASES["wt103"]
    variables = make_variables(case)
    saved = {**variables, "transformer/r_w_bias/Adam": variables["transformer/r_w_bias"], "global_step": np.int64(7)}
    reader = SimpleNamespace(get_variable_to_shape_map=lambda: dict.fromkeys(saved), get_tensor=saved.__getitem__)
    stub = SimpleNamespace(
        train=SimpleNamespace(load_checkpoint=lambda path: reader if path == "model.ckpt-0" else None)
    )
    monkeypatch.setitem(sys.modules, "tensorflow", stub)
    monkeypatch.chdir(convert_npz.folder)
    command = re.search(r'python -c "(.*)"$', tensorflow_xl.EXPORT)
    exec(command[1], {})
    with np.load("model.npz") as file:
        assert sorted(file.files) == sorted(variables)
    page = Path(tensorflow_xl.__file__).parents[2] / "docs" / "checkpoints.md"
    assert command[0] in page.read_text(encoding="utf-8")


def without(name):
    return lambda variables: {key: value for key, value in variables.items() if name not in key}


def replaced(name, change):
    return lambda variables: {**variables, name: change(variables[name])}


def added(name, *shape):
    return lambda variables: {**variables, name: np.ones(shape, np.float32)}


def seventh(variables):
    return {name.replace("transformer/layer_1/", "transformer/layer_7/"): value for name, value in variables.items()}


R_W, R_R, QKV = "transformer/r_w_bias", "transformer/r_r_bias", "transformer/layer_1/rel_attn/qkv/kernel"
ELSEWHERE = "--attn_type and --pre_lnorm must be left out: the TensorFlow code"
# case, changed options, change of the variables, words of the sentence
# fmt: off
REFUSALS = [
    ("wt103", {}, without(QKV), r"decoder\.layers\.1\.self_attn\.in_proj\.weight is missing"),
    ("wt103", {}, without("/layer_"), r"lacks layers\.0\.dec_attn\.o_net\.weight;"),
    ("wt103", {}, seventh, r"r_w_bias must have the biases of 8 layers, got the shape \(2, 2, 4\)"),
    ("wt103", {}, added("transformer/more", 2), "has also transformer/more"),
    ("wt103", {}, without(R_W), rf"model\.npz must be a checkpoint .* without {R_W}: make one where TensorFlow"),
    ("wt103", {}, replaced(QKV, lambda x: x.astype(np.int8)), rf"{QKV} must be floating-point, got torch\.int8"),
    ("wt103", {}, replaced(QKV, lambda x: x.astype(str)), f"{QKV} must be an array of numbers, got none"),
    ("wt103", {}, replaced(QKV, lambda x: x.astype(object)), f"{QKV} must be an array of numbers, got none"),
    ("wt103", {}, replaced(QKV, lambda x: x[0]), rf"{QKV} must have 2 dimensions, .*, got the shape \(24,\)"),
    ("wt103", {}, replaced(QKV, lambda x: x[:0]), rf"{QKV} must have 2 dimensions, .*, got the shape \(0,"),
    ("wt103", {}, replaced(R_W, lambda x: x[0, 0]), rf"{R_W} must have 2 or 3 dimensions, .* \(4,\)"),
    ("wt103", {}, replaced(R_R, lambda x: np.concatenate([x, x])), r"r_r_bias must .* 2 layers, got .* \(4, 2, 4\)"),
    ("wt103", {}, replaced(R_R, lambda x: x[0]), r"r_r_bias must have the biases of 2 layers, got .* \(2, 4\)"),
    ("div_val 1", {}, replaced(f"{SOFTMAX}/cutoff_1/b", lambda x: x[1:]), "got 31 words and 30 biases"),
    ("wt103", {}, replaced(f"{SOFTMAX}/cutoff_0/cluster_W", lambda x: x[1:]), r"clusters\.weight must be \(2, 8\)"),
    ("wt103", {}, without(f"{EMBED}/cutoff_0/proj_W"), "--proj_same_dim must be True"),
    ("wt103", {}, added(f"{SOFTMAX}/cutoff_2/proj", 2, 8), "untied projections, as of --dataset lm1b"),
    ("div_val 1", {}, added(f"{EMBED}/proj_W", 8, 8), "--d_embed must equal --d_model"),
    ("wt103", {"mem_len": None}, None, "--mem_len must be given, as in training"),
    ("wt103", {"tgt_len": None}, None, "--tgt_len must be given"),
    ("wt103", {"n_head": 4}, None, "--n_head must be 2, as in the checkpoint, got 4"),
    ("wt103", {"attn_type": 1}, None, ELSEWHERE),
    ("wt103", {"pre_lnorm": True}, None, ELSEWHERE),
    ("wt103", {"words": WORDS[:-1]}, None, "the vocabulary must have the 31 words of the checkpoint, got 30"),
]
# fmt: on


@looped("case, options, change, says", REFUSALS)
def test_refusals(convert_npz, case, options, change, says):
    variables = make_variables(CASES[case])
    arguments = convert_npz.arguments(change(variables) if change else variables, CASES[case], **options)
    refused(main, *arguments, says=says, out=convert_npz.out)


def test_files_that_are_no_npz(convert_npz):
    whole, array = packed(make_variables(CASES["wt103"])), io.BytesIO()
    np.save(array, np.ones(3))
    damaged = bytearray(whole)
    damaged[len(whole) // 3] ^= 255
    for content in (b"", b"no archive", whole[: len(whole) // 2], array.getvalue(), bytes(damaged), None):
        says = "cannot be read: No such file" if content is None else "must be a complete .npz, got a (trunc|damaged)"
        refused(main, *convert_npz.arguments(content, CASES["wt103"]), says=says, out=convert_npz.out)
