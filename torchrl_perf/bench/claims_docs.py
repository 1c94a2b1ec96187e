"""The page of claims, ``docs/claims.md``, made from the committed JSON files."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrl_perf.bench.claims import SYSTEMS
from torchrl_perf.bench.readme import machine_line
from torchrl_perf.bench.report import RESULTS, format_table, read_results

BEGIN, END = "<!-- claims -->", "<!-- /claims -->"
TITLES = {
    "000": "System 000: inputs that inform a latent model",
    "001": "System 001: a colony on a stiffness gradient, PPO",
    "002": "System 002: fire breaks, DQN and its memory",
    "003": "System 003: SAC with options on a market",
    "004": "System 004: navigation of surface vehicles, six agents",
}
CLAIM_COLUMNS = ("claim", "measured", "verdict", "remark")
ROW_COLUMNS = ("case", "variant", "us", "p10 to p90", "ratio", "spread", "off by", "note")


def page(folder: Path = RESULTS) -> str:
    """Markdown: for each system and device that was measured the verdicts, and every row below them."""
    parts = []
    for system in SYSTEMS:
        sections = [section(system, device, folder) for device in ("cuda", "cpu")]
        found = [text for text in sections if text]
        parts += [f"## {TITLES.get(system, system)}", *(found or ["Not measured yet."])]
    return "\n\n".join(parts)


def section(system: str, device: str, folder: Path = RESULTS) -> str:
    """The tables of one system on one device; empty where it was not measured."""
    name = f"claims_{system}" if device == "cuda" else f"claims_{system}_cpu"
    if not (folder / f"{name}.json").exists():
        return ""
    result = read_results(name, folder)
    verdicts = [row for row in result["rows"] if row.get("part") == "verdict"]
    rows = [row for row in result["rows"] if row.get("part") != "verdict"]
    lines = [f"### On {'CUDA' if device == 'cuda' else 'a CPU'}", machine_line(result["machine"])]
    lines += [format_table(verdicts, CLAIM_COLUMNS), "<details><summary>All rows</summary>"]
    for experiment in dict.fromkeys(row["experiment"] for row in rows):
        own = [shown(row) for row in rows if row["experiment"] == experiment]
        lines += [f"**{experiment}**", format_table(own, used(own))]
    return "\n\n".join([*lines, "</details>"])


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the page has it."""
    low, high = row.get("p10_us"), row.get("p90_us")
    spread = None if low is None or high is None else f"{low:,.1f} to {high:,.1f}"
    return row | {"p10 to p90": spread, "off by": row.get("off_by")}


def used(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Columns in which a row has something."""
    return [column for column in ROW_COLUMNS if any(row.get(column) not in (None, "") for row in rows)]


def main(argv: list[str] | None = None) -> int:
    """Rewrites the block between the markers of docs/claims.md."""
    path = Path(argv[0]) if argv else RESULTS.parents[2] / "docs" / "claims.md"
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    path.write_text(f"{before}{BEGIN}\n\n{page()}\n\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
