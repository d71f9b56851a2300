"""Patches for several processes of one training."""

import os
from collections.abc import Callable
from typing import Any

import torch

Original = Callable[..., Any]


def join_launched_processes(infer: Original) -> Any:
    """If torchrun gives each process at most one GPU, fairseq trains them separately, all into one folder."""

    def infer_or_join(cfg: Any, *args: Any, **kwargs: Any) -> None:
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

    return infer_or_join


def save_for_every_process(save_checkpoint: Original) -> Any:
    """fairseq asks only the first process what a checkpoint must hold; streams have a state in each process."""

    def collect_and_save(cfg: Any, trainer: Any, epoch_itr: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(epoch_itr, "collect_states"):
            epoch_itr.collect_states(trainer.data_parallel_process_group)
        return save_checkpoint(cfg, trainer, epoch_itr, *args, **kwargs)

    return collect_and_save
