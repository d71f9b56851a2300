"""fla's functions on our operators, against their equations in float64, over pairs of options."""

import inspect
from itertools import pairwise as neighbours

import pytest
import torch
import torch.nn.functional as F
from support.fla_functions import FUNCTIONS, stand_in
from support.pairwise import looped, pairwise
from support.subjects import relative_error, state_dtype

from fairseq_fwp.interop import fla

T, K, V, STEPS = 11, 6, 5, 2
ENDS = [0, 4, 4, T]  # of three sequences; the second is empty
ERRORS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Our functions, and the one of fla that each computes.
FORMS = {path.split(".")[1]: path for path in FUNCTIONS}
FORMS |= {name.replace("chunk", "fused_recurrent"): path for name, path in FORMS.items()}


def possible(function, norm, v_first, gate, sigmoid, shared, **_):
    takes = inspect.signature(getattr(fla, function)).parameters
    wanted = {"use_qk_l2norm_in_kernel": norm, "state_v_first": v_first, "use_gate_in_kernel": gate}
    wanted |= {"use_beta_sigmoid_in_kernel": sigmoid, "lower_bound": gate == "bound"}
    return all(name in takes for name, value in wanted.items() if value) and not (
        shared and ("rwkv7" in function or "product" in function)
    )


def cases(function):
    options = {key: [False, True] for key in ("state", "wants_state", "norm", "ends", "v_first", "shared")}
    options |= {"gate": [None, "mamba", "bound"], "sigmoid": [None, "once", "doubled"]}
    given = {"function": [function], "dtype": list(ERRORS), "scale": [None, 0.3], **options}
    return pairwise(lambda case: possible(**case), **given)


def draw(function, state, ends, shared, gate, **_):
    """Return the arguments of a function that are tensors, in float64."""
    names, fades, _ = FUNCTIONS[FORMS[function]]
    batch, heads = (1 if ends else 2), 4
    steps = STEPS if "product" in function else 1
    given = {}
    for name in names.split():
        length = T * steps if name in ("k", "v", "beta") else T
        of_key = heads // 2 if shared and name in ("q", "k") else heads
        x = torch.randn(batch, length, of_key, V if name == "v" or (name, "gdn2" in function) == ("w", True) else K)
        if name == "beta" or (name == "g" and fades == "one"):
            x = x[..., 0]
        if (name == "g" and not gate) or (name == "w" and "rwkv7" in function):
            x = F.logsigmoid(x)
        given[name] = x / 2 if name in ("a", "b", "k", "beta") else x
    if gate:
        given |= {"A_log": torch.randn(heads), "dt_bias": torch.randn(heads * (K if fades == "by key" else 1))}
    if state:
        given["initial_state"] = torch.randn(len(ENDS) - 1 if ends else batch, heads, K, V)
    return {name: x.double() for name, x in given.items()}


