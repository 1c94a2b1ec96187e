"""What happens to a collected batch: marked, split, processed, moved, written into a replay buffer."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.collectors.utils import split_trajectories
from torchrl.data import ReplayBuffer, TensorStorage
from torchrl.envs import EnvBase

Postproc = Callable[[TensorDictBase], TensorDictBase]


class Delivery:
    """The last part of an iteration, in TorchRL's order: split, process, drop private keys, then yield or write.

    Args:
        postproc: called on each batch.
        split_trajs: whether a batch ``[*B, T]`` becomes ``[episodes, longest]``, padded with zeros, with a mask.
        track_traj_ids: whether batches have the numbers of episodes, which splitting needs.
        replay_buffer: where batches are written; they are then not yielded.
        extend_buffer: True writes a batch as a whole, False step by step.
        return_same_td: whether the batch is yielded without a copy, so that the next one overwrites it.
        storing_device: device of the batches; None for that on which they are collected.

    Raises:
        ValueError: for arguments that contradict each other.
    """

    def __init__(
        self,
        *,
        postproc: Postproc | None,
        split_trajs: bool,
        track_traj_ids: bool,
        replay_buffer: ReplayBuffer | None,
        extend_buffer: bool,
        return_same_td: bool,
        use_buffers: bool | None,
        storing_device: torch.device | None,
    ) -> None:
        if split_trajs and not track_traj_ids:
            raise ValueError("split_trajs=True: expected track_traj_ids=True, received False. Remedy: leave it out.")
        if replay_buffer is not None:
            _check_buffer(postproc, split_trajs, extend_buffer, return_same_td, use_buffers)
        elif not extend_buffer:
            raise ValueError("extend_buffer=False: expected a replay_buffer, received None. Remedy: give both.")
        self.split_trajs, self.replay_buffer, self.extend_buffer = split_trajs, replay_buffer, extend_buffer
        self.return_same_td = return_same_td
        if hasattr(postproc, "to") and storing_device is not None:
            postproc = postproc.to(storing_device) or postproc  # some move in place and return None
        self.postproc = postproc

    def processed(self, batch: TensorDictBase) -> TensorDictBase:
        """``batch`` split, processed, and without keys that begin with an underscore."""
        if self.split_trajs:
            batch = split_trajectories(batch, prefix="collector")
        if self.postproc is not None:
            batch = self.postproc(batch)
        private = [key for key in batch.keys(True) if _is_private(key)]
        return batch.exclude(*private) if private else batch

    def owned(self, batch: TensorDictBase) -> TensorDictBase:
        """``batch``, or a copy that owns its data where the next batch would overwrite what the caller keeps."""
        return batch if self.return_same_td else batch.clone()

    def write(self, batch: TensorDictBase) -> None:
        """Write ``batch`` into the replay buffer, which gets data of its own."""
        buffer = self.replay_buffer
        if not isinstance(getattr(buffer, "storage", None), TensorStorage):
            batch = batch.clone()  # a list would keep the rows by reference
        if self.extend_buffer:
            buffer.extend(batch)
            return
        for row in batch.unbind(-1):
            buffer.add(row)


def _check_buffer(
    postproc: Postproc | None,
    split_trajs: bool,
    extend_buffer: bool,
    return_same_td: bool,
    use_buffers: bool | None,
) -> None:
    wrong = None
    if postproc is not None and not extend_buffer:
        wrong = "postproc", "extend_buffer=False, which adds single steps"
    if split_trajs and not extend_buffer:
        wrong = "split_trajs", "extend_buffer=False, which adds single steps"
    if return_same_td:
        wrong = "return_same_td", "a replay_buffer, with which iteration yields None"
    if use_buffers:
        wrong = "use_buffers", "a replay_buffer"
    if wrong:
        raise TypeError(f"{wrong[0]}: expected it to be left out, received it with {wrong[1]}. Remedy: drop one.")


def under_next(key: NestedKey) -> NestedKey:
    """The key of the same entry under "next"."""
    return ("next", *((key,) if isinstance(key, str) else key))


def _is_private(key: Any) -> bool:
    return any(part.startswith("_") for part in ((key,) if isinstance(key, str) else key))


def resolve_traj_format(traj_format: str | None, trajs_per_batch: int | None, trajs_per_write: int | None) -> str:
    """TorchRL's layout of batches of whole episodes: ``"padded"``, also for None, or ``"cat"``.

    Raises:
        ValueError: for another, or one of the three arguments without ``trajs_per_batch``.
    """
    if traj_format not in (None, "padded", "cat"):
        raise ValueError(f"traj_format: expected 'padded' or 'cat', received {traj_format!r}. Remedy: one of the two.")
    if trajs_per_batch is None:
        given = {"traj_format": traj_format, "trajs_per_write": trajs_per_write}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name}: expected trajs_per_batch too, received {value!r} alone. Remedy: give both.")
    elif not isinstance(trajs_per_batch, int) or isinstance(trajs_per_batch, bool) or trajs_per_batch < 1:
        raise ValueError(f"trajs_per_batch: expected an int from 1 on, received {trajs_per_batch!r}. Remedy: 1.")
    return traj_format or "padded"


def truncation_keys(env: EnvBase) -> list[tuple[Any, Any]]:
    """Pairs of "truncated" and "done" keys of an env, which ``set_truncated`` marks at the end of each batch.

    Raises:
        ValueError: for an env without "truncated".
    """
    keys = [key for key in env.done_keys if (key if isinstance(key, str) else key[-1]) == "truncated"]
    if not keys:
        raise ValueError(
            f"set_truncated=True: expected a 'truncated' entry, received done keys {env.done_keys}. Remedy: "
            "env.add_truncated_keys() before the env is given to the collector."
        )
    return [(key, "done" if isinstance(key, str) else (*key[:-1], "done")) for key in keys]
