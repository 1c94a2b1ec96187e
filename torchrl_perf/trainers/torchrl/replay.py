"""Where TorchRL's trainers keep a batch and take minibatches from, without leaving the device."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import TrainerHookBase

from torchrl_perf.trainers.on_policy.minibatches import flat_rows, minibatch_indices
from torchrl_perf.trainers.recurrent import refuse_recurrent_rows


class MinibatchHook(TrainerHookBase):
    """Shuffled minibatches straight from the collected batch, for TorchRL's on-policy trainers: no buffer, no copy.

    Each epoch hands out every row once, in fresh order, and then raises ``StopIteration``, which ends the trainer's
    epoch; so construct the trainer with ``optim_steps_per_batch=None`` (or the number of minibatches of an epoch) and
    ``replay_buffer=None``. Rows are views of the batch until they are gathered.

    Args:
        minibatch_size: rows of a minibatch, a divisor of the batch's N * T.
        keys: the entries that the loss reads; all by default. Fewer is less to gather.

    Raises:
        ValueError: at the first batch, if ``minibatch_size`` does not divide it.
    """

    def __init__(self, minibatch_size: int, *, keys: Sequence[NestedKey] | None = None) -> None:
        self.minibatch_size = minibatch_size
        self.keys = keys
        self._rows: TensorDictBase | None = None
        self._indices: Iterator[Tensor] = iter(())

    def extend(self, batch: TensorDictBase) -> TensorDictBase:
        """Begins an epoch over ``batch [N, T]``, which is returned as it is."""
        _require_batch(batch)
        refuse_recurrent_rows(batch, "MinibatchHook")
        rows = batch.numel()
        if self.minibatch_size < 1 or rows % self.minibatch_size:
            raise ValueError(
                f"minibatch_size: expected a divisor of the {rows} rows of a batch of size {list(batch.batch_size)}, "
                f"received {self.minibatch_size}. Remedy: powers of two for it and for frames_per_batch."
            )
        self._rows = flat_rows(batch, self.keys) if batch.ndim > 1 else batch
        parts = rows // self.minibatch_size
        device = next(iter(self._rows.values(True, True))).device
        self._indices = minibatch_indices(rows, epochs=1, parts=parts, device=device)
        return batch

    def sample(self, batch: TensorDictBase) -> TensorDictBase:
        """The next minibatch ``[B]``.

        Raises:
            StopIteration: at the end of the epoch.
        """
        if self._rows is None:
            return batch
        return self._rows[next(self._indices)]

    def register(self, trainer: Trainer, name: str = "replay_buffer") -> None:
        """Registers both stages; the advantage's own hook has to be there already, as the constructor leaves it."""
        trainer.register_op("pre_epoch", self.extend)
        trainer.register_op("process_optim_batch", self.sample)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """Empty: nothing outlasts a batch."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore."""


class DeviceReplayHook(TrainerHookBase):
    """A replay buffer in TorchRL's trainers, without the copy of each batch to the CPU and back.

    The counterpart of ``torchrl.trainers.ReplayBufferTrainer`` (which copies every batch to the CPU once an epoch), for
    trainers constructed with ``replay_buffer=None``. The buffer decides where rows live: a
    :func:`~torchrl_perf.replay.make_replay_buffer` on the collector's device waits for nothing.

    On-policy (a sampler without replacement): each epoch fills the emptied buffer with the whole batch, after its
    advantages are estimated, and ``StopIteration`` at the end of the sampler's pass ends the epoch. So rows of an older
    batch are never drawn, whatever the capacity.

    Off-policy (any other sampler): each batch is added once, before anything else, so that the random frames at the
    start are kept as well (the trainers' own hook drops those before ``init_random_frames``); then every optimiser step
    draws a sample, and after it the priorities that the loss wrote are handed to the sampler.

    Args:
        replay_buffer: a TorchRL buffer with a ``batch_size``.
        on_policy: which of the two; None asks the sampler.

    Raises:
        ValueError: for a buffer without ``batch_size``.
    """

    def __init__(self, replay_buffer: ReplayBuffer, *, on_policy: bool | None = None) -> None:
        if replay_buffer.batch_size is None:
            raise ValueError(
                "replay_buffer: expected a batch_size, received None. Remedy: construct the buffer with batch_size=."
            )
        self.replay_buffer = replay_buffer
        self.on_policy = _draws_epochs(replay_buffer) if on_policy is None else on_policy
        self._samples: Iterator[TensorDictBase] = iter(())
        self._sample: TensorDictBase | None = None

    def extend(self, batch: TensorDictBase) -> TensorDictBase:
        """Adds ``batch [N, T]`` and returns it as it is."""
        _require_batch(batch)
        if not draws_slices(self.replay_buffer):
            refuse_recurrent_rows(batch, "DeviceReplayHook")
        if self.on_policy:
            self.replay_buffer.empty()
        self.replay_buffer.extend(batch if _keeps_streams(self.replay_buffer) else batch.reshape(-1))
        if self.on_policy:
            self._samples = iter(self.replay_buffer)
        return batch

    def sample(self, batch: TensorDictBase) -> TensorDictBase:
        """The next rows ``[B]``.

        Raises:
            StopIteration: on-policy, at the end of the pass.
        """
        self._sample = next(self._samples) if self.on_policy else self.replay_buffer.sample()
        return self._sample

    def update_priority(self) -> None:
        """Hands the priorities of the latest sample to the sampler, if the loss has written them."""
        sample, self._sample = self._sample, None
        key = getattr(self.replay_buffer, "priority_key", "td_error")
        if sample is not None and sample.get(key, None) is not None:
            cast("TensorDictReplayBuffer", self.replay_buffer).update_tensordict_priority(sample)

    def register(self, trainer: Trainer, name: str = "replay_buffer") -> None:
        """Registers all stages, and the buffer for checkpoints."""
        trainer.register_op("pre_epoch" if self.on_policy else "batch_process", self.extend)
        trainer.register_op("process_optim_batch", self.sample)
        if not self.on_policy and hasattr(self.replay_buffer, "update_tensordict_priority"):
            trainer.register_op("post_optim", self.update_priority)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """The buffer's state."""
        return {"replay_buffer": self.replay_buffer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self.replay_buffer.load_state_dict(state_dict["replay_buffer"])


def _require_batch(batch: TensorDictBase | None) -> None:
    if batch is None:
        raise TypeError(
            "batch: expected the collector's TensorDict, received None. Remedy: async_collection=False, and a "
            "collector without a replay_buffer of its own."
        )


def draws_slices(buffer: ReplayBuffer) -> bool:
    """Whether the sampler draws whole sequences."""
    return "Slice" in type(buffer.sampler).__name__


def _draws_epochs(buffer: ReplayBuffer) -> bool:
    """Whether the sampler passes over the rows without replacement."""
    sampler = buffer.sampler
    return isinstance(sampler, SamplerWithoutReplacement) or "WithoutReplacement" in type(sampler).__name__


def _keeps_streams(buffer: ReplayBuffer) -> bool:
    """Whether the storage takes ``[N, T]`` batches as N streams, rather than rows alone."""
    return hasattr(type(buffer.storage), "ring")  # asked of the instance, it would be made too early
