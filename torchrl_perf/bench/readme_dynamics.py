"""The tables of samples until a field is known in the documentation, from the committed runs of ``bench curves``."""

from pathlib import Path
from typing import Any

from torchrl_perf.bench.curves import FOLDER, stored
from torchrl_perf.bench.curves_dynamics import BOUNDS, RULES, STATED
from torchrl_perf.bench.report import format_table
from torchrl_perf.metrics.aggregates import bootstrap_interval, interquartile_mean

__all__ = ["effort_table", "samples_table"]

BASES = ("random", "held")
EQUAL = (("embedding", "strong", "strong_held"), ("embedding_weak", "random", "held"))
"""Rules with about the same mean square of inputs: that of planned ones, and that of random ones."""


def samples_table(folder: Path = FOLDER) -> str:
    """Markdown: of each field and rule the interquartile mean of the samples and its 95% interval.

    A run that does not reach the stated error counts with all of its samples, so that "at least" stands before a figure
    to which such runs belong, and the number of seeds that have reached it behind it. Last are the shares of the
    samples of random inputs, fresh and held, that the best planned rule needs.

    Args:
        folder: of the runs; fields that are not in it are left out.
    """
    lines, bounded = [], [rule for rule in RULES if rule not in BOUNDS]
    for field, every in _by_field(folder).items():
        by_rule = {rule: own for rule, own in every.items() if rule not in BOUNDS}
        middles = {rule: float(interquartile_mean([one["samples"] for one in own])) for rule, own in by_rule.items()}
        line = {"field": field, "error": f"{STATED[field]:g}"}
        line |= {rule: _cell(own, middles[rule]) for rule, own in by_rule.items()}
        planned = {rule: middle for rule, middle in middles.items() if RULES[rule]["inputs"] != "random"}
        for base in BASES:
            if base in middles and planned:
                best = min(planned, key=planned.__getitem__)
                line[f"best of {base}"] = f"{planned[best] / middles[base]:.2f} ({best})"
        lines.append(line)
    return format_table(lines, ("field", "error", *bounded, *(f"best of {base}" for base in BASES)))


def effort_table(folder: Path = FOLDER) -> str:
    """Markdown: the same of :data:`EQUAL`, each group with its mean squares of inputs.

    Args:
        folder: of the runs; fields that are not in it, or lack a rule, are left out.
    """
    lines = []
    for field, by_rule in _by_field(folder).items():
        if not all(rule in by_rule for rules in EQUAL for rule in rules):
            continue
        line = {"field": field}
        for number, rules in enumerate(EQUAL):
            efforts = [sum(one["effort"] for one in by_rule[rule]) / len(by_rule[rule]) for rule in rules]
            line[_effort(number)] = ", ".join(f"{effort:.2f}" for effort in efforts)
            for rule in rules:
                middle = float(interquartile_mean([one["samples"] for one in by_rule[rule]]))
                line[rule] = _cell(by_rule[rule], middle)
        lines.append(line)
    return format_table(lines, ("field", *(name for n, rules in enumerate(EQUAL) for name in (*rules, _effort(n)))))


def _effort(number: int) -> str:
    return "mean squares" + " " * number  # a column of its own for each group


def _by_field(folder: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What was found of each field and rule, for each seed."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in stored("active-dynamics", folder):
        field, _, rule = row["run"].partition("-")
        found.setdefault(field, {}).setdefault(rule, []).append(row["evaluation"]["trained"])
    return found


def _cell(own: list[dict[str, Any]], middle: float) -> str:
    low, high = bootstrap_interval([one["samples"] for one in own], interquartile_mean)
    reached = sum(one["reached"] == 1.0 for one in own)
    text = f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]" if len(own) > 1 else f"{middle:,.0f}"
    return text if reached == len(own) else f"at least {text}, {reached} of {len(own)}"
