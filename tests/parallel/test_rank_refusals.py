"""What bad input gets on several ranks: one message from one rank, an exit code that is not 0, nothing left running."""

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run, said
from test_torchrun import left_over

from torchrl_perf import cli
from torchrl_perf.parallel import RankError, Ranks, RankStoppedError

joining = importlib.import_module("torchrl_perf.parallel.join")
ROOT = Path(__file__).parents[2]
SMALL = ["train", "ppo", "--num-envs", "12", "--num-steps", "4", "--total-steps", "96", "--no-progress"]


def command(folder, *options, **environment):
    """Runs ``torchrl-perf`` as a user does; its exit code, and what it said, without lines of the run itself."""
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    words = [sys.executable, "-m", "torchrl_perf", *SMALL, *options]
    started = subprocess.Popen(
        words, cwd=folder, env={**os.environ, **given}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        told, _ = started.communicate(timeout=240)
    finally:
        started.kill()
    return started.returncode, told


@pytest.mark.slow
def test_envs_that_ranks_do_not_divide(tmp_path):
    code, told = command(tmp_path, "--device", "cpu", "--ranks", "5")
    assert code == 1
    assert told.count("torchrl-perf: ") == 1
    assert "num_envs: expected a multiple of the 5 ranks, received 12. Remedy: num_envs=10" in told
    assert not left_over(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_gpus_that_are_not_there(capsys):
    assert cli.main([*SMALL, "--gpus", "4"]) == 1
    told = capsys.readouterr().err
    assert told.count("torchrl-perf: ") == 1
    assert "--gpus: expected a machine with GPUs that PyTorch sees, received 4 on one without" in told
    assert "Remedy: --ranks 4 --device cpu" in told


@pytest.mark.parametrize(
    ("there", "nccl", "words"),
    [
        (3, True, "gpus: expected a GPU for each rank of this host, received 3 for rank 3"),
        (2, True, "gpus: expected a GPU for each rank of this host, received 2 for rank 3"),
        (4, False, "ranks: expected a PyTorch with NCCL for several ranks on CUDA, received one without"),
    ],
    ids=["first", "other", "nccl"],
)
def test_a_rank_without_a_gpu_and_a_build_without_nccl(monkeypatch, there, nccl, words):
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    with pytest.raises(RankError if there == 3 else RankStoppedError, match=words):
        joining.join("cuda")
    assert not dist.is_initialized()


@pytest.mark.slow
def test_ranks_without_gpus_are_told_by_one(tmp_path):
    words = {
        "without_gpus": "gpus: expected a GPU for each rank of this host, received 0",
        "without_nccl": "ranks: expected a PyTorch with NCCL",
        "other_versions": "ranks: expected the same torchrl_perf on all, received others. torchrl_perf: expected ",
    }
    assert run(tmp_path, 3, *words) == {check: [1, 1, 1] for check in words}
    for check, expected in words.items():
        told = "".join(said(tmp_path, check, rank) for rank in range(3))
        assert told.count("torchrl-perf: ") == 1, told
        assert expected in told


def test_a_host_without_gpus_among_others_is_named_at_once(tmp_path):
    assert run(tmp_path, 3, "host_without_gpus") == {"host_without_gpus": [1, 1, 1]}
    told = "".join(said(tmp_path, "host_without_gpus", rank) for rank in range(3))
    assert told.count("torchrl-perf: ") == 1, told
    assert "ranks: expected all on cuda, as rank 0 is, received cpu on rank 2 (host " in told


def test_multicast_stays_off_where_nobody_turns_it_on(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RankError, match="expected 1 processes that meet at"):
        joining._start(torch.device("cuda", 0), 1.0)
    assert os.environ["NCCL_NVLS_ENABLE"] == "2"
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


@pytest.mark.slow
def test_a_port_in_use(tmp_path):
    """Of a first rank whose address another program has; ``torchrun`` and ``--ranks`` find a free one themselves."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        life = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", **place}
        code, told = command(tmp_path, "--device", "cpu", "--rank-timeout", "5", **life)
    assert code == 1
    assert told.count("torchrl-perf: ") == 1
    assert f"expected 2 processes that meet at 127.0.0.1:{place['MASTER_PORT']}, received at rank 0" in told
    assert "Remedy: another --master-port where it is in use" in told
    assert not left_over(tmp_path)


def test_symmetric_memory_is_for_ranks_of_one_host(monkeypatch):
    """Two hosts of eight GPUs with two ranks each have as many GPUs as there are ranks, and no memory in common."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    for kernels, one_shot in ((["a"] * 4, True), (["a", "a", "b", "b"], False)):

        def gather(found, own, group, kernels=kernels):
            found[:] = kernels

        monkeypatch.setattr(dist, "all_gather_object", gather)
        made = Ranks(torch.device("cuda", 0), "a group")
        assert (made._one_shot is not None) is one_shot
