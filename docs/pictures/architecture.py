"""Draws docs/pictures/architecture.png, the map of the package: `python docs/pictures/architecture.py`.

The tests read ``LAYERS``, too: what a folder imports lies in a lower row.
"""

import sys
from pathlib import Path

LAYERS: tuple[tuple[str, dict[str, str]], ...] = (
    ("what is started", {"cli": "torchrl-perf train, doctor, monitor, ...", "bench": "benchmarks, tables, results"}),
    ("applications", {"systems": "marine, durotaxis, fuel_breaks, options_market, active_dynamics"}),
    ("runs", {"trainers": "algorithms; run/: rows, checkpoints, state; torchrl/: plug-ins for TorchRL's trainers"}),
    ("the step loop", {"collectors": "batches [N, T] from envs in tensors, or on the CPU"}),
    (
        "parts of a loop",
        {
            "envs": "batched worlds,\nreset inside the step",
            "transforms": "advantages, n-step,\noptions, rewards",
            "objectives": "losses on keys\nof a TensorDict",
        },
    ),
    (
        "their material",
        {
            "modules": "networks, policies,\ndistributions",
            "replay": "storage, writer,\nsamplers, one factory",
            "metrics": "sums on the device,\none copy a row",
            "parallel": "several ranks,\none policy",
        },
    ),
    (
        "ground",
        {
            "functional": "pure functions of tensors",
            "kernels": "the same in Triton",
            "runtime": "compile, graphs, streams,\nclocks, memory, files",
        },
    ),
)
"""Rows of the map from top to bottom: what they are for, and the folders in them with what each holds."""

COLOURS = ("#dbe7f5", "#dff0e2", "#fdf0d5", "#f7e3dc", "#f7e3dc", "#ece4f5", "#e6e6e6")
WIDTH, LEFT, HEIGHT, GAP, PAD = 10.0, 1.45, 0.78, 0.3, 0.12
CENTRE = (WIDTH + LEFT - PAD) / 2


def draw(path: Path) -> None:
    """Writes the map as a PNG.

    Args:
        path: of the file.
    """
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("Agg")
    tall = len(LAYERS) * (HEIGHT + GAP)
    figure, axes = plt.subplots(figsize=(WIDTH, tall))
    axes.set(xlim=(0, WIDTH), ylim=(0, tall))
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    for number, (row, folders) in enumerate(LAYERS):
        bottom = tall - (number + 1) * (HEIGHT + GAP) + GAP / 2
        axes.text(LEFT - 0.15, bottom + HEIGHT / 2, row, ha="right", va="center", fontsize=11, color="#555555")
        width = (WIDTH - LEFT - PAD) / len(folders)
        for column, (name, about) in enumerate(folders.items()):
            left = LEFT + column * width
            box = plt.Rectangle((left, bottom), width - PAD, HEIGHT, facecolor=COLOURS[number], edgecolor="#444444")
            axes.add_patch(box)
            middle = left + (width - PAD) / 2
            axes.text(middle, bottom + HEIGHT * 0.78, name, ha="center", va="center", fontsize=13, weight="bold")
            axes.text(middle, bottom + HEIGHT * 0.33, about, ha="center", va="center", fontsize=9.5, linespacing=1.1)
        if number + 1 < len(LAYERS):
            arrow = {"arrowstyle": "-|>", "color": "#444444", "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (CENTRE, bottom - GAP), (CENTRE, bottom), arrowprops=arrow)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_suffix(".png"))
