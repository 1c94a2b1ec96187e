"""Names of the files in the folder of a run. Loads no torch: whoever watches a run need not wait for it."""

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

RunState = Literal["running", "finished", "stopped", "failed"]
"""What ``status.json`` says of a run."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if the file is missing, being written, or holds something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
