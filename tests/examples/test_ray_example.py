"""The farm on Ray learns, from the file as a user runs it; left out without the extra ray."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

PATH = Path(__file__).resolve().parents[2] / "examples" / "ray_farm.py"


@pytest.mark.slow
def test_the_farm_learns():
    words = [sys.executable, "-W", "ignore", str(PATH), "--total-frames", "12800"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=True)
    found = re.fullmatch(r"mean return of the last 20 episodes: ([\d.]+)", done.stdout.splitlines()[-1])
    assert found is not None
    assert float(found[1]) > 60  # a random policy gets 22
