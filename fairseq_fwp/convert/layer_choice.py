"""Layers that stay softmax in a hybrid: given layers, or those whose conversion changes the distribution most.

One layer at a time is converted. The divergence of the model's distribution from the source's is then measured on a
text, before any training. Li et al. 2025, arXiv 2512.20569, measure it on a trained model instead.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_fwp.criterions.fwp_distillation import kl_divergence

logger = logging.getLogger(__name__)

BY_DIVERGENCE = "kl:"


def costs(source: Any, converted: Any, blocks: Iterable[Tensor]) -> list[float]:
    """Return for each layer the divergence that its conversion causes, in nats per token.

    source, converted: models in evaluation mode that differ only in their attentions; blocks: tokens (1, L).
    """
    layers = list(zip(source.decoder.layers, converted.decoder.layers, strict=True))
    found, tokens = [0.0] * len(layers), 0
    for block in blocks:
        with torch.no_grad():
            expected = log_probs(source, block)
            for index, (layer, other) in enumerate(layers):
                softmax, layer.self_attn = layer.self_attn, other.self_attn
                found[index] += float(kl_divergence(log_probs(source, block), expected))
                layer.self_attn = softmax
        tokens += block.numel()
        logger.info("divergence of each layer after %s tokens: %s", f"{tokens:,}", shown(x / tokens for x in found))
    return [cost / tokens for cost in found]


def log_probs(model: Any, tokens: Tensor) -> Tensor:
    """Return the log-probabilities (L, V) of the words after tokens (1, L)."""
    scores: Tensor = model.get_normalized_probs(model(tokens), log_probs=True)
    return scores[0]


def read_blocks(path: Path, dictionary: Dictionary, length: int) -> Iterator[Tensor]:
    """Yield the words of a text in blocks (1, length). Raises ValueError for one that is empty or cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--kl-text must be a text, got {path}: {error}") from error
    words = [dictionary.encode_line(line, add_if_not_exist=False).long() for line in lines if line.strip()]
    if not words:
        raise ValueError(f"--kl-text must hold words, got the empty file {path}")
    text = torch.cat(words)
    unknown = int(text.eq(dictionary.unk()).sum())
    if unknown > len(text) / 2:
        raise ValueError(
            f"--kl-text must hold words of the dictionary, got {unknown:,} unknown ones among the {len(text):,} words "
            f"and line ends of {path}: apply the BPE of the training first"
        )
    for block in text.split(length):
        yield block.unsqueeze(0)


def read_count(text: str, layers: int) -> int:
    """Return N of kl:N. Raises ValueError if it leaves no layer to convert."""
    number = text.removeprefix(BY_DIVERGENCE)
    if not number.isdecimal() or not 0 < int(number) < layers:
        raise ValueError(f"--keep-softmax-layers must be kl:1 to kl:{layers - 1}, or numbers of layers, got {text!r}")
    return int(number)


def shown(values: Iterable[float]) -> str:
    """Return the number of each layer with its value."""
    return ", ".join(f"{index}: {value:.4f}" for index, value in enumerate(values))
