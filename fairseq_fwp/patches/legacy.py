"""Parts of fairseq that no longer work with newer packages, or with the rest of fairseq."""

from collections.abc import Callable
from typing import Any


def restore_rindex() -> None:
    """bitarray 3 has no `bitarray.util.rindex`; fairseq uses it to find the end of its Huffman codes."""
    from bitarray import bitarray, util

    if not hasattr(util, "rindex"):

        def rindex(bits: bitarray, value: int = 1) -> int:
            return bits.index(value, right=True)

        util.rindex = rindex  # type: ignore[attr-defined]


def load_masked_dictionary(load: Callable[..., Any]) -> Any:
    """fairseq 0.12.3 loads dictionaries with an argument that those for masked language models do not take."""

    def load_without_argument(cls: type, f: Any, add_special_symbols: bool = True) -> Any:
        dictionary: Any = cls()
        dictionary.add_from_file(f)
        return dictionary

    return classmethod(load_without_argument)


def give_hubert_its_option(init: Callable[..., Any]) -> Any:
    """fairseq 0.12.3 reads, from a HuBERT model with CTC, an option that only its sequence-to-sequence models have."""
    from omegaconf import open_dict

    def init_with_option(self: Any, cfg: Any, task: Any) -> None:
        if "autoregressive" in cfg:
            return init(self, cfg, task)
        with open_dict(cfg):
            cfg.autoregressive = False
            init(self, cfg, task)
            del cfg.autoregressive  # the checkpoint's configuration stays that of the model
        return None

    return init_with_option


def name_the_linear_activation(get: Callable[..., Any]) -> Any:
    """fairseq's activation function "linear" has no name, so a model with it cannot be pickled."""
    return lambda activation: _linear if activation == "linear" else get(activation)


def _linear(x: Any) -> Any:
    return x
