"""Launchers of processes on several machines, as in recipes/wikitext103/README.md: torchrun and SLURM."""

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
from small_text import write_text
from test_damaged_files import training

import fairseq_fwp

LAUNCHERS = ("SLURM", "MASTER_", "WORLD_SIZE", "RANK")


@pytest.fixture
def machine(monkeypatch):
    """A function machine(gpus, **environment): a machine with that many GPUs and a launcher's variables."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)

    def made(gpus, **environment):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))

    return made


def infer(**settings):
    """Return fairseq's configuration from flags and environment."""
    # fairseq's number of processes, from its import.
    default = {"distributed_world_size": max(1, torch.cuda.device_count()), "tpu": False}
    cfg = OmegaConf.merge(OmegaConf.structured(DistributedTrainingConfig), default | settings)
    distributed_utils.infer_init_method(cfg)
    return cfg


# GPUs that a process sees, processes of a node, nodes
@pytest.mark.parametrize("gpus, local, nodes", [(8, 8, 1), (8, 8, 2), (1, 1, 2), (0, 1, 2), (0, 2, 1), (8, 4, 2)])
def test_processes_of_torchrun_find_each_other(machine, gpus, local, nodes):
    for rank in range(local * nodes):
        machine(gpus, MASTER_ADDR="first", MASTER_PORT=29500, WORLD_SIZE=local * nodes, RANK=rank)
        cfg = infer()
        assert cfg.distributed_init_method == "env://" and cfg.distributed_no_spawn
        assert (cfg.distributed_world_size, cfg.distributed_rank) == (local * nodes, rank)
        assert cfg.device_id == (rank % gpus if gpus else 0)


def test_a_process_alone_stays_alone(machine):
    machine(0, MASTER_ADDR="first", MASTER_PORT=29500, WORLD_SIZE=1, RANK=0)
    assert infer().distributed_init_method is None
    machine(0, WORLD_SIZE=2)  # of something else: no address
    os.environ.pop("MASTER_ADDR")
    assert infer().distributed_init_method is None


@pytest.mark.parametrize("count", [{"SLURM_NTASKS_PER_NODE": 8}, {"SLURM_NTASKS": 16}])
def test_tasks_of_slurm_find_each_other(machine, monkeypatch, count):
    asked = []
    monkeypatch.setattr(subprocess, "check_output", lambda command: asked.append(command) or b"first\nsecond\n")
    for rank in range(16):
        machine(8, SLURM_STEP_NODELIST="node[1-2]", SLURM_NNODES=2, SLURM_PROCID=rank, SLURM_LOCALID=rank % 8, **count)
        cfg = infer(distributed_world_size=16, distributed_port=29500)
        assert cfg.distributed_init_method == "tcp://first:29500" and cfg.distributed_no_spawn
        assert (cfg.distributed_world_size, cfg.distributed_rank, cfg.device_id) == (16, rank, rank % 8)
    assert asked[0] == ["scontrol", "show", "hostnames", "node[1-2]"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("torchrun", path=str(Path(sys.executable).parent)) is None, reason="needs torchrun")
def test_two_nodes_of_torchrun_train_together(tmp_path):
    """Processes on CPUs share one global batch: their losses and numbers of updates are the same."""
    data = tmp_path / "data"
    data.mkdir()
    write_text(data)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    programs = Path(sys.executable).parent
    user_dir = ["--user-dir", Path(fairseq_fwp.__file__).parent]
    flags = ["--distributed-backend", "gloo", "--max-update", 4, "--log-format", "simple", "--log-interval", 1]
    command = [programs / "fairseq-train", *training(data, tmp_path / "save", "samples", *flags), *user_dir]
    nodes = []
    for rank in (0, 1):
        node = ["--nnodes", 2, "--node_rank", rank, "--nproc_per_node", 1, "--master_addr", "localhost"]
        nodes.append(
            subprocess.Popen(
                [*map(str, [programs / "torchrun", *node, "--master_port", port, *command])],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    logs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], logs
    assert len(re.findall(r"train_inner", logs[0])) == 4 and "train_inner" not in logs[1]
    assert "distributed_world_size=2" in logs[0] and re.search(r"training on 2 devices", logs[0])
    assert torch.load(tmp_path / "save" / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 4
