"""The table of learning over seeds in the documentation, from the committed figures of ``bench curves``."""

from pathlib import Path
from typing import Any

from torchrl_perf.bench.curves import FOLDER
from torchrl_perf.bench.curves_seeds import read_over_seeds
from torchrl_perf.bench.curves_studies import STUDIES
from torchrl_perf.bench.report import format_table

__all__ = ["curves_table"]

TRAINED = "trained"
COLUMNS = ("study", "run", "figure", "seeds", "trained [interval]", "beside it", "chosen on")


def curves_table(folder: Path = FOLDER) -> str:
    """Markdown: the interquartile mean and its interval of the figures that each study is about.

    Args:
        folder: of the runs; studies that are not in it are left out.
    """
    lines = []
    for name, study in STUDIES.items():
        if not (folder / "over_seeds" / f"{name}.json").is_file():
            continue
        found = read_over_seeds(name, folder)
        for figure in study.figures:
            for run in found["shown"]:
                cells = {row["of"]: row for row in found["rows"] if (row["run"], row["figure"]) == (run, figure)}
                others = ", ".join(
                    f"{who} {_short(row['middle'])}" for who, row in cells.items() if _beside(who, study)
                )
                line = {"study": name, "run": run, "figure": figure, "beside it": others}
                line["seeds"] = ", ".join(str(seed) for seed in cells[TRAINED]["seeds"])
                lines.append(line | {"trained [interval]": _cell(cells[TRAINED]), "chosen on": found["chosen_on"]})
    return format_table(lines, COLUMNS)


def _beside(who: str, study: Any) -> bool:
    """Whether it is another way to do the same, and not a part of what was trained."""
    return who != TRAINED and who in study.beside


def _cell(row: dict[str, Any]) -> str:
    if row["low"] is None:
        return f"{_short(row['middle'])}, one seed"
    return f"{_short(row['middle'])} [{_short(row['low'])}, {_short(row['high'])}]"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
