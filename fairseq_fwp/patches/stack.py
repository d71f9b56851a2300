"""Parts of fairseq that today's Python and packages break, or that do not work with the rest of fairseq."""

import argparse
import codecs
import importlib.util
import os
import sys
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from fairseq_fwp.patches.patch import patch


@patch("numpy.compat", since="numpy 2.0")
def restore_numpy_compat() -> None:
    """Define `np.compat.long`: fairseq's `--sample-break-mode eos` reads it, and numpy 2 has no `np.compat`."""
    if not hasattr(np, "compat"):
        np.compat = argparse.Namespace(long=int)  # type: ignore[attr-defined]


@patch("torch.serialization", since="torch 2.6")
def allow_checkpoint_types() -> None:
    """Allow the types in fairseq's checkpoints and object broadcasts: torch >= 2.6 unpickles tensors only."""
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


@patch("fairseq.data.token_block_dataset.best_fitting_int_dtype", since="numpy 2.0")
def count_below_zero(best_fitting, largest):
    """Count ends of blocks with a sign: in a block of one token, fairseq's 1 - 2 becomes 65,535 in numpy 2."""
    return np.int64


@patch("fairseq.utils.import_user_module")
def import_once(import_user_module, args):
    """Take every path of an imported plug-in for it: fairseq refuses a link to it, as `not globally unique`."""
    folder = getattr(args, "user_dir", None)
    if folder is None or not _is_imported(folder):
        import_user_module(args)


def _is_imported(folder: str) -> bool:
    import fairseq

    # fairseq looks in these places, in this order.
    places = (os.path.join(base, folder) for base in ("", fairseq.__path__[0], os.path.dirname(fairseq.__path__[0])))
    path = next(filter(os.path.exists, places), None)
    module = sys.modules.get(os.path.basename(os.path.abspath(folder)))
    return path is not None and any(os.path.samefile(path, imported) for imported in getattr(module, "__path__", ()))


@patch("fairseq.distributed.utils.call_main")
def forget_tpu(call_main, cfg, main, **kwargs):
    """Run --bf16 on the present device: fairseq takes it for a TPU, and stops where torch_xla is not installed."""
    if cfg.common.tpu and cfg.common.bf16 and importlib.util.find_spec("torch_xla") is None:
        cfg.common.tpu = cfg.distributed_training.tpu = False
    return call_main(cfg, main, **kwargs)


@patch("fairseq.distributed.utils.infer_init_method")
def join_launched_processes(infer, cfg, *args, **kwargs):
    """Join the processes of torchrun: with at most one GPU each, fairseq trains them separately, into one folder."""
    launched = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"} <= os.environ.keys()
    together = int(os.environ["WORLD_SIZE"]) if launched else 1
    if together == 1 or cfg.distributed_init_method is not None or cfg.tpu:
        return infer(cfg, *args, **kwargs)
    cfg.distributed_world_size = together  # 1 tells fairseq that there is only one process
    if torch.cuda.device_count():
        return infer(cfg, *args, **kwargs)
    cfg.distributed_init_method, cfg.distributed_no_spawn = "env://", True
    cfg.distributed_rank, cfg.device_id = int(os.environ["RANK"]), 0
    return None


@patch("fairseq.models.distributed_fairseq_model.DistributedDataParallel")
def join_processes_on_cpus() -> None:
    """Train together on CPUs by --ddp-backend pytorch_ddp, the default: fairseq gives a number of a GPU in any case."""
    from fairseq.models import distributed_fairseq_model

    distributed_fairseq_model.DistributedDataParallel = _data_parallel


def _data_parallel(module: torch.nn.Module, device_ids: Any, output_device: Any, **options: Any) -> torch.nn.Module:
    if next(module.parameters()).device.type == "cpu":
        device_ids = output_device = None
    return DistributedDataParallel(module, device_ids, output_device, **options)


@patch("bitarray.util.rindex", since="bitarray 3.0")
def restore_rindex() -> None:
    """Define `bitarray.util.rindex`: fairseq finds the end of Huffman codes with it, and bitarray 3 has none."""
    from bitarray import util

    if not hasattr(util, "rindex"):
        util.rindex = lambda bits, value=1: bits.index(value, right=True)  # type: ignore[attr-defined]


@patch("fairseq.data.legacy.masked_lm_dictionary.MaskedLMDictionary.load", since="fairseq 0.12.3")
def load_masked_dictionary(load, cls, f, add_special_symbols=True):
    """Accept an argument with which fairseq 0.12.3 loads every dictionary: those of masked models refuse it."""
    dictionary = cls()
    dictionary.add_from_file(f)
    return dictionary


@patch("fairseq.models.hubert.hubert_asr.HubertEncoder.__init__", since="fairseq 0.12.3")
def give_hubert_its_option(init, self, cfg, task):
    """Build a HuBERT model with CTC: fairseq 0.12.3 reads an option that only sequence-to-sequence models have."""
    from omegaconf import open_dict

    if "autoregressive" in cfg:
        return init(self, cfg, task)
    with open_dict(cfg):
        cfg.autoregressive = False
        init(self, cfg, task)
        del cfg.autoregressive  # the checkpoint's configuration stays that of the model
    return None


@patch("fairseq.utils.get_activation_fn")
def name_the_linear_activation(get, activation):
    """Return a function with a name for "linear": a model with fairseq's, which has none, cannot be pickled."""
    return _linear if activation == "linear" else get(activation)


def _linear(x: Any) -> Any:
    return x
