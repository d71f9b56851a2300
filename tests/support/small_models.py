"""Small models of every kind, built as fairseq builds them, and how language models read and learn."""

import copy
import io
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import fields

import torch
from fairseq.data import Dictionary
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
)
from omegaconf import OmegaConf

import fairseq_fwp  # noqa: F401  (registers the models)
from fairseq_fwp.models.fast_weight_layer.layer import PACE
from fairseq_fwp.models.presets import PRESETS
from fairseq_fwp.modules.attention import FastWeightState
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.ops import MlstmState
from fairseq_fwp.tasks.synthetic.model import RETRIEVAL_PRESETS, FwpAssociativeRetrieval, FwpAssociativeRetrievalConfig

SMALL = {"decoder_layers": 2, "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_attention_heads": 4}
SEGMENT = 4  # tokens
# Large heads: normalisation of a few numbers enlarges their rounding in half precision.
WIDE = {"decoder_key_dim": 12, "decoder_value_dim": 12}
HEADS = {"decoder_attention_heads": 2, "decoder_value_heads": 4}
ROTARY = {"attention_softmax_heads": 2, "attention_kv_heads": 1, "attention_qkv_bias": True}
ROTARY["attention_rope_theta"] = 100.0
LLAMA = {
    "attention_kv_heads": 2, "attention_rope_theta": 100.0, "rms_norm": True, "swiglu": True,
    "decoder_normalize_before": True, "no_token_positional_embeddings": True,
}  # fmt: skip

# The kinds of models that all laws are tried with: an architecture, and flags.
LANGUAGE_MODELS = {
    **{arch.removesuffix("_lm_wt103"): (arch, {}) for arch in PRESETS if not arch.endswith("_medium")},
    **{
        rule: ("fwp_lm", {"decoder_update_rule": rule, "sum_normalization": True})
        for rule in UPDATE_RULES
        if f"{rule}_lm_wt103" not in PRESETS
    },
    "DeltaNet": ("delta_net_lm_tiny", WIDE),
    "Gated DeltaNet": ("gated_deltanet_lm_tiny", {**HEADS, "decoder_key_dim": 8, "decoder_value_dim": 16}),
    "KDA": ("kda_lm_tiny", {"decoder_attention_heads": 2, "output_gate_rank": 8, "decay_lower_bound": -5.0}),
    "RWKV-7": ("rwkv7_lm_tiny", {"decoder_layers": 3, "decoder_attention_heads": 2}),
    "xLSTM": ("xlstm_lm_tiny", WIDE),
    "local": ("softmax_lm_wt103", {"attention_window": 3}),
    "clusters": ("delta_lm_wt103", {"adaptive_softmax_cutoff": "10,30", "no_token_positional_embeddings": True}),
    "clusters of softmax": ("softmax_lm_wt103", {"adaptive_softmax_cutoff": "10,30", "decoder_normalize_before": True}),
    "adaptive inputs": ("delta_lm_wt103", {"div_val": 2, "adaptive_softmax_cutoff": "10,30"}),
    "pre-norm": ("decay_lm_wt103", {"decoder_normalize_before": True}),
    "biases": ("gated_delta_lm_wt103", {"attention_bias": True}),
    "learned positions": ("softmax_lm_wt103", {"decoder_learned_pos": True, "tokens_per_sample": 32}),
    "positions from the end": ("delta_lm_wt103", {"positions_from_end": True}),
    "softmax last": ("fwp_lm", {"softmax_layers": "1", "sum_normalization": True}),
    "softmax first": ("gated_delta_lm_wt103", {"softmax_layers": "0"}),
    "local last": ("fwp_lm", {"softmax_layers": "1", "attention_window": 3, "attention_normalization": True}),
    "rotary last": ("delta_net_lm_tiny", {"softmax_layers": "1", **ROTARY, **WIDE}),
    "rotary": ("softmax_lm_wt103", {**LLAMA, "attention_head_dim": 6, "attention_qk_norm": True}),
    "rotary in a window": ("softmax_lm_wt103", {**LLAMA, "attention_window": 3, "output_layer": "untied"}),
    "hybrid": ("hqlt_lm_tiny", {"attention_window": 3}),
    "recurrent": ("recurrent_delta_lm_wt103", {"scale_read_out": True}),
    "softmax and recurrence": ("delta_rnn_lm_wt103", {"softmax_layers": "0", "no_token_positional_embeddings": True}),
}
TRANSFORMER_XL = {
    name: ("fwp_xl_lm", {"mem_len": 6, **flags})
    for name, flags in {
        "relative": {},
        "untied": {"untie_biases": True},
        "clamped": {"clamp_len": 3},
        "same length": {"same_length": True},
        "shaw": {"decoder_positions": "shaw", "clamp_len": 5},
        "no recurrence": {"mem_len": 0},
        "shaw_biased": {"decoder_positions": "shaw_biased", "clamp_len": 5},
        "layerwise": {"decoder_positions": "layerwise", "mem_len": 0},
        "absolute": {"decoder_positions": "absolute", "mem_len": 0},
        "pre-norm XL": {"decoder_normalize_before": True},
        "adaptive": {"div_val": 2, "adaptive_softmax_cutoff": "10,30"},
    }.items()
}
XL = {"fwl_base": "fwp_xl_lm", "mem_len": 6}
LOCAL = {"decoder_update_rule": "softmax", "attention_window": 3}
FAST_WEIGHT_LAYERS = {
    f"layer on {name}": ("fwp_fwl_lm", flags)
    for name, flags in {
        "local": LOCAL,
        "Transformer-XL": XL,
        "softmax": {"decoder_update_rule": "softmax"},
        "delta": {"sum_normalization": True, "no_token_positional_embeddings": True},
        "hybrid": {"softmax_layers": "1", "sum_normalization": True},
        "adaptive": {**LOCAL, "adaptive_softmax_cutoff": "10,30"},
        "projected": {**XL, "div_val": 2, "adaptive_softmax_cutoff": "10,30"},
        "local, first": {**LOCAL, "fwl_fast_weights": "first"},
        "XL, second": {**XL, "fwl_fast_weights": "second"},
        "softmax bias": {**LOCAL, "fwl_fast_weights": "softmax-bias", "adaptive_softmax_cutoff": "10,30"},
        "XL, at test time": {**XL, "fwl_step_size": 0.05, "fwl_decay": 1.0},
        "local, none": {**LOCAL, "fwl_fast_weights": "none"},
        "XL, mapped": {**XL, "fwl_map_inputs": True},
        "XL, carried": {**XL, "fwl_gradients_at": "carried"},
    }.items()
}
MODELS = {**LANGUAGE_MODELS, **TRANSFORMER_XL, **FAST_WEIGHT_LAYERS}


