"""Models as objects: pickled, copied, loaded under former names, and with oneDNN's products."""

import copy
import io
import pickle
import sys
from types import ModuleType

import pytest
import torch
from pairwise import looped
from small_models import build_model, build_retrieval, build_translation, log_probs, random_tokens

from fairseq_fwp.modules import layers
from fairseq_fwp.modules.attention import FORMER_NAMES


@looped("arch", ["delta_lm_wt103", "softmax_lm_wt103", "xl_lm_wt103_medium"])
def test_many_tokens_take_onednn_where_torch_is_slow(arch, monkeypatch):
    """Loss and gradients are the same; a step of decoding, for which it is not faster, does not take it."""
    model, tokens = build_model(arch, adaptive_softmax_cutoff="20,40").float(), random_tokens(8, layers.MIN_ROWS // 8)
    found, products, product = [], [], layers._product
    with monkeypatch.context() as patch:
        patch.setattr(layers, "_product", lambda *tensors: products.append(1) or product(*tensors))
        for slow in (False, True):
            patch.setattr(layers, "mkl_is_slow", lambda slow=slow: slow)
            loss = log_probs(model, tokens)[..., 7].sum()
            found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
            # Of each linear layer: the product, the gradient of its input and that of its weight.
            assert len(products) >= slow * 3 * 8
            assert slow or not products
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
        model.make_generation_fast_()
        state = {}
        model(tokens, incremental_state=state)
        products.clear()
        model(torch.cat([tokens, tokens[:, :1]], 1), incremental_state=state)
        assert not products


PICKLED = {
    **{name: {} for name in ("delta_favor_lm_wt103", "softmax_lm_wt103", "xl_lm_wt103_medium", "fwl_xl_lm_wt103")},
    "fwp_lm": {"activation_fn": "linear", "softmax_layers": "1"},
    "fwp_transformer": {"activation_fn": "linear"},
    "transformer": {"activation_fn": "linear"},
    "delta_retrieval": {},
}


@looped("arch", PICKLED)
def test_a_pickled_model_is_the_same(arch):
    """As torch.save of a model, and processes that are spawned, need it."""
    if "transformer" in arch:
        model, inputs = build_translation(arch, **PICKLED[arch]), (random_tokens(2, 5), None, random_tokens(2, 5))
    elif "retrieval" in arch:
        model, inputs = build_retrieval(arch), [torch.randint(6, (2, 5)) for _ in range(3)]
    else:
        model, inputs = build_model(arch, **PICKLED[arch]), (random_tokens(2, 5),)
    for same in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        for found, expected in zip(same(*inputs)[:1], model(*inputs)[:1], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("kind", "former"), FORMER_NAMES, ids=lambda x: getattr(x, "__name__", None))
def test_states_of_files_written_before_their_modules_moved_are_loaded(kind, former, monkeypatch):
    """A checkpoint in mid-epoch has the name of the class, and torch only loads names that it knows."""
    module, _, name = former.rpartition(".")
    state = kind(*(torch.randn(2, 3) for _ in kind._fields))
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    setattr(sys.modules[module], name, kind)
    monkeypatch.setattr(kind, "__module__", module)
    file = io.BytesIO()
    torch.save(state, file)
    monkeypatch.undo()
    found = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert type(found) is kind
    assert all(torch.equal(one, other) for one, other in zip(found, state, strict=True))
