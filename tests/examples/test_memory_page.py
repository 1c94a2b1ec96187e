"""docs/memory.md: its snippets run, and its command is one that the command line knows."""

import re
from pathlib import Path

import torch

from torchrl_perf.trainers import PPOConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


def test_snippets_run_one_after_the_other():
    torch.manual_seed(0)
    scope, found = {}, re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for code in found:
        exec(compile(code, "docs/memory.md", "exec"), scope)
    assert len(found) == 4


def test_the_table_has_every_memory():
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    for memory in named:
        assert PPOConfig(memory=memory).memory == memory
    assert named == {"gru", "lstm", "mingru", "lru"}
