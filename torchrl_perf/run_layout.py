"""Names of the files in the folder of a run, and what commands for one share. Loads no torch, which takes seconds."""

import json
from pathlib import Path
from typing import Any, Literal

PROGRESS, CONFIG, MACHINE, STATUS, CHECKPOINTS = (
    "progress.csv",
    "config.json",
    "machine.json",
    "status.json",
    "checkpoints",
)

FRESH_SEEDS = 20_000
"""Added to a run's seed: neither its own envs nor those of the evaluations during the run have such a seed."""

RunState = Literal["running", "finished", "stopped", "failed"]
"""What ``status.json`` says of a run."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if the file is missing, being written, or holds something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
