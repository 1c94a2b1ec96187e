"""VMAS: the simulation below TorchRL's env, and the parts of a step that are not asked of the host.

VMAS's own step asks the host whether each action is in range, whether there is gravity, and which pairs are near.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor


def simulation_of(env: Any) -> Any:
    """The ``vmas.simulator.environment.Environment`` that a TorchRL ``VmasEnv`` steps."""
    return env._env


def decoded_action(environment: Any, agent: Any, action: Tensor) -> tuple[Tensor, Tensor | None]:
    """What VMAS makes of an action ``[N, 1]`` of an agent without its noise: physical ``[N, D]``, spoken ``[N, C]``."""
    noises = agent.action._u_noise, agent._c_noise
    agent.action._u_noise = agent._c_noise = 0
    environment._set_action(action, agent)
    agent.action._u_noise, agent._c_noise = noises
    return agent.action.u.clone(), None if agent.action.c is None else agent.action.c.clone()


def has_gravity(world: Any) -> bool:
    """Whether a world pulls all entities down; waits for the host."""
    return bool(world._gravity.any())


def replace_gravity(world: Any, function: Callable[[Any, Any], None]) -> None:
    """Let one world, not its class, apply ``function(world, entity)`` in place of its gravity."""
    world._apply_gravity = MethodType(function, world)


def shapes_collide(world: Any, one: Any, other: Any) -> bool:
    """Whether VMAS computes a force between entities of these two shapes."""
    return {type(one.shape), type(other.shape)} in world._collidable_pairs
