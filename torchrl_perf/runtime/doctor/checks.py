"""A check before a run: what was found, whether that is well, and what to do if it is not."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

__all__ = ["SEVERITY", "Check", "Finding", "format_checks", "run_checks", "short_error", "worst"]

SEVERITY = {"n/a": 0, "ok": 1, "warn": 2, "fail": 3}
NAME_WIDTH = 18
LONGEST_ERROR = 160


class Finding(NamedTuple):
    """What one look has shown."""

    verdict: str
    """ok; warn: works, but less well than it could; fail: runs would break; n/a: does not apply here."""
    found: str
    """What is there, in numbers where there are any."""
    remedy: str = ""
    """What to do about a warn or a fail."""


@dataclass(frozen=True)
class Check:
    """One line of a report."""

    name: str
    """What was looked at."""
    verdict: str
    """ok, warn, fail or n/a, as in :class:`Finding`."""
    found: str
    """What is there."""
    remedy: str = ""
    """What to do about it."""

    def __str__(self) -> str:
        remedy = f" Remedy: {self.remedy}" if self.remedy else ""
        return f"{self.verdict:<4}  {self.name:<{NAME_WIDTH}}  {self.found}{remedy}"

    def to_dict(self) -> dict[str, str]:
        """Plain values, for JSON."""
        return asdict(self)


def run_checks(probes: Mapping[str, Callable[[], Finding]]) -> list[Check]:
    """Make each check; one that raises becomes a warning that names its error.

    Args:
        probes: name to function, in the order of the report.

    Returns:
        One check for each.
    """
    return [_run_check(name, probe) for name, probe in probes.items()]


def _run_check(name: str, probe: Callable[[], Finding]) -> Check:
    with warnings.catch_warnings():
        # What a library warns of on import is either a check of its own or none of a user's business.
        warnings.simplefilter("ignore")
        try:
            return Check(name, *probe())
        except Exception as error:
            return Check(name, "warn", f"could not be checked: {short_error(error)}.", "see the error's own text.")


def short_error(error: BaseException) -> str:
    """Type and first line of an error, shortened to fit on a line."""
    line = (str(error).strip().splitlines() or [""])[0]
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return (text if len(text) <= LONGEST_ERROR else text[:LONGEST_ERROR] + "...").rstrip(".")


def worst(checks: Iterable[Check]) -> str:
    """The gravest verdict among the checks; ok if there are none or none applies."""
    verdict = max((check.verdict for check in checks), key=SEVERITY.__getitem__, default="ok")
    return "ok" if verdict == "n/a" else verdict


def format_checks(checks: Iterable[Check]) -> str:
    """One line a check, and a last line that counts the verdicts."""
    checks = list(checks)
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in ("ok", "warn", "fail", "n/a")}
    total = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return "\n".join([*map(str, checks), f"{worst(checks)}: {total}"])
