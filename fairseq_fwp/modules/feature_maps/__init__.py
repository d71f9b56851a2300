"""Feature maps: each is an nn.Module from (..., head_dim) to (..., feature_dim), applied to each token separately.

`FEATURE_MAPS[name](head_dim, **arguments)` builds one, a `FeatureMap`. A new map is one file here and one line below.
"""

from fairseq_fwp.modules.feature_maps.dpfp import Dpfp
from fairseq_fwp.modules.feature_maps.elu import EluPlusOne
from fairseq_fwp.modules.feature_maps.favor import Favor
from fairseq_fwp.modules.feature_maps.identity import Identity
from fairseq_fwp.modules.feature_maps.relu import LearnedRelu
from fairseq_fwp.modules.feature_maps.tanh import Tanh

FEATURE_MAPS = {
    "elu": EluPlusOne,
    "favor": Favor,
    "dpfp": Dpfp,
    "relu": LearnedRelu,
    "identity": Identity,
    "tanh": Tanh,
}
