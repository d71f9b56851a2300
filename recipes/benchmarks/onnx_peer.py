"""ONNX Runtime's LinearAttention, another operator of this kind for a CPU: float32, forward only.

There are two: that of opset 27, which ONNX Runtime expands to a loop of simple operators (Scan), and a fused kernel
with the same inputs in the domain com.microsoft.
"""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

DOMAINS = {"ONNX Runtime's Scan": "", "ONNX Runtime's fused kernel": "com.microsoft"}


def linear_attention(rule, shape, domain, decays, rates):
    """Return a session of one thread whose `run(None, pack(...))` gives the output (B, L, H Dv) and the state.

    rule: linear, gated, delta or gated_delta; shape: (B, H, L, Dk, Dv); decays, rates: whether it has them.
    """
    B, H, L, Dk, Dv = shape
    names = ["query", "key", "value", "past_state", "decay" if decays else "", "beta" if rates else ""]
    asked = {"update_rule": rule, "scale": 1.0, "q_num_heads": H, "kv_num_heads": H, "domain": domain}
    node = helper.make_node("LinearAttention", names, ["output", "present_state"], **asked)
    # Without these sizes the Scan does not run.
    sizes = {name: [B, L, H * D] for name, D in (("query", Dk), ("key", Dk), ("value", Dv), ("output", Dv))}
    sizes |= {name: [B, H, Dk, Dv] for name in ("past_state", "present_state")}
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes.get(name)) for name in of if name]
        for of in (names, node.output)
    )
    versions = [helper.make_opsetid("", 27), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], rule, inputs, outputs), opset_imports=versions, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def pack(q, k, v, state, decay=None, beta=None):
    """Return its inputs from those of our operators: tokens come before heads, and decays are logarithms."""

    def tokens_first(x):
        return np.ascontiguousarray(x.transpose(1, 2).flatten(2).numpy())

    feed = {"query": tokens_first(q), "key": tokens_first(k), "value": tokens_first(v), "past_state": state.numpy()}
    if decay is not None:
        feed["decay"] = tokens_first((decay if decay.dim() == 4 else decay.unsqueeze(-1)).log())
    return feed if beta is None else feed | {"beta": tokens_first(beta.unsqueeze(-1))}
