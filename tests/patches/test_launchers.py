"""Launchers of processes on several machines, as in recipes/wikitext103/README.md: torchrun."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq.dataclass.configs import DistributedTrainingConfig
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf
from support.command_server import PLUGIN, shared
from support.pairwise import looped
from support.small_text import training, write_text


@pytest.fixture
def infer(monkeypatch):
    """A function infer(GPUs, **environment): fairseq's configuration on a machine of a launcher."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "MASTER_", "WORLD_SIZE", "RANK")):
            monkeypatch.delenv(name)

    def infer(gpus, **environment):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        # fairseq's number of processes, from its import.
        given = {"distributed_world_size": max(1, gpus), "tpu": False}
        cfg = OmegaConf.merge(OmegaConf.structured(DistributedTrainingConfig), given)
        with monkeypatch.context() as launched:
            for name, value in environment.items():
                launched.setenv(name, str(value))
            distributed_utils.infer_init_method(cfg)
        return cfg

    return infer


# GPUs that a process sees, processes of a node, nodes
@looped("gpus, local, nodes", [(8, 8, 1), (8, 8, 2), (1, 1, 2), (0, 1, 2), (0, 2, 1), (8, 4, 2)])
def test_processes_of_torchrun_find_each_other(infer, gpus, local, nodes):
    for rank in range(local * nodes):
        cfg = infer(gpus, MASTER_ADDR="first", MASTER_PORT=29500, WORLD_SIZE=local * nodes, RANK=rank)
        assert cfg.distributed_init_method == "env://" and cfg.distributed_no_spawn
        assert (cfg.distributed_world_size, cfg.distributed_rank) == (local * nodes, rank)
        assert cfg.device_id == (rank % gpus if gpus else 0)


def test_one_process_has_no_others(infer):
    assert infer(0, MASTER_ADDR="first", MASTER_PORT=29500, WORLD_SIZE=1, RANK=0).distributed_init_method is None
    assert infer(0, WORLD_SIZE=2).distributed_init_method is None  # of something else: no address


@pytest.mark.parametrize("flags", [[], pytest.param(["--bf16"], marks=pytest.mark.slow)], ids=" ".join)
def test_processes_on_cpus_train_by_each_backend(tmp_path, flags):
    data, found = write_text(tmp_path / "data"), {}
    flags = ["--criterion", "cross_entropy", "--max-update", 3, *flags]
    for backend in ("legacy_ddp", "pytorch_ddp"):
        folder, log = tmp_path / backend, tmp_path / f"{backend}.log"
        arguments = training(data, folder, "samples", *flags, "--ddp-backend", backend)
        assert shared().run("fairseq-train", *arguments, log=log, processes=2) == 0, log.read_text()
        found[backend] = torch.load(folder / "checkpoint_last.pt")["model"]
    torch.testing.assert_close(found["pytorch_ddp"], found["legacy_ddp"])


PROGRAMS = Path(sys.executable).parent


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("torchrun", path=str(PROGRAMS)) is None, reason="needs torchrun")
def test_two_nodes_of_torchrun_train_together(tmp_path):
    """Processes on CPUs share one global batch: their losses and numbers of updates are the same."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = ["--distributed-backend", "gloo", "--max-update", 4, "--log-format", "simple", "--log-interval", 1]
    command = training(write_text(tmp_path / "data"), tmp_path / "save", "samples", *flags, "--user-dir", PLUGIN)
    nodes = []
    for rank in (0, 1):
        node = ["--nnodes", 2, "--node_rank", rank, "--nproc_per_node", 1, "--master_addr", "localhost"]
        line = [PROGRAMS / "torchrun", *node, "--master_port", port, PROGRAMS / "fairseq-train", *command]
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        nodes.append(subprocess.Popen([*map(str, line)], env=os.environ | {"OMP_NUM_THREADS": "1"}, **how))
    logs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], logs
    assert logs[0].count("train_inner") == 4 and "train_inner" not in logs[1]
    assert "'distributed_world_size': 2" in logs[0] and re.search(r"training on 2 devices", logs[0])
    assert torch.load(tmp_path / "save" / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 4
