"""Logs a row of numbers and histograms to any TorchRL logger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torchrl.record.loggers import Logger

from torchrl_perf.metrics.histogram import Histogram


@runtime_checkable
class RowLogger(Protocol):
    """A logger that takes the numbers and histograms of an interval in one call."""

    def log_row(self, row: Mapping[str, float], histograms: Mapping[str, Histogram], step: int) -> None:
        """Log one row."""
        ...


def log_row(logger: Logger, row: Mapping[str, float], histograms: Mapping[str, Histogram], step: int) -> None:
    """Log the metrics of an interval, histograms included, as one row.

    The package's loggers take a row as it is. Any other gets the numbers in one ``log_metrics`` call and the bin
    centres of each histogram through ``log_histogram``, repeated in proportion to their counts; a logger that refuses
    histograms gets the numbers only.

    Args:
        logger: a TorchRL logger.
        row: names and numbers.
        histograms: names and histograms.
        step: environment steps so far.
    """
    if isinstance(logger, RowLogger):
        logger.log_row(row, histograms, step)
        return
    if row:
        logger.log_metrics(dict(row), step=step)
    for name, histogram in histograms.items():
        _log_centres(logger, name, histogram, step)


def bin_centres(histogram: Histogram) -> list[float]:
    """Centre of each bin, in the unit of the metric."""
    return [(low + high) / 2 for low, high in zip(histogram.edges[:-1], histogram.edges[1:], strict=True)]


def _log_centres(logger: Any, name: str, histogram: Histogram, step: int) -> None:
    """Log a histogram through TorchRL's interface, which takes elements rather than bins."""
    most = max(sum(histogram.counts), 1.0)
    # A thousand elements show the shape; the true number may be millions.
    repeats = [round(count * min(1.0, 1000 / most)) for count in histogram.counts]
    data = [centre for centre, n in zip(bin_centres(histogram), repeats, strict=True) for _ in range(n)]
    try:
        logger.log_histogram(name, data, step=step, bins=len(histogram.counts))
    except NotImplementedError:
        return
