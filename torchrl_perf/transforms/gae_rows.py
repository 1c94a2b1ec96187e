"""How advantages read a batch, and write into it."""

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_perf.functional.rows.missing import stand_in

__all__ = [
    "available",
    "fitted_steps",
    "read_next",
    "read_pairs",
    "read_terminated",
    "with_own_bootstrap",
    "write_entry",
]


def available(td: TensorDictBase) -> list[Any]:
    """The names of all entries, for an error."""
    return sorted(td.keys(include_nested=True, leaves_only=True), key=str)


def read_next(td: TensorDictBase, key: NestedKey) -> Tensor:
    """An entry under "next".

    Raises:
        KeyError: where there is none.
    """
    tensor = td.get(("next", key), None)
    if tensor is None:
        raise KeyError(f"expected {('next', key)!r} in the batch, received {available(td)}. Remedy: set_keys names it")
    return tensor


def read_pairs(
    td: TensorDictBase, keys: list[NestedKey], ended: Tensor | None
) -> dict[NestedKey, tuple[Tensor, Tensor]]:
    """The network's inputs of the steps and of the next ones; missing ones are replaced where ``ended`` is True."""
    pairs = {}
    for key in keys:
        root, following = td.get(key, None), td.get(("next", key), None)
        if root is None:
            raise KeyError(f"expected {key!r} for the value network, received {available(td)}. Remedy: keep it there")
        if following is not None and ended is not None:
            following = stand_in(following, root, ended, td.batch_dims)
        pairs[key] = root, root if following is None else following
    if keys and all(root is following for root, following in pairs.values()):
        raise KeyError(
            f"expected one of {[('next', key) for key in keys]}, inputs of the value network at the next step, in the "
            f"batch, received {available(td)}. Remedy: keep them in the batch; without them the next step's value "
            "would be this one's"
        )
    return pairs


def with_own_bootstrap(gamma: Tensor, reward: Tensor, truncated: Tensor, value: Tensor) -> Tensor:
    """The reward, and at truncated steps the discounted value of the step's own observation: ``value``'s shape."""
    reward, truncated = (
        tensor.reshape(*tensor.shape[:-1], *(1,) * (value.ndim - tensor.ndim), tensor.shape[-1])
        for tensor in (reward, truncated)
    )
    return torch.where(truncated, reward + gamma.to(value.dtype) * value, reward)


def read_terminated(td: TensorDictBase, key: NestedKey, done: Tensor) -> Tensor:
    """The terminated flag; if it is missing, done and not truncated."""
    terminated = td.get(("next", key), None)
    if terminated is not None:
        return terminated
    sibling = (*key[:-1], "truncated") if isinstance(key, tuple) else "truncated"
    truncated = td.get(("next", sibling), None)
    if truncated is None:
        raise KeyError(
            f"expected {('next', key)!r} or {('next', sibling)!r} in the batch, received {available(td)}. Remedy: "
            "write one; done alone does not tell a terminated step, without future value, from a truncated one"
        )
    return done & ~truncated


def fitted_steps(steps: Tensor, reward: Tensor, batch_dims: int) -> Tensor:
    """Steps in a shape that broadcasts to the reward, which may have further dims of agents or components."""
    if steps.numel() == reward.numel():
        return steps.view_as(reward)
    return steps.reshape(*reward.shape[:batch_dims], *[1] * (reward.ndim - batch_dims))


def write_entry(td: TensorDictBase, key: NestedKey, tensor: Tensor) -> None:
    """Sets an entry; in a locked batch it is written in place, where there is one.

    Raises:
        RuntimeError: for a new entry of a locked batch.
    """
    if not td.is_locked:
        td.set(key, tensor)
    elif key in td.keys(include_nested=True):
        td.set_(key, tensor)
    else:
        raise RuntimeError(f"expected {key!r} in a locked batch, received {available(td)}. Remedy: unlock or allocate")
