"""Ranks that ``torchrun`` starts: restarts from the newest checkpoint of all, and agents that stand for two hosts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_processes import free_port
from test_lost_ranks import parameters, rows

from torchrl_perf.trainers.run.rank_folder import newest_common

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SECONDS = 280


def agents(folder, check, *options, hosts=1, ranks=1):
    """Starts an agent of torchrun for each host; their exit codes and what they and their ranks printed."""
    endpoint = f"127.0.0.1:{free_port()}"
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts), "--nproc-per-node", str(ranks)]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "test", "--local-addr", "127.0.0.1"]
    words += ["--monitor-interval", "0.1", *options, str(HERE / "torchrun_check.py"), check]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    files = [(folder / f"{check}-{host}.txt").open("w+") for host in range(hosts)]
    started = [
        subprocess.Popen(words, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT) for file in files
    ]
    try:
        codes = [agent.wait(SECONDS) for agent in started]
    finally:
        for agent in started:
            agent.kill()
            agent.wait()
    told = []
    for file in files:
        file.seek(0)
        told.append(file.read())
        file.close()
    return codes, told


def left_over(folder):
    """Processes that still work in a folder."""
    places = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            place = os.readlink(process / "cwd")
        except OSError:
            continue
        if Path(place) == folder:
            places.append(process.name)
    return places


def test_a_restart_goes_on_from_the_newest_checkpoint_of_all(tmp_path):
    codes, (told,) = agents(tmp_path, "killed_once", "--max-restarts", "1", ranks=2)
    assert codes == [0], told
    assert told.count("torchrl-perf: ") == 1, told
    assert "rank 1 of 2 was lost in iteration 7 (env step 576)" in told
    assert "resume: runs/ppo-CartPole-0 goes on from 000000004.pt, 384 of 960 steps" in told
    resumed = tmp_path / "runs/ppo-CartPole-0"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [resumed.name], "one run"
    codes, (told,) = agents(tmp_path, "whole_run", ranks=2)
    assert codes == [0], told
    whole = tmp_path / "runs/ppo-CartPole-0-2"
    assert rows(resumed) == rows(whole)
    for one, other in zip(*(parameters(newest_common(path, 2)).values() for path in (resumed, whole)), strict=True):
        assert torch.equal(one, other)


def test_without_restarts_nothing_is_left_and_the_code_is_not_0(tmp_path):
    codes, (told,) = agents(tmp_path, "killed_once", ranks=2)
    assert codes == [1], told
    assert told.count("torchrl-perf: ") == 1, told
    assert not left_over(tmp_path)


def test_two_hosts_learn_one_policy(tmp_path):
    codes, told = agents(tmp_path, "two_hosts", hosts=2)
    assert codes == [0, 0], told
    assert sum(text.count("2 ranks on cpu: 12 envs (6 of each)") for text in told) == 1
    newest = newest_common(tmp_path / "runs/ppo-CartPole-0", 2)
    assert newest.name == "000000010.pt"
    one, other = (parameters(path) for path in (newest, newest.parent / "rank1" / newest.name))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_hosts_come_back_after_one_has_lost_a_rank(tmp_path):
    codes, told = agents(tmp_path, "killed_once_on_two_hosts", "--max-restarts", "1", hosts=2)
    assert codes == [0, 0], told
    text = "".join(told)
    assert "rank 1 of 2 was lost in iteration 7" in text
    assert "goes on from 000000004.pt, 384 of 960 steps" in text
    assert newest_common(tmp_path / "runs/ppo-CartPole-0", 2).name == "000000010.pt"


def test_a_rank_of_another_host_that_is_killed_is_named(tmp_path):
    codes, told = agents(tmp_path, "killed_on_two_hosts", hosts=2)
    assert codes == [1, 1], told
    assert sum(text.count("torchrl-perf: ") for text in told) == 1, told
    lost = [line for text in told for line in text.splitlines() if "was lost in iteration 7" in line]
    assert len(lost) == 1, told
    assert "rank 1 of 2" in lost[0]
    assert "on host host1 has ended or cannot be reached" in lost[0]
    assert "--resume runs/ppo-CartPole-0" in lost[0]
    assert not left_over(tmp_path)