def definition(function, given, scale, norm, ends, v_first, gate, sigmoid, **_):
    """Return out and the states by the equations."""
    given = dict(given)
    if norm:
        given |= {x: given[x] / (given[x].square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in "qk"}
    if gate:
        rate, bias = given.pop("A_log").exp(), given.pop("dt_bias")
        rate = rate.unsqueeze(1) if given["g"].dim() == 4 else rate
        x = given["g"] + bias.view(given["g"].shape[2:])
        given["g"] = -rate * F.softplus(x) if gate == "mamba" else -5 * torch.sigmoid(rate * x)
    if sigmoid:
        given["beta"] = (2 if sigmoid == "doubled" else 1) * given["beta"].sigmoid()
    query = "r" if "rwkv7" in function else "q"
    heads = given["v"].shape[2]
    given |= {x: given[x].repeat_interleave(heads // given[x].shape[2], 2) for x in (query, "k")}
    state = given.pop("initial_state", None)
    if scale is None:
        scale = 1 if function == "chunk_rwkv7" else K**-0.5
    given["cu_seqlens"] = torch.tensor(ENDS) if ends else None
    given["num_householder"] = STEPS if "product" in function else 1
    out, states = stand_in(FORMS[function], **given, scale=scale, initial_state=state, output_final_state=True)
    return out, states.mT if v_first else states


def ours(function, given, scale, wants_state, norm, ends, v_first, gate, sigmoid, **_):
    takes = inspect.signature(getattr(fla, function)).parameters
    given = {"gk" if name == "g" and "gk" in takes and "g" not in takes else name: x for name, x in given.items()}
    if v_first and "initial_state" in given:
        given["initial_state"] = given["initial_state"].mT
    more = {"use_qk_l2norm_in_kernel": norm, "state_v_first": v_first, "use_gate_in_kernel": bool(gate)}
    more |= {"use_beta_sigmoid_in_kernel": bool(sigmoid), "allow_neg_eigval": sigmoid == "doubled"}
    more |= {"lower_bound": -5.0 if gate == "bound" else None, "scale": scale, "normalize": False}
    more |= {"output_final_state": wants_state, "num_householder": STEPS}
    more["cu_seqlens"] = torch.tensor(ENDS) if ends else None
    if scale is None and function == "chunk_rwkv7":
        more.pop("scale")
    return getattr(fla, function)(**given, **{name: x for name, x in more.items() if name in takes})


@pytest.mark.parametrize("function", FORMS)
def test_results_and_gradients_are_those_of_the_equations(function):
    for case in cases(function):
        dtype = case["dtype"]
        tokens = draw(**case)
        wide = {"initial_state": state_dtype(dtype)}
        found = {name: x.to(wide.get(name, dtype)).requires_grad_() for name, x in tokens.items()}
        exact = {name: x.detach().double().requires_grad_() for name, x in found.items()}
        results = ours(given=found, **case)
        truth = definition(given=exact, **case)
        assert (results[1] is not None) == case["wants_state"]
        pairs = [(x, y) for x, y in zip(results, truth, strict=True) if x is not None]
        weights = [torch.randn(y.shape, dtype=torch.float64) for _, y in pairs]
        grads = [
            torch.autograd.grad(outs, list(given.values()), [w.to(x.dtype) for w, x in zip(weights, outs, strict=True)])
            for outs, given in (([x for x, _ in pairs], found), ([y for _, y in pairs], exact))
        ]
        named = [*zip(("out", "states"), *zip(*pairs, strict=True), strict=False), *zip(found, *grads, strict=True)]
        for name, x, y in named:
            assert x.shape == y.shape, f"{name}, {case}"
            assert relative_error(x, y) <= ERRORS[dtype], f"{name}, {case}: {relative_error(x, y):.1e}"


@looped("function", ["chunk_gated_delta_rule", "fused_recurrent_kda"])
def test_packed_sequences_are_the_sequences_to_the_bit(function):
    case = {"state": False, "ends": True, "shared": True, "gate": None}
    given = {name: x.float() for name, x in draw(function, **case).items()}
    packed, _ = getattr(fla, function)(**given, cu_seqlens=torch.tensor(ENDS))
    apart = [getattr(fla, function)(**{name: x[:, a:b] for name, x in given.items()})[0] for a, b in neighbours(ENDS)]
    assert torch.equal(packed, torch.cat(apart, 1))


def test_normalised_linear_attention():
    q, k, v = (torch.rand(2, T, 3, size, dtype=torch.float64) for size in (K, K, V))
    out, state = fla.chunk_linear_attn(q, k, v, output_final_state=True)
    weights = (torch.einsum("bthk,bshk->bhts", q, k) * K**-0.5).tril()
    expected = torch.einsum("bhts,bshv->bthv", weights / (weights.sum(-1, keepdim=True) + 1e-10), v)
    torch.testing.assert_close(out, expected)
    halves, carried = [], None
    for some in (slice(0, 4), slice(4, T)):
        given = [x[:, some] for x in (q, k, v)]
        part, carried = fla.fused_recurrent_linear_attn(*given, None, carried, True, normalize=True)
        halves.append(part)
    torch.testing.assert_close(torch.cat(halves, 1), expected)
    torch.testing.assert_close(carried, state)
    assert state[1].shape == (2, 1, 3, K)


def test_decays_of_values_and_of_all_tokens():
    q, k, v = (torch.randn(2, T, 3, size, dtype=torch.float64) for size in (K, K, V))
    gk, gv = (F.logsigmoid(torch.randn(2, T, 3, size, dtype=torch.float64)) for size in (K, V))
    out, memory = [], torch.zeros(2, 3, K, V, dtype=torch.float64)
    for t in range(T):
        fades = gk[:, t].exp().unsqueeze(-1) * gv[:, t].exp().unsqueeze(-2)
        memory = fades * memory + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-2) @ memory).squeeze(-2))
    torch.testing.assert_close(fla.fused_recurrent_gla(q, k, v, gk, gv, scale=1.0)[0], torch.stack(out, 1))
    gamma = F.logsigmoid(torch.randn(3, dtype=torch.float64))
    expected = fla.chunk_simple_gla(q, k, v, gamma.expand(2, T, 3))
    torch.testing.assert_close(fla.chunk_simple_gla(q, k, v, g_gamma=gamma), expected)


