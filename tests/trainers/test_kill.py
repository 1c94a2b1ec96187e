"""Runs that are killed at random moments, and go on as if they had not been."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="forks and signals of POSIX")
def test_killed_runs_end_like_one_that_was_not(tmp_path):
    script = Path(__file__).with_name("kill_runs.py")
    command = [sys.executable, "-W", "ignore", str(script), "ppo,dqn", "6", "41", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for algorithm, result in json.loads(done.stdout.splitlines()[-1]).items():
        assert result["problems"] == [], algorithm
        assert result["kills"] == 6
