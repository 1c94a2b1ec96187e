"""Tables and JSON of benchmark results."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_perf.runtime import machine_card
from torchrl_perf.runtime.files import write_text

RESULTS = Path(__file__).parent / "results"
CONFIRMED, PARTLY, NOT_REPRODUCED, NOT_HERE = "confirmed", "partly", "not reproduced", "n/a here"
"""Verdicts on a claim: met; met in part or in some sizes; not met; this machine cannot say."""


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


class Sheet:
    """Rows of a benchmark, printed and written as they come, so that an interrupted run keeps them.

    Args:
        columns: the columns of a row to print, in this order.
        name: of the JSON file; None writes nothing.
        out: its folder, as for :func:`write_results`.

    Attributes:
        rows: the rows so far.
        path: the file, once it is written.
    """

    def __init__(self, columns: Sequence[str], name: str | None = None, out: str | Path | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.path: Path | None = None
        self._columns, self._name, self._out = columns, name, out
        self._card = None if name is None else machine_card()

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Takes a new row; returns it, to be changed."""
        self.rows.append(row)
        self.show(row)
        return row

    def show(self, row: dict[str, Any]) -> None:
        """Prints a row, new or changed, and writes all of them."""
        cells = ((column, row.get(column)) for column in self._columns)
        texts = (f"{column} {_cell(value)}" if not isinstance(value, str) else value
                 for column, value in cells if value is not None)  # fmt: skip
        print("  ".join(texts), flush=True)
        self.write()

    def write(self) -> None:
        """Writes the rows, if there is a file to write."""
        if self._name is not None:
            self.path = write_results(self._name, self.rows, self._out, self._card)


def write_results(
    name: str, rows: Sequence[dict[str, Any]], out: str | Path | None = None, card: dict[str, Any] | None = None
) -> Path:
    """Writes ``{"machine": card, "rows": rows}`` to ``out/<name>.json``, whole or not at all.

    NaN and infinity, such as a mean of no episodes, become null: JSON has no words for them.

    Args:
        name: of the file, without its suffix.
        rows: what was measured.
        out: folder; by default that of the package's results.
        card: the machine card; by default that of this machine.
    """
    folder = Path(out) if out is not None else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {"machine": machine_card() if card is None else card, "rows": list(rows)}
    write_text(path, json_text(content, indent=1) + "\n", lasting=False)
    return path


def json_text(content: Any, *, indent: int | None = None) -> str:
    """JSON that any reader takes: a number that is not finite is null.

    Args:
        content: dicts, lists, tuples and plain values.
        indent: spaces of a level; None for one line.
    """
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """The same, with None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_results(name: str, folder: str | Path | None = None) -> dict[str, Any]:
    """Reads a file of :func:`write_results`."""
    path = (Path(folder) if folder is not None else RESULTS) / f"{name}.json"
    return json.loads(path.read_text())
