"""Four rules against ONNX Runtime's LinearAttention, an independent implementation: float32, forward."""

import runpy
from pathlib import Path

import torch
from pairwise import looped

from fairseq_fwp import ops

PEER = runpy.run_path(str(Path(__file__).parents[2] / "recipes/benchmarks/onnx_peer.py"))
DOMAINS, linear_attention, pack = (PEER[name] for name in ("DOMAINS", "linear_attention", "pack"))

CASES = {
    "linear": (ops.sum_rule, "linear", ()),
    "gated, per head": (ops.gla_rule, "gated", ("head",)),
    "gated, per key dimension": (ops.gla_rule, "gated", ("key",)),
    "delta": (ops.delta_rule, "delta", ("beta",)),
    "gated_delta, per head": (ops.gated_delta_rule, "gated_delta", ("head", "beta")),
    "gated_delta, per key dimension": (ops.gated_delta_rule, "gated_delta", ("key", "beta")),
}


@looped("backend", ["kernel", "reference"])
@looped("peer", DOMAINS)
@looped("case", CASES)
def test_the_same_numbers_as_onnx_runtime(case, peer, backend):
    rule, theirs, gates = CASES[case]
    B, H, L, Dk, Dv = 2, 3, 70, 16, 24
    q, k, v = torch.randn(B, H, L, Dk), torch.randn(B, H, L, Dk), torch.randn(B, H, L, Dv)
    k, state = torch.nn.functional.normalize(k, dim=-1), torch.randn(B, H, Dk, Dv)
    made = {
        "head": torch.rand(B, H, L) / 2 + 0.5,
        "key": torch.rand(B, H, L, Dk) / 2 + 0.5,
        "beta": torch.rand(B, H, L),
    }
    given = {name: made[name] for name in gates}
    decay, beta = given.get("head", given.get("key")), given.get("beta")
    session = linear_attention(theirs, (B, H, L, Dk, Dv), DOMAINS[peer], decay is not None, beta is not None)
    expected, last = (torch.from_numpy(x) for x in session.run(None, pack(q, k, v, state, decay, beta)))
    out, after = rule(q, k, v, *given.values(), state, backend=backend)
    torch.testing.assert_close(out, expected.unflatten(-1, (H, Dv)).transpose(1, 2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after, last, rtol=1e-5, atol=1e-5)
