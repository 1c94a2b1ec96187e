"""VMAS scenarios as an env that resets inside its step by mask.

VMAS: arXiv:2207.03530. It is an optional dependency under the GPL, imported when an env is made. Dimension key: ``N``
envs, ``A`` agents of a group.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import VmasEnv

from torchrl_perf.envs.arguments import check_count
from torchrl_perf.envs.structured_env import EnvSpecs, StructuredEnv, Transition
from torchrl_perf.envs.vmas_state import StateSlots
from torchrl_perf.envs.vmas_world import VmasWorld
from torchrl_perf.runtime.upstream.tensordicts import unchecked
from torchrl_perf.runtime.upstream.vmas import simulation_of

__all__ = ["DeviceVmasEnv"]

PROBE_ENVS = 5
"""Envs of the copy that is examined; few, and a number that is rarely another dim."""


class DeviceVmasEnv(StructuredEnv):
    """A VMAS scenario with masked resets; the counterpart of :class:`torchrl.envs.VmasEnv`, with its keys and groups.

    ``VmasEnv`` resets finished rows one by one, in a loop of the host: with 1,024 envs a reset of a quarter of them
    takes longer than six steps. Here the state of the simulation is a dict of tensors, and a finished row is
    overwritten by ``torch.where`` inside the step, without a loop or a host wait. Other rows are untouched bit for bit.

    **Initial states** are those of the scenario's own reset of all envs. Since that may wait for the host, or draw
    until nothing overlaps, ``pool_size`` of them are made ahead and given out at random: an episode starts from one of
    them, until :meth:`refill` draws others. Numbers that a reset of all envs draws once for all of them are drawn for
    each env, by resets of single envs, when the pool is filled. What a reset of the scenario does not write goes on
    until then.

    **Which scenarios.** At construction a small copy of the scenario is reset and stepped, to find its state
    (:class:`~torchrl_perf.envs.vmas_state.StateSlots`). Scenarios are refused if they keep state outside of tensors
    with a row for each env, if their reset reads state of the last episode, or if observing changes their state. Of the
    40 in VMAS 1.5.2 these are: ball_passage, ball_trajectory, football, het_mass, road_traffic, simple_adversary,
    simple_push, simple_reference and simple_speaker_listener (the goal of the last four is a Python object that all
    envs share).

    **Steps** are VMAS's own, without its checks of the actions, which wait for the host: continuous actions are
    clamped. Some scenarios wait in their own rewards and observations, and those with boxes in the contact forces; on
    CUDA, VMAS makes constants on the host in each step. Such a step cannot be captured: ``DeviceCollector`` then
    collects in mode ``"eager"``, and says so. Resetting rows never waits, in any scenario.

    **Time limit.** ``max_steps`` truncates; in ``VmasEnv`` it terminates.

    Keys: as ``VmasEnv``, for each group ``(group, "observation")`` ``[N, A, O]``, ``(group, "info", ...)``,
    ``(group, "action")`` and ``(group, "reward")`` ``[N, A, 1]``; and as :class:`StructuredEnv`, ``"is_init"`` and
    ``"done"``, ``"terminated"``, ``"truncated"`` ``[N, 1]``, repeated for each agent in ``(group, "done")`` and so on.
    The rest of what a :class:`StructuredEnv` promises holds: nothing is returned by reference, the state is in the
    buffers, the pool of initial states too, and resumes bit for bit.

    Args:
        scenario: name of a scenario of VMAS, or one of your own.
        num_envs: N.
        max_steps: time limit of an episode.
        continuous_actions: float actions; otherwise indices, int64 ``[N, A]``.
        group_map: groups of agents, as for ``VmasEnv``.
        pool_size: number of initial states that are made ahead.
        device: where everything lives. Default: torch's default device.
        seed: passed to ``set_seed``, which draws the initial states anew.
        **scenario_kwargs: passed to the scenario, such as ``n_agents``.

    Raises:
        ImportError: without VMAS.
        ValueError: for a scenario whose reset cannot be masked exactly, or agents of one group that differ in shape.

    Examples:
        >>> env = DeviceVmasEnv("navigation", num_envs=64, max_steps=100, n_agents=3)
        >>> env.rollout(10)["next", "agents", "reward"].shape
        torch.Size([64, 10, 3, 1])
    """

    def __init__(
        self,
        scenario: Any,
        num_envs: int,
        *,
        max_steps: int | None = None,
        continuous_actions: bool = True,
        group_map: Any = None,
        pool_size: int = 4096,
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        **scenario_kwargs: Any,
    ) -> None:
        super().__init__(num_envs, device=device, max_episode_steps=max_steps)
        check_count(type(self).__name__, "pool_size", pool_size)
        check_installed()
        unsupported = {"dict_spaces", "multidiscrete_actions", "categorical_actions"} & scenario_kwargs.keys()
        if unsupported:
            raise ValueError(
                "DeviceVmasEnv expected actions and observations as VmasEnv has them by default, received "
                f"{sorted(unsupported)}. Remedy: leave them out."
            )
        name = scenario if isinstance(scenario, str) else type(scenario).__name__

        def make(envs: int) -> VmasEnv:
            own = scenario if isinstance(scenario, str) else copy.deepcopy(scenario)
            return VmasEnv(
                own,
                num_envs=envs,
                continuous_actions=continuous_actions,
                group_map=group_map,
                device=self.device,
                **scenario_kwargs,
            )

        self.vmas_env = make(num_envs)
        self._check_groups()
        self._pool_world = VmasWorld(simulation_of(make(max(pool_size, PROBE_ENVS + 1))), name)
        slots = StateSlots(VmasWorld(simulation_of(make(PROBE_ENVS)), name), self._pool_world)
        self._world = VmasWorld(simulation_of(self.vmas_env), name)
        self._world.reset()
        self._world.random_step()
        self._world.reset()
        self._slots = slots.bind(self._world)
        self._pool_slots = slots.bind(self._pool_world)
        self._drawn = slots.drawn
        self._one_by_one = bool(slots.drawn_together)
        if seed is None:
            self.refill()
        self.begin(seed)

    # -- initial states ----------------------------------------------------------------------------------------------

    def refill(self) -> None:
        """Draw new initial states by the scenario's own reset; may wait for the host."""
        if self._one_by_one:
            self._pool_world.reset_one_by_one()
        else:
            self._pool_world.reset()
        state = self._pool_slots.read()
        for path in self._drawn:
            name = f"pool_{path}"
            if name in self._buffers:
                getattr(self, name).copy_(state[path])
            else:
                self.register_buffer(name, state[path].clone(memory_format=torch.contiguous_format))

    def draw_state(self) -> dict[str, Tensor]:
        """Return initial states of all rows from the pool, with the entries that a reset does not change."""
        # before there are buffers, those entries come from the simulation
        return {**(self._state() or self._slots.read()), **self._from_pool()}

    def redraw_state(self, ended: Tensor) -> dict[str, Tensor]:
        """Return initial states from the pool, for all rows: asking which have ended would be a wait."""
        return self._from_pool()

    def _from_pool(self) -> dict[str, Tensor]:
        index = torch.randint(self._pool_world.num_envs, (self.num_envs,), device=self.device)
        return {path: getattr(self, f"pool_{path}").index_select(0, index) for path in self._drawn}

    # -- the task ----------------------------------------------------------------------------------------------------

    def advance(self, state: dict[str, Tensor], action: Tensor | dict[NestedKey, Tensor]) -> Transition:
        """Step the simulation from ``state``."""
        self._slots.load(state, copy=True)
        rewards, terminated = self._world.step(self._by_agent(action))
        self._slots.check_constants()
        after = self._slots.read()
        entries: dict[NestedKey, Tensor] = {
            (group, "reward"): self._stacked([rewards[index] for index in members])
            for group, members in self._members.items()
        }
        return Transition(after, entries, terminated)

    def _by_agent(self, action: Tensor | dict[NestedKey, Tensor]) -> list[Tensor]:
        """The actions in the order of the simulation's agents."""
        by_group = action if isinstance(action, dict) else {(next(iter(self._members)), "action"): action}
        agents: dict[int, Tensor] = {}
        for group, members in self._members.items():
            agents.update(zip(members, by_group[group, "action"].unbind(1), strict=True))
        return [agents[index] for index in range(len(agents))]

    def observe(self, state: dict[str, Tensor]) -> dict[NestedKey, Tensor]:
        """Return observations and infos of ``state``, which the simulation only reads."""
        self._slots.load(state, copy=False)
        entries: dict[NestedKey, Any] = {}
        for group, members in self._members.items():
            agents = [self._world.agents[index] for index in members]
            entries[group, "observation"] = self._stacked([self._world.observation(agent) for agent in agents])
            infos = [self._world.info(agent) for agent in agents]
            if infos[0]:
                entries[group, "info"] = self._stacked(infos, torch.float32)
        return entries

    def _stacked(self, values: list[Any], dtype: torch.dtype | None = None) -> Any:
        """``[N, A, ...]`` of the values of A agents, ``[N]`` or ``[N, ...]`` each; dicts are stacked entry by entry."""
        if isinstance(values[0], dict):
            entries = {key: self._stacked([value[key] for value in values], dtype) for key in values[0]}
            return unchecked(entries, batch_size=(*self.batch_size, len(values)), device=self.device)
        stacked = torch.stack(values, 1)
        stacked = stacked if dtype is None else stacked.to(dtype)
        return stacked.unsqueeze(-1) if stacked.ndim == 2 else stacked

    def group_flags(self, step: Transition, truncated: Tensor) -> dict[NestedKey, Tensor]:
        """Return the env's own flags for each agent: VMAS ends all agents of an env together."""
        flags: dict[NestedKey, Tensor] = {}
        for group, members in self._members.items():
            for name, value in (("terminated", step.terminated), ("truncated", truncated)):
                flags[group, name] = value.view(-1, 1, 1).repeat(1, len(members), 1)
        return flags

    # -- specs -------------------------------------------------------------------------------------------------------

    def _check_groups(self) -> None:
        env = self.vmas_env
        if env.het_specs:
            uneven = [group for group, uneven in env.het_specs_map.items() if uneven]
            raise ValueError(
                f"group_map: expected agents of one group with the same shapes, received the groups {uneven} of "
                f"{env.group_map}. Remedy: group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT of torchrl.envs.utils."
            )
        groups = cast("dict[str, list[str]]", env.group_map)  # VmasEnv has turned its argument into a dict
        self._members = {
            group: [env.agent_names_to_indices_map[name] for name in names] for group, names in groups.items()
        }

    def make_specs(self) -> EnvSpecs:
        """Return the specs of the ``VmasEnv``, by group."""
        env = self.vmas_env
        observation: dict[NestedKey, Any] = {}
        for group in self._members:
            for key, spec in env.full_observation_spec[group].items():
                observation[group, key] = spec.clone()
        return EnvSpecs(
            observation=observation,
            action={(group, "action"): env.full_action_spec[group, "action"].clone() for group in self._members},
            reward={(group, "reward"): env.full_reward_spec[group, "reward"].clone() for group in self._members},
            groups={group: len(members) for group, members in self._members.items()},
        )

    def _set_seed(self, seed: int | None) -> None:
        super()._set_seed(seed)
        if seed is not None:
            self.refill()


def check_installed() -> None:
    """Raise an ImportError with the remedy where VMAS is not installed."""
    try:
        import vmas  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "DeviceVmasEnv expected the package vmas, received an environment without it. Remedy: pip install "
            "'torchrl_perf[marl]'"
        ) from error
