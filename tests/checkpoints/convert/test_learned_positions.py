"""Attention types 1 and 3 of Transformer-XL's public code: their equations in plain PyTorch, and refusals."""

import pytest
import torch
import torch.nn.functional as F
from support.pairwise import looped

from checkpoints.convert.conftest import build, ones, read_vector, score

LAYERS, HEADS, SIZE, LENGTH = 2, 2, 4, 11
SEGMENTS = [LENGTH, LENGTH]


def state_dict(attn_type):
    """Return a vector of type 0 with the parameters of another type."""
    vector = read_vector("transformer-xl/enwik8")
    tensors = {name: tensor for name, tensor in vector.tensors.items() if not name.startswith(("r_", "pos_emb."))}
    tensors = {name: tensor for name, tensor in tensors.items() if "r_net" not in name}
    generator = torch.Generator().manual_seed(1)
    tensors["r_emb"] = torch.randn(LAYERS, LENGTH + 3, HEADS, SIZE, generator=generator)
    if attn_type == 1:
        tensors["r_w_bias"] = torch.randn(LAYERS, HEADS, SIZE, generator=generator)
        tensors["r_bias"] = torch.randn(LAYERS, LENGTH + 3, HEADS, generator=generator)
    else:
        for index in range(LAYERS):
            queries, others = tensors.pop(f"layers.{index}.dec_attn.qkv_net.weight").split([8, 16])
            tensors |= {f"layers.{index}.dec_attn.q_net.weight": queries}
            tensors |= {f"layers.{index}.dec_attn.kv_net.weight": others}
    options = {"attn_type": attn_type, "n_head": HEADS, "tgt_len": LENGTH, "mem_len": 5 if attn_type == 1 else 0}
    return vector._replace(tensors=tensors, options=options, segments=SEGMENTS, tokens=vector.tokens[:23])


def heads(x):
    return x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)


def plain_losses(vector, clamp_len):
    """Return losses (T, B) by segments: Dai et al. 2019, Sec. 3.3, with learned (b) and (d), or Al-Rfou et al. 2019."""
    attn_type, mem_len = vector.options["attn_type"], vector.options["mem_len"]
    given = {name: tensor.double() for name, tensor in vector.tensors.items()}
    words, memories, losses = given["word_emb.emb_layers.0.weight"], [None] * LAYERS, []
    inputs, outputs = (tokens.T.split(SEGMENTS, 1) for tokens in (vector.tokens[:-1], vector.tokens[1:]))
    for segment, targets in zip(inputs, outputs, strict=True):
        x = words[segment] * words.shape[1] ** 0.5
        for index in range(LAYERS):
            layer = {name.split(".", 2)[2]: t for name, t in given.items() if name.startswith(f"layers.{index}.")}
            if attn_type == 3:
                x = x + given["r_emb"][index, -LENGTH:].flatten(1)
            past = x[:, :0] if memories[index] is None else memories[index]
            seen = torch.cat([past, x], 1)
            memories[index] = seen[:, max(seen.shape[1] - mem_len, 0) :]
            if attn_type == 1:
                w_q, w_k, w_v = layer["dec_attn.qkv_net.weight"].split(8)
            else:
                w_q, (w_k, w_v) = layer["dec_attn.q_net.weight"], layer["dec_attn.kv_net.weight"].split(8)
            q, k, v = heads(x @ w_q.T), heads(seen @ w_k.T), heads(seen @ w_v.T)
            distance = torch.arange(past.shape[1], seen.shape[1])[:, None] - torch.arange(seen.shape[1])
            scores = q @ k.transpose(-1, -2)
            if attn_type == 1:
                rows = LENGTH + 2 - distance.clamp(0, clamp_len)
                scores = scores + torch.einsum("bhid,ijhd->bhij", q, given["r_emb"][index][rows])
                scores = scores + torch.einsum("hd,bhjd->bhj", given["r_w_bias"][index], k).unsqueeze(2)
                scores = scores + given["r_bias"][index][rows].permute(2, 0, 1)
            weights = (scores / SIZE**0.5).masked_fill(distance < 0, -torch.inf).softmax(-1)
            y = (weights @ v).transpose(1, 2).flatten(2) @ layer["dec_attn.o_net.weight"].T
            x = F.layer_norm(x + y, (8,), layer["dec_attn.layer_norm.weight"], layer["dec_attn.layer_norm.bias"])
            y = F.relu(x @ layer["pos_ff.CoreNet.0.weight"].T + layer["pos_ff.CoreNet.0.bias"])
            y = y @ layer["pos_ff.CoreNet.3.weight"].T + layer["pos_ff.CoreNet.3.bias"]
            x = F.layer_norm(x + y, (8,), layer["pos_ff.layer_norm.weight"], layer["pos_ff.layer_norm.bias"])
        log_probs = (x @ words.T + given["crit.out_layers.0.bias"]).log_softmax(-1)
        losses.append(-log_probs.gather(2, targets.unsqueeze(2)).squeeze(2))
    return torch.cat(losses, 1).T


@looped(("attn_type", "clamp_len"), [(1, -1), (1, 6), (3, -1)])
def test_losses_are_those_of_the_published_equations(attn_type, clamp_len):
    """The public code's --clamp_len N means a largest distance of N - 1; without it, that of its table."""
    vector = state_dict(attn_type)
    model, dictionary, conversion = build(vector, clamp_len=clamp_len)
    found = score(model, dictionary, vector.tokens, SEGMENTS, carry=attn_type == 1)
    expected = plain_losses(vector, clamp_len - 1 if clamp_len > 0 else LENGTH + 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    told = [note for note in conversion.notes if "of fewer than 11 tokens has the last positions" in note]
    assert bool(told) == (attn_type == 3)


# attention type, changed options, change of the state dict, words of the sentence
# fmt: off
REFUSALS = [
    (3, {"tgt_len": 15}, dict, "--tgt_len must be at most 14, the positions of the checkpoint, got 15"),
    (3, {"mem_len": 5}, dict, "--mem_len must be left out with absolute positions"),
    (3, {"pre_lnorm": True}, dict, "--pre_lnorm cannot be converted with this --attn_type"),
    (3, {}, ones("r_emb", 2, 14, 2, 3), r"r_emb must be \(2, 14, 2, 4\), got \(2, 14, 2, 3\): the checkpoint is"),
    (3, {}, ones("r_emb", 14), r"r_emb must be \(2, 2, 4\), got \(14,\)"),
    (1, {"clamp_len": 1}, dict, "--clamp-len must be at least 1 with --decoder-positions shaw_biased, got 0"),
    (1, {}, ones("r_emb", 3, 14, 2, 4), r"r_emb must be \(2, 14, 2, 4\), got \(3, 14, 2, 4\)"),
    (1, {}, ones("r_bias", 2, 13, 2), r"r_bias must be \(2, 14, 2\), got \(2, 13, 2\)"),
    (1, {}, ones("r_w_bias", 2, 4), r"r_w_bias must be \(2, 2, 4\), got \(2, 4\)"),
    (1, {"attn_type": 0}, dict, "lacks r_r_bias"),
]
# fmt: on


@looped("attn_type, options, change, says", REFUSALS)
def test_refusals(attn_type, options, change, says):
    vector = state_dict(attn_type)
    with pytest.raises(ValueError, match=says):
        build(vector._replace(tensors=change(vector.tensors)), **options)
