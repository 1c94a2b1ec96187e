"""The last steps of each environment in order, on the device; and bounded histories of Python numbers."""

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Composite

from torchrl_perf.replay._checks import check_entries_of_state, check_tensor_of_state

__all__ = ["BoundedHistory", "RecentWindow"]

_MASK = "mask"


class RecentWindow:
    """The last L steps of each of N environments as a ring, read in order: oldest first, newest last.

    For policies and models that read a window of steps (a transformer's context, a filter that encodes the last steps,
    stacked frames). A step costs one row and no allocation: rows, view and counters are made once and written in place,
    so that :meth:`append` and :meth:`view` may be compiled or recorded in a CUDA graph. The position is a device
    number, which is why the view is gathered into separate memory. (A ring that stores each row twice has an ordered
    view without a copy, but the start of that view would be a host number, which a graph would freeze.)

    Steps before the beginning of an environment's episode are 0 in the view, and False in its mask.

    Args:
        length: L, steps of the window.
        example: a step: a TensorDict ``[N]``, whose keys, shapes, dtypes and device are used, or a spec ``[N]``.
        device: device of the window; None for the example's.

    Raises:
        ValueError: if ``length`` is below 1, or the example has no single batch dimension, no entries, or one named
            "mask".
    """

    def __init__(
        self, length: int, example: TensorDictBase | Composite, *, device: torch.device | str | None = None
    ) -> None:
        step = example.zero() if isinstance(example, Composite) else example
        if length < 1:
            raise ValueError(
                f"RecentWindow: expected a length of at least 1 step, received {length}. Remedy: length=1 or more."
            )
        if step.ndim != 1 or step.is_empty() or _MASK in step.keys():
            raise ValueError(
                f"RecentWindow: expected an example of batch size [N] with entries, none named {_MASK!r}, received "
                f"{list(step.batch_size)} with {_names(step)}. Remedy: td.select(...) of one step of all environments."
            )
        self._keys = list(step.keys(include_nested=True, leaves_only=True))
        leaves = [step.get(key) for key in self._keys]
        device = leaves[0].device if device is None else torch.device(device)
        N, self.length, self.num_envs = step.shape[0], length, step.shape[0]

        def zeros(rows: int, like: Tensor) -> Tensor:
            return torch.zeros(rows, *like.shape[1:], dtype=like.dtype, device=device)

        # A row for each step of each environment, and after them one of zeros, which stands for missing steps.
        stored = [zeros(length * N + 1, leaf) for leaf in leaves]
        self._rows = [rows[:-1].view(length, *leaf.shape) for rows, leaf in zip(stored, leaves, strict=True)]
        ordered = [zeros(length * N, leaf) for leaf in leaves]
        self._gathers = [(_column(rows), _column(into)) for rows, into in zip(stored, ordered, strict=True)]
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._count = torch.zeros(N, dtype=torch.int64, device=device)
        self._ages = torch.arange(length - 1, -1, -1, device=device).unsqueeze(1)
        self._offsets = torch.arange(length, device=device).unsqueeze(1)
        self._lanes = torch.arange(N, device=device)
        self._nothing = torch.tensor(length * N, device=device)
        self._order = torch.zeros_like(self._offsets)
        self._index, self._shown = (torch.zeros(length, N, dtype=torch.int64, device=device) for _ in range(2))
        self._mask = torch.zeros(length, N, dtype=torch.bool, device=device)
        shaped = [into.view(length, *leaf.shape) for into, leaf in zip(ordered, leaves, strict=True)]
        entries = {key: leaf.transpose(0, 1) for key, leaf in zip(self._keys, shaped, strict=True)}
        view = TensorDict({_MASK: self._mask.t()}, [N, length], device=device, names=[None, "time"])
        for key, leaf in entries.items():
            view.set(key, leaf)
        self._view = view.lock_()

    def append(self, step: TensorDictBase, reset: Tensor | None = None) -> None:
        """Add the newest step of all environments, in place of the oldest one.

        Args:
            step: ``[N]``, with at least the example's entries; copied and detached.
            reset: bool, ``[N]`` or ``[N, 1]``: environments whose episode begins with this step (TorchRL's "is_init").

        Raises:
            KeyError: if an entry is missing.
            ValueError: if an entry has another shape or dtype than in the example.
        """
        with torch.no_grad():
            for key, rows in zip(self._keys, self._rows, strict=True):
                leaf = step.get(key, None)
                if leaf is None:
                    raise KeyError(
                        f"RecentWindow: expected {key!r} in the step, received {_names(step)}. Remedy: a policy or "
                        "env that writes it."
                    )
                if leaf.shape != rows.shape[1:] or leaf.dtype != rows.dtype:
                    raise ValueError(
                        f"RecentWindow: expected {key!r} as {rows.dtype}{list(rows.shape[1:])}, received "
                        f"{leaf.dtype}{list(leaf.shape)}. Remedy: a window made from an example like this step."
                    )
                rows.index_copy_(0, self._position, leaf.unsqueeze(0))
            self._position.add_(1).remainder_(self.length)
            self._count.add_(1).clamp_(max=self.length)
            if reset is not None:
                self._count.masked_fill_(reset.view(self.num_envs), 1)

    def view(self) -> TensorDict:
        """The window in order of time.

        Returns:
            The example's entries, ``[N, L, ...]``, and "mask", bool ``[N, L]``, True for steps of the present episode.
            Always the same locked TensorDict, which the next call overwrites: clone what must last.
        """
        with torch.no_grad():
            torch.add(self._offsets, self._position, out=self._order)
            self._order.remainder_(self.length)
            torch.add(self._lanes, self._order, alpha=self.num_envs, out=self._index)
            torch.lt(self._ages, self._count, out=self._mask)
            torch.where(self._mask, self._index, self._nothing, out=self._shown)
            index = self._shown.view(-1)
            for rows, into in self._gathers:
                torch.index_select(rows, 0, index, out=into)
        return self._view

    def clear(self) -> None:
        """Forget all steps."""
        self._count.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Copies of the rows, one for each entry of the example in its order, and of the counters."""
        return {
            "rows": [rows.clone() for rows in self._rows],
            "position": self._position.clone(),
            "count": self._count.clone(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of :meth:`state_dict`, in place: recorded graphs stay valid.

        Raises:
            ValueError: if it is of a window of other entries, length or environments; nothing is changed then.
        """
        name = "RecentWindow"
        check_entries_of_state(state_dict, {"rows": (list, tuple), "position": Tensor, "count": Tensor}, name)
        expected = [tuple(t.shape) for t in self._rows]
        received = [tuple(getattr(t, "shape", ())) for t in state_dict["rows"]]
        if expected != received:
            raise ValueError(
                f"RecentWindow: expected rows of shapes {expected}, received {received}. Remedy: make the window with "
                "the length and the example of the checkpoint."
            )
        for key, rows, saved in zip(self._keys, self._rows, state_dict["rows"], strict=True):
            check_tensor_of_state(saved, rows, str(key), name)
        check_tensor_of_state(state_dict["position"], self._position, "position", name)
        check_tensor_of_state(state_dict["count"], self._count, "count", name)
        for rows, saved in zip(self._rows, state_dict["rows"], strict=True):
            rows.copy_(saved)
        self._position.copy_(state_dict["position"])
        self._count.copy_(state_dict["count"])


