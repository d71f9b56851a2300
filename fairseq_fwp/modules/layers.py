"""Former names: whole layers were pickled under them, and plug-ins may import them."""

from fairseq_fwp.checks import check, look_up
from fairseq_fwp.modules.decoder_layer import DecoderLayer, LayerState, squared_relu
from fairseq_fwp.modules.dropout import Dropout
from fairseq_fwp.modules.layer_norm import layer_norm
from fairseq_fwp.modules.onednn import OneDnnLinear, faster_linear
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.rows import gated_silu

__all__ = [
    "DecoderLayer",
    "Dropout",
    "LayerState",
    "OneDnnLinear",
    "at_least_float32",
    "check",
    "faster_linear",
    "gated_silu",
    "layer_norm",
    "look_up",
    "squared_relu",
]
