"""Steps that a transform repeats within one step of the env above it, and episodes that end among them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_perf.runtime.upstream.envs import FRAME_SKIP_CODE

__all__ = ["is_repeated", "joined"]

_DEPTH = 12
"""Frames of the call stack searched for the frame skip above an env's step: a transform and an env per level."""


def is_repeated() -> bool:
    """Whether the caller's caller steps for TorchRL's ``FrameSkipTransform``, a second time or more.

    The transform passes the same TensorDict and says nothing of its own, so the call stack is asked. A compiler cannot
    ask it: there the answer is False.
    """
    if torch.compiler.is_compiling():
        return False
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code is FRAME_SKIP_CODE:
            return True
        frame = frame.f_back
    return False


def joined(
    before: Mapping[NestedKey, Tensor], after: Mapping[NestedKey, Tensor], rewards: Collection[NestedKey]
) -> dict[NestedKey, Tensor]:
    """The result of two steps together: ``before`` in the rows that the first one ended, else ``after``.

    Args:
        before: entries of "next" of the first step, ``[*B, ...]``, with "done" ``[*B, 1]``.
        after: those of the second.
        rewards: keys that are 0 in an ended row, since the caller adds the reward that it had.

    Returns:
        The entries of ``after``, new tensors.
    """
    done = before["done"].squeeze(-1)
    result = {}
    for key, new in after.items():
        old = before.get(key)
        mask = done.reshape(done.shape + (1,) * (new.ndim - done.ndim))
        if key in rewards:
            old = torch.zeros_like(new)
        result[key] = new if old is None else torch.where(mask, old, new)
    return result
