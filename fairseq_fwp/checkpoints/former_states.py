"""States of streams under the names that their classes had in earlier commits.

A checkpoint in mid-epoch holds the state of its streams by the names of its classes, and torch loads only names that it
knows. A class that moves, or gets another name, leaves a line here.
"""

import torch

from fairseq_fwp.models.decoder import DecoderState
from fairseq_fwp.models.fast_weight_layer import FastWeightLayerState, Gradients
from fairseq_fwp.modules.attention import FastWeightState, KeyValueCache, SegmentMemory
from fairseq_fwp.modules.decoder_layer import LayerState


class FwlState:
    """The state of a decoder and of the fast weight layer above it; now the layer's is the last of all."""

    def __new__(cls, base: DecoderState, layer: FastWeightLayerState) -> DecoderState:  # type: ignore[misc]
        return DecoderState((*base.layers, layer), base.positions)


FORMER: dict[str, type] = {
    "fairseq_fwp.fast_weight_layer.model.FwlState": FwlState,
    "fairseq_fwp.fast_weight_layer.update.FastWeightLayerState": FastWeightLayerState,
    "fairseq_fwp.fast_weight_layer.update.Gradients": Gradients,
    "fairseq_fwp.models.fwp_fwl_lm.FwlState": FwlState,
    "fairseq_fwp.models.fwp_lm.DecoderState": DecoderState,
    "fairseq_fwp.modules.attention.fast_weight.FastWeightState": FastWeightState,
    "fairseq_fwp.modules.attention.relative.Memory": SegmentMemory,
    "fairseq_fwp.modules.attention.state.FastWeightState": FastWeightState,
    "fairseq_fwp.modules.fast_weight_attention.FastWeightState": FastWeightState,
    "fairseq_fwp.modules.fast_weight_layer.FastWeightLayerState": FastWeightLayerState,
    "fairseq_fwp.modules.fast_weight_layer.Gradients": Gradients,
    "fairseq_fwp.modules.fast_weight_layer.state.FastWeightLayerState": FastWeightLayerState,
    "fairseq_fwp.modules.fast_weight_layer.state.Gradients": Gradients,
    "fairseq_fwp.modules.layers.LayerState": LayerState,
    "fairseq_fwp.modules.relative_attention.Memory": SegmentMemory,
    "fairseq_fwp.modules.softmax_attention.KeyValueCache": KeyValueCache,
}
torch.serialization.add_safe_globals([(kind, name) for name, kind in FORMER.items()])
