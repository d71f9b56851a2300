"""The functions of flash-linear-attention on our operators: with its arguments and results, also on a CPU.

    from fairseq_fwp.interop.fla import chunk_gated_delta_rule

B batch, T tokens, H heads of queries and keys, HV heads of values (a multiple of H), K and V their sizes:

    q, k: (B, T, H, K). v, out: (B, T, HV, V). beta: (B, T, HV). States: (N, HV, K, V) of N sequences, float32 or 64.
    g: the logarithm of the decay, (B, T, HV), or (B, T, HV, K) in gla, kda, gdn2 and rwkv7.

    scale: of the queries; None: K^-0.5.
    cu_seqlens: (N + 1,), where the N sequences begin and end, if B is 1; None: N = B.
    output_final_state: whether the second result is the states after the last tokens; otherwise it is None.
    use_qk_l2norm_in_kernel: whether q and k are divided by sqrt(sum of squares + 1e-6).
    state_v_first: whether states are (N, HV, V, K).
    use_gate_in_kernel: whether g is the argument of Mamba's gate -exp(A_log) softplus(g + dt_bias), or with
        `lower_bound` of lower_bound sigmoid(exp(A_log) (g + dt_bias)). Without it the three have no effect, as in fla.
    use_beta_sigmoid_in_kernel: whether beta is the argument of a sigmoid, which `allow_neg_eigval` doubles.

`chunk_` and `fused_recurrent_` functions compute the same here. Hints for fla's kernels have no effect. What our
operators cannot do is refused (ValueError), and so are unknown arguments (TypeError).
"""

import ast
from collections.abc import Callable
from functools import partial
from inspect import Parameter, Signature
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_fwp import ops
from fairseq_fwp.ops.arguments import expect_shape, state_dtype
from fairseq_fwp.ops.checks import check
from fairseq_fwp.ops.convolution import causal_conv1d

Results = tuple[Tensor, Any]
Run = Callable[..., Results]
EPSILON = 1e-6  # of the L2 norm
STATES = "scale=None initial_state=None output_final_state=False"
NORM, V_FIRST, ENDS = "use_qk_l2norm_in_kernel=False", "state_v_first=False", "cu_seqlens=None"
OF_RUN = {x.split("=")[0] for x in f"{STATES} {NORM} {V_FIRST} {ENDS}".split()}
GATE, BETA = "use_gate_in_kernel=False", "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False"
GATE_INPUTS = "A_log=None dt_bias=None"


def _parameters(arguments: str, kind: Any) -> list[Parameter]:
    pairs = [argument.partition("=") for argument in arguments.split()]
    return [Parameter(x, kind, default=ast.literal_eval(value) if is_ else Parameter.empty) for x, is_, value in pairs]


BY_NAME = Parameter.KEYWORD_ONLY
REFUSED = _parameters("reverse=False return_intermediate_states=False cp_context=None", BY_NAME)
HINTS = _parameters(
    "cu_seqlens_cpu=None chunk_indices=None disable_recompute=False safe_gate=False use_graph=False max_num_seqs=None"
    " chunk_size=None",
    BY_NAME,
)


