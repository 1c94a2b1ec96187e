"""Metrics that accumulate on the device and cross to the host in one packed copy per interval."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrl_perf.metrics.histogram import Histogram, update_row_no_sync
from torchrl_perf.metrics.log_row import log_row
from torchrl_perf.metrics.metric_layout import MAX_HISTOGRAMS, MetricLayout, Reduce, Slot, check_value, expand_mask
from torchrl_perf.runtime.self_capture import InPlaceReplays
from torchrl_perf.runtime.transfer import Download

if TYPE_CHECKING:
    from torchrl.record.loggers import Logger

__all__ = ["MAX_HISTOGRAMS", "DeviceMetrics", "Reduce"]

_NAMES = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_WITHOUT_MAXIMUM = {getattr(torch, name) for name in _NAMES if hasattr(torch, name)}


class DeviceMetrics:
    """Accumulates named metrics on a device without a host read, and flushes them as one row.

    ``add`` only issues in-place updates of one preallocated float64 buffer, so it may be captured in a CUDA graph:
    replays accumulate with no Python at all. Names get their slot at the first ``add``, which is host work; a slot
    made during capture is kept, and ``flush`` reads whatever the replays left in it. Call ``reset`` after a warm-up
    whose values should not count.

    The accumulators are float64: a float32 sum of ones stops growing at 2**24, which a GPU environment reaches within
    a second, and a mean must not depend on how often it is flushed. The cost is a handful of scalar double adds.

    Every value is reduced when it is added, so the caller may overwrite its tensor right after. Over an interval

    * ``mean`` is the sum over all elements divided by their count, whatever the number of ``add`` calls,
    * ``sum`` and ``max`` run over all elements,
    * ``last`` is the mean over the elements of the latest ``add`` that had any,
    * ``histogram`` counts all elements in ``histogram_bins`` even bins whose power-of-two width grows with the range.

    A metric that got no element in an interval (nothing added, an empty tensor, a mask without a true element) is left
    out of the row. NaN is reported as NaN, and only for the interval in which it came.

    Args:
        device: where the metrics are computed.
        capacity: greatest number of scalar names; up to ``MAX_HISTOGRAMS`` histograms come on top.
        logger: a TorchRL logger that receives one row per flush, or ``None`` to return the row only.
        histogram_bins: number of bins of each histogram, at least 2.
        capture: on CUDA, each ``add`` and ``add_all`` that repeats its names and shapes becomes a CUDA graph after two
            calls, into which the values are copied.

    Raises:
        ValueError: if ``capacity`` or ``histogram_bins`` is too small.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        capacity: int = 256,
        logger: Logger | None = None,
        histogram_bins: int = 32,
        capture: bool = True,
    ) -> None:
        if capacity < 1 or histogram_bins < 2:
            raise ValueError(
                f"DeviceMetrics: expected capacity >= 1 and histogram_bins >= 2, received capacity={capacity} and "
                f"histogram_bins={histogram_bins}. Remedy: pass larger numbers."
            )
        # An empty tensor resolves "cuda" to "cuda:0", the form in which values carry their device.
        self.device = torch.empty(0, device=device).device
        self.capacity = capacity
        self.histogram_bins = histogram_bins
        self.logger = logger
        self.last_histograms: dict[str, Histogram] = {}
        self._layout = MetricLayout(capacity, histogram_bins)
        self._last_step: int | None = None
        self._empty = self._layout.empty(self.device)
        self._state = self._empty.clone()
        self._totals, self._maxima, self._counts, self._histograms = self._layout.planes(self._state)
        self._download = Download(self._state)
        self._started: deque[int] = deque()
        self.capture = capture
        self._replays = InPlaceReplays(type(self).__name__, limit=capacity + MAX_HISTOGRAMS)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that have a slot, in the order of their first ``add``."""
        return tuple(self._layout.slots)

    @property
    def reductions(self) -> dict[str, Reduce]:
        """How each metric that has come so far is combined, by name."""
        return {name: slot.reduce for name, slot in self._layout.slots.items()}

    @property
    def last_step(self) -> int | None:
        """Step of the latest flush, ``None`` before the first."""
        return self._last_step

    def add(self, name: str, value: Tensor, *, reduce: Reduce = "mean", mask: Tensor | None = None) -> None:
        """Fold the elements of a tensor into a metric, on the device and without a host read.

        Args:
            name: name of the metric, for example ``"loss/actor"``.
            value: real tensor of any shape on ``device``; its gradient is not tracked.
            reduce: how elements are combined; must stay the same for a name.
            mask: bool tensor on ``device`` that broadcasts to the shape of ``value``; only elements where it is true
                count, and the others may hold anything, NaN included.

        Raises:
            TypeError: if ``value`` is not a real tensor or ``mask`` is not a bool tensor.
            ValueError: for a wrong device, an unknown or changed ``reduce``, or a mask that does not broadcast.
            RuntimeError: if there is no slot left for a new name.
        """
        check_value(name, value, self.device)
        if mask is not None:
            mask = expand_mask(name, value, mask)
        slot = self._layout.slot(name, reduce)
        value = value.detach()
        if value.numel() == 0:
            return
        if self.capture and self._replays.serves(self.device):
            self._replays(lambda given: self._take(slot, *given), (value, mask), slot, device=self.device)
        else:
            self._take(slot, value, mask)

    def add_all(self, values: Mapping[str, Tensor], reduce: Reduce = "mean", *, mask: Tensor | None = None) -> None:
        """Fold many one-element tensors at once: one stack and two in-place updates, whatever their number.

        Names seen first in one call lie side by side; when they do not, because some of them were added alone before,
        the tensors are added one by one with the same result.

        Args:
            values: mapping (or flat TensorDict) from name to a one-element real tensor on ``device``.
            reduce: how elements are combined, for all of them; not ``"histogram"``.
            mask: bool of one element on ``device``, whether they count; they may hold anything where it is false.

        Raises:
            TypeError: if a value is not a real tensor, or the mask is no bool tensor.
            ValueError: if a value has more than one element or lives elsewhere, or ``reduce`` does not fit.
            RuntimeError: if there is no slot left for a new name.
        """
        if reduce == "histogram":
            raise ValueError(
                "DeviceMetrics.add_all: expected a scalar reduce, received 'histogram'. Remedy: use add for that."
            )
        items = list(values.items())
        for name, value in items:
            check_value(name, value, self.device)
            if value.numel() != 1:
                raise ValueError(
                    f"DeviceMetrics.add_all({name!r}): expected a tensor of one element, received shape "
                    f"{tuple(value.shape)}. Remedy: use add({name!r}, value), which reduces any shape."
                )
        if not items:
            return
        if mask is not None:
            flag = mask.reshape(()) if isinstance(mask, Tensor) and mask.numel() == 1 else mask
            mask = expand_mask(items[0][0], items[0][1].reshape(()), flag)
        slots = [self._layout.slot(name, reduce) for name, _ in items]
        first = slots[0].index
        if [slot.index for slot in slots] != list(range(first, first + len(slots))):
            for slot, (_, value) in zip(slots, items, strict=True):
                self._fold(slot, value.detach().reshape(()), mask)
            return
        block = slice(first, first + len(slots))
        given = [value.detach().reshape(()) for _, value in items]
        if self.capture and self._replays.serves(self.device):
            key = (reduce, first)
            inputs = [*given, mask]
            self._replays(
                lambda taken: self._take_block(block, reduce, taken[:-1], taken[-1]), inputs, key, device=self.device
            )
        else:
            self._take_block(block, reduce, given, mask)

    def start_flush(self, step: int) -> None:
        """End the interval and start its packed copy into a pinned slot; a new interval begins.

        Nothing waits. If the row is read with ``finish_flush`` after more work was given to the device, logging costs
        the device no pause. Two intervals may be under way.

        Args:
            step: environment steps so far; must not fall.

        Raises:
            ValueError: if ``step`` is lower than the last one; the interval is kept.
            RuntimeError: if two intervals are under way, or the current stream is being captured; the interval is kept.
        """
        self._check_step(step)
        self._download.start(self._state)
        self.reset()
        self._last_step = step
        self._started.append(step)

    def finish_flush(
        self,
        extra: Mapping[str, float] | None = None,
        *,
        summarise: Callable[[dict[str, float]], dict[str, float]] | None = None,
    ) -> dict[str, float] | None:
        """Log the oldest interval that is under way as one row; waits for its copy only.

        Args:
            extra: host numbers that belong in the same row, for example steps per second.
            summarise: gets the row before it is logged, and returns the one to log.

        Returns:
            The row as it was logged, or ``None`` when no interval is under way.

        Raises:
            ValueError: if ``extra`` reuses a name; the interval stays under way.
        """
        if not self._started:
            return None
        self._check_extra(extra)
        row, self.last_histograms = self._layout.read(self._download.wait())
        step = self._started.popleft()
        row.update(extra or {})
        if summarise is not None:
            row = summarise(row)
        if self.logger is not None and (row or self.last_histograms):
            log_row(self.logger, row, self.last_histograms, step)
        return row

    def flush(self, step: int, *, extra: Mapping[str, float] | None = None) -> dict[str, float]:
        """Read the interval in one packed copy, start a new one, and log one row.

        On CUDA this waits once, for an event behind the copy into a pinned buffer; ``start_flush`` and ``finish_flush``
        are the same in two parts, with no wait in between. Intervals under way are finished first. A step equal to the
        last one is accepted, so that the last interval can be written on exit; an interval without any value writes no
        row.

        Args:
            step: environment steps so far; must not fall.
            extra: host numbers that belong in the same row, for example steps per second.

        Returns:
            The row: name to value, in the order of first use, then ``extra``. Histograms go to the logger and to
            ``last_histograms``; their non-finite elements, if any, are reported as ``"<name>/nonfinite"``.

        Raises:
            ValueError: if ``step`` is lower than the last one (the interval is kept), or ``extra`` reuses a name.
        """
        self._check_step(step)
        self._check_extra(extra)
        while self._started:
            self.finish_flush()
        self.start_flush(step)
        return self.finish_flush(extra) or {}

    def reset(self) -> None:
        """Drop what the interval has accumulated, on the device; names keep their slots."""
        self._state.copy_(self._empty)

    @property
    def pending(self) -> int:
        """Number of intervals whose flush was started but not finished."""
        return len(self._started)

    def state_dict(self) -> dict[str, Any]:
        """Return the interval so far and the last step, as CPU tensors and plain scalars; waits for the device.

        Intervals under way are not part of it: finish them first, or their rows are missing after a resume.

        Returns:
            ``{"last_step", "histogram_bins", "metrics": {name: {"reduce", "values"}}}``; ``values`` is float64:
            total, maximum and count of a scalar, or the row of a histogram.
        """
        metrics = self._layout.gather(self._state.to("cpu", copy=True))
        return {"last_step": self._last_step, "histogram_bins": self.histogram_bins, "metrics": metrics}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned, in place, so that captured graphs stay valid.

        Metrics are matched by name: a name that already has a slot here keeps it.

        Args:
            state_dict: as returned by ``state_dict``, possibly from an object with another capacity.

        Raises:
            KeyError: if a key is missing.
            ValueError: if the number of histogram bins or the reduction of a name differs.
            RuntimeError: if there is no slot left.
        """
        if missing := {"last_step", "histogram_bins", "metrics"} - set(state_dict):
            raise KeyError(
                f"DeviceMetrics.load_state_dict: expected keys last_step, histogram_bins and metrics, received "
                f"{sorted(state_dict)}; {sorted(missing)} missing. Remedy: pass what state_dict() returned."
            )
        if state_dict["histogram_bins"] != self.histogram_bins:
            raise ValueError(
                f"DeviceMetrics.load_state_dict: expected histogram_bins={self.histogram_bins}, received "
                f"{state_dict['histogram_bins']}. Remedy: construct DeviceMetrics with the saved number."
            )
        host = self._empty.to("cpu", copy=True)
        planes = self._layout.planes(host)
        for name, entry in state_dict["metrics"].items():
            slot = self._layout.slot(name, entry["reduce"])
            if slot.reduce == "histogram":
                planes[3][slot.index] = entry["values"]
            else:
                for plane, word in zip(planes[:3], entry["values"], strict=True):
                    plane[slot.index] = word
        self._state.copy_(host)
        self._last_step = state_dict["last_step"]
        while self._started:  # flushes of the run before
            self._download.wait()
            self._started.popleft()

    # Device work

    def _take(self, slot: Slot, value: Tensor, mask: Tensor | None) -> None:
        """Take a tensor with at least one element into its slot, in place."""
        if slot.reduce == "histogram":
            update_row_no_sync(self._histograms[slot.index], value, mask)
        else:
            self._fold(slot, value, mask)

    def _take_block(self, block: slice, reduce: Reduce, values: Sequence[Tensor], mask: Tensor | None) -> None:
        """Take one 0-d tensor into each of the scalar slots that lie side by side, in place."""
        if len({value.dtype for value in values}) > 1:
            values = [value.to(torch.float64) for value in values]
        stacked = torch.stack(list(values)).to(torch.float64)
        if mask is not None:
            neutral = {"max": -torch.inf, "last": self._totals[block]}.get(reduce, 0.0)
            stacked = torch.where(mask, stacked, neutral)
        if reduce == "max":
            torch.maximum(self._maxima[block], stacked, out=self._maxima[block])
        elif reduce == "last":
            self._totals[block].copy_(stacked)
        else:
            self._totals[block].add_(stacked)
        self._counts[block].add_(1 if mask is None else mask)

    def _fold(self, slot: Slot, value: Tensor, mask: Tensor | None) -> None:
        """Fold a tensor with at least one element into a scalar slot, in place."""
        total, maximum, count = self._totals[slot.index], self._maxima[slot.index], self._counts[slot.index]
        number = value.numel() if mask is None else mask.sum(dtype=torch.float64)
        if slot.reduce == "max":
            if mask is not None:
                value = torch.where(mask, value.to(torch.float64), -torch.inf)
            elif value.dtype in _WITHOUT_MAXIMUM:
                value = value.to(torch.float64)
            torch.maximum(maximum, value.amax().to(torch.float64), out=maximum)
        else:
            if mask is not None:
                # torch before 2.13 selects no unsigned integers of 16 bits and more
                value = value.to(torch.float64) if value.dtype in _WITHOUT_MAXIMUM else value
                value = torch.where(mask, value, 0)
            summed = value.sum(dtype=torch.float64) if value.ndim else value.to(torch.float64)
            if slot.reduce != "last":
                total.add_(summed)
            elif isinstance(number, Tensor):
                total.copy_(torch.where(number > 0, summed / number, total))
            else:
                total.copy_(summed if number == 1 else summed / number)
        count.add_(number)

    # Checks

    def _check_step(self, step: int) -> None:
        """Refuse a step below the last one."""
        if self._last_step is not None and step < self._last_step:
            raise ValueError(
                f"DeviceMetrics.flush: expected a step of at least {self._last_step}, received {step}. Remedy: "
                "count environment steps from the start of training, and restore them with load_state_dict on resume."
            )

    def _check_extra(self, extra: Mapping[str, float] | None) -> None:
        """Refuse host numbers that have the name of a metric."""
        if clash := sorted(set(extra or ()) & set(self._layout.slots)):
            raise ValueError(
                f"DeviceMetrics.flush: expected extra names that no metric has, received {clash}. Remedy: rename them "
                "in extra."
            )
