"""A ring of the transitions of options, whose number in a batch only the device knows."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_perf.kernels import gather_rows
from torchrl_perf.replay._checks import check_entries_of_state, check_tensor_of_state
from torchrl_perf.replay.layout import RowLayout, build, fields_of, leaves_of, readable_key
from torchrl_perf.replay.memory import reserve
from torchrl_perf.replay.ring import slots_among


class OptionReplay:
    """Keeps the newest ``capacity`` of the rows whose mask is True, and samples them uniformly.

    Only the device knows how many options end in a batch. Their rows go to the next free slots of the ring by a running
    count of the mask, the others to a slot that is never read: static shapes, no host wait, capturable in a CUDA graph.
    A buffer that stores whole batches would fill up with, and sample, meaningless rows. All entries of a row are packed
    side by side, so that one gather reads all.

    Args:
        example: rows ``[*]`` as :class:`~torchrl_perf.transforms.OptionSegments` returns them, for shapes and dtypes.
        capacity: number of transitions to keep.
        batch_size: default number of rows of a sample.

    Attributes:
        written: transitions written since the start, int64 0-d on the device.
        columns: live view ``[capacity + 1, *size]`` of each entry, by its key as a tuple; the last row has no meaning.

    Raises:
        ValueError: for a capacity below 1 or beyond the memory, a batch size below 1; when extended by more rows than
            the capacity.
        KeyError: where rows lack the mask or an entry that the example has.
    """

    def __init__(self, example: TensorDictBase, *, capacity: int, batch_size: int = 128) -> None:
        if capacity < 1 or batch_size < 1:
            raise ValueError(
                f"capacity, batch_size: expected at least 1, received {capacity} and {batch_size}. Remedy: raise them."
            )
        self.capacity, self.batch_size = capacity, batch_size
        self.device = _mask_of(example).device
        leaves = leaves_of(example)
        self._layout = RowLayout(fields_of(leaves, example.ndim))
        slots, row_bytes = capacity + 1, self._layout.row_bytes  # one more, for the rows that are not kept
        reserve(slots * row_bytes, self.device, f"OptionReplay: {capacity} rows", "a smaller capacity")
        self._rows = torch.zeros(slots, row_bytes, dtype=torch.uint8, device=self.device)
        self.columns = dict(zip(self._layout.keys, self._layout.views(self._rows), strict=True))
        self.written = torch.zeros((), dtype=torch.int64, device=self.device)

    def extend(self, rows: TensorDictBase) -> None:
        """Writes the rows ``[*]`` whose "mask" is True, those of a batch ``[N, T]`` in the order of time."""
        mask = _mask_of(rows)
        if mask.numel() > self.capacity:
            raise ValueError(
                f"rows: expected at most {self.capacity}, the capacity, received {mask.numel()} ({list(mask.shape)}), "
                "all of which might be kept. Remedy: a larger capacity, or smaller batches."
            )
        mask = _flat(mask)
        count = mask.cumsum(0)
        slots = torch.where(mask, (self.written + count - 1).remainder(self.capacity), self.capacity)
        for key, column in self.columns.items():
            column.index_copy_(0, slots, _flat(rows[key], rows.ndim))
        self.written += count[-1]

    @property
    def size(self) -> Tensor:
        """Transitions that can be sampled, int64 0-d on the device."""
        return self.written.clamp(max=self.capacity)

    def __len__(self) -> int:
        """The same as a Python number; waits for the device."""
        return int(self.size)

    def sample(self, batch_size: int | None = None) -> TensorDict:
        """Transitions ``[B]`` drawn uniformly with replacement, views of fresh rows, without a host wait.

        "mask" is True; from an empty ring the rows are zeros and it is False, so that a loss that respects the mask is
        0.
        """
        count = self.batch_size if batch_size is None else batch_size
        uniform = torch.rand(count, dtype=torch.float64, device=self.device)
        slots = slots_among(uniform, self.written, self.size, self.capacity, 1)
        views = self._layout.views(gather_rows(self._rows, slots))
        return build(dict(zip(self._layout.keys, views, strict=True)), (count,), self.device)

    def state_dict(self) -> dict[str, Any]:
        """Rows and counter, on the device."""
        return {"written": self.written.clone(), "columns": [column.clone() for column in self.columns.values()]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`, in place, so that captured graphs stay valid.

        Raises:
            ValueError: for rows of another shape, dtype or capacity, and for missing entries; nothing is changed then.
        """
        check_entries_of_state(state_dict, {"columns": (list, tuple), "written": Tensor}, "OptionReplay")
        columns = state_dict["columns"]
        shapes = [list(column.shape) for column in self.columns.values()]
        if [list(getattr(column, "shape", ())) for column in columns] != shapes:
            received = [list(getattr(column, "shape", ())) for column in columns]
            raise ValueError(
                f"expected columns {shapes}, received {received}. Remedy: the example and the capacity of the saved "
                "buffer."
            )
        for (key, column), saved in zip(self.columns.items(), columns, strict=True):
            check_tensor_of_state(saved, column, readable_key(key), "OptionReplay")
        check_tensor_of_state(state_dict["written"], self.written, "written", "OptionReplay")
        for column, saved in zip(self.columns.values(), columns, strict=True):
            column.copy_(saved)
        self.written.copy_(state_dict["written"])


def _mask_of(rows: TensorDictBase) -> Tensor:
    mask = rows.get("mask", None)
    if mask is None:
        raise KeyError(
            f"expected 'mask' in the rows, received {sorted(map(str, rows.keys(True, True)))}. Remedy: rows of a "
            "policy with options."
        )
    return mask


def _flat(tensor: Tensor, batch_dims: int | None = None) -> Tensor:
    """``[rows, *F]``, time first where there are two batch dims, so that older rows come first."""
    dims = tensor.ndim if batch_dims is None else batch_dims
    return tensor.transpose(0, 1).flatten(0, 1) if dims == 2 else tensor.flatten(0, dims - 1)
