"""Writes ``docs/compatibility.md`` from the cells: ``python tests/compatibility/page.py``.

The page says what ``test_compatibility.py`` asserts; a test fails where the two differ.
"""

from collections.abc import Iterable
from pathlib import Path

from all_cells import CELLS
from cells import Cell

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
HEAD = """# What works with what

One of our parts beside one of TorchRL's, in an ordinary TorchRL script. "yes" is a test that uses both and checks what
comes out, on a CPU in float32; "on a GPU" is a test that needs one (`pytest -m gpu`). "no" is a pair that ends in an
error, and "untried" one that no test uses; the number after them is the reason, below the table. "-" is a pair that
does not arise, or that stands for its neighbours. This page is made from the tests in `tests/compatibility/` and
`tests/replay/torchrl_matrix.py`: `python tests/compatibility/page.py`.
"""


def table(cells: list[Cell]) -> str:
    """The cells of one heading as a Markdown table, with the reasons of those that are refused."""
    rows, columns = list(dict.fromkeys(c.row for c in cells)), list(dict.fromkeys(c.column for c in cells))
    across = len(columns) <= len(rows)
    down, over = (rows, columns) if across else (columns, rows)
    reasons: list[str] = []
    marks: dict[tuple[str, str], str] = {}
    for cell in cells:
        place = (cell.row, cell.column) if across else (cell.column, cell.row)
        marks[place] = _mark(cell, reasons)
    lines = ["| | " + " | ".join(over) + " |", "| --- |" + " --- |" * len(over)]
    lines += [f"| {name} | " + " | ".join(marks.get((name, other), "-") for other in over) + " |" for name in down]
    lines += ["", *(f"{number}. {_sentence(reason)}" for number, reason in enumerate(reasons, 1))]
    return "\n".join(lines).rstrip() + "\n"


def _mark(cell: Cell, reasons: list[str]) -> str:
    reason = cell.refused or cell.untried
    if not reason:
        return "on a GPU" if cell.mark == "gpu" else "yes"
    if reason not in reasons:
        reasons.append(reason)
    return f"{'no' if cell.refused else 'untried'} ({reasons.index(reason) + 1})"


def _sentence(reason: str) -> str:
    return reason[:1].upper() + reason[1:].rstrip(".") + "."


def page(cells: Iterable[Cell] = CELLS) -> str:
    """The whole page."""
    headings: dict[str, list[Cell]] = {}
    for cell in cells:
        headings.setdefault(cell.table, []).append(cell)
    return "\n".join([HEAD, *(f"## {name}\n\n{table(group)}" for name, group in headings.items())])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
