"""Entries of ``info`` as leaves of an observation: action masks, success flags, anything with a fixed shape."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torchrl.data import Binary, TensorSpec, Unbounded

from torchrl_perf.collectors.host_spaces import RESERVED, Leaf, key_leaf

__all__ = ["InfoKeys", "info_leaves", "learned_info_leaves", "read_info"]

InfoKeys = Sequence[str | tuple[str, ...]] | Mapping[Any, gym.Space | TensorSpec]


def info_leaves(keys: Mapping[Any, gym.Space | TensorSpec], taken: Sequence[Leaf]) -> list[Leaf]:
    """The leaves of entries of ``info`` whose specs are given.

    Args:
        keys: the key of an entry, a tuple for one in nested dicts, and the gymnasium space or TorchRL spec of its value
            in one env.
        taken: leaves of the observation, whose keys are not free.

    Raises:
        ValueError: for a key that the batch or the observation has already, and for what is neither space nor spec.
    """
    leaves = []
    for key, kind in keys.items():
        path = _checked_path(key, taken)
        name = path if len(path) > 1 else path[0]
        if isinstance(kind, TensorSpec):
            if not isinstance(getattr(kind, "dtype", None), torch.dtype):
                raise ValueError(
                    f"info_keys[{key!r}]: expected the spec of one tensor, received {kind}. Remedy: one entry for "
                    "each tensor: info_keys={{name: spec}}."
                )
            leaves.append(Leaf(name, path, None, tuple(kind.shape), kind.dtype, given=kind))
        elif isinstance(kind, gym.Space):
            leaves.append(key_leaf(kind, name, path))
        else:
            raise ValueError(
                f"info_keys[{key!r}]: expected a gymnasium space or a TorchRL spec of one env's value, received "
                f"{kind!r}. Remedy: for an action mask of 4 actions torchrl.data.Binary(4, dtype=torch.bool)."
            )
    return leaves


def learned_info_leaves(keys: Sequence[Any], info: Any, taken: Sequence[Leaf], num_envs: int) -> list[Leaf]:
    """The leaves of entries of ``info`` as a reset shows them.

    Args:
        keys: of the entries.
        info: what the reset of a vector env gave.
        taken: leaves of the observation.
        num_envs: n.

    Raises:
        ValueError: where the reset's info has no such entry, or one without a fixed shape.
    """
    kinds: dict[Any, TensorSpec] = {}
    for key in keys:
        path = _checked_path(key, taken)
        value, present = _find(info, path, num_envs)
        if value is None or not present.any():
            raise ValueError(
                f"info_keys: expected {key!r} in the info of a reset, received {sorted(map(str, info))}. Remedy: say "
                f"what it holds: info_keys={{{key!r}: torchrl.data.Unbounded(shape)}}."
            )
        one = np.asarray(value[int(np.argmax(present))])
        if one.dtype == object or one.dtype.kind in "USmM":
            raise ValueError(f"info_keys: expected numbers below {key!r}, received {one.dtype}. Remedy: leave it out.")
        dtype = torch.get_default_dtype() if one.dtype == np.float64 else torch.as_tensor(one).dtype
        shape = torch.Size(one.shape)
        kinds[key] = (
            Binary(shape=shape, dtype=dtype) if dtype == torch.bool and shape else Unbounded(shape, dtype=dtype)
        )
    return info_leaves(kinds, taken)


def _checked_path(key: Any, taken: Sequence[Leaf]) -> tuple[str, ...]:
    path = key if isinstance(key, tuple) else (key,)
    if not path or not all(isinstance(part, str) for part in path):
        raise ValueError(
            f"info_keys: expected strings, or tuples of them for nested entries, received {key!r}. Remedy: 'name' or "
            "('outer', 'name')."
        )
    names = [(leaf.key,) if isinstance(leaf.key, str) else leaf.key for leaf in taken]
    if path[0] in RESERVED or any(path[: len(name)] == name or name[: len(path)] == path for name in names):
        raise ValueError(
            f"info_keys: expected keys other than those of the batch {RESERVED} and of the observation "
            f"{[leaf.key for leaf in taken]}, received {key!r}. Remedy: rename the entry with a gymnasium wrapper."
        )
    return path


def _find(info: Any, path: Sequence[Any], num_envs: int) -> tuple[Any, np.ndarray]:
    """The values ``[n, ...]`` of an entry, and which envs have it: gymnasium writes that below ``_key``."""
    value: Any = info
    present = np.ones(num_envs, dtype=bool)
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return None, np.zeros(num_envs, dtype=bool)
        mask = value.get(f"_{key}")
        present = present if mask is None else present & np.asarray(mask, dtype=bool)
        value = value[key]
    if isinstance(value, Mapping):
        raise ValueError(f"info_keys: expected an array below {path}, received a dict. Remedy: a tuple with its key.")
    if isinstance(value, np.ndarray) and value.dtype == object:
        present = present & np.array([entry is not None for entry in value])
    return value, present


def read_info(leaf: Leaf, info: Any, num_envs: int) -> np.ndarray:
    """The values of a leaf ``[n, *shape]``; zeros for envs whose info has none.

    Args:
        leaf: one of :func:`info_leaves`.
        info: of a vector env, with masks below ``_key``.
        num_envs: n.

    Raises:
        ValueError: for values of another shape than the leaf's.
    """
    value, present = _find(info, leaf.path, num_envs)
    out = np.zeros((num_envs, *leaf.shape), dtype=leaf.numpy_dtype)
    if value is None:
        return out
    rows = range(num_envs) if present.all() else np.flatnonzero(present)
    if isinstance(value, np.ndarray) and value.dtype != object:
        if value.shape != out.shape:
            _refuse(leaf, value.shape[1:])
        chosen = value if leaf.start is None else value - leaf.start
        if len(rows) == num_envs:
            out[...] = chosen
        else:
            out[rows] = chosen[rows]
        return out
    for i in rows:
        one = np.asarray(value[i])
        if one.shape != leaf.shape:
            _refuse(leaf, one.shape)
        out[i] = one if leaf.start is None else one - leaf.start
    return out


def _refuse(leaf: Leaf, shape: tuple[int, ...]) -> None:
    raise ValueError(
        f"info_keys[{leaf.key!r}]: expected values of shape {list(leaf.shape)}, received {list(shape)}. Remedy: the "
        "space or spec of one env's value."
    )
