"""Which calls of one function become graphs: the third of a kind, until eight kinds are, or one cannot be recorded."""

import warnings
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from torchrl_perf.runtime.self_capture.conditions import (
    SHAPES,
    WARMUP,
    SelfCaptureWarning,
    alone_on_side_stream,
)
from torchrl_perf.runtime.upstream.tensors import current_stream

__all__ = ["Kinds", "place_of"]

Made = TypeVar("Made")

COUNTED = 1024
"""Kinds of calls whose repeats are counted at a time."""


class Kinds:
    """Counts the calls of one function by kind, and says once why some run eagerly.

    Args:
        name: of the function, for the warnings.
        limit: kinds that are recorded at most.
    """

    def __init__(self, name: str, *, limit: int = SHAPES) -> None:
        self.name, self._limit = name, limit
        self._calls: dict[Hashable, int] = {}
        self._said: set[str] = set()
        self.refused = False

    def is_due(self, kind: Hashable, recorded: int) -> bool:
        """Counts a call of a kind that is not recorded; whether it is to be.

        Args:
            kind: equal for calls that one graph can repeat.
            recorded: kinds that are recorded.
        """
        if self.refused or recorded == self._limit:
            return False
        calls = self._calls.pop(kind, 0)
        if calls >= WARMUP:
            return True
        if len(self._calls) == COUNTED:  # of shapes that do not come back
            self._calls.clear()
        self._calls[kind] = calls + 1
        return False

    def attempt(self, make: Callable[[], Made]) -> Made | None:
        """What ``make`` records; None where it raises, and then no other call is recorded."""
        try:
            with alone_on_side_stream():
                return make()
        except Exception as error:
            self.refused = True
            self.say(
                f"a call that a CUDA graph can repeat, received {type(error).__name__}: {error}. Remedy: "
                "capture=False, or no host wait in it."
            )
            return None

    def say(self, words: str) -> None:
        """Warns once that calls run eagerly: "expected" and what follows."""
        if words not in self._said:
            self._said.add(words)
            warnings.warn(f"{self.name} runs eagerly: expected {words}", SelfCaptureWarning, stacklevel=5)


def place_of(device: torch.device) -> tuple[bool, int]:
    """What every kind of call depends on: inference mode, and the stream that it is launched on."""
    stream = current_stream(device) if device.type == "cuda" else 0
    return torch.is_inference_mode_enabled(), stream
