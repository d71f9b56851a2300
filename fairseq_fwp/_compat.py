"""What fairseq 0.12 needs on today's Python, numpy and torch. Each mend is conditional, and tested.

A mend replaces one attribute of one fairseq module, never a file. `apply()` runs them all once.
"""

import argparse
import codecs
import contextlib
import errno
import functools
import importlib.util
import logging
import operator
import os
import pickle
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

# Warnings of fairseq's own imports and calls that a user of this plugin can do nothing about.
KNOWN_WARNINGS = (
    (r"hydra\.experimental\.(initialize|compose)\(\) is no longer experimental", UserWarning),
    (r"In 'config': Usage of deprecated keyword in package header", UserWarning),
    (r"\s*'config' is validated against ConfigStore schema with the same name", UserWarning),
    (r"\s*The strict flag in the compose API is deprecated", UserWarning),
    (r"\s*The version_base parameter is not specified", UserWarning),
    (r"`torch\.cuda\.amp\.(custom_fwd|custom_bwd|autocast|GradScaler)\(.*\)` is deprecated", FutureWarning),
    (r"'pin_memory' argument is set as true but no accelerator is found", UserWarning),
)

# What torch.load asks the environment.
TRUST, DISTRUST = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def apply() -> None:
    """Runs every mend; a second call changes nothing."""
    silence_known_warnings()
    for mend in (
        restore_numpy_compat,
        allow_checkpoint_types,
        keep_last_batch,
        keep_batches_of_first_epoch,
        count_below_zero,
        forget_tpu,
        join_launched_processes,
        pass_over_missing_biases,
        explain_damaged_checkpoints,
        explain_missing_dictionary,
        refuse_unscored_tokens,
        refuse_wide_context,
        save_for_every_process,
        count_diverse_beams_by_batch,
        explain_wide_cutoffs,
    ):
        mend()


def silence_known_warnings() -> None:
    """Hides the warnings above by their exact text, and the advice of a speech task to install tensorboardX."""
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    for message, category in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)


def restore_numpy_compat() -> None:
    """numpy 2 has no `np.compat`; fairseq's `--sample-break-mode eos` reads `np.compat.long`."""
    if not hasattr(np, "compat"):
        np.compat = argparse.Namespace(long=int)  # type: ignore[attr-defined]


