"""docs/systems.md: its snippets run one after the other, each env with a few rows on the CPU."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "systems.md"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# what is made small, each of them once at the least: rows, the colony, the run and the device
SMALLER = {
    "4096": "6",
    "1024,": "4,",
    "65_536": "8",
    '"cuda"': '"cpu"',
    "critical_nodes=100": "critical_nodes=10",
    "steps=200": "steps=3",
    "FuelBreaksOneShotConfig()": 'FuelBreaksOneShotConfig(total_steps=512, device="cpu", logger="none")',
    "landscapes=50": "landscapes=2",
}


@pytest.mark.slow
def test_the_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    page, scope = PAGE.read_text(encoding="utf-8"), {}
    codes = FENCE.findall(page)
    assert all(any(large in code for code in codes) for large in SMALLER)
    for code in codes:
        small = re.sub("|".join(map(re.escape, SMALLER)), lambda found: SMALLER[found[0]], code)
        exec(compile(small, f"{PAGE.name}: {code.splitlines()[0]}", "exec"), scope)
    assert {"ways.png", "ways.gif"} <= {path.name for path in tmp_path.iterdir()}
    assert scope["breaks"].shape == (2, 20, 20)
    assert scope["breaks"].dtype == torch.bool