def _function(compute: Callable[..., Results], name: str, arguments: str) -> Callable[..., Results]:
    """Return compute(run, tokens) with the signature of fla's function.

    arguments: names, or names with defaults; after *, and what is the same everywhere, by name only.
    """
    places, _, by_name = arguments.partition("*")
    parameters = {x.name: x for x in _parameters(places, Parameter.POSITIONAL_OR_KEYWORD)}
    for x in (*_parameters(by_name, BY_NAME), *REFUSED, *HINTS):
        parameters.setdefault(x.name, x)
    signature = Signature([*parameters.values()])

    def call(*args: Any, **named: Any) -> Results:
        try:
            bound = signature.bind(*args, **named)
        except TypeError as error:
            raise TypeError(f"{name} must get {', '.join(signature.parameters)}: {error}") from None
        bound.apply_defaults()
        values = dict(bound.arguments)
        for x in REFUSED:
            if values.pop(x.name) not in (x.default, None):
                raise ValueError(f"{name}: {x.name} must be left out, which this package does not compute")
        try:
            _check_options(values)
            for x in HINTS:
                values.pop(x.name)
            options = {option: values.pop(option) for option in OF_RUN & values.keys()}
            return compute(partial(_run, **options), **values)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, (AttributeError, TypeError)) else ValueError
            raise kind(f"{name}: {error}") from error

    call.__name__ = call.__qualname__ = name
    call.__doc__, call.__module__ = compute.__doc__, __name__
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _check_options(values: dict[str, Any]) -> None:
    """Raise ValueError for an option without those that it needs."""
    if values.get("allow_neg_eigval") and not values["use_beta_sigmoid_in_kernel"]:
        raise ValueError("use_beta_sigmoid_in_kernel must be True with allow_neg_eigval, got False")
    if not values.get("use_gate_in_kernel"):
        return
    bound = values.get("lower_bound")
    check(values["g"] is not None, "g must be given with use_gate_in_kernel, got None")
    if values["A_log"] is None and bound is None:
        raise ValueError("A_log must be given with use_gate_in_kernel and without lower_bound, got None")
    if values["safe_gate"] and "lower_bound" in values and (bound is None or not -5 <= bound < 0):
        raise ValueError(f"lower_bound must be in [-5, 0) with use_gate_in_kernel and safe_gate, got {bound}")


