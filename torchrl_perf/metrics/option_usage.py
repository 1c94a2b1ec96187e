"""Which options are used, and a warning where a policy over options has collapsed to a few."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchrl_perf.metrics.device_metrics import DeviceMetrics


class OptionCollapseWarning(UserWarning):
    """A policy over options uses too few of them."""


class OptionUsage:
    """Share of the steps that each option ran, accumulated on the device and checked when flushed.

    :meth:`update` adds to a :class:`~torchrl_perf.metrics.DeviceMetrics` without a host read and may be captured;
    :meth:`check` reads a row that was flushed, on the host. Columns: ``option/usage_<name>``, the share of the
    interval's steps, for each option; ``option/duration``, the mean number of steps between two choices;
    ``option/max_usage`` and ``option/num_used`` are added by :meth:`check`.

    Args:
        metrics: accumulators.
        names: of the options, in the order of their indices.
        max_share: greatest share of the steps that one option may have; by default .5, and .95 where there are fewer
            than three options.
        min_share: share from which on an option counts as used.
        min_used: least number of options in use; by default 3, or all where there are fewer.

    Raises:
        ValueError: for fewer than two names, names that are given twice, shares outside [0, 1], ``min_used``
            greater than the number of options.
    """

    def __init__(
        self,
        metrics: DeviceMetrics,
        names: Sequence[str],
        *,
        max_share: float | None = None,
        min_share: float = 0.05,
        min_used: int | None = None,
    ) -> None:
        self.names = list(names)
        count = len(self.names)
        self.max_share = (0.5 if count > 2 else 0.95) if max_share is None else max_share
        self.min_share = min_share
        self.min_used = min(3, count) if min_used is None else min_used
        in_range = 0 <= self.max_share <= 1 and 0 <= min_share <= 1 and 0 <= self.min_used <= count
        if count < 2 or len(set(self.names)) < count or not in_range:
            raise ValueError(
                "expected at least two names, all different, shares in [0, 1] and min_used of at most their number, "
                f"received {self.names}, max_share={max_share}, min_share={min_share}, min_used={min_used}. Remedy: "
                "shares and min_used that fit the names."
            )
        self.metrics = metrics
        self._index = torch.arange(count, device=metrics.device)
        self._warned = False

    def columns(self) -> list[str]:
        """Names of the usage columns, in the order of the options."""
        return [f"option/usage_{name}" for name in self.names]

    def update(self, active_option: Tensor, start: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Counts the options of a batch, on the device and without a host read.

        Args:
            active_option: index of any dtype and shape, such as ``batch["active_option"] [N, T]``. Steps of any other
                index, such as -1 for none, count as steps of no option.
            start: bool of the same shape, ``batch["option_start"]``, for the mean duration.
            mask: bool of the same shape, True for the steps that count; all by default.
        """
        used = active_option.unsqueeze(-1) == self._index
        for column, name in enumerate(self.columns()):
            self.metrics.add(name, used[..., column], mask=mask)
        if start is not None:
            self.metrics.add("option/choice_rate", start, mask=mask)

    def check(self, row: Mapping[str, float]) -> dict[str, float]:
        """Checks a flushed row, warns if the options have collapsed, and returns summary columns.

        It warns once, and again only after an interval without collapse.

        Args:
            row: as :meth:`DeviceMetrics.flush` returned it.

        Returns:
            ``option/max_usage``, ``option/num_used`` and ``option/duration`` (mean steps of an option, where known);
            empty where the row holds no usage.
        """
        shares = {name: row[key] for name, key in zip(self.names, self.columns(), strict=True) if key in row}
        if len(shares) < len(self.names):
            return {}
        verdict = self.verdict(shares)
        if verdict is not None and not self._warned:
            warnings.warn(verdict, OptionCollapseWarning, stacklevel=2)
        self._warned = verdict is not None
        summary = {
            "option/max_usage": max(shares.values()),
            "option/num_used": float(sum(share > self.min_share for share in shares.values())),
        }
        rate = row.get("option/choice_rate")
        return summary | ({"option/duration": 1.0 / rate} if rate else {})

    def verdict(self, shares: Mapping[str, float]) -> str | None:
        """What is wrong with the shares of the options, by name; None if nothing is."""
        largest = max(shares, key=lambda name: shares[name])
        used = [name for name, share in shares.items() if share > self.min_share]
        if shares[largest] <= self.max_share and len(used) >= self.min_used:
            return None
        listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        return (
            f"the options have collapsed: expected none above {self.max_share:.0%} of an interval's steps and at least "
            f"{self.min_used} above {self.min_share:.0%}, received {listed} ({largest} leads, {len(used)} in use). "
            "Remedy: none where it passes, as option/max_usage of the next rows says; else more entropy or a higher "
            "temperature of the controller, or rules that leave the others a chance."
        )

    def state_dict(self) -> dict[str, Any]:
        """Whether the warning was given."""
        return {"warned": self._warned}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self._warned = bool(state_dict["warned"])
