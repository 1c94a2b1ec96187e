"""Gymnasium vector envs of what makes single envs: in groups, in processes, with actions within their bounds."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from torchrl_perf.collectors.host_faults import ignore_interrupts
from torchrl_perf.envs.from_callable import Made

__all__ = ["ClippedActions", "vector_envs"]


class ClippedActions(gymnasium.ActionWrapper):
    """Moves an action that lies outside of a Box to its nearest bound; the action space stays as it is.

    A normal distribution knows no bounds; without this an env may charge for an action that it cannot carry out.

    Args:
        env: with actions in a Box.
    """

    def action(self, action: Any) -> np.ndarray:
        """The action ``[D]`` within the bounds."""
        space: Any = self.env.action_space
        return np.clip(action, space.low, space.high)


def vector_envs(made: Made, num_envs: int, *, groups: int = 1, processes: bool = False) -> list[VectorEnv]:
    """The vector envs of a run, for a :class:`HostCollector`. An env that is done is reset within the step.

    Args:
        made: what makes Gymnasium envs.
        num_envs: N, of all groups.
        groups: vector envs of equal size; one steps while the policy acts for another.
        processes: step each env in a process of its own.

    Raises:
        ValueError: for groups that do not divide the envs, and vector envs that have another number of envs, or
            whose steps are their own where processes are asked for.
    """
    if num_envs % groups:
        raise ValueError(
            f"env_groups: expected a divisor of num_envs = {num_envs}, received {groups}. Remedy: num_envs="
            f"{max(1, num_envs // groups) * groups}."
        )
    size = num_envs // groups
    if made.vector is not None:
        if processes:
            raise ValueError(
                f"env_processes: expected False for {made.label}, a vector env that steps its envs itself, received "
                "True. Remedy: leave it out; env_groups steps several of them at once."
            )
        found = [made.vector(size) for _ in range(groups)]
        if any(envs.num_envs != size for envs in found):
            sizes = [envs.num_envs for envs in found]
            for envs in found:
                envs.close()
            raise ValueError(
                f"num_envs: expected {groups} vector envs of {size} envs, received {sizes} of {made.label}. Remedy: "
                f"num_envs={sizes[0] * groups}, or an argument num_envs of what makes them."
            )
        return found
    assert made.single is not None
    makers = [ignore_interrupts(_Clipped(made.single))] * size
    if processes:
        # importing torchrl makes "spawn" the default way to start a process, which takes seconds each
        same_step = {"autoreset_mode": AutoresetMode.SAME_STEP, "context": "fork"}
        return [AsyncVectorEnv(makers, **same_step) for _ in range(groups)]
    return [SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP) for _ in range(groups)]


class _Clipped:
    """Makes an env, with :class:`ClippedActions` where it has a Box of them."""

    def __init__(self, maker: Callable[[], gymnasium.Env]) -> None:
        self.maker = maker

    def __call__(self) -> gymnasium.Env:
        env = self.maker()
        return ClippedActions(env) if isinstance(env.action_space, gymnasium.spaces.Box) else env
