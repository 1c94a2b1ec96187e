"""Verdicts on the claims, ``docs/claims.md`` and ``docs/claims_cpu.md``, and every row, ``studies/tables/``.

python -m studies.page
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.claims import RESULTS, SYSTEMS
from torchrl_perf.bench.readme import machine_line
from torchrl_perf.bench.report import format_table, read_results

BEGIN, END = "<!-- claims -->", "<!-- /claims -->"
ROOT = Path(__file__).resolve().parents[1]
TITLES = {
    "active_dynamics": "Inputs that inform a latent model",
    "active_dynamics_loops": "Inputs that inform a latent model: whole loops, beside 35 other processes on the GPU",
    "durotaxis": "A colony on a stiffness gradient, PPO",
    "fuel_breaks": "Fire breaks, DQN and its memory",
    "options_market": "SAC with options on a market",
    "marine": "Navigation of surface vehicles, six agents",
}
"""By file of results: of each system, and of experiments that another sitting measured on another machine."""
PAGES = {"claims.md": "", "claims_cpu.md": "_cpu"}
"""Pages of verdicts by the ending of the files of results that they are made of."""
ROWS = "studies/results/"
CLAIM_COLUMNS = ("claim", "measured", "verdict", "remark")
ROW_COLUMNS = ("case", "variant", "us", "p10 to p90", "ratio", "spread", "off by", "note")


def verdicts(ending: str, folder: Path = RESULTS) -> str:
    """Markdown of one page: for each system that was measured its verdicts, and a link to the rows."""
    parts = []
    for name, title in TITLES.items():
        if not (folder / f"{name}{ending}.json").exists():
            if name in SYSTEMS:
                parts.append(f"## {title}\n\nNot measured yet.")
            continue
        result = read_results(f"{name}{ending}", folder)
        table = format_table([row for row in result["rows"] if row.get("part") == "verdict"], CLAIM_COLUMNS)
        link = f"[Every row](../studies/tables/{name}{ending}.md)."
        parts.append(f"## {title}\n\n{link} {_machine(result)}\n\n{table}")
    return "\n\n".join(parts)


def tables(system: str, ending: str, folder: Path = RESULTS) -> str:
    """Markdown of all rows of one file of results on one kind of device."""
    result = read_results(f"{system}{ending}", folder)
    rows = [row for row in result["rows"] if row.get("part") != "verdict"]
    lines = [f"# {TITLES[system]}, {'a CPU' if ending else 'CUDA'}", _machine(result)]
    for experiment in dict.fromkeys(row["experiment"] for row in rows):
        own = [shown(row) for row in rows if row["experiment"] == experiment]
        lines += [f"**{experiment}**", format_table(own, used(own))]
    return "\n\n".join(lines) + "\n"


def _machine(result: dict[str, Any]) -> str:
    """What the figures of a file of results are."""
    return f"The figures are {machine_line(result['machine'], ROWS)}"


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the page has it."""
    low, high = row.get("p10_us"), row.get("p90_us")
    spread = None if low is None or high is None else f"{low:,.1f} to {high:,.1f}"
    return row | {"p10 to p90": spread, "off by": row.get("off_by")}


def used(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Columns in which a row has something."""
    return [column for column in ROW_COLUMNS if any(row.get(column) not in (None, "") for row in rows)]


def main() -> int:
    """Rewrites the block between the markers of both pages, and all tables."""
    for name, ending in PAGES.items():
        path = ROOT / "docs" / name
        before, rest = path.read_text(encoding="utf-8").split(BEGIN, 1)
        _, after = rest.split(END, 1)
        path.write_text(f"{before}{BEGIN}\n\n{verdicts(ending)}\n\n{END}{after}", encoding="utf-8")
        for system in TITLES:
            if (RESULTS / f"{system}{ending}.json").exists():
                target = ROOT / "studies" / "tables" / f"{system}{ending}.md"
                target.write_text(tables(system, ending), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
