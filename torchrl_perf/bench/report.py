"""Tables and JSON of benchmark results."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrl_perf.runtime import machine_card

RESULTS = Path(__file__).parent / "results"


def format_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Markdown table of ``columns``; a row without a value gets an empty cell."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [
        max(len(column), *(len(row[i]) for row in cells)) if cells else len(column) for i, column in enumerate(columns)
    ]
    lines = [columns, ["-" * width for width in widths], *cells]
    return "\n".join(
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def write_results(name: str, rows: Sequence[dict[str, Any]], out: str | Path | None = None) -> Path:
    """Writes ``{"machine": card, "rows": rows}`` to ``out/<name>.json``, by default among the package's results."""
    folder = Path(out) if out is not None else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": machine_card(), "rows": list(rows)}, indent=1) + "\n")
    return path


def read_results(name: str, folder: str | Path | None = None) -> dict[str, Any]:
    """What :func:`write_results` wrote."""
    path = (Path(folder) if folder is not None else RESULTS) / f"{name}.json"
    return json.loads(path.read_text())
