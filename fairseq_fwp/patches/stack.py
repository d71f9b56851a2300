"""Patches for the parts of fairseq that today's Python, numpy and torch break."""

import argparse
import codecs
import importlib.util
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Original = Callable[..., Any]


def restore_numpy_compat() -> None:
    """numpy 2 has no `np.compat`; fairseq's `--sample-break-mode eos` reads `np.compat.long`."""
    if not hasattr(np, "compat"):
        np.compat = argparse.Namespace(long=int)  # type: ignore[attr-defined]


def allow_checkpoint_types() -> None:
    """torch >= 2.6 unpickles tensors only; fairseq's checkpoints and object broadcasts hold other types too."""
    from fairseq.data import Dictionary
    from fairseq.distributed import utils as distributed_utils
    from omegaconf import DictConfig, ListConfig, base, nodes

    torch.serialization.add_safe_globals(
        [argparse.Namespace, DictConfig, ListConfig, base.ContainerMetadata, base.Metadata, defaultdict]
        + [distributed_utils._TensorPlaceholder, Dictionary]  # for HuBERT, and for fine-tuning on speech
        + [nodes.AnyNode, nodes.BooleanNode, nodes.FloatNode, nodes.IntegerNode, nodes.StringNode]
        + [Any, dict, list, int]
        # Saved with --best-checkpoint-metric bleu: its value, and counts of n-grams.
        + [np.ndarray, np.dtype, np.ndarray(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
        + [type(np.dtype(number)) for number in (np.float64, np.float32, np.int64, np.int32)]
        + [codecs.encode]  # for their bytes; torch 2.4 does not allow it by default
    )


def count_below_zero(best_fitting: Original) -> Any:
    """fairseq's ends of blocks are unsigned and stay so in numpy 2: in a block of one token, 1 - 2 becomes 65,535."""
    return lambda largest: np.int64


def forget_tpu(call_main: Original) -> Any:
    """fairseq treats --bf16 as a run on a TPU and stops where torch_xla is not installed."""

    def call_without_tpu(cfg: Any, main: Any, **kwargs: Any) -> Any:
        if cfg.common.tpu and cfg.common.bf16 and importlib.util.find_spec("torch_xla") is None:
            cfg.common.tpu = False
        return call_main(cfg, main, **kwargs)

    return call_without_tpu


def count_diverse_beams_by_batch(step: Original) -> Any:
    """Diverse beam search uses sentence numbers of the data set as rows of the batch. It fails or mixes them up."""

    def step_by_row(
        self: Any,
        number: int,
        lprobs: Any,
        scores: Any,
        prev_output_tokens: Any = None,
        original_batch_idxs: Any = None,
    ) -> Any:
        if number == 0:
            self.sentences = original_batch_idxs
        # The row in the whole batch of each sentence that is still in the batch.
        rows = (original_batch_idxs.unsqueeze(1) == self.sentences).int().argmax(1)
        return step(self, number, lprobs, scores, prev_output_tokens, rows)

    return step_by_row
