"""ONNX Runtime's LinearAttention, the operator of this kind that others ship for a CPU: float32, forward only.

Its kernel is the one of the domain com.microsoft, which computes what ONNX's opset 27 defines.
"""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper


def linear_attention(rule, heads, decays, rates):
    """Return a session of one thread whose `run(None, pack(...))` gives the output (B, L, H Dv) and the state.

    rule: linear, gated, delta or gated_delta; decays, rates: whether it has them.
    """
    names = ["query", "key", "value", "past_state", "decay" if decays else "", "beta" if rates else ""]
    node = helper.make_node(
        "LinearAttention",
        names,
        ["output", "present_state"],
        update_rule=rule,
        scale=1.0,
        q_num_heads=heads,
        kv_num_heads=heads,
        domain="com.microsoft",
    )
    of = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in [*names, *node.output] if name}
    graph = helper.make_graph([node], rule, [of[name] for name in names if name], [of[name] for name in node.output])
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def pack(q, k, v, state, decay=None, beta=None):
    """Return its inputs for those of our operators: tokens stand before heads there, and decays are logarithms."""

    def tokens_first(x):
        return np.ascontiguousarray(x.transpose(1, 2).flatten(2).numpy())

    feed = {"query": tokens_first(q), "key": tokens_first(k), "value": tokens_first(v), "past_state": state.numpy()}
    for name, x in (("decay", None if decay is None else decay.log()), ("beta", beta)):
        if x is not None:
            feed[name] = tokens_first(x if x.dim() == 4 else x.unsqueeze(-1))
    return feed
