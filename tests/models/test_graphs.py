"""CUDA graphs of a decoder, with stand-ins that read and write the same memory in each replay, on a CPU.

What a GPU launches is counted in tests/nightly/fake_gpu.
"""

import contextlib
import copy
import logging
import pickle

import pytest
import torch
from support.small_models import build_model, log_probs, loss_of, random_tokens

from fairseq_fwp.checkpoints.pretrained.model import PretrainedModel
from fairseq_fwp.models import graphs
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS

ROWS, LENGTH = 3, 4


class Replays:
    """In place of torch.cuda.make_graphed_callables: what a replay computes lies where the next one writes."""

    def __init__(self):
        self.captures, self.count = [], 0

    def __call__(self, trunk, inputs, allow_unused_input, pool):
        self.captures.append([tuple(x.shape) for x in inputs])
        run, leaves = trunk.forward, [*inputs, *trunk.parameters()]
        memory, trained = {}, [x for x in leaves if x.requires_grad]

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *given):
                self.count += 1
                for x, new in zip(inputs, given, strict=False):
                    x.data.copy_(new)
                with torch.enable_grad():
                    memory["y"] = run(*inputs)
                after, join = graphs.split(trunk.after)
                graphs.copy_all(memory.setdefault("after", graphs.copies_of(after)), after)
                trunk.after = join(memory["after"])
                return memory["y"].detach()

            @staticmethod
            def backward(ctx, grad):
                found = torch.autograd.grad(memory["y"], trained, grad, retain_graph=True)
                graphs.copy_all(memory.setdefault("gradients", graphs.copies_of(found)), found)
                places = iter(memory["gradients"])
                return tuple(next(places).detach() if x.requires_grad else None for x in leaves)

        trunk.forward = lambda *given: Replay.apply(*given, *trunk.parameters())


class EagerStep:
    """In place of `StepGraph`: results lie in the same memory, of which the caller gets copies."""

    captured = 0

    def __init__(self, read, tensors, pool):
        self.read, self.inputs = read, [x.clone() for x in tensors]
        EagerStep.captured += 1

    def __call__(self, tensors):
        graphs.copy_all(self.inputs, tensors)
        return graphs.copies_of(self.read(*self.inputs))


@pytest.fixture
def replays(monkeypatch):
    """Tensors claim to lie on a GPU."""
    made = Replays()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", made)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    monkeypatch.setattr(graphs, "StepGraph", EagerStep)
    EagerStep.captured = 0
    return made


def pair(arch="delta_lm_wt103", **flags):
    """Return the same model without and with graphs."""
    torch.manual_seed(1)
    plain = build_model(arch, **{"dropout": 0.0, **flags})
    graphed = copy.deepcopy(plain)
    graphed.decoder.cuda_graphs = True
    return plain.train(), graphed.train()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(models, what=gradients):
    torch.testing.assert_close(*map(what, models), rtol=0, atol=0)


def test_a_shape_is_captured_after_three_calls_and_only_so_many_are(caplog):
    caplog.set_level(logging.INFO)
    shapes, captured = graphs.Shapes("training"), []

    def find(shape):
        return shapes.find(shape, lambda: captured.append(shape) or shape)

    assert [find("a") for _ in range(5)] == [None, None, None, "a", "a"]
    for shape in range(2 * graphs.MOST_SHAPES):
        found = [find(shape) for _ in range(4)]
        assert found[:3] == [None] * 3 and found[3] == (shape if shape < graphs.MOST_SHAPES - 1 else None)
    assert captured == ["a", *range(graphs.MOST_SHAPES - 1)] and find("a") == "a"
    assert [record.getMessage() for record in caplog.records] == [
        "8 shapes of training have CUDA graphs: all others run without"
    ]


@pytest.mark.parametrize("arch", ["delta_favor_lm_wt103", "rwkv7_lm_tiny", "softmax_lm_wt103"])
def test_updates_are_those_without_graphs(replays, arch):
    """With a carried state, and a last segment of another shape; the state of an earlier segment stays as it was."""
    models = pair(arch)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    segments, results = random_tokens(8, ROWS, LENGTH + 1), ([], [])
    for model, optimizer, losses in zip(models, optimizers, results, strict=True):
        state = None
        for segment in [*segments, segments[0, :1, :3]]:
            optimizer.zero_grad()
            loss, after = loss_of(model, segment, state if len(segment) > 1 else None)
            loss.backward()
            optimizer.step()
            losses += [loss.detach(), [x.clone() for x in graphs.split(after)[0]], graphs.split(after)[0]]
            state = None if arch.startswith("softmax") else after
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert all(torch.equal(x, y) for copies, kept in zip(results[1][1::3], results[1][2::3], strict=True)
               for x, y in zip(copies, kept, strict=True))  # fmt: skip
    # All but three of each shape; without a state in the first segment, and always if it grows.
    assert (len(replays.captures), replays.count) == ((1, 5) if arch.startswith("softmax") else (1, 4))
    assert_same(models)


