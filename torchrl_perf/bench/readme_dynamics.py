"""The table of samples until a field is known in the documentation, from the committed runs of ``bench curves``."""

from pathlib import Path
from typing import Any

from torchrl_perf.bench.curves import FOLDER, stored
from torchrl_perf.bench.curves_dynamics import RULES, STATED
from torchrl_perf.bench.report import format_table
from torchrl_perf.metrics.aggregates import bootstrap_interval, interquartile_mean

__all__ = ["samples_table"]

BASE = "random"


def samples_table(folder: Path = FOLDER) -> str:
    """Markdown: of each field and rule the interquartile mean of the samples and its 95% interval.

    A run that does not reach the stated error counts with all of its samples, so that "at least" stands before a figure
    to which such runs belong, and the number of seeds that have reached it behind it. Last is the best planned rule's
    share of the samples of random inputs.

    Args:
        folder: of the runs; fields that are not in it are left out.
    """
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in stored("active-dynamics", folder):
        field, _, rule = row["run"].partition("-")
        found.setdefault(field, {}).setdefault(rule, []).append(row["evaluation"]["trained"])
    lines = []
    for field, by_rule in found.items():
        middles = {rule: float(interquartile_mean([one["samples"] for one in own])) for rule, own in by_rule.items()}
        line = {"field": field, "error": f"{STATED[field]:g}"}
        line |= {rule: _cell(own, middles[rule]) for rule, own in by_rule.items()}
        planned = {rule: middle for rule, middle in middles.items() if RULES[rule]["inputs"] != "random"}
        if BASE in middles and planned:
            best = min(planned, key=planned.__getitem__)
            line["best of random"] = f"{planned[best] / middles[BASE]:.2f} ({best})"
        lines.append(line)
    return format_table(lines, ("field", "error", *RULES, "best of random"))


def _cell(own: list[dict[str, Any]], middle: float) -> str:
    low, high = bootstrap_interval([one["samples"] for one in own], interquartile_mean)
    reached = sum(one["reached"] == 1.0 for one in own)
    text = f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]" if len(own) > 1 else f"{middle:,.0f}"
    return text if reached == len(own) else f"at least {text}, {reached} of {len(own)}"
