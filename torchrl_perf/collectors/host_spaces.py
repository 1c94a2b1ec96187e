"""Gymnasium spaces as TorchRL specs, and observations as flat lists of arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded

INIT_KEY = "is_init"
RESERVED = ("action", "collector", "done", "index", INIT_KEY, "next", "reward", "terminated", "truncated")
DONE_KEYS = ("done", "terminated", "truncated")

_WIDENED = {"uint16": torch.int32, "uint32": torch.int64}
_KEPT = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32")


@dataclass(frozen=True)
class Leaf:
    """One array of an observation, or the action.

    Attributes:
        key: where it lies in a TensorDict.
        path: where it lies in what the env returns, dict keys and tuple positions.
        space: the space of one env; None where a spec is given.
        shape: of one env's value.
        dtype: as stored.
        start: smallest value of a discrete space, taken off so that stored values start at 0, or None where it is 0.
        given: TorchRL's spec of one env's value, instead of a space.
    """

    key: NestedKey
    path: tuple[str | int, ...]
    space: gym.Space | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: Any = None
    given: TensorSpec | None = None

    def read(self, observation: Any) -> Any:
        """This leaf's values in an observation (of one env or of all), as stored."""
        for step in self.path:
            observation = observation[step]
        return observation if self.start is None else observation - self.start

    @property
    def numpy_dtype(self) -> np.dtype:
        """The stored dtype as numpy's."""
        return np.asarray(torch.empty(0, dtype=self.dtype)).dtype

    def spec(self, num_envs: int, device: torch.device) -> TensorSpec:
        """TorchRL's spec of the batched values, ``[N, *shape]``."""
        shape = torch.Size((num_envs, *self.shape))
        if self.given is not None:
            return self.given.expand(shape).to(device)
        space: Any = self.space
        if isinstance(space, spaces.Discrete):
            return Categorical(int(space.n), shape=shape, dtype=self.dtype, device=device)
        if isinstance(space, spaces.MultiDiscrete):
            nvec = torch.as_tensor(space.nvec, device=device)
            return MultiCategorical(nvec.expand(shape), shape=shape, dtype=self.dtype, device=device)
        if isinstance(space, spaces.MultiBinary):
            return Binary(shape=shape, dtype=self.dtype, device=device)
        if np.isinf(space.low).all() and np.isinf(space.high).all():
            return Unbounded(shape=shape, dtype=self.dtype, device=device)
        low, high = (torch.as_tensor(bound, device=device).to(self.dtype) for bound in (space.low, space.high))
        return Bounded(low.expand(shape), high.expand(shape), shape=shape, dtype=self.dtype, device=device)


def observation_leaves(space: gym.Space) -> list[Leaf]:
    """The arrays of an observation space of one env.

    A Dict's keys are TensorDict keys, nested ones too; a Tuple's entries are ``"0"``, ``"1"``, and so on, below
    ``"observation"`` where the Tuple is the whole observation; anything else is ``"observation"``.

    Raises:
        ValueError: for a space without a fixed shape (Sequence, Graph, Text) and for a key that the batch uses itself.
    """
    leaves = _walk(space, (), ())
    for leaf in leaves:
        first = leaf.key if isinstance(leaf.key, str) else leaf.key[0]
        if first in RESERVED:
            raise ValueError(
                f"observation space: expected keys other than {RESERVED}, which the batch uses, received {leaf.key!r}. "
                "Remedy: rename it, for example with gymnasium.wrappers.TransformObservation."
            )
    return leaves


def action_leaf(space: gym.Space) -> Leaf:
    """The action of one env, as key ``"action"``.

    Raises:
        ValueError: for Dict, Tuple and other composed action spaces.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        raise ValueError(
            f"action space: expected Box, Discrete, MultiDiscrete or MultiBinary, received {space}. Remedy: flatten it "
            "with a gymnasium wrapper, such as gymnasium.wrappers.TransformAction with gymnasium.spaces.flatten_space."
        )
    return _leaf(space, "action", ())


def key_leaf(space: gym.Space, key: NestedKey, path: tuple[str | int, ...]) -> Leaf:
    """The leaf of a space that is one array, as ``key``; ``path`` is where it lies in what the env returns.

    Raises:
        ValueError: for a space without a fixed shape.
    """
    return _leaf(space, key, path)


def _walk(space: gym.Space, key: tuple[str, ...], path: tuple[str | int, ...]) -> list[Leaf]:
    if isinstance(space, spaces.Dict):
        return [leaf for name, sub in space.items() for leaf in _walk(sub, (*key, name), (*path, name))]
    if isinstance(space, spaces.Tuple):
        prefix = key or ("observation",)
        return [leaf for i, sub in enumerate(space.spaces) for leaf in _walk(sub, (*prefix, str(i)), (*path, i))]
    name: NestedKey = key if len(key) > 1 else (key[0] if key else "observation")
    return [_leaf(space, name, path)]


def _leaf(space: gym.Space, key: NestedKey, path: tuple[str | int, ...]) -> Leaf:
    if isinstance(space, spaces.Box):
        return Leaf(key, path, space, tuple(space.shape), _stored_dtype(space.dtype, key))
    if isinstance(space, spaces.Discrete):
        return Leaf(key, path, space, (), torch.int64, int(space.start) or None)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        start = space.start if np.any(space.start) else None
        return Leaf(key, path, space, tuple(space.shape), torch.int64, start)
    if isinstance(space, spaces.MultiBinary):
        return Leaf(key, path, space, tuple(space.shape), torch.int8)
    raise ValueError(
        f"{key!r}: expected a Box, Discrete, MultiDiscrete (one-dimensional) or MultiBinary space, received {space}. "
        "Remedy: encode it with gymnasium.wrappers.TransformObservation or TransformAction."
    )


def _stored_dtype(dtype: Any, key: NestedKey) -> torch.dtype:
    """float64 becomes torch's default dtype, which networks expect; unsigned integers a wider signed type."""
    name = np.dtype(dtype).name
    if name == "float64":
        return torch.get_default_dtype()
    if name in _WIDENED:
        return _WIDENED[name]
    if name not in _KEPT:
        raise ValueError(
            f"{key!r}: expected a dtype among {(*_KEPT, *_WIDENED, 'float64')}, received {name}. Remedy: cast it in "
            "the env."
        )
    return getattr(torch, name)


