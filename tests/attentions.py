"""What tests of attentions share: the papers' equations of every update rule, a layer's inputs to them, and errors."""

import torch


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def rule_inputs(layer, x, key_padding_mask=None):
    """Return q, k, v and gates of a layer in double precision: projected, mapped and normalised."""
    queries_keys, v, gates = layer.project(x)
    if layer.convolution is not None:
        queries_keys, v, _ = layer.convolve(queries_keys, v, None, key_padding_mask, None)
    features = layer.feature_map(queries_keys)
    for normalization in layer.key_normalizations:
        features = normalization(features)
    return layer.arrange(features, v, gates, key_padding_mask)


def half_precision_error(found, expected):
    """Return the error of outputs (B, L, D) relative to their sizes, without the worst tenth of the tokens.

    A divisor close to zero makes any error of one output large.
    """
    errors, sizes = ((x.float().norm(dim=-1).flatten()) for x in (found.float() - expected, expected))
    return (errors / (sizes + sizes.mean())).quantile(0.9)


def outer(x, y):
    return x.unsqueeze(-1) * y.unsqueeze(-2)


def read(key, memory):
    return (key.unsqueeze(-2) @ memory).squeeze(-2)


def memories(rule, k, v, gates, divided=False, state=None):
    """Yield the memory W (B, H, Dk, Dv) and the normaliser z (B, H, Dk) after each token.

    Schlag et al. 2021, Eqs. 17-29, Mao 2022, Eqs. 5 and 7, and the later rules; z forgets as the memory does.
    k (B, H, L, Dk) mapped, v (B, H, L, Dv), gates (B, H, L) or (B, H, L, size). With N steps k
    and v are (B, H, L, N, size).
    divided: retrieved values are divided by z . k (Eq. 27). state: W and z before the first token.
    """
    w, z = state or (k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), k.new_zeros(*k.shape[:2], k.shape[-1]))
    for t in range(k.shape[2]):
        key, value = k[:, :, t], v[:, :, t]
        gate = [x[:, :, t] if x.dim() == 4 else x[:, :, t, None] for x in gates]
        if rule == "sum":
            w, z = w + outer(key, value), z + key
        elif rule == "gated":
            w = gate[0].unsqueeze(-1) * w + (1 - gate[0]).unsqueeze(-1) * outer(key, value)
            z = gate[0] * z + (1 - gate[0]) * key
        elif rule == "decay":
            w, z = outer(*gate) * w + outer(key, value), gate[0] * z + key
        elif rule == "gla":
            w, z = gate[0].unsqueeze(-1) * w + outer(key, value), gate[0] * z + key
        elif rule in ("gated_delta", "kda"):
            w, z = gate[0].unsqueeze(-1) * w, gate[0] * z + key
            w = w + outer(key, gate[1] * (value - read(key, w)))
        elif rule == "gdn2":
            w, z = gate[0].unsqueeze(-1) * w, gate[0] * z + key
            w = w + outer(key, gate[2] * value - read(gate[1] * key, w))
        elif rule == "rwkv7":
            removed = outer(gate[2] * gate[1], read(gate[1], w))
            w = gate[0].unsqueeze(-1) * w - removed + outer(key, value)
        elif rule == "delta_product":
            for step, rate in enumerate(gate[0].unbind(-1)):
                w = w + outer(key[:, :, step], rate[..., None] * (value[:, :, step] - read(key[:, :, step], w)))
        elif rule in ("delta", "fwm"):
            old, stored = read(key, w), (key * z).sum(-1, keepdim=True)
            if divided:
                old = torch.where(stored > 0, old / stored.clamp(min=1e-6), 0)
            before, w, z = w, w + outer(key, gate[0] * (value - old)), z + key
            if rule == "fwm":
                norm = w.norm(dim=(-2, -1), keepdim=True).clamp(min=1)
                w = torch.where(before.abs().sum((-2, -1), keepdim=True) > 0, w / norm, w)
        else:
            raise NotImplementedError(f"write the equation of {rule} here")
        yield w, z