def allow_checkpoint_types() -> None:
    """torch >= 2.6 unpickles tensors only; fairseq's checkpoints and object broadcasts hold these types too."""
    from fairseq.distributed import utils as distributed_utils
    from omegaconf import DictConfig, ListConfig, base, nodes

    torch.serialization.add_safe_globals(
        [argparse.Namespace, DictConfig, ListConfig, base.ContainerMetadata, base.Metadata, defaultdict]
        + [distributed_utils._TensorPlaceholder]
        + [nodes.AnyNode, nodes.BooleanNode, nodes.FloatNode, nodes.IntegerNode, nodes.StringNode]
        + [Any, dict, list, int]
        # What --best-checkpoint-metric bleu leaves in them: its value, and the n-grams counted.
        + [np.ndarray, np.dtype, np.ndarray(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
        + [type(np.dtype(number)) for number in (np.float64, np.float32, np.int64, np.int32)]
        + [codecs.encode]  # their bytes; torch 2.4 does not allow it by itself
    )


def keep_last_batch() -> None:
    """fairseq drops a last batch whose size is no multiple of --required-batch-size-multiple (8 by default)."""
    from fairseq.data import data_utils

    def mend(batch_by_size: Callable[..., Any]) -> Callable[..., Any]:
        def batch_all(indices: Any, *args: Any, **kwargs: Any) -> Any:
            indices = np.fromiter(indices, dtype=np.int64) if not isinstance(indices, np.ndarray) else indices
            batches = batch_by_size(indices, *args, **kwargs) if len(indices) else []
            # Fixed shapes part the data otherwise; elsewhere batches are consecutive and only the last can be missing.
            kept = sum(len(batch) for batch in batches)
            if kept < len(indices) and kwargs.get("fixed_shapes") is None:
                batches = [*batches, indices[kept:]]
            return batches

        return batch_all

    replace(data_utils, "batch_by_size", mend)


def keep_batches_of_first_epoch() -> None:
    """fairseq deals the text into batches once and shuffles those in every epoch; resumed, it deals by another seed.

    In mid-epoch a resumed run would read some samples again, others never, and at its end go on in another order.
    """
    from fairseq.tasks import FairseqTask

    def mend(get_batch_iterator: Callable[..., Any]) -> Callable[..., Any]:
        def get_with_seed_of_first_epoch(
            self: Any, dataset: Any, *args: Any, seed: int = 1, epoch: int = 1, **kwargs: Any
        ) -> Any:
            anew = any(map(kwargs.get, ("disable_iterator_cache", "update_epoch_batch_itr")))
            kept = self.can_reuse_epoch_itr(dataset) and not anew and not getattr(self.cfg, "rebuild_batches", False)
            if epoch == 1 or not kept or dataset in self.dataset_to_epoch_iter:
                return get_batch_iterator(self, dataset, *args, seed=seed, epoch=epoch, **kwargs)
            # Batches are made by the sum of both, shuffled by the iterator's own seed and epoch.
            iterator = get_batch_iterator(self, dataset, *args, seed=seed + 1 - epoch, epoch=epoch, **kwargs)
            iterator.seed = seed
            return iterator

        return get_with_seed_of_first_epoch

    replace(FairseqTask, "get_batch_iterator", mend)


def count_below_zero() -> None:
    """numpy 2 keeps fairseq's unsigned ends of blocks unsigned: that of a block of one token, less two, is 65,535."""
    from fairseq.data import token_block_dataset

    replace(token_block_dataset, "best_fitting_int_dtype", lambda best_fitting: lambda largest: np.int64)


def forget_tpu() -> None:
    """fairseq takes --bf16 for a TPU run and looks for torch_xla, also where there is none."""
    from fairseq.distributed import utils as distributed_utils

    def mend(call_main: Callable[..., Any]) -> Callable[..., Any]:
        def call_without_tpu(cfg: Any, main: Any, **kwargs: Any) -> Any:
            if cfg.common.tpu and cfg.common.bf16 and importlib.util.find_spec("torch_xla") is None:
                cfg.common.tpu = False
            return call_main(cfg, main, **kwargs)

        return call_without_tpu

    replace(distributed_utils, "call_main", mend)


def join_launched_processes() -> None:
    """Of processes that torchrun starts with one GPU or none each, fairseq has every one train alone, to one folder."""
    from fairseq.distributed import utils as distributed_utils

    def mend(infer: Callable[..., None]) -> Callable[..., None]:
        def infer_or_join(cfg: Any, *args: Any, **kwargs: Any) -> None:
            launched = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"} <= os.environ.keys()
            together = int(os.environ["WORLD_SIZE"]) if launched else 1
            if together == 1 or cfg.distributed_init_method is not None or cfg.tpu:
                return infer(cfg, *args, **kwargs)
            cfg.distributed_world_size = together  # 1 is fairseq's word for a process that is alone
            if torch.cuda.device_count():
                return infer(cfg, *args, **kwargs)
            cfg.distributed_init_method, cfg.distributed_no_spawn = "env://", True
            cfg.distributed_rank, cfg.device_id = int(os.environ["RANK"]), 0
            return None

        return infer_or_join

    replace(distributed_utils, "infer_init_method", mend)


def pass_over_missing_biases() -> None:
    """fairseq logs every pair of layers without a bias as sharing one parameter."""
    from fairseq import trainer

    def mend(catalog: Callable[..., Any]) -> Callable[..., Any]:
        def catalog_parameters(module: Any, *args: Any, **kwargs: Any) -> Any:
            groups = catalog(module, *args, **kwargs)
            if groups is None:  # an inner call of its recursion
                return None
            return [paths for paths in groups if operator.attrgetter(paths[0])(module) is not None]

        return catalog_parameters

    replace(trainer, "_catalog_shared_params", mend)


def explain_damaged_checkpoints() -> None:
    """A file that is no checkpoint, or cut short, is named with its size instead of an error of the zip reader."""
    from fairseq import checkpoint_utils

    def mend(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_or_explain(path: str, *args: Any, **kwargs: Any) -> Any:
            try:
                with _weights_only():
                    return load(path, *args, **kwargs)
            except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
                # A zip archive that was cut short sends its reader to places before its beginning.
                if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EISDIR):
                    raise
                # Whole, but with objects beside its tensors.
                if untrusted := re.search(r"GLOBAL (\S+)|unrecognized|only build", str(error)):
                    raise RuntimeError(
                        f"{path} holds pickled objects ({untrusted[1] or 'of unknown types'}), which could run any "
                        f"code: if you trust where it comes from, set {TRUST}=1"
                    ) from error
                size = os.path.getsize(path) if os.path.exists(path) else 0
                raise RuntimeError(
                    f"{path} ({size:,} bytes) is not a complete checkpoint: it was cut short or is another kind of "
                    "file; copy it again, or use another checkpoint of the same folder"
                ) from error
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                if not _holds_model(path):
                    raise RuntimeError(
                        f"{path} is no checkpoint of fairseq: give one that fairseq-train has written, or make one of "
                        "it with fwp-convert"
                    ) from error
                if isinstance(error, KeyError):
                    raise RuntimeError(
                        f"{path} has a model, but not all that fairseq saves beside it (no {error}): it was damaged, "
                        "or written by something else; copy it again, or use another checkpoint of the same folder"
                    ) from error
                raise

        return load_or_explain

    replace(checkpoint_utils, "load_checkpoint_to_cpu", mend)


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    """torch 2.4 and 2.5 run what is pickled in a file unless they are told not to, as later ones are unless trusted."""
    if os.environ.get(TRUST, "").lower() in ("1", "y", "yes", "true"):  # torch's own words
        yield
        return
    before = os.environ.get(DISTRUST)
    os.environ[DISTRUST] = "1"
    try:
        yield
    finally:
        os.environ.pop(DISTRUST)
        if before is not None:
            os.environ[DISTRUST] = before


def _holds_model(path: str) -> bool:
    """Whether a file is, for all we can tell, a checkpoint of fairseq."""
    try:
        with _weights_only(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has just said that the file is trusted
            found = torch.load(path, map_location="cpu")
    except Exception:  # whatever a damaged pickle leads to
        return False
    return isinstance(found, dict) and "model" in found


def explain_missing_dictionary() -> None:
    """A data folder without dict.txt is named, with the command that makes one."""
    from fairseq import utils
    from fairseq.tasks.language_modeling import LanguageModelingTask

    def mend(setup_dictionary: Callable[..., Any]) -> Callable[..., Any]:
        def setup_or_explain(cls: type, args: Any, **kwargs: Any) -> Any:
            first = utils.split_paths(args.data or "")[0]
            if first and not os.path.exists(os.path.join(first, "dict.txt")):
                raise FileNotFoundError(
                    f"no dict.txt in the data folder {first!r}: pass a folder that fairseq-preprocess --only-source "
                    "has written"
                )
            return setup_dictionary(args, **kwargs)

        return classmethod(setup_or_explain)  # type: ignore[return-value]

    replace(LanguageModelingTask, "setup_dictionary", mend)


def refuse_unscored_tokens() -> None:
    """fairseq-eval-lm leaves out blocks longer than the model takes and reports the perplexity of the rest."""
    from fairseq.tasks.language_modeling import LanguageModelingTask

    def mend(eval_lm_dataloader: Callable[..., Any]) -> Callable[..., Any]:
        def check_lengths(
            self: Any, dataset: Any, *args: Any, max_positions: Any = None, context_window: int = 0, **kwargs: Any
        ) -> Any:
            longest = int(max(dataset.sizes, default=0)) + context_window
            limit = min(max_positions) if isinstance(max_positions, Iterable) else max_positions
            if longest == 0:
                raise ValueError("nothing to evaluate: the data set is empty")
            if limit is not None and longest > limit:
                raise ValueError(
                    f"text of {longest} tokens in one piece is longer than the {limit} that the model was trained on: "
                    f"pass --tokens-per-sample {limit} with --sample-break-mode none, or allow more with "
                    f"--model-overrides \"{{'max_target_positions': {longest}}}\""
                )
            return eval_lm_dataloader(
                self, dataset, *args, max_positions=max_positions, context_window=context_window, **kwargs
            )

        return check_lengths

    replace(LanguageModelingTask, "eval_lm_dataloader", mend)


def refuse_wide_context() -> None:
    """fairseq-eval-lm takes --context-window off --tokens-per-sample and fails on what is not positive."""
    from fairseq.tasks.language_modeling import LanguageModelingTask

    def mend(load_dataset: Callable[..., Any]) -> Callable[..., Any]:
        def check_room(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.args.tokens_per_sample < 1:
                raise ValueError(
                    "no tokens are left to score in a block: --context-window must be smaller than --tokens-per-sample"
                )
            return load_dataset(self, *args, **kwargs)

        return check_room

    replace(LanguageModelingTask, "load_dataset", mend)


def save_for_every_process() -> None:
    """fairseq asks the first process alone what a checkpoint is to hold; streams have a state in each of them."""
    from fairseq import checkpoint_utils

    def mend(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def collect_and_save(cfg: Any, trainer: Any, epoch_itr: Any, *args: Any, **kwargs: Any) -> Any:
            if hasattr(epoch_itr, "collect_states"):
                epoch_itr.collect_states(trainer.data_parallel_process_group)
            return save_checkpoint(cfg, trainer, epoch_itr, *args, **kwargs)

        return collect_and_save

    replace(checkpoint_utils, "save_checkpoint", mend)


def count_diverse_beams_by_batch() -> None:
    """Diverse beams look up a table with a row per sentence of the batch by the sentence's number in the data set."""
    from fairseq.search import DiverseBeamSearch

    def mend(step: Callable[..., Any]) -> Callable[..., Any]:
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
            # Each sentence still in the batch, as its row in the whole batch.
            rows = (original_batch_idxs.unsqueeze(1) == self.sentences).int().argmax(1)
            return step(self, number, lprobs, scores, prev_output_tokens, rows)

        return step_by_row

    replace(DiverseBeamSearch, "step", mend)


def explain_wide_cutoffs() -> None:
    """fairseq's own adaptive embeddings and softmax stop at cutoffs beyond the vocabulary without naming their flag."""
    from fairseq.modules import AdaptiveInput, AdaptiveSoftmax

    for kind, flag in ((AdaptiveInput, "--adaptive-input-cutoff"), (AdaptiveSoftmax, "--adaptive-softmax-cutoff")):

        def mend(init: Callable[..., None], flag: str = flag) -> Callable[..., None]:
            def init_or_explain(self: Any, vocab_size: int, *args: Any, **kwargs: Any) -> None:
                try:
                    init(self, vocab_size, *args, **kwargs)
                except AssertionError as error:
                    raise ValueError(
                        f"{flag} must be at most the vocabulary's {vocab_size:,} words: set it lower, or give more text"
                    ) from error

            return init_or_explain

        replace(kind, "__init__", mend)


def replace(owner: Any, name: str, mend: Callable[[Callable[..., Any]], Any]) -> None:
    """Replaces owner.name by mend(owner.name), once for each module that has a mend of it."""
    original = getattr(owner, name)
    mended_by = getattr(original, "mended_by", ())
    if mend.__module__ in mended_by:
        return
    replacement = mend(original)
    function = getattr(replacement, "__func__", replacement)
    functools.update_wrapper(function, original)
    function.mended_by = (*mended_by, mend.__module__)
    setattr(owner, name, replacement)
