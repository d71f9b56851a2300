"""The functions of flash-linear-attention, from the equations, in its layout and signatures."""

from itertools import pairwise

import torch

# fla's functions: their tokens, the numbers of a token's decay, and whether they erase.
FUNCTIONS = {
    "linear_attn.chunk_linear_attn": ("q k v", None, False),
    "simple_gla.chunk_simple_gla": ("q k v g", "one", False),
    "gla.chunk_gla": ("q k v g", "by key", False),
    "delta_rule.chunk_delta_rule": ("q k v beta", None, True),
    "gated_delta_rule.chunk_gated_delta_rule": ("q k v g beta", "one", True),
    "kda.chunk_kda": ("q k v g beta", "by key", True),
    "gated_delta_product.chunk_gated_delta_product": ("q k v g beta", "one", True),
    "rwkv7.chunk_rwkv7": ("r w k v a b", "by key", False),
    "gdn2.chunk_gdn2": ("q k v g b w", "by key", False),
}
NAMES = {"r": "q", "g": "decay", "w": "decay", "beta": "rate", "a": "read", "b": "write"}


def recurrence(q, k, v, decay, rate, read, write, erases, initial_state, cu_seqlens):
    """Return q W (B, L, H, Dv) and the state of each document, from tensors (B, L, H, ...) and logarithms of decays."""
    B, L, H, K = q.shape
    places = [0, *range(L, B * L + 1, L)] if cu_seqlens is None else cu_seqlens.tolist()
    assert cu_seqlens is None or (B == 1 and cu_seqlens.dtype == torch.int64)
    tokens = (q, k, v, decay, rate, read, write)
    q, k, v, decay, rate, read, write = (None if x is None else x.flatten(0, 1) for x in tokens)
    outs, states = [], []
    for number, (start, end) in enumerate(pairwise(places)):
        state = q.new_zeros(H, K, v.shape[-1]) if initial_state is None else initial_state[number]
        for t in range(start, end):
            removed = 0 if read is None else (read[t].unsqueeze(1) @ state) * write[t].unsqueeze(2)
            if decay is not None:
                state = decay[t].exp().view(H, -1, 1) * state
            value = v[t] - (k[t].unsqueeze(1) @ state).squeeze(1) if erases else v[t]
            value = value if rate is None else rate[t].unsqueeze(1) * value
            state = state + k[t].unsqueeze(2) * value.unsqueeze(1) + removed
            outs.append((q[t].unsqueeze(1) @ state).squeeze(1))
        states.append(state)
    return torch.stack(outs).view(B, L, H, -1), torch.stack(states)


def stand_in(
    function, *, scale, initial_state, output_final_state, cu_seqlens=None, normalize=False, num_householder=1, **given
):
    """Compute what fla's function does. Of several steps a token, the memory fades at the first, and the last reads."""
    names, fades, erases = FUNCTIONS[function]
    assert output_final_state and not normalize and {*given} == {*names.split()}
    if function == "gdn2.chunk_gdn2":
        given["a"], given["b"], given["v"] = (
            -given["g"].exp() * given["b"] * given["k"],
            given["k"],
            given.pop("w") * given["v"],
        )
    tokens = dict.fromkeys(("q", "k", "v", *NAMES.values())) | {NAMES.get(name, name): x for name, x in given.items()}
    q, decay, steps = tokens["q"], tokens["decay"], num_householder
    assert tokens["k"].shape[1] == q.shape[1] * steps
    assert decay is None or decay.shape == (q.shape if fades == "by key" else q.shape[:3])
    tokens["q"] = torch.stack([*[torch.zeros_like(q)] * (steps - 1), q], 2).flatten(1, 2)
    if decay is not None:
        tokens["decay"] = torch.stack([decay, *[torch.zeros_like(decay)] * (steps - 1)], 2).flatten(1, 2)
    places = None if cu_seqlens is None else cu_seqlens * steps
    out, state = recurrence(**tokens, erases=erases, initial_state=initial_state, cu_seqlens=places)
    return scale * out[:, steps - 1 :: steps], state
