"""Past prices from a package on the Python Package Index: the S&P 500."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PriceSeries", "sp500"]

SP500_FILE = "datasets/data/sp500_index.csv.gz"
"""Where the package skfolio keeps the series."""


class PriceSeries(NamedTuple):
    """Closes by date.

    Attributes:
        dates: T dates, ISO 8601, rising.
        prices: float64 ``[T]``.
    """

    dates: list[str]
    prices: Tensor

    def between(self, first: str, last: str) -> PriceSeries:
        """The bars from the date ``first`` to ``last``, both included, as ISO 8601 dates.

        Raises:
            ValueError: where there are none.
        """
        kept = [index for index, date in enumerate(self.dates) if first <= date <= last]
        if not kept:
            raise ValueError(
                f"between: expected dates within {self.dates[0]} to {self.dates[-1]}, received {first!r} to {last!r}. "
                "Remedy: dates within the series, the first before the last."
            )
        part = slice(kept[0], kept[-1] + 1)
        return PriceSeries(self.dates[part], self.prices[part])


def sp500(path: str | os.PathLike[str] | None = None) -> PriceSeries:
    """Daily closes of the S&P 500 index, 1990 to 2022, from the data files of the package ``skfolio``.

    The file is read where the package is installed; the package itself, which needs a solver, is not imported. The
    series belongs to its publisher, and is no part of this package. An index cannot be bought, pays no dividends, and
    consists of companies that did well: a policy's result on it is no forecast.

    Args:
        path: a file of the same form, gzipped CSV with a header, dates and closes; that of ``skfolio`` by default.

    Raises:
        ImportError: if ``skfolio`` is not installed.
        FileNotFoundError: if the file is not where it is expected.
        ValueError: if it does not hold dates and closes.
    """
    file = _packaged() if path is None else Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"sp500: expected the file {file}, received a package without it. Remedy: pip install 'skfolio>=1.12,<2', "
            "or pass the path of a gzipped CSV of dates and closes."
        )
    with gzip.open(file, "rt", encoding="utf-8", newline="") as text:
        rows = list(csv.reader(text))[1:]
    try:
        dates, closes = [row[0] for row in rows], [float(row[1]) for row in rows]
    except (IndexError, ValueError) as error:
        raise ValueError(
            f"sp500: expected a date and a close in each row of {file}, received {error}. Remedy: rows such as "
            "1990-01-02,359.69."
        ) from error
    if not rows or dates != sorted(dates):
        raise ValueError(
            f"sp500: expected rows by rising dates in {file}, received {len(rows)} rows in another order. Remedy: "
            "sort the file by date."
        )
    return PriceSeries(dates, torch.tensor(closes, dtype=torch.float64))


def _packaged() -> Path:
    """The file of the installed package."""
    found = importlib.util.find_spec("skfolio")
    if found is None or not found.submodule_search_locations:
        raise ImportError(
            "sp500: expected the package skfolio, received an environment without it. Remedy: pip install "
            "'torchrl_perf[data]'"
        )
    return Path(next(iter(found.submodule_search_locations))) / SP500_FILE
