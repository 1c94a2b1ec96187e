"""Observations that are stacks of frames, of which a buffer stores the newest alone: stacks are made when sampled."""

from typing import cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_perf.replay.buffer import DeviceReplayBuffer
from torchrl_perf.replay.storage import DeviceStorage

__all__ = ["StackedFrames"]


class StackedFrames:
    """Makes of a stack ``[*, F, ...]`` its newest frame, and of a sample of frames stacks again.

    A stack of four images takes a fourth of the memory. Frames before the first of an episode are 0, as
    ``AtariVectorEnv`` has them; so are those that are no longer in the buffer. Nothing waits for the host.

    Args:
        buffer: stores single frames, and ``("next", "done")``.
        frames: F, of a stack, the newest last.
        key: of the observation.

    Keys read and written: ``key`` and ``("next", key)``; of a sample ``"index"`` and, with n-step returns,
    ``"steps_to_next_obs"`` besides.

    Raises:
        ValueError: for fewer than two frames.
    """

    def __init__(self, buffer: DeviceReplayBuffer, frames: int, key: NestedKey = "observation") -> None:
        if frames < 2:
            raise ValueError(f"frames: expected at least 2, received {frames}. Remedy: store observations as they are.")
        self.buffer, self.frames, self.key = buffer, frames, key
        self._next_key = ("next", key) if isinstance(key, str) else ("next", *key)

    def newest(self, batch: TensorDictBase) -> TensorDictBase:
        """A batch ``[N, T]`` with the newest frame of each stack, ``[N, T, 1, ...]``; the batch itself stays."""
        kept = batch.copy()
        for key in (self.key, self._next_key):
            kept.set(key, batch.get(key)[:, :, -1:])
        return kept

    def whole(self, sample: TensorDictBase) -> TensorDictBase:
        """A sample ``[B]`` with stacks ``[B, F, ...]`` in place of its frames ``[B, 1, ...]``."""
        storage = cast("DeviceStorage", self.buffer.storage)
        ring, index = storage.ring, sample.get("index")
        frames, done = storage.field(self.key), storage.field(("next", "done"))
        row, stream = index // ring.num_streams, index % ring.num_streams
        age = (ring.cursor - 1 - row) % ring.steps
        seen = [torch.ones_like(index, dtype=torch.bool)]  # whether the frame so many rows before is of the episode
        for back in range(1, self.frames):
            before = (row - back) % ring.steps
            seen.append(seen[-1] & (age + back < ring.length) & ~done[before, stream].view(-1))
        known = torch.stack(seen)  # [F, B]

        def at(ahead: Tensor) -> Tensor:
            """The frame ``[B, 1, ...]`` so many rows after that of the sample, or 0."""
            valid = known.gather(0, (-ahead).clamp_min(0).unsqueeze(0)).squeeze(0)
            found = frames[(row + ahead) % ring.steps, stream]
            return torch.where(valid.view(-1, *[1] * (found.ndim - 1)), found, torch.zeros_like(found))

        zero = torch.zeros_like(index)
        steps = sample.get("steps_to_next_obs", None)
        following = zero + 1 if steps is None else steps.view(-1)
        backs = range(self.frames - 1, 0, -1)
        root = torch.cat([*(at(zero - back) for back in backs), sample.get(self.key)], 1)
        stack = torch.cat([*(at(following - back) for back in backs), sample.get(self._next_key)], 1)
        return sample.set(self.key, root).set(self._next_key, stack)
