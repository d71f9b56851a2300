"""Feature maps: each an nn.Module from (..., head_dim) to (..., feature_dim), element by element of the sequence.

`FEATURE_MAPS[name](head_dim, **arguments)` builds one. A new map is one file here and one line below. Every map has
`feature_dim`, the size of its output, and `positive`, whether its features are never negative.
"""

from fairseq_fwp.modules.feature_maps.dpfp import Dpfp
from fairseq_fwp.modules.feature_maps.elu import EluPlusOne
from fairseq_fwp.modules.feature_maps.identity import Identity

FEATURE_MAPS = {
    "elu": EluPlusOne,
    "dpfp": Dpfp,
    "identity": Identity,
}
