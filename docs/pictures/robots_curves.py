"""Draws docs/pictures/robots_curves.png, the rows of robots_learning.json: `python docs/pictures/robots_curves.py`."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

PUBLISHED = {"HalfCheetah": 7337, "Hopper": 3128, "Walker2d": 4896, "Ant": 4079, "Humanoid": 1360}
"""Tianshou's PPO after 3 M steps in MuJoCo 2.0: the best mean of ten seeds on the way, examples/mujoco/README.md of
https://github.com/thu-ml/tianshou, commit f240205."""
RESULTS = Path(__file__).parents[2] / "torchrl_perf" / "bench" / "results" / "robots_learning.json"


def panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    """The curves of one task by seed, exploration included, and at their ends the returns in MuJoCo's C code."""
    for row, colour in zip(rows, ("#1f77b4", "#ff7f0e", "#2ca02c"), strict=False):
        seconds, _, returns = zip(*row["curve"], strict=True)
        axes.plot(seconds, returns, color=colour, lw=1.4)
        axes.plot(row["seconds"], row["mean_return"], "o", color=colour, ms=5)
    axes.axhline(PUBLISHED[rows[0]["task"]], color="0.4", lw=1, ls="--")
    axes.set(title=rows[0]["task"], xlabel="seconds of training")
    axes.grid(alpha=0.3)


def main() -> int:
    """Writes the picture beside this file."""
    rows = json.loads(RESULTS.read_text())["rows"]
    rows = [row for row in rows if row.get("algorithm", "ppo") == "ppo"]
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
