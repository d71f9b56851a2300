"""Architectures: one entry each, what differs from the model's defaults. A new size is one entry.

Sizes and settings: Schlag, Irie & Schmidhuber 2021, arXiv 2102.11174, Sec. 6.3 and App. F. Its linear Transformer
(rule sum) normalises the read-out, its Delta Network the mapped keys and queries (Tables 2 and 3).
"""

from collections.abc import Callable
from typing import Any

from fairseq.models import register_model_architecture

WT103 = {"adaptive_softmax_cutoff": "20000,40000,200000"}
SMALL = {"decoder_embed_dim": 128}
MEDIUM = {"decoder_embed_dim": 256}

SUM = {"decoder_update_rule": "sum", "attention_normalization": True}
DELTA = {"decoder_update_rule": "delta", "sum_normalization": True}
SOFTMAX = {"decoder_update_rule": "softmax"}

PRESETS: dict[str, dict[str, Any]] = {
    f"{rule}_lm_wt103{suffix}": {**settings, **size, **WT103}
    for rule, settings in (("sum", SUM), ("delta", DELTA), ("softmax", SOFTMAX))
    for suffix, size in (("", SMALL), ("_medium", MEDIUM))
}


def register(name: str, preset: dict[str, Any], model: str = "fwp_lm") -> None:
    """Makes `--arch name` known to fairseq; a flag given on the command line wins over the preset."""
    register_model_architecture(model, name)(_architecture(preset))


def _architecture(preset: dict[str, Any]) -> Callable[[Any], None]:
    def fill_in(args: Any) -> None:
        for key, value in preset.items():
            setattr(args, key, getattr(args, key, value))

    return fill_in


for _name, _preset in PRESETS.items():
    register(_name, _preset)
