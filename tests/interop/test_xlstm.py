"""xLSTM of transformers computes the same with our operator as with its own functions in PyTorch."""

from functools import partial

import pytest
import torch
from support.pairwise import looped

from fairseq_fwp.interop.transformers import use_in_transformers
from fairseq_fwp.modules.attention import Mlstm

transformers = pytest.importorskip("transformers", minversion="5.20")
transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers

# Widths of 64, as in the published models: of others the cache of transformers does not fit.
SIZES = {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4, "chunk_size": 16}


def build(dtype=torch.float32, **more):
    """Return a model whose gates differ: with first weights all of them are the same."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.xLSTMConfig(**SIZES | more))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "gate_preact" in name and "ogate" not in name:
                weight.add_(torch.randn_like(weight), alpha=0.5 if name.endswith("weight") else 3)
    return model.to(dtype).eval()


def results(model, tokens):
    """Return the logits, and the gradients of the loss by parameter."""
    model.zero_grad()
    out = model(input_ids=tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@looped("more", [{}, {"qk_dim_factor": 1.0}, {"v_dim_factor": 2.0}])
def test_logits_and_gradients_in_float64(more):
    """At multiples of a chunk, where transformers keeps float64; logits are float32."""
    model, tokens = build(torch.float64, norm_reduction_force_float32=False, **more), torch.randint(3, 64, (2, 48))
    expected, grads = results(model, tokens)
    with use_in_transformers():
        found, ours = results(model, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for name, x in grads.items():
        torch.testing.assert_close(ours[name], x, rtol=1e-6, atol=1e-6 * x.abs().max().item(), msg=name)
    assert torch.equal(results(model, tokens)[0], expected)  # and theirs are given back


@looped("dtype", [torch.float32, torch.bfloat16])
def test_generation_and_its_cache(dtype):
    model, tokens = build(dtype), torch.randint(3, 64, (2, 21))
    generate = partial(model.generate, tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        expected, sequences = model(input_ids=tokens, use_cache=True), generate()
        with use_in_transformers():
            found = model(input_ids=tokens, use_cache=True)
            if dtype == torch.float32:
                assert torch.equal(generate(), sequences)
    close = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(found.logits, expected.logits, rtol=close, atol=close)
    for layer, states in expected.cache.rnn_state.items():
        for x, y in zip(found.cache.rnn_state[layer], states, strict=True):
            assert x.dtype == dtype and (x - y).norm() <= close * y.norm()


def test_any_width_has_a_cache_that_fits():
    """transformers rounds the widths of its cache to 64, but not those of its layers, and stops at the first token."""
    model, tokens = build(torch.float64, hidden_size=96), torch.randint(3, 64, (1, 9))
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
        with pytest.raises((RuntimeError, ValueError)):
            model(input_ids=tokens, use_cache=True)
        with use_in_transformers():
            found = model(input_ids=tokens[:, :5], use_cache=True)
            rest = model(input_ids=tokens[:, 5:], cache=found.cache, use_cache=True).logits
    torch.testing.assert_close(torch.cat([found.logits, rest], 1), expected, rtol=1e-5, atol=1e-6)  # float32


def test_modes_of_training_take_any_length_and_states_come_together():
    model, tokens = build(mode="train"), torch.randint(3, 64, (1, 21))
    with pytest.raises(ValueError, match="not divisible by chunk size"):
        model(input_ids=tokens, use_cache=False)
    expected = build()(input_ids=tokens, use_cache=False).logits
    backend, x = model.backbone.blocks[0].mlstm_layer.mlstm_backend, torch.randn(1, 4, 16, 8)
    with use_in_transformers():
        torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
        model(input_ids=tokens, labels=tokens, use_cache=True).loss.backward()  # the model overwrites its cache
        assert torch.is_tensor(backend(x, x, x, x[..., 0], x[..., 0], return_last_states=False))
        with pytest.raises(ValueError, match="n_initial and m_initial must be given together, got only some"):
            backend(x, x, x, x[..., 0], x[..., 0], x[:, :, :8])


def test_the_package_xlstm_is_said_to_be_used(monkeypatch):
    """transformers then takes its layers, and has no backend to replace."""
    monkeypatch.delattr(transformers.models.xlstm.modeling_xlstm, "xLSTMBackend")
    with pytest.warns(UserWarning, match="xLSTM does not run on fairseq_fwp: .* pip uninstall xlstm for ours"):
        use_in_transformers().undo()


def test_our_attention_is_that_of_xlstm():
    """That of `--decoder-update-rule mlstm`, with weights of transformers; the first gates are those of public code."""
    theirs = build(torch.float64, norm_reduction_force_float32=False).backbone.blocks[1].mlstm_layer
    ours, x = Mlstm(128, 4, key_dim=16, norm_epsilon=1e-6).double(), torch.randn(2, 48, 128, dtype=torch.float64)
    weights = {"in_proj": "q k v ogate_preact", "gates": "igate_preact fgate_preact", "out_proj": "out_proj"}
    with torch.no_grad():
        for name, others in weights.items():
            parts = [getattr(theirs, other) for other in others.split()]
            getattr(ours, name).weight.copy_(torch.cat([part.weight for part in parts]))
        ours.gates.bias.copy_(torch.cat([theirs.igate_preact.bias, theirs.fgate_preact.bias]))
        assert Mlstm(128, 4).gates.bias.tolist() == [-10, -10, -10, -10, 3, 4, 5, 6]
        ours.read_out_gain.copy_(theirs.multihead_norm.weight)
    torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=1e-10, atol=1e-10)
