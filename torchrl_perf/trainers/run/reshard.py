"""The replay of a run's ranks, dealt out anew among another number of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_perf.runtime.files import CheckpointError

__all__ = ["end_streams", "problem_of_replay", "resharded_frames", "resharded_replay"]


def problem_of_replay(config: Any) -> str:
    """Why the replay of a run cannot be dealt out anew; empty where it can, or where there is none.

    Args:
        config: settings of the run.
    """
    if getattr(config, "compact", False):
        return "its replay is compact"
    return "its samples are slices" if getattr(config, "memory", "none") != "none" else ""


def resharded_replay(states: Sequence[Mapping[str, Any]], rank: int, streams: int, room: int) -> dict[str, Any]:
    """The state of a rank's replay: its streams of those of all ranks before, the newest rows where there is less room.

    Args:
        states: of the replay of each rank before, in their order.
        rank: whose state is made.
        streams: of each rank now.
        room: rows that a rank has room for now.

    Returns:
        A state that a buffer of so many streams and rows loads.

    Raises:
        CheckpointError: for replays of ranks that are not equally far, and rows of which some do not count.
    """
    first = states[0]
    storage, sampler = first["_storage"], first["_sampler"]
    rings = [state["_storage"].get("ring") for state in states]
    if not storage["initialized"]:
        return {**first, "_storage": {**storage, "max_size": room}}
    if any(ring != rings[0] for ring in rings) or sampler.get("admitted") is not None:
        raise CheckpointError(
            "checkpoint: expected replays of ranks that are equally far, all of whose rows count, received others. "
            "Remedy: the number of ranks that the run was begun with."
        )
    ring, before = rings[0], storage["layout"]["num_streams"]
    steps = room // streams
    kept = min(ring["length"], steps)
    times = torch.arange(ring["cursor"] - kept, ring["cursor"]) % ring["steps"]

    def dealt(parts: list[Tensor]) -> Tensor:
        """Entries of the slots of each rank before, as those of this rank's: the oldest first."""
        whole = torch.cat([part.cpu().unflatten(0, (-1, before)) for part in parts], 1)
        rows = whole[times]
        return rows[:, rank * streams : (rank + 1) * streams].flatten(0, 1).contiguous()

    columns = zip(*(state["_storage"]["rows"] for state in states), strict=True)
    layout = {**storage["layout"], "num_streams": streams, "capacity": streams * steps}
    own = {**storage, "max_size": streams * steps, "layout": layout, "rows": [dealt(list(parts)) for parts in columns]}
    own["ring"] = {**ring, "steps": steps, "num_streams": streams, "cursor": kept, "length": kept}
    if sampler.get("tree") is not None:
        weights = dealt([state["_sampler"]["tree"]["weights"] for state in states])
        largest = max(state["_sampler"]["max_priority"] for state in states)
        sampler = {**sampler, "max_priority": largest, "tree": {"num_slots": streams * steps, "weights": weights}}
    return {
        **first,
        "_storage": own,
        "_sampler": sampler,
        "_writer": {**first["_writer"], "write_count": kept * streams},
    }


@torch.no_grad()
def end_streams(buffer: Any) -> None:
    """Truncates the newest row of each stream: what is written next is of other episodes.

    Args:
        buffer: a :class:`~torchrl_perf.replay.DeviceReplayBuffer`.
    """
    storage = buffer.storage
    if not storage.initialized or not len(storage):
        return
    ring = storage.ring
    slots = (ring.read()[0] - 1) % ring.steps * ring.num_streams + torch.arange(ring.num_streams, device=ring.device)
    names = [name for name in ("done", "truncated") if ("next", name) in storage.fields]
    shape = (ring.num_streams, *storage.fields["next", names[0]].shape)
    ends = TensorDict({name: torch.ones(shape, dtype=torch.bool, device=ring.device) for name in names}, shape[:1])
    storage.put(slots, TensorDict({"next": ends}, shape[:1]))


def resharded_frames(state: Mapping[str, Any], own: Mapping[str, Any], before: int, ranks: int) -> dict[str, Any]:
    """The state of a policy whose exploration is counted in frames, of which each rank has a part.

    Args:
        state: of a rank before.
        own: of the policy that is to be loaded, whose lengths and whose noise of each env are kept.
        before: number of ranks that there were.
        ranks: that there are.
    """
    found = dict(state)
    for name, value in own.items():
        saved, last = state.get(name), name.rpartition(".")[2]
        if last == "frames" and isinstance(saved, Tensor):
            found[name] = (saved.double() * before / ranks).to(saved.dtype)
        elif last == "decay_frames" or (isinstance(saved, Tensor) and _is_of_envs(saved, value, before, ranks)):
            found[name] = value
    return found


def _is_of_envs(saved: Tensor, own: Tensor, before: int, ranks: int) -> bool:
    """Whether a tensor has a row for each env of a rank."""
    if not saved.ndim or saved.shape[1:] != own.shape[1:]:
        return False
    return saved.shape[0] != own.shape[0] and saved.shape[0] * before == own.shape[0] * ranks
