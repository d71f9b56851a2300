"""mLSTM, the memory of xLSTM: exponential gates and a normaliser, as a case of gated linear attention.

B batch, H heads, Hk heads of q and k, L tokens, Dk size of a key, Dv size of a value.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import PER_TOKEN, PER_VALUE, SHARED_KEY, Shape, check_arguments, expect_shape, for_heads, state_dtype
from .rules import gla_rule

# Tokens that are scanned side by side: splits at its multiples give the same bits, as those of the kernels.
CHUNK = 64


class MlstmState(NamedTuple):
    """What mLSTM keeps, in the state's dtype: C, n and m of public code, where exp(m) divides C and n.

    weights: C (B, H, Dk, Dv); normalizer: n (B, H, Dk); maximum: m (B, H), 0 before the first token.
    """

    weights: Tensor
    normalizer: Tensor
    maximum: Tensor


def mlstm_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    state: MlstmState | None = None,
    *,
    first: Tensor | None = None,
    epsilon: float = 1e-6,
    backend: str = "auto",
) -> tuple[Tensor, MlstmState]:
    """Multiply memory and normaliser by a forget gate, add i k^T v and i k, then read both with q, and divide.

        m_t = max(log s_t + m_{t-1}, i~_t)        s_t = sigmoid(f~_t)
        f_t = exp(log s_t + m_{t-1} - m_t)        i_t = exp(i~_t - m_t)
        C_t = f_t C_{t-1} + i_t k_t^T v_t         n_t = f_t n_{t-1} + i_t k_t
        out_t = q_t C_t / (max(|q_t . n_t|, exp(-m_t)) + epsilon)

    Both are ``gla_rule``, n with values of one. The running maximum m only keeps the exponentials finite: but for
    epsilon, out does not depend on it. As in public code, m starts at 0, also at each document, and epsilon is added
    to the divisor. Nothing is scaled here: xLSTM-7B divides q by sqrt(Dk), the paper k.

    Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory" (arXiv 2405.04517), Eqs. 19-27, with m as in
    Eqs. 15-17; Beck et al. 2025, "xLSTM 7B" (arXiv 2503.13427).

    Args:
        q, k: (B, H, L, Dk); v: (B, H, L, Dv), as of all rules.
        input_gate, forget_gate: (B, H, L), i~ and f~, before their exponential and sigmoid.
        state, first, backend: as of ``gla_rule``, with an `MlstmState`.
        epsilon: above 0.
    """
    fits = input_gate.shape == forget_gate.shape == v.shape[:3] and input_gate.dtype == forget_gate.dtype == q.dtype
    if first is not None or not fits:  # `gla_rule` checks the rest
        tensors: dict[str, tuple[Tensor, tuple[Shape, ...]]] = {"q": (q, (SHARED_KEY,)), "k": (k, (SHARED_KEY,))}
        tensors |= {"v": (v, (PER_VALUE,)), "input_gate": (input_gate, (PER_TOKEN,))}
        check_arguments("mlstm_rule", tensors | {"forget_gate": (forget_gate, (PER_TOKEN,))}, first=first)
    if not epsilon > 0:
        raise ValueError(f"mlstm_rule: epsilon must be above 0, got {epsilon}")
    batch, heads, wide = v.shape[0], v.shape[1], state_dtype(q.dtype)
    if state is None:
        weights, normalizer, start = None, None, q.new_zeros((batch, heads), dtype=wide)
    else:
        sizes = {"B": batch, "H": heads, "Dk": q.shape[3]}
        expect_shape("mlstm_rule: state.weights", state.weights, **sizes, Dv=v.shape[3])
        expect_shape("mlstm_rule: state.normalizer", state.normalizer, **sizes)
        expect_shape("mlstm_rule: state.maximum", state.maximum, B=batch, H=heads)
        weights, normalizer, start = state.weights, state.normalizer.unsqueeze(3), state.maximum.to(wide)
    # In float64, where exp(-m) is finite too: errors of logarithms add up over tokens. There are few of these numbers.
    log_forget, log_input = F.logsigmoid(forget_gate.double()), input_gate.double()
    maximum = scan_maximum(log_forget, log_input, start, first)
    before = maximum[:, :, :-1] if first is None else maximum[:, :, :-1].masked_fill(first.unsqueeze(1), 0)
    after = maximum[:, :, 1:]
    decay, write = ((x - after).exp().to(wide) for x in (log_forget + before, log_input))
    queries, keys = for_heads(q, heads), (write.unsqueeze(3) * for_heads(k, heads)).to(k.dtype)
    ones = v.new_ones(()).expand(*v.shape[:3], 1)
    out, weights = gla_rule(queries, keys, v, decay, weights, first=first, backend=backend)
    sums, normalizer = gla_rule(queries, keys, ones, decay, normalizer, first=first, backend=backend)
    least = (-after).exp().to(wide).unsqueeze(3)
    out = (out / (torch.maximum(sums.abs(), least) + epsilon)).to(v.dtype)
    return out, MlstmState(weights, normalizer.squeeze(3), maximum[:, :, -1].to(wide))


def scan_maximum(log_forget: Tensor, log_input: Tensor, start: Tensor, first: Tensor | None) -> Tensor:
    """Return m_0 ... m_L (B, H, L + 1) with m_t = max(log_forget_t + m_{t-1}, log_input_t), and 0 for m before `first`.

    log_forget, log_input: (B, H, L), float64; start: m_0 (B, H). Results are float64 numbers that start's dtype has.
    """
    if first is not None:
        documents = first.unsqueeze(1)
        log_input = torch.where(documents, torch.maximum(log_forget, log_input), log_input)
        log_forget = log_forget.masked_fill(documents, -torch.inf)
    length, begin = log_forget.shape[2], start.double().unsqueeze(2)
    if length == 1:  # decoding, without the microseconds of the rest
        return torch.cat([begin, torch.maximum(log_forget + begin, log_input).to(start.dtype).double()], 2)
    size = min(length, CHUNK) or 1
    chunks = -(-length // size) or 1
    fill = chunks * size - length
    # Each pair (a, b) stands for m -> max(a + m, b) over the tokens up to its own: 1, 2, 4 ... of them.
    a = F.pad(log_forget, (0, fill)).unflatten(2, (chunks, size))
    b = F.pad(log_input, (0, fill), value=-torch.inf).unflatten(2, (chunks, size))
    span = 1
    while span < size:
        b = torch.maximum(a + F.pad(b[..., :-span], (span, 0), value=-torch.inf), b)
        a = a + F.pad(a[..., :-span], (span, 0))
        span *= 2
    starts = [begin]
    for n in range(chunks - 1):
        end = torch.maximum(a[:, :, n, -1:] + starts[-1], b[:, :, n, -1:])
        starts.append(end.to(start.dtype).double())
    maximum = torch.maximum(a + torch.stack(starts, 2), b).flatten(2)[:, :, :length]
    return torch.cat([begin, maximum.to(start.dtype).double()], 2)
