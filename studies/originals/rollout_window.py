"""The window of recent steps of active_dynamics and its copies, before and after.

Dimension key: ``B`` envs, ``L`` steps of the window. Entries are ``[B, L, ...]``, oldest first.
"""

import torch
from torch import Tensor

Data = dict[str, Tensor]


def copy_always(data: Data) -> Data:
    """Before: each entry cloned, then detached."""
    return {name: value.clone().detach() for name, value in data.items()}


def copy_by_need(data: Data) -> Data:
    """After: detached, then cloned, where a gradient is asked for; else cloned without one."""
    copied = {}
    for name, value in data.items():
        if value.requires_grad:
            copied[name] = value.detach().clone()
        else:
            with torch.no_grad():
                copied[name] = value.clone()
    return copied


class RollWindow:
    """The last L steps: all are moved by one place, the newest is written behind them.

    The pool of tensors that was added to it is made and never filled, so that before and after are the same.

    Args:
        length: L.
        example: one step, ``[B, ...]``.
    """

    def __init__(self, length: int, example: Data) -> None:
        self.data = {
            name: torch.zeros(value.shape[0], length, *value.shape[1:], dtype=value.dtype, device=value.device)
            for name, value in example.items()
        }
        self.length, self.count = length, 0
        self.pool: Data = {}

    def add(self, step: Data) -> None:
        """Takes the newest step ``[B, ...]``."""
        for name, value in step.items():
            self.data[name] = torch.roll(self.data[name], -1, dims=1)
            self.data[name][:, -1] = value
        self.count = min(self.count + 1, self.length)

    def recent(self) -> Data:
        """The steps that there have been, ``[B, count, ...]``; views."""
        return {name: value[:, self.length - self.count :] for name, value in self.data.items()}


class TurningWindow:
    """The pool as it was described: a circular buffer for each entry, put into order where it is read.

    Args:
        length: L.
        example: one step, ``[B, ...]``.
    """

    def __init__(self, length: int, example: Data) -> None:
        self.data, self.length, self.cursor = RollWindow(length, example).data, length, 0

    def add(self, step: Data) -> None:
        """Takes the newest step ``[B, ...]``, in the place of the oldest."""
        for name, value in step.items():
            self.data[name][:, self.cursor] = value
        self.cursor = (self.cursor + 1) % self.length

    def ordered(self) -> Data:
        """The window ``[B, L, ...]`` in memory of its own."""
        return {
            name: torch.cat((value[:, self.cursor :], value[:, : self.cursor]), 1) for name, value in self.data.items()
        }