X, G, B = torch.randn(2, 9, 4, 6), torch.zeros(2, 9, 4), torch.ones(2, 9, 4)
WRONG = [
    ({"cu_seqlens": torch.tensor([0.0, 4.5, 9.0])}, ValueError, "cu_seqlens must be integers"),
    ({"cu_seqlens": [0]}, ValueError, "cu_seqlens must be integers"),
    ({"beta": 1.0}, TypeError, "beta must be a tensor|attribute"),
    ({"beta": B[:, :5]}, ValueError, r"beta must have shape \(B, H, L\) = \(2, 4, 9\), got \(2, 4, 5\)"),
    ({"k": X.double()}, TypeError, "k must have q's dtype"),
    ({"v": X[..., 0]}, ValueError, "v must have shape|Dimension out of range"),
    ({"q": X[0]}, ValueError, "q must have shape"),
    ({"initial_state": torch.zeros(3, 4, 6, 6)}, ValueError, "state must have shape"),
    ({"cu_seqlens": torch.tensor([0, 9])}, ValueError, "of a batch of one, got .* a batch of 2"),
    ({"cp_context": object()}, ValueError, "cp_context must be left out"),
    ({"head_first": True}, TypeError, " must get q, .* 'head_first'"),
    ({"use_gate_in_kernel": True}, ValueError, "A_log must be given"),
]


@looped(("change", "error", "said"), WRONG)
def test_wrong_use_is_one_sentence(change, error, said):
    given = {"q": X, "k": X, "v": X, "g": G, "beta": B} | change
    with pytest.raises(error, match=f"^chunk_gated_delta_rule[^\n]*({said})[^\n]*$"):
        fla.chunk_gated_delta_rule(**given)
    with pytest.raises(TypeError, match="missing a required argument: 'beta'"):
        fla.chunk_gated_delta_rule(X, X, X, G)
    for steps in (0, 3):
        with pytest.raises(ValueError, match="chunk_gated_delta_product: num_householder must be"):
            fla.chunk_gated_delta_product(X, X.repeat(1, 2, 1, 1), X.repeat(1, 2, 1, 1), G, B.repeat(1, 2, 1), steps)


GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(4)}
BY_KEY = X.abs().neg()
WITHOUT = "use_beta_sigmoid_in_kernel must be True with allow_neg_eigval, got False"
BOUND = r"lower_bound must be in \[-5, 0\) with use_gate_in_kernel and safe_gate, got"
DELTA = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda")
# functions, changed arguments, words of the sentence
# fmt: off
OPTIONS = [
    (DELTA, {"allow_neg_eigval": True}, WITHOUT),
    (DELTA[1:2], {"g": None, **GATE}, "g must be given with use_gate_in_kernel, got None"),
    (DELTA[2:], {**GATE, "A_log": None}, "A_log must be given with use_gate_in_kernel and without lower_bound, got"),
    (("chunk_kda", "chunk_gdn2"), {**GATE, "safe_gate": True}, f"{BOUND} None"),
    (("chunk_kda", "chunk_gdn2"), {**GATE, "safe_gate": True, "lower_bound": -6.0}, f"{BOUND} -6.0"),
    (DELTA, {**GATE, "A_log": torch.zeros(3)}, r"A_log must have 4 numbers with g of shape \(2, 9, 4.*\), got 3"),
    (DELTA, {**GATE, "dt_bias": torch.zeros(5)}, r"dt_bias must have (4|24) numbers with g of shape .*, got 5"),
    (DELTA, {**GATE, "g": G[:1]}, r"g must begin with \(B, T, HV\) = \(2, 9, 4\), got \(1, 9, 4\)"),
    (DELTA[1:2], {"gk": BY_KEY[..., :5]}, r"gk must have shape \(B = 2, T = 9, HV = 4, K = 6\), got \(2, 9, 4, 5\)"),
    (DELTA[1:2], {"gk": BY_KEY, "g": G[:1]}, r"g must have shape \(B = 2, T = 9, HV = 4\), got \(1, 9, 4\)"),
    (("chunk_simple_gla",), {"g_gamma": G[0, 0, :3]}, r"g_gamma must have shape \(HV = 4\), got \(3,\)"),
    (("chunk_simple_gla",), {"g_gamma": G[0, 0], "g": G[:1]}, r"g must have shape \(B = 2, T = 9, HV = 4\), got"),
    (("chunk_gated_delta_product",), {"num_householder": 1, "beta": B[:, :8]}, "num_householder .* rates of each"),
]
# fmt: on


@looped(("functions", "change", "said"), OPTIONS)
def test_options_that_need_others_and_shapes_that_do_not_fit(functions, change, said):
    for function in functions:
        takes = inspect.signature(getattr(fla, function)).parameters
        g = BY_KEY if function.endswith(("kda", "gdn2")) else G
        given = {"q": X, "k": X, "v": X, "g": g, "beta": B, "b": X, "w": X} | change
        with pytest.raises(ValueError, match=f"^{function}: {said}"):
            getattr(fla, function)(**{name: x for name, x in given.items() if name in takes})


