"""Draws docs/pictures/memory_curves.png of the rows of recurrent_learning.json; run it without arguments."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[2] / "torchrl_perf" / "bench" / "results" / "recurrent_learning.json"


def panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    """The curves of one task by seed: blue with a memory, pale where it has not learnt, grey without one."""
    learnt = max(row["steps"] for row in rows if not row["variant"].endswith(":none"))
    for row in rows:
        plain = row["variant"].endswith(":none")
        steps, returns = zip(*row["curve"], strict=True)
        color = "#999999" if plain else "#1f77b4" if row["learnt"] else "#9ecae1"
        axes.plot([step / 1e6 for step in steps], returns, color=color, lw=1.1)
    axes.set(title=rows[0]["variant"].partition(":")[0], xlabel="million env steps", xlim=(0, 1.2 * learnt / 1e6))
    low = min(value for row in rows for _, value in row["curve"])
    axes.set_ylim(bottom=max(low, -4.0) if low < 0 else 0)
    axes.grid(alpha=0.3)


def main() -> int:
    """Writes the picture beside this file."""
    rows = json.loads(RESULTS.read_text())["rows"]
    tasks = list(dict.fromkeys(row["variant"].partition(":")[0] for row in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(3 * len(tasks), 2.8), squeeze=False)
    for place, task in zip(axes[0], tasks, strict=True):
        panel(place, [row for row in rows if row["variant"].startswith(f"{task}:")])
    axes[0][0].set_ylabel("mean return")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=90, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
