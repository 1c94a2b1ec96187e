"""Figures without a window, for every picture of the package.

matplotlib takes a third of a second to import, so it is imported when a figure is made.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["new_figure", "save_figure"]


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure of a size in inches whose layout keeps labels and legends inside.

    ``pyplot`` is not used: it keeps every figure until it is closed, and asks for a window system.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str], *, dpi: int = 150) -> Path:
    """Write a figure to a file, in a folder that is made where it is missing.

    Args:
        figure: what to write.
        path: of the picture; its suffix gives the format, for example ``.png``.
        dpi: dots per inch.

    Returns:
        The path that was written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=dpi)
    return target