class BoundedHistory(deque[float]):
    """A ``collections.deque`` with a bound, for numbers that a script keeps (losses, returns, epsilons).

    A full deque drops its oldest entry for each new one, in constant time. Added here are a mean, slices, and a state
    for checkpoints. Numbers on the device belong into :class:`torchrl_perf.metrics.DeviceMetrics`, which reads them
    once an interval.

    Args:
        values: first entries.
        maxlen: most entries, at least 1.

    Raises:
        ValueError: if ``maxlen`` is below 1.
    """

    def __init__(self, values: Iterable[float] = (), maxlen: int = 1000) -> None:
        if maxlen < 1:
            raise ValueError(
                f"BoundedHistory: expected maxlen of at least 1, received {maxlen}. Remedy: maxlen=1 or more."
            )
        super().__init__(values, maxlen)

    def mean(self, last: int | None = None) -> float:
        """Mean of the newest ``last`` entries, of all by default; NaN where there are none."""
        count = len(self) if last is None else min(last, len(self))
        return math.fsum(islice(reversed(self), count)) / count if count else math.nan

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index] if isinstance(index, slice) else super().__getitem__(index)

    def state_dict(self) -> dict[str, list[float]]:
        """The entries, oldest first."""
        return {"values": list(self)}

    def load_state_dict(self, state_dict: dict[str, list[float]]) -> None:
        """Take the entries of :meth:`state_dict`; the newest ``maxlen`` of them stay."""
        check_entries_of_state(state_dict, {"values": (list, tuple)}, "BoundedHistory")
        values = [float(value) for value in state_dict["values"]]
        self.clear()
        self.extend(values)


def _column(rows: Tensor) -> Tensor:
    """The same memory as ``[rows, numbers of a row]``."""
    return rows.view(rows.shape[0], rows.stride(0) if rows.numel() else 0)


def _names(step: TensorDictBase) -> list[str]:
    return sorted(str(key) for key in step.keys(include_nested=True, leaves_only=True))
