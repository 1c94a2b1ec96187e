"""A VMAS simulation, stepped without its host waits. Dimension key: ``N`` envs, ``A`` agents."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from torchrl_perf.runtime.upstream.vmas import decoded_action, has_gravity, replace_gravity, shapes_collide

__all__ = ["VmasWorld"]

AgentValue = Tensor | dict[str, Any]


class VmasWorld:
    """Drives a ``vmas.simulator.environment.Environment`` through those parts of VMAS that never wait.

    ``Environment.step`` asks the host whether each action is in range and without NaN, and its world asks for each pair
    of entities whether they are near in any env. Here continuous actions are clamped to their range, and every pair
    that may collide is computed: the force between two that are apart is exactly zero. Results equal those of VMAS up
    to rounding, which depends on how many pairs are computed together; random numbers come from torch's default
    generator of the device instead of VMAS's own.

    Scenarios with boxes still wait: VMAS asks in each step whether a box is hollow, from a tensor that it makes on the
    host.

    Args:
        environment: the simulation, from ``vmas.make_env`` or inside a ``VmasEnv``. Its world is changed: two of its
            methods are replaced on the object.
        name: name of the scenario, for messages.
    """

    def __init__(self, environment: Any, name: str) -> None:
        self.environment, self.name = environment, name
        self.scenario, self.world = environment.scenario, environment.world
        self.num_envs: int = environment.num_envs
        self.device = torch.device(environment.device)
        self.agents: list[Any] = environment.agents
        # on the object only: the library's class is not changed
        self.world.collides = MethodType(_may_collide, self.world)
        if not has_gravity(self.world):
            replace_gravity(self.world, _apply_entity_gravity)
        self._tables = None if environment.continuous_actions else [self._action_table(agent) for agent in self.agents]

    def _action_table(self, agent: Any) -> tuple[Tensor, Tensor | None]:
        """VMAS's meaning of each discrete action of an agent: physical ``[K, D]`` and spoken ``[K, C]`` parts."""
        physical, spoken = [], []
        for index in range(self.environment.get_agent_action_space(agent).n):
            action = torch.full((self.num_envs, 1), index, device=self.device)
            push, words = decoded_action(self.environment, agent, action)
            physical.append(push[0])
            spoken.append(None if words is None else words[0])
        silent = spoken[0] is None
        return torch.stack(physical), None if silent else torch.stack(spoken)

    def reset(self) -> None:
        """Reset all envs by the scenario's own code, which may wait for the host."""
        self.scenario.env_reset_world_at(env_index=None)

    def reset_one_by_one(self) -> None:
        """Reset each env by itself, in a loop: for scenarios that draw some numbers once for all envs they reset."""
        self.reset()
        for index in range(self.num_envs):
            self.scenario.env_reset_world_at(env_index=index)

    def _set_actions(self, actions: list[Tensor]) -> None:
        for index, (agent, action) in enumerate(zip(self.agents, actions, strict=True)):
            spoken: Tensor | None = None
            if self._tables is not None:
                table, words = self._tables[index]
                # int64 indices [N] into a table on the device: no read, and no check of their range
                physical = table[action]
                spoken = None if words is None else words[action]
            else:
                size, reach = agent.action_size, agent.action.u_range_tensor
                physical = action[:, :size].to(torch.float32).clamp(-reach, reach) * agent.action.u_multiplier_tensor
                if self.world.dim_c > 0 and not agent.silent:
                    spoken = action[:, size:].clamp(0, 1)
            if agent.action.u_noise > 0:
                physical = physical + torch.randn_like(physical) * agent.u_noise
            if spoken is not None and agent.c_noise > 0:
                spoken = spoken + torch.randn_like(spoken) * agent.c_noise
            agent.action.u = physical
            if spoken is not None:
                agent.action.c = spoken

    def step(self, actions: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Step all envs.

        Args:
            actions: for each agent float ``[N, D]``, clamped to its range, or int64 ``[N]``.

        Returns:
            The rewards of each agent, ``[N]`` or ``[N, 1]``, and whether the task has ended, bool ``[N]``; new tensors.
        """
        self._set_actions(actions)
        for agent in self.world.agents:
            if agent.action_script is not None:
                agent.action_script(agent, self.world)
            self.scenario.process_action(agent)
            agent.dynamics.check_and_process_action()
        self.scenario.pre_step()
        self.world.step()
        self.scenario.post_step()
        rewards = [self.scenario.reward(agent).clone() for agent in self.agents]
        return rewards, self.scenario.done().clone().view(self.num_envs)

    def random_step(self) -> None:
        """Step with random actions, and read everything that can be read after a step."""
        if self._tables is not None:
            actions = [torch.randint(len(table), (self.num_envs,), device=self.device) for table, _ in self._tables]
        else:
            sizes = [self.environment.get_agent_action_size(agent) for agent in self.agents]
            actions = [torch.rand(self.num_envs, size, device=self.device) * 2 - 1 for size in sizes]
        self.step(actions)
        self.observe()

    def observe(self) -> None:
        """Read all observations and infos, for the side effects of doing so."""
        for agent in self.agents:
            self.observation(agent)
            self.info(agent)

    def observation(self, agent: Any) -> AgentValue:
        """What an agent sees: ``[N, O]``, or a dict of such."""
        return self.scenario.observation(agent)

    def info(self, agent: Any) -> dict[str, Tensor]:
        """The scenario's infos of an agent, ``[N]`` or ``[N, ...]`` each."""
        return self.scenario.info(agent)


def _may_collide(world: Any, one: Any, other: Any) -> bool:
    """Whether two entities can collide at all, wherever they are; replaces a method that asks where they are."""
    if one is other or not (one.collides(other) and other.collides(one)):
        return False
    if not (one.movable or one.rotatable or other.movable or other.rotatable):
        return False
    return shapes_collide(world, one, other)


def _apply_entity_gravity(world: Any, entity: Any) -> None:
    """The gravity of an entity in a world that has none; replaces a method that asks whether it has."""
    if entity.movable and entity.gravity is not None:
        world.forces_dict[entity] = world.forces_dict[entity] + entity.mass * entity.gravity