def make_dictionary(size: int) -> Dictionary:
    dictionary = Dictionary()
    for index in range(size - len(dictionary)):
        dictionary.add_symbol(f"w{index}")
    return dictionary


def random_tokens(*shape, vocabulary=50):
    return torch.randint(4, vocabulary, shape)


def configure(arch: str, **flags):
    """Return the configuration of `--arch arch` and the given flags."""
    args = Namespace(**{"tokens_per_sample": 32, "max_target_positions": None, "add_bos_token": False, **flags})
    ARCH_CONFIG_REGISTRY[arch](args)
    config = MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY[arch]]
    return OmegaConf.merge(OmegaConf.structured(config), vars(args))


def build_model(arch: str, vocabulary: int = 50, **flags):
    """Return a small float64 model in evaluation mode, with large weights: small initial ones would hide differences.

    The steps of a fast weight layer are small, as gradients are large.
    """
    if ARCH_MODEL_NAME_REGISTRY[arch] == "fwp_lm":
        flags = {"fwp_backend": "reference", **flags}
    task = Namespace(target_dictionary=make_dictionary(vocabulary))
    model = ARCH_MODEL_REGISTRY[arch].build_model(configure(arch, **{**SMALL, **flags}), task)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("fast_weight_layer.log_step_sizes"):
                parameter.copy_(torch.linspace(1, 5, len(parameter)).log() / PACE)
            elif "layer_norm" not in name:
                parameter.normal_(std=0.3)
    return model.double().eval()


def build(kind: str, **flags):
    """Return a model of MODELS for segments of SEGMENT tokens."""
    arch, own = MODELS[kind]
    return build_model(arch, **{"tokens_per_sample": SEGMENT, **own, **flags})


def numbers_in(state):
    """Return the numbers in a tree of tensors, as the paper counts those of a state: without z and masks."""
    if isinstance(state, torch.Tensor):
        return state.numel() if state.is_floating_point() else 0
    if isinstance(state, FastWeightState | MlstmState):
        state = state._replace(normalizer=None)
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(numbers_in, values))


def log_probs(model, tokens, **kwargs):
    return model.get_normalized_probs(model(tokens, **kwargs), log_probs=True)


