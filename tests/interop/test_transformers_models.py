"""Models of transformers, made from small configurations, compute the same with our operators as with its own."""

import subprocess
import sys
from functools import partial
from itertools import pairwise

import pytest
import torch
from support.fla_functions import stand_in
from support.pairwise import looped

from fairseq_fwp.interop import transformers as interop

transformers = pytest.importorskip("transformers", minversion="5.20")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers

# fmt: off
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
GATED_DELTA = SIZES | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
KIMI = SIZES | EXPERTS | LATENT | {"linear_num_heads": 2, "linear_head_dim": 8}
INDEXER = {
    f"indexer_{name}": number for name, number in
    {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 16, "compress_ratio": 4}.items()
}
# fmt: on
GLM = KIMI | {"q_lora_rank": 8, "index_head_dim": 8, "index_n_heads": 2, "index_kpool": 4}
GLM |= {"mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 4}
for name in ("num_experts", "num_local_experts", "shared_expert_intermediate_size", "qk_rope_head_dim", "head_dim"):
    del GLM[name]
CONFIGS = {
    "qwen3_next": GATED_DELTA | EXPERTS,
    "qwen3_5_text": GATED_DELTA,
    "qwen3_5_moe_text": GATED_DELTA | EXPERTS,
    "olmo_hybrid": GATED_DELTA | {"linear_num_value_heads": 2},
    "lara_mini": GATED_DELTA,
    "qwen4_exp_text": GATED_DELTA | EXPERTS | INDEXER,
    "kimi_linear": KIMI,
    "bailing_hybrid": KIMI,
    "glm5_next": {"text_config": GLM, "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2}},
}
every_model = pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind in transformers.CONFIG_MAPPING])


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


def build(kind, dtype=torch.float32, **more):
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**CONFIGS[kind] | more)
    auto = "AutoModelForImageTextToText" if "text_config" in CONFIGS[kind] else "AutoModelForCausalLM"
    return getattr(transformers, auto).from_config(config, experts_implementation="eager").to(dtype).eval()


def results(model, tokens):
    """Return the logits, and the gradients of the loss by parameter."""
    model.zero_grad()
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_equations(path, q, k, v, g, beta, initial_state=None, output_final_state=False, **_):
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    given = {"q": q, "k": k, "v": v, "g": g.double(), "beta": beta, "scale": q.shape[-1] ** -0.5}
    out, state = stand_in(path, **given, initial_state=initial_state, output_final_state=True)
    return out, state if output_final_state else None


@every_model
def test_logits_and_gradients_in_float64_are_those_of_the_equations(kind, monkeypatch):
    model, tokens = build(kind, torch.float64), torch.randint(3, 64, (2, 21))
    with interop.use_in_transformers():
        found, found_grads = results(model, tokens)
    for name, path in (("gated_delta_rule", "gated_delta_rule"), ("kimi_delta_attention", "kda")):
        function = partial(by_equations, f"{path}.chunk_{path}")
        for form in (f"torch_chunk_{name}", f"torch_recurrent_{name}", f"chunk_{name}", f"recurrent_{name}"):
            if form in interop.FUNCTIONS:
                monkeypatch.setitem(interop.FUNCTIONS, form, function)
    with interop.use_in_transformers():
        expected, grads = results(model, tokens)
    # Some models compute norms and gates in float32.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert found_grads.keys() == grads.keys()
    for name, x in grads.items():
        torch.testing.assert_close(found_grads[name], x, rtol=1e-5, atol=1e-8, msg=name)


@every_model
def test_in_float32_and_token_by_token_as_transformers_itself(kind):
    model, tokens = build(kind), torch.randint(3, 64, (2, 21))
    padded = torch.ones_like(tokens)
    padded[1, :4] = 0
    if kind == "bailing_hybrid":  # whose cache needs its attention layer first
        padded = None

    def computed():
        with torch.no_grad():
            logits = model(input_ids=tokens, attention_mask=padded).logits
        generated = model.generate(tokens, attention_mask=padded, max_new_tokens=8, do_sample=False, eos_token_id=None)
        return logits, generated

    expected, sequences = computed()
    with interop.use_in_transformers():
        found, ours = computed()
    assert torch.equal(ours, sequences)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    again, _ = computed()
    assert torch.equal(again, expected)


