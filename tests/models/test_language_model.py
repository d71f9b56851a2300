"""Models as objects: pickled, copied, with oneDNN's products, and states under former names."""

import copy
import io
import pickle
import sys
from collections import namedtuple
from types import SimpleNamespace

import torch
from support.pairwise import looped
from support.small_models import build_model, build_retrieval, build_translation, random_tokens
from torch.utils._pytree import tree_leaves

from fairseq_fwp.checkpoints.former_states import FORMER, FwlState
from fairseq_fwp.models.decoder import DecoderState
from fairseq_fwp.modules import onednn
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS

LANGUAGE_MODELS = ["delta_lm_wt103", "softmax_lm_wt103", "xl_lm_wt103_medium"]
TRANSLATIONS = ["softmax_mt_wmt14_en_de", "delta_mt_wmt14_en_de", "sum_favor_mt_wmt14_en_de"]


@looped("arch", [*LANGUAGE_MODELS, *TRANSLATIONS])
def test_many_tokens_take_onednn_where_torch_is_slow(arch, monkeypatch):
    """Loss and gradients are the same; a step of decoding, for which it is not faster, does not take it."""
    flags = {"dropout": 0.0} if arch in TRANSLATIONS else {"adaptive_softmax_cutoff": "20,40"}
    model = (build_translation if arch in TRANSLATIONS else build_model)(arch, **flags).float()
    tokens = random_tokens(8, onednn.MIN_ROWS // 8)
    found, products, product = [], [], onednn._product
    with monkeypatch.context() as patch:
        patch.setattr(onednn, "_product", lambda *tensors: products.append(1) or product(*tensors))
        for slow in (False, True):
            patch.setattr(onednn, "mkl_is_slow", lambda slow=slow: slow)
            copied = copy.deepcopy(model).train(arch in TRANSLATIONS)
            out = copied(tokens[:, :7], None, tokens) if arch in TRANSLATIONS else copied(tokens)
            loss = copied.get_normalized_probs(out, log_probs=True)[..., 7].sum()
            found.append((loss, *torch.autograd.grad(loss, list(copied.parameters()))))
            # Of each linear layer: the product, the gradient of its input and that of its weight.
            assert len(products) >= slow * 3 * 8
            assert slow or not products
        model.make_generation_fast_()
        read, state = {"encoder_out": model.encoder(tokens)} if arch in TRANSLATIONS else {}, {}
        model.decoder(tokens, incremental_state=state, **read)
        products.clear()
        model.decoder(torch.cat([tokens, tokens[:, :1]], 1), incremental_state=state, **read)
        assert not products
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


PICKLED = {
    **{name: {} for name in ("delta_favor_lm_wt103", "softmax_lm_wt103", "xl_lm_wt103_medium", "fwl_xl_lm_wt103")},
    "fwp_lm": {"activation_fn": "linear", "softmax_layers": "1"},
    "fwp_transformer": {"activation_fn": "linear"},
    "transformer": {"activation_fn": "linear"},
    "delta_retrieval": {},
}


def with_inputs(arch, **flags):
    """Return a model of any kind, and what it reads."""
    if "transformer" in arch or "_mt_" in arch:
        return build_translation(arch, **flags), (random_tokens(2, 5), None, random_tokens(2, 5))
    if "retrieval" in arch:
        return build_retrieval(arch, **flags), [torch.randint(6, (2, 5)) for _ in range(3)]
    return build_model(arch, **flags), (random_tokens(2, 5),)


@looped("arch", PICKLED)
def test_a_pickled_model_is_the_same(arch):
    """As torch.save of a model, and processes that are spawned, need it."""
    model, inputs = with_inputs(arch, **PICKLED[arch])
    for same in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        for found, expected in zip(same(*inputs)[:1], model(*inputs)[:1], strict=True):
            assert torch.equal(found, expected)


DRAWING = [("delta_favor_lm_wt103", {}, 2), ("sum_favor64_retrieval", {}, 1)]
DRAWING += [("sum_favor_mt_wmt14_en_de", {"checkpoint_activations": again}, 6) for again in (False, True)]


@looped("arch, flags, count", DRAWING)
def test_favor_draws_once_a_mini_batch_in_training_and_never_in_evaluation(arch, flags, count):
    """Nor does it draw where activations are computed again. Each map has a matrix of its own."""
    model, inputs = with_inputs(arch, **flags)
    maps = [module for module in model.modules() if type(module) is FEATURE_MAPS["favor"]]
    for mode, draws in ((False, 1), (True, 2), (True, 3), (False, 3)):
        out = model.train(mode)(*inputs)
        (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()
        assert {int(feature_map.draws) for feature_map in maps} == {draws}
    assert len({feature_map.projection.sum().item() for feature_map in maps}) == len(maps) == count


@looped("former", FORMER)
def test_states_of_earlier_commits_are_loaded(former, monkeypatch):
    """A checkpoint in mid-epoch has the name of the class, and torch only loads names that it knows."""
    module, _, name = former.rpartition(".")
    kind, x = FORMER[former], torch.randn(2, 3)
    parts = {"base": DecoderState((x,), x), "layer": x} if kind is FwlState else dict.fromkeys(kind._fields, x)
    earlier, file = namedtuple(name, parts, module=module), io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, SimpleNamespace(**{name: earlier}))
        torch.save(earlier(**parts), file)
    file.seek(0)
    found, expected = torch.load(file, weights_only=True), kind(**parts)
    assert type(found) is type(expected)
    assert all(map(torch.equal, tree_leaves(found), tree_leaves(expected)))
