"""How options_market flattened its dicts of observations, and kept transitions: a deque of dicts, then NumPy arrays."""

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

KEYS = ("technical", "sentiment", "position", "portfolio", "regime")
Row = dict[str, Any]


def flatten(observation: dict[str, np.ndarray]) -> np.ndarray:
    """One dict, ``[578]``."""
    return np.concatenate([observation[key].ravel() for key in KEYS])


def flatten_each(observations: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
    """Before: each env's dict, then an array of them, ``[N, 578]``."""
    return np.array([flatten(observation) for observation in observations])


def flatten_keys(observations: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
    """After: one array that is filled key by key and env by env, ``[N, 578]``."""
    sizes = [observations[0][key].size for key in KEYS]
    out = np.empty((len(observations), sum(sizes)), np.float32)
    begin = 0
    for key, size in zip(KEYS, sizes, strict=True):
        for index, observation in enumerate(observations):
            out[index, begin : begin + size] = observation[key].ravel()
        begin += size
    return out


class DequeReplay:
    """Before: a deque of dicts, sampled without replacement and stacked entry by entry.

    Args:
        capacity: number of rows.
    """

    def __init__(self, capacity: int) -> None:
        self.rows: deque[Row] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Sequence[Row]) -> None:
        """Appends transitions."""
        for row in rows:
            self.rows.append(row)

    def take(self, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """The rows at places counted from the oldest, stacked and brought to the device."""
        return collate([self.rows[index] for index in indices], device)

    def sample(self, count: int, device: torch.device) -> dict[str, Tensor]:
        """Random rows; with replacement where there are fewer than asked for."""
        few = len(self.rows) < count
        return collate(random.choices(self.rows, k=count) if few else random.sample(self.rows, count), device)


def collate(rows: Sequence[Row], device: torch.device) -> dict[str, Tensor]:
    """Entries of the rows, each one tensor on the device, by way of a list and an array."""
    return {key: torch.tensor(np.array([row[key] for row in rows])).to(device) for key in rows[0]}


class ArrayReplay:
    """After: one preallocated NumPy array for each entry, written in a ring.

    Args:
        capacity: number of rows.
        example: a row, for names, shapes and dtypes.
    """

    def __init__(self, capacity: int, example: Row) -> None:
        self.capacity, self.written = capacity, 0
        arrays = {key: np.asarray(value) for key, value in example.items()}
        self.columns = {key: np.zeros((capacity, *value.shape), value.dtype) for key, value in arrays.items()}

    def __len__(self) -> int:
        return min(self.written, self.capacity)

    def add(self, rows: Sequence[Row]) -> None:
        """Writes transitions, row by row."""
        for row in rows:
            slot = self.written % self.capacity
            for key, column in self.columns.items():
                column[slot] = row[key]
            self.written += 1

    def take(self, indices: Sequence[int] | np.ndarray, device: torch.device) -> dict[str, Tensor]:
        """The rows at places counted from the oldest, brought to the device."""
        slots = (np.asarray(indices) + max(0, self.written - self.capacity)) % self.capacity
        return {key: torch.from_numpy(column[slots]).to(device) for key, column in self.columns.items()}

    def sample(self, count: int, device: torch.device) -> dict[str, Tensor]:
        """Random rows, with replacement."""
        return self.take(np.random.randint(0, len(self), count), device)