@every_model
def test_packed_sequences_are_kept_apart(kind):
    # The other attention of glm5_next takes packed sequences for one, also in transformers.
    linear = {"text_config": GLM | {"layer_types": ["linear_attention"] * 2}} if kind == "glm5_next" else {}
    model, lengths = build(kind, **linear), (5, 9, 7)
    tokens = torch.randint(3, 64, (1, sum(lengths)))
    ends = torch.tensor([0, 5, 14, 21], dtype=torch.int32)
    places = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    packed = {"position_ids": places, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    packed |= {"max_length_q": 9, "max_length_k": 9, "use_cache": False}
    with torch.no_grad(), interop.use_in_transformers():
        together = model(input_ids=tokens, **packed).logits
        apart = [model(input_ids=tokens[:, a:b], use_cache=False).logits for a, b in pairwise(ends.tolist())]
    torch.testing.assert_close(together, torch.cat(apart, 1), rtol=1e-4, atol=1e-5)


def test_softmax_layers_of_transformers_see_across_documents_with_a_mask_or_without_positions():
    """docs/interop.md says so: the mask is made in transformers, where the linear layers do not see it."""
    model, tokens = build("qwen3_5_text"), torch.randint(3, 64, (1, 14))
    places = torch.cat([torch.arange(5), torch.arange(9)]).unsqueeze(0)
    right = {"cu_seq_lens_q": torch.tensor([0, 5, 14]), "position_ids": places, "use_cache": False}
    with torch.no_grad(), interop.use_in_transformers():
        expected = model(input_ids=tokens, **right).logits
        for wrong in ({"attention_mask": torch.ones_like(tokens)}, {"position_ids": None}):
            assert (model(input_ids=tokens, **right | wrong).logits - expected)[:, 5:].abs().max() > 1e-2


def test_what_would_mix_sequences_is_refused():
    model, tokens, ends = build("qwen3_5_text"), torch.randint(3, 64, (1, 14)), torch.tensor([0, 5, 14])
    with interop.use_in_transformers():
        with pytest.raises(ValueError, match="packed sequences must be computed without a cache: use_cache=False"):
            model(input_ids=tokens, cu_seq_lens_q=ends)
        with pytest.raises(ValueError, match="cu_seq_lens_q must be given with seq_idx"):
            model(input_ids=tokens, seq_idx=torch.zeros(1, 14, dtype=torch.int32), use_cache=False)
        with pytest.raises(ValueError, match=r"must be in one row, with cu_seq_lens_q, got 2 rows$"):
            model(input_ids=tokens.expand(2, -1), cu_seq_lens_q=ends, use_cache=False)


@looped("length", [3, 20])
def test_one_sequence_with_a_cache_may_have_its_ends(length):
    model, tokens = build("qwen3_5_text"), torch.randint(3, 64, (1, 30))
    with torch.no_grad(), interop.use_in_transformers():
        whole = model(input_ids=tokens, use_cache=False).logits
        first = model(input_ids=tokens[:, :length], cu_seq_lens_q=torch.tensor([0, length]))
        name = "cache" if hasattr(first, "cache") else "past_key_values"  # until transformers 5.23
        cached = {name: first[name], "cu_seq_lens_q": torch.tensor([0, 30 - length])}
        rest = model(input_ids=tokens[:, length:], **cached)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, rtol=1e-4, atol=1e-5)


def test_arguments_are_those_of_transformers():
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    x, g, beta, state = torch.randn(1, 9, 2, 4), -torch.rand(1, 9, 2), torch.rand(1, 9, 2), torch.randn(1, 2, 4, 4)
    calls = [
        lambda: module.torch_chunk_gated_delta_rule(x, x, x, g, beta, 64, state, True),
        lambda: module.torch_recurrent_gated_delta_rule(x, x, x, g, beta, state, True),
        lambda: module.torch_chunk_gated_delta_rule(query=x, key=x, value=x, g=g, beta=beta),
        lambda: module.causal_conv1d_fn(x[0].mT, x[0, 0].mT, activation="gelu"),
    ]
    expected = [call() for call in calls]
    with interop.use_in_transformers():
        torch.testing.assert_close([call() for call in calls], expected)


def test_functions_are_replaced_and_given_back():
    """Uses may overlap, and be undone again."""
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    before = {name: getattr(module, name) for name in interop.FUNCTIONS if hasattr(module, name)}
    first, second = interop.use_in_transformers(), interop.use_in_transformers()
    for handle in (first, first, second):
        assert all(getattr(module, name) is not function for name, function in before.items())
        handle.undo()
    assert before and all(getattr(module, name) is function for name, function in before.items())


IN_A_NEW_PROCESS = """
import sys

class Blocked:
    tried = []
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("fairseq", "transformers", "fla"):
            self.tried.append(name)
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
from fairseq_fwp.interop import fla
from fairseq_fwp.interop.transformers import use_in_transformers
import torch
x = torch.randn(1, 5, 2, 4)
fla.chunk_delta_rule(x, x, x, x[..., 0])
assert not Blocked.tried, Blocked.tried
"""


IMPORTED_LATER = """
from fairseq_fwp.interop.transformers import use_in_transformers
handle = use_in_transformers()
from transformers.models.qwen3_next import modeling_qwen3_next as module
import torch
x, g = torch.randn(1, 9, 2, 4, dtype=torch.float64), torch.zeros(1, 9, 2, dtype=torch.float64)
call = lambda: module.torch_chunk_gated_delta_rule(x, x, x, g, g, output_final_state=True)[1].dtype
assert call() == torch.float64
handle.undo()
assert call() == torch.float32, call()
"""


@looped("code", [IN_A_NEW_PROCESS, IMPORTED_LATER])
def test_nothing_else_is_imported_and_models_imported_later_get_our_functions(code):
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr


def test_another_transformers_is_refused(monkeypatch):
    from transformers.integrations import hub_kernels

    monkeypatch.delattr(hub_kernels, interop.DECORATOR)
    with pytest.raises(RuntimeError, match=f"transformers must have {interop.DECORATOR}, as"):
        interop.use_in_transformers()
