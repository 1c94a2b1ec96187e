"""Two GPUs: sums inside CUDA graphs, in one kernel, over symmetric memory and by NCCL; equal parameters; an end,
also of a run whose rank was killed, and that goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from torchrl_perf.bench.scaling_rank import Case
from torchrl_perf.trainers.run.rank_folder import newest_common

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multigpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SECONDS = 280
LOST_SECONDS = 60
"""Within which a run has to end after a rank is gone: its own limit is 30 s, and 20 s for a GPU that waits."""
STEPS = 40_000_000
"""Of a run whose rank is killed after its first checkpoint: 2,000 iterations, of which one takes a millisecond or less,
so that the run has not ended before the signal comes."""
ROOT = Path(__file__).parents[2]


def launched(*words):
    """Runs a program on two ranks; its exit code."""
    code = "import sys; from torchrl_perf.launch import launch_ranks; sys.exit(launch_ranks(sys.argv[1:], 2))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, timeout=SECONDS, check=False
    ).returncode


def test_sums_in_one_kernel_are_those_of_nccl(tmp_path):
    out = tmp_path / "sums.json"
    assert launched(str(Path(__file__).with_name("gpu_sums.py")), str(out)) == 0
    found = json.loads(out.read_text())
    assert found["wrong"] == 0
    assert found["norms_off"] < 1e-5


def test_ranks_stay_equal_and_leave(tmp_path):
    """All ways to sum in one start of the ranks, which takes longer than what they do."""
    found = [(algorithm, sums) for algorithm in ("ppo", "sac") for sums in ("fused", "one-shot", "nccl")]
    sizes = {"ppo": (256, 32), "sac": (16, 256)}
    cases = [Case(algorithm, *sizes[algorithm], "tf32", "weak", sums) for algorithm, sums in found]
    work = {"device": "cuda", "repeats": 20, "cases": [vars(case) for case in cases]}
    out = tmp_path / "rows.json"
    assert launched("-m", "torchrl_perf.bench.scaling_rank", json.dumps(work), str(out)) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["algorithm"], row["sums"]) for row in rows] == found
    assert all(row["equal"] for row in rows)
    assert [row["collectives"] for row in rows] == [17] * 3 + [8] * 3


def ranks_below(folder):
    """The processes of the ranks that work in a folder, by rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(
                word.split(b"=", 1) for word in (process / "environ").read_bytes().split(b"\0") if b"=" in word
            )
            if os.readlink(process / "cwd") == str(folder) and b"LOCAL_RANK" in variables:
                found[int(variables[b"RANK"])] = int(process.name)
        except OSError:
            continue
    return found


def test_a_killed_rank_is_named_and_the_run_goes_on_and_ends_by_itself(tmp_path):
    words = [sys.executable, "-m", "torchrl_perf", "train", "ppo", "--no-progress"]
    settings = ["--gpus", "2", "--num-envs", "512", "--num-steps", "32", "--total-steps", str(STEPS)]
    settings += ["--checkpoint-interval", "200", "--log-interval", "100", "--run-dir", "runs"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    usual = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = subprocess.Popen([*words, *settings], **usual)
    try:
        end = time.monotonic() + SECONDS
        while not list(tmp_path.glob("runs/*/checkpoints/rank1/*.pt")):
            assert started.poll() is None, started.communicate()[0]
            assert time.monotonic() < end, "no checkpoint came"
            time.sleep(0.02)
        os.kill(ranks_below(tmp_path)[1], signal.SIGKILL)
        killed = time.monotonic()
        told, _ = started.communicate(timeout=SECONDS)
    finally:
        started.kill()
    assert started.returncode != 0
    assert time.monotonic() - killed < LOST_SECONDS
    assert told.count("torchrl-perf: ") == 1, told
    assert "2 ranks on cuda: 512 envs (256 of each)" in told
    assert "rank 1 of 2 was lost in iteration " in told
    assert not ranks_below(tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    resumed = subprocess.run([*words, "--resume", f"runs/{run.name}"], timeout=SECONDS, check=False, **usual)
    assert resumed.returncode == 0, resumed.stdout
    assert "goes on from " in resumed.stdout
    assert "mean return of the last 100 episodes" in resumed.stdout
    newest = newest_common(run, 2)
    one, other = (
        torch.load(path / newest.name, weights_only=True) for path in (newest.parent, newest.parent / "rank1")
    )
    assert one["counters"]["iterations_done"] == STEPS // (512 * 32) + 1
    actors = [state["parts"]["actor"] for state in (one, other)]
    assert all(torch.equal(actors[0][name].cpu(), actors[1][name].cpu()) for name in actors[0])