def by_segments(model, tokens, lengths=SEGMENT, state=None):
    """Return log-probabilities of segments read one after the other, and the last state."""
    scores = []
    for segment in tokens.split(lengths, 1):
        out = model(segment, state=state)
        scores.append(model.get_normalized_probs(out, log_probs=True))
        state = out[1]["state"].detach()
    return torch.cat(scores, 1), state


def by_steps(model, tokens, pieces=None, **kwargs):
    """Return log-probabilities of decoding in pieces, token by token without them."""
    kept, end, scores = {}, 0, []
    for piece in pieces or [1] * tokens.shape[1]:
        end += piece
        scores.append(log_probs(model, tokens[:, :end], incremental_state=kept, **kwargs))
        assert scores[-1].shape[1] == piece
    return torch.cat(scores, 1)


def loss_of(model, segment, state=None):
    """Return the loss of a language model on a segment, and the state after it."""
    out = model(segment[:, :-1], state=state)
    scores = model.get_normalized_probs(out, log_probs=True)
    return -scores.gather(2, segment[:, 1:, None]).mean(), out[1]["state"].detach()


def train(model, optimizer, batches, state=None, loss_of=loss_of):
    """Return the losses of successive updates, and the last state; each update has a seed, as in fairseq."""
    losses = []
    for update, batch in enumerate(batches):
        torch.manual_seed(update)
        loss, state = loss_of(model, batch, state)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, state


def check_resumed(build, batches, loss_of=loss_of):
    """Train a model that `build()` returns; saved in the middle and loaded, the next losses have the same bits."""
    model, half = build().train(), len(batches) // 2
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    _, state = train(model, optimizer, batches[:half], loss_of=loss_of)
    assert all(parameter.grad is not None for parameter in model.parameters())
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), state], file)
    expected, _ = train(model, optimizer, batches[half:], state, loss_of)
    file.seek(0)
    weights, moments, state = torch.load(file, weights_only=True)
    resumed = build().train()
    resumed.load_state_dict(weights)
    optimizer = torch.optim.Adam(resumed.parameters(), lr=1e-3)
    optimizer.load_state_dict(moments)
    assert train(resumed, optimizer, batches[half:], state, loss_of)[0] == expected
    assert torch.tensor(expected).isfinite().all()


@contextmanager
def without_attention(model):
    """All attentions of a model return zeros."""

    def zeros(module, given, out):
        return (torch.zeros_like(out[0]), *out[1:]) if isinstance(out, tuple) else torch.zeros_like(out)

    attentions = [module for name, module in model.named_modules() if name.endswith(("self_attn", "encoder_attn"))]
    hooks = [module.register_forward_hook(zeros) for module in attentions]
    yield
    for hook in hooks:
        hook.remove()


def check_half_precision(model, dtype, score, share):
    """Check that a half-precision copy errs by a small share of what attention contributes; return the copy."""
    full = model.float()
    half = copy.deepcopy(full).to(dtype)
    expected, found = score(full), score(half)
    with without_attention(full):
        contributed = (score(full) - expected).norm()
    error = (found.float() - expected).norm()
    assert error <= share * contributed, f"error {error:.3g}, attention contributes {contributed:.3g}"
    return half


# Translation.

SMALL_TRANSLATION = {
    f"{side}_{size.removeprefix('decoder_')}": value for side in ("encoder", "decoder") for size, value in SMALL.items()
}


def translation_task(vocabulary: int = 50):
    dictionary = make_dictionary(vocabulary)
    return Namespace(source_dictionary=dictionary, target_dictionary=dictionary)


def build_translation(arch: str = "fwp_transformer", vocabulary: int = 50, **flags):
    """Return a small float64 translation model in evaluation mode."""
    if ARCH_MODEL_NAME_REGISTRY[arch] == "fwp_transformer":
        flags = {"fwp_backend": "reference", **flags}
    args = Namespace(**{**SMALL_TRANSLATION, "share_all_embeddings": True, "dropout": 0.1, **flags})
    ARCH_CONFIG_REGISTRY[arch](args)
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, translation_task(vocabulary))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and "norm" not in name:
                parameter.normal_(std=0.1)
    return model.double().eval()


def build_retrieval(arch: str = "fwp_associative_retrieval", num_keys: int = 6, **flags):
    """Return a model of the synthetic retrieval task."""
    options = {option.name: option.default for option in fields(FwpAssociativeRetrievalConfig)}
    options |= RETRIEVAL_PRESETS.get(arch, {}) | flags
    return FwpAssociativeRetrieval.build_model(Namespace(**options), Namespace(num_keys=num_keys))
