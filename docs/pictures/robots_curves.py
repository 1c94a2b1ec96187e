"""Draws docs/pictures/robots_curves.png, the rows of robots_learning.json: `python docs/pictures/robots_curves.py`."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[2] / "torchrl_perf" / "bench" / "results" / "robots_learning.json"


def panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    """The curves of one task by seed, exploration included, and at their ends the returns in MuJoCo's C code."""
    for row, colour in zip(rows, ("#1f77b4", "#ff7f0e", "#2ca02c"), strict=False):
        seconds, _, returns = zip(*row["curve"], strict=True)
        axes.plot(seconds, returns, color=colour, lw=1.4)
        axes.plot(row["seconds"], row["mean_return"], "o", color=colour, ms=5)
    axes.set(title=rows[0]["task"], xlabel="seconds of training")
    axes.grid(alpha=0.3)


def main() -> int:
    """Writes the picture beside this file."""
    rows = json.loads(RESULTS.read_text())["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(3 * len(tasks), 2.8), squeeze=False)
    for place, task in zip(axes[0], tasks, strict=True):
        panel(place, [row for row in rows if row["task"] == task])
    axes[0][0].set_ylabel("return")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=90, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