def test_gradients_of_several_batches_are_added(replays):
    models = pair()
    for _ in range(6):
        segments = random_tokens(3, ROWS, LENGTH + 1)
        for model in models:
            model.zero_grad()
            for segment in segments:
                loss_of(model, segment)[0].backward()
        assert_same(models)
    assert replays.count == 3 * 6 - 3


def test_a_pass_whose_backward_pass_is_still_to_come_keeps_its_memory(replays):
    models = pair()
    for _ in range(5):
        segments = random_tokens(2, ROWS, LENGTH + 1)
        for model in models:
            model.zero_grad()
            sum(loss_of(model, segment)[0] for segment in segments).backward()
        assert_same(models)
    assert 0 < replays.count <= 5
    before = replays.count
    for _ in range(2):  # a loss without a backward pass is not waited for
        loss_of(models[1], segments[0])
    assert replays.count == before + 2


def test_what_a_replay_would_miss_runs_without_one(replays):
    """Hooks, gradients through a state, padding, documents, other parameters that learn, and evaluation."""
    _, model = pair()
    tokens, padded = random_tokens(ROWS, LENGTH), random_tokens(ROWS, LENGTH)
    padded[0, 0] = model.decoder.padding_idx
    for _ in range(5):
        model(tokens)
    assert replays.count == 2
    before, state = replays.count, model(tokens)[1]["state"]
    assert replays.count == before + 1 and not any(x.requires_grad for x in graphs.split(state)[0])
    before = replays.count
    weights = state.layers[0]._replace(weights=state.layers[0].weights.requires_grad_())
    state = state._replace(layers=(weights, *state.layers[1:]))
    hook = model.decoder.layers[1].fc1.register_forward_hook(lambda *_: None)
    model(tokens)
    hook.remove()
    for _ in range(4):
        model(tokens, state=state)
        model(padded)
        model(tokens, first=torch.zeros_like(tokens, dtype=torch.bool))
        with torch.no_grad():
            model(tokens)
        model.eval()(tokens)
        model.train()
    model.decoder.layers[0].fc1.bias.requires_grad_(False)
    model(tokens)
    assert replays.count == before


def test_graphs_are_of_one_model_in_its_place(replays):
    """They are neither copied nor saved, and are made again after a model has moved."""
    _, model = pair()
    tokens = random_tokens(ROWS, LENGTH)
    for _ in range(4):
        model(tokens)
    assert len(model.decoder.trunk_graphs.shapes.graphs) == 1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.float()):
        assert len(other.decoder.trunk_graphs.shapes.graphs) == 0 and other.decoder.cuda_graphs


@pytest.mark.parametrize(
    "arch",
    ["gated_deltanet_lm_tiny", "rwkv7_lm_tiny", "delta_rnn_lm_wt103", "recurrent_delta_lm_wt103", "srwm_lm_wt103"],
)
def test_decoding_by_graphs_is_decoding(replays, arch):
    """With rows that a beam selects, of which there may become fewer, and states that stay as they were."""
    models = [model.eval() for model in pair(arch)]
    tokens = random_tokens(ROWS, 12)
    scores = []
    with torch.no_grad():
        for model in models:
            kept, rows, found = {}, torch.tensor([2, 0, 0]), []
            for end in range(2, 13):
                found.append(log_probs(model, tokens[:, :end], incremental_state=kept))
                if end == 11:
                    rows, tokens_now = torch.tensor([1, 2]), tokens[:2]
                    model.decoder.reorder_incremental_state(kept, rows)
                    found.append(log_probs(model, tokens_now, incremental_state=kept))
                    break
                model.decoder.reorder_incremental_state(kept, rows)
            scores.append(found)
    torch.testing.assert_close(*scores, rtol=1e-12, atol=1e-12)
    assert EagerStep.captured == 1


def test_a_loaded_model_writes_by_graphs(replays):
    tokens = random_tokens(ROWS, 3)
    written = [PretrainedModel(model).generate(tokens, 8) for model in pair("gated_deltanet_lm_tiny")]
    assert torch.equal(*written) and EagerStep.captured == 1


def test_steps_without_a_constant_shape_have_no_graph(replays):
    for arch, flags in (
        ("softmax_lm_wt103", {}),
        ("softmax_lm_wt103", {"attention_window": 3}),
        ("fwp_lm", {"softmax_layers": "1"}),
        ("delta_lm_wt103", {"decoder_learned_pos": True}),
        ("delta_lm_wt103", {"div_val": 2, "adaptive_softmax_cutoff": "10,30"}),
        ("fwp_fwl_lm", {}),
    ):
        assert not build_model(arch, **flags).decoder.steps_are_alike, (arch, flags)
    assert build_model("gated_deltanet_lm_tiny").decoder.steps_are_alike


def test_random_features_are_drawn_in_place():
    """A graph reads them there. States that gave a matrix, or were saved with it, keep theirs."""
    favor, given = FEATURE_MAPS["favor"](8), torch.ones(4, 8)
    place = favor.projection.data_ptr()
    favor.load_state_dict({**favor.state_dict(), "projection": given})
    saved = favor.state_dict()["projection"]
    favor.resample()
    assert favor.projection.data_ptr() == place and not favor.projection.eq(1).any()
    assert saved.eq(1).all() and given.eq(1).all()
