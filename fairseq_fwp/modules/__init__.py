"""Building blocks of models: PyTorch modules made from plain arguments, without fairseq's configurations."""

import sys

from fairseq_fwp.modules import feature_maps
from fairseq_fwp.ops import arguments

# Plug-ins may import these by the names of the files in which they were.
for former in ("feature_map", "elu", "dpfp", "favor", "relu", "identity", "tanh"):
    sys.modules[f"{feature_maps.__name__}.{former}"] = feature_maps
sys.modules[f"{__name__}.precision"] = arguments
