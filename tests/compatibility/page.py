"""Writes ``docs/compatibility.md`` from the cells: ``python tests/compatibility/page.py``.

The page says what ``test_compatibility.py`` asserts; a test fails where the two differ.
"""

from collections.abc import Iterable
from pathlib import Path

from all_cells import CELLS
from cells import Cell

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
HEAD = """# What works with what

One of our parts beside one of TorchRL's, in an ordinary TorchRL script. Each "yes" is a test that uses both and checks
what comes out (`tests/compatibility/`); each number is a pair that is refused with an error, for the reason below its
table; "-" is a pair that does not arise. This page is made from the tests: `python tests/compatibility/page.py`.
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
        if cell.refused and cell.refused not in reasons:
            reasons.append(cell.refused)
        marks[place] = f"no ({reasons.index(cell.refused) + 1})" if cell.refused else "yes"
    lines = ["| | " + " | ".join(over) + " |", "| --- |" + " --- |" * len(over)]
    lines += [f"| {name} | " + " | ".join(marks.get((name, other), "-") for other in over) + " |" for name in down]
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
    return "\n".join(lines).rstrip() + "\n"


def page(cells: Iterable[Cell] = CELLS) -> str:
    """The whole page."""
    headings: dict[str, list[Cell]] = {}
    for cell in cells:
        headings.setdefault(cell.table, []).append(cell)
    return "\n".join([HEAD, *(f"## {name}\n\n{table(group)}" for name, group in headings.items())])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
