"""Where each metric lives in one packed buffer, and how the buffer is read on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from torchrl_perf.metrics.histogram import HEADER, Histogram, empty_row, read_row

Reduce = Literal["mean", "sum", "max", "last", "histogram"]
"""How the elements of one metric are combined over an interval."""

MAX_HISTOGRAMS = 16
"""Number of histograms that one ``DeviceMetrics`` can hold."""

Planes = tuple[Tensor, Tensor, Tensor, Tensor]
"""Views of a packed buffer: totals, maxima and counts ``[capacity]``, histogram rows ``[16, HEADER + bins]``."""


class Slot(NamedTuple):
    """Where a metric lives: its reduction and its index among the scalars or among the histograms."""

    reduce: Reduce
    index: int


class MetricLayout:
    """Names and their places in a packed float64 buffer; host work only.

    Args:
        capacity: greatest number of scalar names.
        bins: number of bins of each histogram.
    """

    def __init__(self, capacity: int, bins: int) -> None:
        self.capacity = capacity
        self.bins = bins
        self.slots: dict[str, Slot] = {}
        self._used = {"scalar": 0, "histogram": 0}

    def empty(self, device: torch.device) -> Tensor:
        """The packed buffer of an interval without any element, float64."""
        histograms = empty_row(self.bins, device).repeat(MAX_HISTOGRAMS)
        zeros = torch.zeros(self.capacity, dtype=torch.float64, device=device)
        return torch.cat([zeros, torch.full_like(zeros, -torch.inf), zeros, histograms])

    def planes(self, flat: Tensor) -> Planes:
        """View a packed buffer as totals, maxima and counts ``[capacity]`` and histogram rows."""
        scalars = flat[: 3 * self.capacity].view(3, self.capacity)
        return scalars[0], scalars[1], scalars[2], flat[3 * self.capacity :].view(-1, HEADER + self.bins)

    def slot(self, name: str, reduce: Reduce) -> Slot:
        """Find the slot of a name, or give it the next free one.

        Raises:
            ValueError: for an unknown reduction, or another one than before.
            RuntimeError: if there is no slot left.
        """
        slot = self.slots.get(name)
        if slot is not None and slot.reduce == reduce:
            return slot
        if reduce not in get_args(Reduce):
            raise ValueError(
                f"DeviceMetrics.add({name!r}): expected reduce in {get_args(Reduce)}, received {reduce!r}. Remedy: "
                "reduce='mean', for example."
            )
        if slot is not None:
            raise ValueError(
                f"DeviceMetrics.add({name!r}): expected reduce={slot.reduce!r} as at the first add, received "
                f"{reduce!r}. Remedy: use another name for another reduction."
            )
        kind, limit = ("histogram", MAX_HISTOGRAMS) if reduce == "histogram" else ("scalar", self.capacity)
        if self._used[kind] >= limit:
            remedy = "drop one" if kind == "histogram" else f"construct DeviceMetrics with capacity > {limit}"
            raise RuntimeError(
                f"DeviceMetrics.add({name!r}): expected at most {limit} {kind} metrics, received one more. Remedy: "
                f"{remedy}."
            )
        slot = self.slots[name] = Slot(reduce, self._used[kind])
        self._used[kind] += 1
        return slot

    def gather(self, host: Tensor) -> dict[str, dict[str, object]]:
        """Reduction and words of each metric: total, maximum and count of a scalar, or the row of a histogram."""
        planes = self.planes(host)
        return {
            name: {"reduce": slot.reduce, "values": self._words(planes, slot).clone()}
            for name, slot in self.slots.items()
        }

    @staticmethod
    def _words(planes: Planes, slot: Slot) -> Tensor:
        if slot.reduce == "histogram":
            return planes[3][slot.index]
        return torch.stack([plane[slot.index] for plane in planes[:3]])

    def read(self, host: Tensor) -> tuple[dict[str, float], dict[str, Histogram]]:
        """Turn a buffer on the host into a row and histograms; metrics without an element are left out."""
        used = self._used["scalar"]
        totals, maxima, counts, rows = self.planes(host)
        columns = (totals[:used].tolist(), maxima[:used].tolist(), counts[:used].tolist())
        row: dict[str, float] = {}
        histograms: dict[str, Histogram] = {}
        for name, slot in self.slots.items():
            if slot.reduce == "histogram":
                histogram = read_row(rows[slot.index])
                if histogram is not None:
                    histograms[name] = histogram
                    row.update({f"{name}/nonfinite": float(histogram.nonfinite)} if histogram.nonfinite else {})
                continue
            total, maximum, count = (column[slot.index] for column in columns)
            if count > 0:
                row[name] = _VALUE[slot.reduce](total, maximum, count)
        return row, histograms


_VALUE = cast(
    "dict[str, Callable[[float, float, float], float]]",
    {
        "mean": lambda total, maximum, count: total / count,
        "sum": lambda total, maximum, count: total,
        "max": lambda total, maximum, count: maximum,
        "last": lambda total, maximum, count: total,
    },
)


def check_value(name: str, value: Tensor, device: torch.device) -> None:
    """Refuse anything but a real tensor on the device.

    Raises:
        TypeError: for anything but a real tensor.
        ValueError: for another device.
    """
    if not isinstance(value, Tensor) or value.is_complex():
        got = f"dtype {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"DeviceMetrics.add({name!r}): expected a real torch.Tensor on {device}, received {got}. "
            "Remedy: host numbers belong in flush(step, extra={...})."
        )
    if value.device != device:
        raise ValueError(
            f"DeviceMetrics.add({name!r}): expected a tensor on {device}, received shape {tuple(value.shape)}, "
            f"dtype {value.dtype} on {value.device}. Remedy: compute it on {device}, or construct DeviceMetrics there."
        )


def expand_mask(name: str, value: Tensor, mask: Tensor) -> Tensor:
    """Check a mask and broadcast it to the shape of the value, without a copy.

    Raises:
        TypeError: for anything but a bool tensor.
        ValueError: for another device than the value's, or a shape that does not broadcast.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"DeviceMetrics.add({name!r}): expected a mask of dtype torch.bool, received {got}. Remedy: mask.bool()."
        )
    if mask.device != value.device:
        raise ValueError(
            f"DeviceMetrics.add({name!r}): expected a mask on {value.device}, received one on {mask.device}. Remedy: "
            "mask.to(value.device)."
        )
    try:
        return mask.expand(value.shape)
    except RuntimeError as error:
        raise ValueError(
            f"DeviceMetrics.add({name!r}): expected a mask that broadcasts to the value's shape "
            f"{tuple(value.shape)}, received {tuple(mask.shape)}. Remedy: reshape it (a trailing 1 is often missing)."
        ) from error
