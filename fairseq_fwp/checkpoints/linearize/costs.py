"""What the conversion of each layer costs, by which the layers that keep softmax are chosen."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_fwp.checkpoints.convert.checkpoint import build_converted
from fairseq_fwp.checkpoints.convert.conversion import Conversion
from fairseq_fwp.evaluation.scoring import kl_divergence
from fairseq_fwp.models.fwp_lm import FwpLanguageModel
from fairseq_fwp.ops.checks import check

logger = logging.getLogger(__name__)


@torch.no_grad()
def costs(source: FwpLanguageModel, converted: FwpLanguageModel, blocks: Iterable[Tensor]) -> list[float]:
    """Return for each layer the divergence that its conversion causes, in nats per token, before any training.

    source, converted: models in evaluation mode that differ only in their attentions; blocks: tokens (L,). Li et al.
    2025, arXiv 2512.20569, measure it on a trained model instead.
    """

    def log_probs(tokens: Tensor) -> Tensor:
        scores: Tensor = source.get_normalized_probs(source(tokens.unsqueeze(0)), log_probs=True)
        return scores[0]

    layers = list(zip(source.decoder.layers, converted.decoder.layers, strict=True))
    totals, tokens = [0.0] * len(layers), 0
    for block in blocks:
        expected = log_probs(block)
        for index, (layer, other) in enumerate(layers):
            softmax, layer.self_attn = layer.self_attn, other.self_attn
            totals[index] += float(kl_divergence(log_probs(block), expected))
            layer.self_attn = softmax
        tokens += block.numel()
        logger.info("divergence of each layer after %s tokens: %s", f"{tokens:,}", shown(x / tokens for x in totals))
    return [cost / tokens for cost in totals]


def build_whole(conversion: Conversion) -> FwpLanguageModel:
    """Return the model of a conversion, in evaluation mode and in float32 or wider."""
    model = cast(FwpLanguageModel, build_converted(conversion)).eval()
    return model.to(torch.promote_types(next(model.parameters()).dtype, torch.float32))


def read_text(path: Path, dictionary: Dictionary) -> Tensor:
    """Return the words of a text as numbers (N,). Raises ValueError for one that is empty or cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--kl-text must be a text, got {path}: {error}") from error
    words = [dictionary.encode_line(line, add_if_not_exist=False).long() for line in lines if line.strip()]
    check(words, f"--kl-text must hold words, got the empty file {path}")
    text = torch.cat(words)
    unknown = int(text.eq(dictionary.unk()).sum())
    got = f"{unknown:,} unknown ones of {len(text):,} in {path}: apply the BPE of the training"
    check(unknown <= len(text) / 2, f"--kl-text must hold words of the dictionary, got {got}")
    return text


def shown(values: Iterable[float]) -> str:
    """Return the number of each layer with its value."""
    return ", ".join(f"{index}: {value:.4f}" for index, value in enumerate(values))