def test_decays_of_heads_and_of_keys_are_added():
    g, gk = -torch.rand(2, 9, 4), -torch.rand(2, 9, 4, 6)
    found, _ = fla.fused_recurrent_gated_delta_rule(X, X / 4, X, g=g, gk=gk, beta=B / 2)
    expected, _ = fla.chunk_kda(X, X / 4, X, g.unsqueeze(-1) + gk, B / 2)
    assert torch.equal(found, expected)
    # As in flash-linear-attention, what only the gate reads has no effect without it.
    again, _ = fla.chunk_kda(X, X / 4, X, g.unsqueeze(-1) + gk, B / 2, A_log=B[0, 0], lower_bound=-2.0, safe_gate=True)
    assert torch.equal(again, expected)


def test_convolutions_equal_their_definition():
    x, weight, bias = torch.randn(2, 3, 10, dtype=torch.float64), torch.randn(3, 4).double(), torch.randn(3).double()
    numbers = torch.tensor([[0] * 4 + [1] * 6, [0] * 9 + [1]])

    def expected(b, d, t, of=None):
        seen = [w for w in range(4) if t - 3 + w >= 0 and (of is None or of[b, t - 3 + w] == of[b, t])]
        return F.silu(bias[d] + sum(weight[d, w] * x[b, d, t - 3 + w] for w in seen))

    def all_of(of=None):
        values = [[[expected(b, d, t, of) for t in range(10)] for d in range(3)] for b in range(2)]
        return torch.tensor(values, dtype=torch.float64)

    torch.testing.assert_close(fla.causal_conv1d_fn(x, weight, bias, activation="silu"), all_of())
    torch.testing.assert_close(fla.causal_conv1d_fn(x, weight, bias, numbers, activation="swish"), all_of(numbers))
    first, state = fla.causal_conv1d_fn(x[..., :5], weight, bias, return_final_states=True, activation="silu")
    second = fla.causal_conv1d_fn(x[..., 5:], weight, bias, initial_states=state, activation="silu")
    torch.testing.assert_close(torch.cat([first, second], -1), all_of())
    one = fla.causal_conv1d_update(x[..., 5], state, weight, bias, "silu")
    rest = fla.causal_conv1d_update(x[..., 6:], state, weight, bias, "silu")
    torch.testing.assert_close(torch.cat([one.unsqueeze(-1), rest], -1), all_of()[..., 5:])
    assert torch.equal(state, x[..., 7:])
    for wrong in ({"activation": "relu"}, {"seq_idx": numbers, "return_final_states": True}, {"initial_states": x}):
        with pytest.raises(ValueError, match=r"must (be|have)"):
            fla.causal_conv1d_fn(x, weight, bias, **wrong)
    with pytest.raises(ValueError, match="conv_state must have at least 3 columns, got 2"):
        fla.causal_conv1d_update(x, x[..., :2].clone(), weight)


def test_shapes_of_convolutions_are_named():
    x, weight, bias = torch.randn(2, 3, 10), torch.randn(3, 4), torch.randn(3)
    of_both = {
        "x": (x[0, 0], r"x must have shape \(B, D, T\), got"),
        "weight": (weight[:2], r"weight must have shape \(D = 3, W\), got \(2, 4\)"),
        "bias": (bias[:2], r"bias must have shape \(D = 3\), got \(2,\)"),
    }
    of_all = {
        "seq_idx": (torch.zeros(1, 10).long(), r"seq_idx must have shape \(B = 2, T = 10\), got \(1, 10\)"),
        "initial_states": (x[:1, :, :3], r"initial_states must have shape \(B = 2, D = 3, W - 1 = 3\), got \(1,"),
        "final_states_out": (x[:, :2, :3], r"final_states_out must have shape \(B = 2, D = 3, W - 1 = 3\), got"),
    }
    of_update = {"conv_state": (x[:1], r"conv_state must have shape \(B = 2, D = 3, S\), got \(1, 3, 10\)")}
    for function, wrong in ((fla.causal_conv1d_fn, of_both | of_all), (fla.causal_conv1d_update, of_both | of_update)):
        more = {} if function is fla.causal_conv1d_fn else {"conv_state": x.clone()}
        for name, (value, said) in wrong.items():
            with pytest.raises(ValueError, match=f"^{said}"):
                function(**{"x": x, "weight": weight, "bias": bias, **more, name: value})
    with pytest.raises(TypeError, match=r"seq_idx must be integers, got torch\.float32"):
        fla.causal_conv1d_fn(x, weight, seq_idx=torch.zeros(2, 10))
    with pytest.raises(ValueError, match="weight must have at least one column, got none"):
        fla.causal_conv1d_fn(x, weight[:, :0])