class HostSpecs:
    """Specs of N envs that step on the host, with the names that TorchRL's envs give them.

    Args:
        observations: the leaves of an observation.
        action: the action's leaf.
        num_envs: N.
        device: where the batch lives.
        states: specs of one row of what a policy carries from step to step, further entries of the root.

    Attributes:
        observation_spec: Composite ``[N]`` of the observation keys and the states.
        carried: keys of the states, which the envs do not observe.
        action_spec: of ``"action"``, ``[N, *shape]``.
        full_action_spec: Composite ``[N]`` of it.
        reward_spec: ``[N, 1]`` float32.
        full_done_spec: Composite ``[N]`` of done, terminated and truncated, ``[N, 1]`` bool.
    """

    def __init__(
        self,
        observations: Sequence[Leaf],
        action: Leaf,
        num_envs: int,
        device: torch.device,
        states: Mapping[NestedKey, TensorSpec] | None = None,
    ) -> None:
        self.batch_size = torch.Size((num_envs,))
        self.device = device
        self.action_keys = ["action"]
        self.done_keys = list(DONE_KEYS)
        self.observation_spec = Composite(shape=self.batch_size, device=device)
        for leaf in observations:
            self.observation_spec[leaf.key] = leaf.spec(num_envs, device)
        self.carried = list(states or {})
        for key, spec in (states or {}).items():
            self.observation_spec[key] = spec.expand(num_envs, *spec.shape).to(device)
        self.full_action_spec = Composite(action=action.spec(num_envs, device), shape=self.batch_size, device=device)
        self.reward_spec = Unbounded(shape=(num_envs, 1), dtype=torch.float32, device=device)
        flags = {key: Categorical(2, shape=(num_envs, 1), dtype=torch.bool, device=device) for key in DONE_KEYS}
        self.full_done_spec = Composite(flags, shape=self.batch_size, device=device)

    @property
    def action_spec(self) -> TensorSpec:
        """Spec of ``"action"``."""
        return self.full_action_spec["action"]

    @property
    def full_action_spec_unbatched(self) -> Composite:
        """Composite of one env's action."""
        return self.full_action_spec[0]

    @property
    def action_spec_unbatched(self) -> TensorSpec:
        """Spec of one env's action."""
        return cast("Any", self.action_spec)[0]

    @property
    def observation_spec_unbatched(self) -> Composite:
        """Composite of one env's observation."""
        return self.observation_spec[0]

    def fake_tensordict(self) -> TensorDict:
        """A step of zeros, ``[N]``, with ``"next"``."""
        root = self.observation_spec.zero().update(self.full_done_spec.zero())
        root.set(INIT_KEY, torch.zeros_like(root.get("done")))
        following = root.clone().set("reward", self.reward_spec.zero())
        return root.update(self.full_action_spec.zero()).set("next", following)


def host_specs(envs: VectorEnv | Sequence[VectorEnv], device: torch.device | str = "cpu") -> HostSpecs:
    """Specs of what a ``HostCollector`` will collect from these envs, to size networks with.

    Args:
        envs: a vector env, or a list of them with equal spaces.
        device: where batches will live.

    Raises:
        ValueError: for spaces that cannot be stored.
    """
    groups = list(envs) if isinstance(envs, list | tuple) else [envs]
    first: Any = groups[0]
    leaves = observation_leaves(first.single_observation_space)
    total = sum(int(cast("Any", group).num_envs) for group in groups)
    return HostSpecs(leaves, action_leaf(first.single_action_space), total, torch.device(device))
