"""The agents of a multi-agent env as the rows of one batch, for a policy that all of them share.

Dimension key: ``E`` envs, ``R`` agents of an env, ``N = E * R`` streams.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Binary, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from torchrl_perf.runtime.upstream.envs import inner_reset

__all__ = ["AgentStreams"]

Path = tuple[str, ...]
FLAGS = ("done", "terminated", "truncated")
NO_STREAM = ("reward", "_reset", *FLAGS)


class AgentStreams(EnvBase):
    """Each agent of a multi-agent env as a separate stream: a TorchRL env with ``batch_size [E * R]``.

    Collectors, replay buffers, losses and trainers for one agent then train one policy that all agents share, each row
    being agent ``n % R`` of env ``n // R``. Nothing is copied where the env's tensors are contiguous: the entries are
    views ``[E, R, *] -> [E * R, *]``.

    **Keys.** Every entry below ``group`` loses that part of its key: ``("agents", "observation")`` is ``"observation"``
    here. All agents share ``is_init`` of their env; other entries of the env as a whole are left out.

    **Validity.** ``"valid"`` (bool ``[N, 1]``, root) says whether the agent takes part in the coming step: the env's
    ``active_key``, or True for all agents of an env that has none. Learn from the transitions whose root is valid,
    among them the one that ends the agent: give ``mask_key="valid"`` to a sampler, and ``valid`` to
    statistics. In the rows of an agent that is gone, ``terminated`` is False, and ``done`` is True only in the step in
    which its env ends, so that these rows form a separate episode that no n-step return crosses.

    **A critic that all agents share** may see all of them: with ``joint=True`` the root has "joint" ``[N, R (O + 1)]``,
    the observations ``[O]`` of all agents of the row's env and whether each takes part, those of the row's own agent
    first and then the others in turn; zeros for agents that are gone (arXiv:2103.01955).

    **Ends.** An agent's own flags below ``group`` count if the env has them, else those of the env. The step that ends
    an agent is ``done``, whether or not its env goes on; the env is reset when all of its streams are done.

    **Steps and resets** are the env's own. An env that resets inside its step without a host wait, such as a
    :class:`~torchrl_perf.envs.DeviceEnv`, does so here too; any other is stepped and reset by mask.

    Args:
        env: a TorchRL env with ``batch_size [E]`` and agents along the first dim below ``group``, such as
            ``MarineNavigation`` or a ``VmasEnv``.
        group: key of the group of agents.
        active_key: key below ``group`` of the agents' activity, bool ``[E, R, 1]``.
        joint: whether each row has the observations of all agents of its env, too.

    Attributes:
        base_env: the env.
        resets_inside_step: whether the env resets inside its step without a host wait, and so do its streams.
        num_agents: R.

    Raises:
        ValueError: for an env with another batch size, without that group, with another number of actions than one
            below it, or without a reward below it, and for ``joint`` without a vector ``(group, "observation")``.
    """

    def __init__(self, env: EnvBase, group: str = "agents", *, active_key: str = "active", joint: bool = False) -> None:
        self._rows = _shape_of_group(env, group)
        super().__init__(device=env.device, batch_size=(self._rows.numel(),))
        self.base_env, self.group, self.active_key, self.joint = env, group, active_key, joint
        self.num_agents = self._rows[1]
        agents = torch.arange(self.num_agents, device=env.device)
        self._turn = (agents.unsqueeze(1) + agents).remainder(self.num_agents)  # [R, R]: itself, and the others
        # that of a wrapper is not its own
        self.resets_inside_step = bool(getattr(type(env), "resets_inside_step", False))
        self._make_specs()

    # -- specs --------------------------------------------------------------------------------------------------------

    def _make_specs(self) -> None:
        env, device, batch = self.base_env, self.device, self.batch_size
        flag = Binary(shape=torch.Size((*batch, 1)), dtype=torch.bool, device=device)
        spec = env.full_observation_spec
        self._root_paths = [path for path in self._paths(spec) if path[-1] not in NO_STREAM]
        self._has_active = (self.active_key,) in self._root_paths
        self._has_init = "is_init" in spec.keys()
        observation = {self._name(path): self._flat(spec, path) for path in self._root_paths}
        observation["valid"] = flag.clone()
        if self._has_init:
            observation["is_init"] = flag.clone()
        if self.joint:
            observation["joint"] = self._joint_spec(observation.get("observation"))
        reward = env.full_reward_spec
        self._reward_paths = [path for path in self._paths(reward) if path not in self._root_paths]
        if ("reward",) not in self._reward_paths:
            raise ValueError(
                f"env: expected a reward ({self.group!r}, 'reward') for each agent, received reward keys "
                f"{list(reward.keys(True, True))}. Remedy: an env that rewards its agents one by one."
            )
        actions = list(self._paths(env.full_action_spec))
        if len(actions) != 1 or len(list(env.full_action_spec.keys(True, True))) != 1:
            raise ValueError(
                f"env: expected one action below {self.group!r} and no other, received action keys "
                f"{list(env.full_action_spec.keys(True, True))}. Remedy: one action for each agent."
            )
        self._action_path = actions[0]
        self._done_paths = {path[-1]: path for path in self._paths(env.full_done_spec)}
        self.observation_spec = _composite(observation, batch, device)
        self.reward_spec = _composite({self._name(p): self._flat(reward, p) for p in self._reward_paths}, batch, device)
        self.action_spec = _composite(
            {self._name(self._action_path): self._flat(env.full_action_spec, self._action_path)}, batch, device
        )
        self.full_done_spec = _composite({name: flag.clone() for name in FLAGS}, batch, device)

    def _joint_spec(self, own: TensorSpec | None) -> Unbounded:
        """Of the observations of all agents in each row."""
        if own is None or len(own.shape) != 2 or not own.dtype.is_floating_point:
            raise ValueError(
                f"joint: expected a vector of floats ({self.group!r}, 'observation') of each agent, received {own}. "
                "Remedy: joint=False, or an env whose agents observe one."
            )
        shape = torch.Size((self.batch_size[0], self.num_agents * (own.shape[-1] + 1)))
        return Unbounded(shape=shape, dtype=own.dtype, device=self.device)

    def _paths(self, spec: Composite) -> Iterator[Path]:
        """Keys below the group, without its name."""
        for key in spec.keys(True, True):
            path = (key,) if isinstance(key, str) else cast("Path", key)
            if path[0] == self.group and len(path) > 1:
                yield path[1:]

    def _name(self, path: Path) -> NestedKey:
        """The key of an entry of the streams."""
        if path == (self.active_key,):
            return "valid"
        return path[0] if len(path) == 1 else path

    def _flat(self, spec: Composite, path: Path) -> TensorSpec:
        return spec[(self.group, *path)].flatten(0, 1)

    # -- from the env to its streams ----------------------------------------------------------------------------------

    def _streams(self, td: TensorDictBase, paths: list[Path]) -> dict[NestedKey, Tensor]:
        """Entries ``[N, *]`` of the agents."""
        return {self._name(path): td.get((self.group, *path)).flatten(0, 1) for path in paths}

    def _of_env(self, values: Tensor) -> Tensor:
        """``[N, 1]`` of what holds for all agents of an env, ``[E, 1]``."""
        return values.repeat_interleave(self.num_agents, 0, output_size=self._rows.numel())

    def _observed(self, td: TensorDictBase) -> dict[NestedKey, Tensor]:
        """What the observation spec names."""
        entries = self._streams(td, self._root_paths)
        if not self._has_active:
            entries["valid"] = torch.ones(*self.batch_size, 1, dtype=torch.bool, device=self.device)
        if self._has_init:
            entries["is_init"] = self._of_env(td.get("is_init"))
        if self.joint:
            entries["joint"] = self._of_all(entries["observation"], entries["valid"])
        return entries

    def _of_all(self, observation: Tensor, valid: Tensor) -> Tensor:
        """``[N, R (O + 1)]`` of ``[N, O]`` and ``[N, 1]``."""
        seen = torch.cat((torch.where(valid, observation, 0.0), valid.to(observation.dtype)), -1)
        return seen.unflatten(0, self._rows)[:, self._turn].flatten(0, 1).flatten(1)

    def _flags(self, following: TensorDictBase, valid: Tensor) -> dict[NestedKey, Tensor]:
        """Ends of the streams; in the rows of agents that were gone before, that of their env."""
        env_done = self._of_env(following.get("done"))
        agents = {name: following.get((self.group, *path)).flatten(0, 1) for name, path in self._done_paths.items()}
        if "done" not in agents:
            present = [name for name in FLAGS if name in following.keys()]
            agents = {name: self._of_env(following.get(name)) for name in present}
        done = agents["done"]
        if "terminated" in agents:
            terminated = agents["terminated"] & valid
        else:
            terminated = done & valid & ~agents.get("truncated", torch.zeros_like(done))
        truncated = agents["truncated"] if "truncated" in agents else done & ~terminated
        return {
            "done": torch.where(valid, done, env_done),
            "terminated": terminated,
            "truncated": torch.where(valid, truncated, env_done),
        }

    def _following(self, following: TensorDictBase, valid: Tensor) -> TensorDict:
        """The entries of "next"."""
        entries = self._observed(following)
        entries.update(self._streams(following, self._reward_paths))
        return self._wrap({**entries, **self._flags(following, valid)})

    def root_of(self, root: TensorDictBase) -> TensorDict:
        """The root of the streams ``[E * R]`` for a root of the env ``[E]``: what is observed, and flags of False.

        Args:
            root: what the env's own reset gives, or another way to start it.
        """
        flags = torch.zeros(3, *self.batch_size, 1, dtype=torch.bool, device=self.device).unbind(0)
        return self._wrap({**self._observed(root), **dict(zip(FLAGS, flags, strict=True))})

    def _wrap(self, entries: dict[Any, Tensor]) -> TensorDict:
        return TensorDict(entries, batch_size=self.batch_size, device=self.device)

    def env_action(self, tensordict: TensorDictBase) -> TensorDict:
        """What the env is stepped with: the actions of the streams, as the agents' ``[E, R, ...]``."""
        name = self._name(self._action_path)
        action = tensordict.get(name, None)
        if action is None:
            raise KeyError(
                f"{type(self).__name__} expected the key {name!r}, received {sorted(map(str, tensordict.keys()))}. "
                "Remedy: run a policy that writes it."
            )
        env = self.base_env
        td = TensorDict({}, batch_size=env.batch_size, device=env.device)
        return td.set((self.group, *self._action_path), action.unflatten(0, self._rows))

    @property
    def resets_nonfinite(self) -> bool:
        """Whether the env truncates and re-draws a row whose state is no longer finite, for envs that can."""
        return bool(getattr(self.base_env, "resets_nonfinite", False))

    @resets_nonfinite.setter
    def resets_nonfinite(self, value: bool) -> None:
        if hasattr(type(self.base_env), "resets_nonfinite"):
            self.base_env.resets_nonfinite = value

    # -- TorchRL's interface ------------------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        following = self.base_env.step(self.env_action(tensordict)).get("next")
        return self._following(following, self._valid_of(tensordict))

    def _valid_of(self, tensordict: TensorDictBase) -> Tensor:
        """Which agents are active before the step."""
        valid = tensordict.get("valid", None)
        if valid is None:
            raise KeyError(
                f"{type(self).__name__} expected the key 'valid', received {sorted(map(str, tensordict.keys()))}. "
                "Remedy: step from the TensorDict of reset or of the last step."
            )
        return valid

    def _step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        plain = type(tensordict) is TensorDict and "next" not in tensordict.keys() and "_step" not in tensordict.keys()
        if not (self.resets_inside_step and plain):
            return super()._step_and_maybe_reset(tensordict)
        stepped, root = self.base_env.step_and_maybe_reset(self.env_action(tensordict))
        following = self._following(stepped.get("next"), self._valid_of(tensordict))
        # what the policy wrote is carried on to the next root, as in step_mdp
        later = tensordict.exclude("_reset", "reward")
        tensordict.set("next", following)
        return tensordict, later.update(self.root_of(root))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        """Reset the envs whose streams are all in the mask ``"_reset"``, ``[N, 1]``; without one, all."""
        mask = None if tensordict is None else tensordict.get("_reset", None)
        env = self.base_env
        if mask is None:
            return self.root_of(inner_reset(env, **kwargs))
        # an agent that has ended while its env goes on comes back with the env
        whole = mask.view(*self._rows, -1).flatten(1).all(-1, keepdim=True)
        asked = TensorDict({"_reset": whole}, batch_size=env.batch_size, device=env.device)
        return self.root_of(inner_reset(env, asked, **kwargs))

    def _set_seed(self, seed: int | None) -> None:
        self.base_env.set_seed(seed)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the env too."""
        if not self.base_env.is_closed:
            self.base_env.close(raise_if_closed=raise_if_closed)
        super().close(raise_if_closed=raise_if_closed)


def _composite(entries: dict[Any, TensorSpec], batch: torch.Size, device: torch.device | None) -> Composite:
    made = Composite(shape=batch, device=device)
    for key, spec in entries.items():
        made[key] = spec
    return made


def _shape_of_group(env: EnvBase, group: str) -> torch.Size:
    """``[E, R]`` of a group of agents.

    Raises:
        ValueError: where there is none, or the env is not one batch.
    """
    if len(env.batch_size) != 1:
        raise ValueError(
            f"env: expected batch_size [E], received {list(env.batch_size)}. Remedy: an env that is one batch of envs."
        )
    found = env.full_observation_spec.get(group, None)
    if not isinstance(found, Composite):
        raise ValueError(
            f"group: expected a group of agents in the env's observation_spec, received {group!r}; there are "
            f"{sorted(map(str, env.full_observation_spec.keys()))}. Remedy: the key that the agents' entries are below."
        )
    shape = found.shape if len(found.shape) > 1 else next(iter(found.values(True, True))).shape[:2]
    if len(shape) != 2:
        raise ValueError(
            f"group: expected entries [E, R, ...] below {group!r}, received {list(shape)}. Remedy: a dim of agents "
            "behind that of the envs."
        )
    return torch.Size(shape)
