"""Two GPUs: sums inside CUDA graphs over symmetric memory and by NCCL, equal parameters, and an end by itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchrl_perf.bench.scaling_rank import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multigpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SECONDS = 280
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("sums", ["one-shot", "nccl"])
def test_ranks_stay_equal_and_leave(tmp_path, sums):
    cases = [
        Case("ppo", 256, 32, "tf32", "weak", sums),
        Case("sac", 16, 256, "tf32", "weak", sums),
    ]
    work = {"device": "cuda", "repeats": 20, "cases": [vars(case) for case in cases]}
    code = "import sys; from torchrl_perf.parallel.launch import launch_ranks; sys.exit(launch_ranks(sys.argv[1:], 2))"
    words = [sys.executable, "-c", code, "-m", "torchrl_perf.bench.scaling_rank", json.dumps(work)]
    out = tmp_path / "rows.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([*words, str(out)], env=environment, timeout=SECONDS, check=False).returncode == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["algorithm"] for row in rows] == ["ppo", "sac"]
    assert all(row["equal"] for row in rows)
    assert [row["collectives"] for row in rows] == [17, 8]


def test_a_run_by_command_ends_by_itself(tmp_path):
    words = [sys.executable, "-m", "torchrl_perf", "train", "ppo", "--gpus", "2", "--num-envs", "512"]
    words += ["--num-steps", "32", "--total-steps", "1000000", "--no-progress", "--logger", "csv"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    usual = {"capture_output": True, "text": True, "timeout": SECONDS}
    done = subprocess.run(words, cwd=tmp_path, env=environment, check=False, **usual)
    assert done.returncode == 0, done.stderr
    assert "2 ranks on cuda: 512 envs (256 of each)" in done.stderr
    assert "mean return of the last 100 episodes" in done.stdout.splitlines()[-1]