def _run(
    rule: Run,
    q: Tensor,
    k: Tensor,
    *tokens: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Results:
    """Return out (B, T, HV, V) and the final states of a rule for tensors (B, T, ...)."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    wide = tokens[0].dtype  # of v; narrower queries and keys are welcome
    q, k = (x.to(wide) if x.dtype.itemsize < wide.itemsize else x for x in (q, k))
    q, k = _scaled(q, factor, use_qk_l2norm_in_kernel), _scaled(k, 1, use_qk_l2norm_in_kernel)
    tensors = [x.transpose(1, 2) for x in (q, k, *tokens)]
    state = initial_state
    if state is not None:
        state = (state.mT if state_v_first else state).to(state_dtype(q.dtype))
    try:
        if cu_seqlens is None:
            out, state = rule(*tensors, state)
        else:
            ends = torch.as_tensor(cu_seqlens)
            out, state = _run_sequences(rule, tensors, state, ends, output_final_state)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        error.args = (f"{error} (shapes are (B, H, T, ...) here)",)
        raise
    out = out.transpose(1, 2)
    if not output_final_state:
        return out, None
    return out, state.mT if state_v_first else state


def _scaled(x: Tensor, scale: float, normalize: bool) -> Tensor:
    if not normalize:
        return x if scale == 1 else x * scale
    wide = x.to(state_dtype(x.dtype))
    return (wide * ((wide.square().sum(-1, keepdim=True) + EPSILON).rsqrt() * scale)).to(x.dtype)


def _run_sequences(
    rule: Run, tensors: list[Tensor], state: Tensor | None, places: Tensor, wants_states: bool
) -> Results:
    (batch, _, length), ends = tensors[0].shape[:3], places.tolist()
    ascending = len(ends) > 1 and ends == sorted(ends) and (ends[0], ends[-1]) == (0, length)
    integers = f"integers that ascend from 0 to the {length} tokens of a batch of one"
    fits = batch == 1 and ascending and not places.is_floating_point()
    check(fits, f"cu_seqlens must be {integers}, got {ends} for a batch of {batch}")
    if state is not None and state.shape[0] != len(ends) - 1:
        raise ValueError(f"initial_state must be one for each of {len(ends) - 1} sequences, got {state.shape[0]}")
    if state is None and not wants_states:  # one call for all
        first = torch.zeros(1, length, dtype=torch.bool, device=tensors[0].device)
        first[0, [end for end in ends if end < length]] = True
        return rule(*tensors, first=first)
    results = [
        rule(*(x[:, :, start:end] for x in tensors), None if state is None else state[n : n + 1])
        for n, (start, end) in enumerate(pairwise(ends))
    ]
    outs, states = zip(*results, strict=True)
    return torch.cat(outs, 2), torch.cat(states)


def _sizes(v: Tensor) -> dict[str, int]:
    """Return the sizes that gates have in common with the values."""
    return dict(zip(("B", "T", "HV"), v.shape, strict=False))


def _decay(g: Tensor, q: Tensor) -> Tensor:
    return g.to(state_dtype(q.dtype)).exp()


def _linear_attn(run: Run, q: Tensor, k: Tensor, v: Tensor, normalize: bool) -> Results:
    """Linear attention. With `normalize`, a state is a pair: the memory, and the sum of the keys (N, 1, H, K)."""
    initial_state = run.keywords["initial_state"]  # type: ignore[attr-defined]
    memory, total = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    out, memory = run(ops.sum_rule, q, k, v, initial_state=memory)
    if not normalize:
        return out, memory
    total = None if total is None else total.squeeze(1).unsqueeze(-1)
    divisor, total = run(ops.sum_rule, q, k, torch.ones_like(v[..., :1]), initial_state=total)
    return out / (divisor + 1e-10), None if total is None else (memory, total.squeeze(-1).unsqueeze(1))


def _gla(run: Run, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_gamma: Tensor | None = None) -> Results:
    """Linear attention with a decay per head, or per key dimension.

    g: of each token; g_gamma (HV,): of a head at all tokens (RetNet); both: their sum.
    """
    if g_gamma is not None:
        expect_shape("g_gamma", g_gamma, HV=v.shape[2])
        if g is not None:
            expect_shape("g", g, **_sizes(v))
        g = g_gamma.expand(v.shape[:3]) if g is None else g + g_gamma
    return run(ops.sum_rule, q, k, v) if g is None else run(ops.gla_rule, q, k, v, _decay(g, q))


def _decayed_values(run: Run, q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None, gv: Tensor | None) -> Results:
    """Gated linear attention with a decay per key dimension, gk, and per value dimension, gv (B, T, HV, V)."""
    if gv is None:
        return _gla(run, q, k, v, gk)
    by_key = v.new_ones(()).expand(*v.shape[:3], k.shape[3]) if gk is None else _decay(gk, q)
    return run(ops.decay_rule, q, k, v, by_key, _decay(gv, q))


def _gated_delta_rule(
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> Results:
    """The delta rule, with a decay per head or per key dimension (Kimi Delta Attention), or none.

    Without beta, its rate is one.
    """
    check(gv is None, "gv must be left out: the gated delta rule has no decay per value dimension here")
    if g is not None and use_gate_in_kernel:
        g = _gate(g, v, A_log, dt_bias, lower_bound)
    if g is not None and gk is not None:
        expect_shape("g", g, **_sizes(v))
        expect_shape("gk", gk, **_sizes(v), K=q.shape[-1])
        gk = gk + g.unsqueeze(-1)
    g = g if gk is None else gk
    if beta is None:
        beta = torch.ones_like(v[..., 0])
    else:
        beta = beta.to(state_dtype(q.dtype))
        beta = (1 + allow_neg_eigval) * beta.sigmoid() if use_beta_sigmoid_in_kernel else beta
    return run(ops.delta_rule, q, k, v, beta) if g is None else run(ops.gated_delta_rule, q, k, v, _decay(g, q), beta)


def _gate(g: Tensor, v: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    of_values = v.shape[:3]
    check(g.shape[:3] == of_values, f"g must begin with (B, T, HV) = {tuple(of_values)}, got {tuple(g.shape)}")
    for name, x, count in (("A_log", A_log, g.shape[2]), ("dt_bias", dt_bias, g.shape[2:].numel())):
        if x is not None and x.numel() != count:
            raise ValueError(f"{name} must have {count} numbers with g of shape {tuple(g.shape)}, got {x.numel()}")
    g = g.to(state_dtype(g.dtype))
    if dt_bias is not None:
        g = g + dt_bias.view(g.shape[2:])
    rate: Any = 1 if A_log is None else A_log.to(g.dtype).exp().view(-1, *[1] * (g.dim() - 3))
    return -rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)


def _delta_product(
    run: Run, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, num_householder: int
) -> Results:
    """N delta steps a token: k, v and beta are (B, T N, H, ...), the decay g (B, T, H) precedes the first."""
    for name, x in (("keys", k), ("values", v), ("rates", beta)):
        fits = num_householder >= 1 and x.shape[1] == num_householder * q.shape[1]
        got = f"{num_householder} and {x.shape[1]} {name} for {q.shape[1]} queries"
        check(fits, f"num_householder must be the number of {name} of each query, got {got}")
    k, v, beta = (x.unflatten(1, (-1, num_householder)).transpose(2, 3) for x in (k, v, beta))
    if g is None:
        return run(ops.delta_product_rule, q, k, v, beta)
    return run(ops.gated_delta_product_rule, q, k, v, _decay(g, q), beta)


def _rwkv7(
    run: Run, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, lower_bound: Any = None
) -> Results:
    """W = diag(exp(w)) W + b^T (a W) + k^T v, read by r: any diagonal plus rank one. lower_bound is a hint."""
    return run(ops.dplr_rule, r, k, v, _decay(w, r), a, -b)


def _gdn2(
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
) -> Results:
    """Gated DeltaNet-2: gates for erasing, b (B, T, HV, K), and for writing, w (B, T, HV, V)."""
    g = _gate(g, v, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
    return run(ops.gdn2_rule, q, k, v, _decay(g, q), b, w)


chunk_linear_attn = _function(_linear_attn, "chunk_linear_attn", f"q k v {STATES} normalize=True {ENDS}")
fused_recurrent_linear_attn = _function(
    _linear_attn, "fused_recurrent_linear_attn", f"q k v {STATES} reverse=False normalize=False {ENDS}"
)
DECAYS = "q k v g=None g_gamma=None"
chunk_simple_gla = _function(_gla, "chunk_simple_gla", f"{DECAYS} {STATES} {V_FIRST} {ENDS}")
fused_recurrent_simple_gla = _function(
    _gla, "fused_recurrent_simple_gla", f"{DECAYS} {STATES} reverse=False {V_FIRST} {ENDS}"
)
chunk_gla = _function(_gla, "chunk_gla", f"q k v g {STATES} {V_FIRST} {ENDS}")
fused_recurrent_gla = _function(
    _decayed_values, "fused_recurrent_gla", f"q k v gk=None gv=None {STATES} reverse=False {V_FIRST} {ENDS}"
)
chunk_delta_rule = _function(_gated_delta_rule, "chunk_delta_rule", f"q k v beta {STATES} {NORM} {ENDS}")
fused_recurrent_delta_rule = _function(
    _gated_delta_rule, "fused_recurrent_delta_rule", f"q k v beta=None {STATES} {NORM} {ENDS}"
)
chunk_gated_delta_rule = _function(
    _gated_delta_rule,
    "chunk_gated_delta_rule",
    f"q k v g beta {STATES} {NORM} {BETA} {V_FIRST} {ENDS} * {GATE} {GATE_INPUTS}",
)
fused_recurrent_gated_delta_rule = _function(
    _gated_delta_rule,
    "fused_recurrent_gated_delta_rule",
    f"q k v g=None gk=None gv=None beta=None {STATES} {NORM} {GATE} {GATE_INPUTS} {BETA} {V_FIRST} {ENDS}",
)
chunk_kda = _function(
    _gated_delta_rule,
    "chunk_kda",
    f"q k v g beta {STATES} {NORM} {GATE} {BETA} safe_gate=False lower_bound=None disable_recompute=False"
    f" return_intermediate_states=False {V_FIRST} {ENDS} * {GATE_INPUTS}",
)
fused_recurrent_kda = _function(
    _gated_delta_rule,
    "fused_recurrent_kda",
    f"q k v g beta {GATE_INPUTS} {STATES} {NORM} {GATE} {BETA} lower_bound=None {V_FIRST} {ENDS}",
)
PRODUCT = f"num_householder {STATES} {NORM} {ENDS}"
chunk_gated_delta_product = _function(_delta_product, "chunk_gated_delta_product", f"q k v g beta {PRODUCT}")
fused_recurrent_gated_delta_product = _function(
    _delta_product, "fused_recurrent_gated_delta_product", f"q k v g beta {PRODUCT}"
)
chunk_rwkv7 = _function(
    _rwkv7,
    "chunk_rwkv7",
    f"r w k v a b scale=1.0 initial_state=None output_final_state=False {ENDS} * lower_bound=None",
)
fused_recurrent_rwkv7 = _function(
    _rwkv7,
    "fused_recurrent_rwkv7",
    f"r w k v a b scale=None initial_state=None output_final_state=True {ENDS}",
)
chunk_gdn2 = _function(
    _gdn2, "chunk_gdn2", f"q k v g b w {STATES} {NORM} {GATE} {ENDS} * lower_bound=None {V_FIRST} {GATE_INPUTS}"
)
fused_recurrent_gdn2 = _function(
    _gdn2, "fused_recurrent_gdn2", f"q k v g b w {GATE_INPUTS} {STATES} {NORM} {GATE} lower_bound=None {V_FIRST} {ENDS}"
)


def _silu(x: Tensor, activation: str | None) -> Tensor:
    check(activation in (None, "silu", "swish"), f"activation must be None, silu or swish, got {activation!r}")
    return x if activation is None else F.silu(x)


def _columns_before(channels: int, weight: Tensor, bias: Tensor | None) -> int:
    """Return how many columns before its own a token sees. Raises ValueError for parameters of another shape."""
    expect_shape("weight", weight, D=channels, W=None)
    if bias is not None:
        expect_shape("bias", bias, D=channels)
    check(weight.shape[1], "weight must have at least one column, got none")
    return weight.shape[1] - 1


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Convolve each channel of x (B, D, T) with its past: out_t = activation(bias + sum_w weight_w x_{t-W+1+w}).

    weight (D, W), bias (D,). seq_idx (B, T), integers: tokens of other sequences are not seen. initial_states
    (B, D, W - 1) precede x. return_final_states: also return the last W - 1 columns (B, D, W - 1).
    """
    if seq_idx is not None and (initial_states is not None or return_final_states):
        raise ValueError("seq_idx must be left out with initial_states or return_final_states")
    expect_shape("x", x, B=None, D=None, T=None)
    before = _columns_before(x.shape[1], weight, bias)
    columns = {"B": x.shape[0], "D": x.shape[1], "W - 1": before}
    for name, states in (("initial_states", initial_states), ("final_states_out", final_states_out)):
        if states is not None:
            expect_shape(name, states, **columns)
    if seq_idx is not None:
        expect_shape("seq_idx", seq_idx, B=x.shape[0], T=x.shape[2])
        if seq_idx.is_floating_point():
            raise TypeError(f"seq_idx must be integers, got {seq_idx.dtype}")
    seen = x if initial_states is None else torch.cat([initial_states.to(x.dtype), x], -1)
    out = causal_conv1d(seen.mT, weight, bias, seq_idx).mT[..., seen.shape[-1] - x.shape[-1] :]
    out = _silu(out, activation)
    if not return_final_states:
        return out
    final = F.pad(seen, (before, 0))[..., seen.shape[-1] :]
    return out, final if final_states_out is None else final_states_out.copy_(final)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: None = None,
    conv_state_indices: None = None,
) -> Tensor:
    """Return the output for the next tokens x, (B, D) or (B, D, T), and move conv_state (B, D, S) on in place.

    S must be at least W - 1.
    """
    for name, value in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        check(value is None, f"{name} must be left out, which this package does not compute")
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    expect_shape("x", tokens, B=None, D=None, T=None)
    before = _columns_before(tokens.shape[1], weight, bias)
    expect_shape("conv_state", conv_state, B=x.shape[0], D=x.shape[1], S=None)
    columns = conv_state.shape[-1]
    check(columns >= before, f"conv_state must have at least {before} columns, got {columns}")
    seen = torch.cat([conv_state.to(x.dtype), tokens], -1)
    conv_state.copy_(seen[..., -columns:])
    out = _silu(causal_conv1d(seen.mT, weight, bias).mT[..., -tokens.shape[-1] :], activation)
    return out.squeeze(-1) if x.dim() == 2 else out
