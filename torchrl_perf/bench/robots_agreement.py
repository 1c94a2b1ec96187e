"""How far physics on MuJoCo Warp is from MuJoCo's own C code: step by step, and in returns of a fixed policy."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

__all__ = ["compare_returns", "compare_steps"]

Policy = Callable[[Tensor], Tensor]


class Twins:
    """Gymnasium's env of a task beside each world of one on MuJoCo Warp.

    Args:
        env: of ``torchrl_perf.envs.mujoco``, ``[N]``.
    """

    def __init__(self, env: Any) -> None:
        self._envs: list[Any] = [gymnasium.make(env.gymnasium_id).unwrapped for _ in range(env.num_envs)]
        for each in self._envs:
            each.reset(seed=0)

    def follow(
        self, qpos: Tensor, qvel: Tensor, action: Tensor, fresh: Tensor
    ) -> Iterator[tuple[np.ndarray, np.ndarray, float, bool]]:
        """Positions, velocities, reward and end of a step of each from the given state, in double precision.

        Args:
            qpos: ``[N, Q]``.
            qvel: ``[N, V]``.
            action: ``[N, U]``.
            fresh: bool ``[N]``, where an episode begins: derived quantities are then those of the state, as after
                Gymnasium's reset, and else of the start of the last physics step, as after a step.
        """
        rows = (each.double().cpu().numpy() for each in (qpos, qvel, action))
        for env, place, speed, push, begins in zip(self._envs, *rows, fresh.tolist(), strict=True):
            if begins:
                env.set_state(place, speed)
            env.data.qpos[:], env.data.qvel[:] = place, speed
            _, reward, ended, _, _ = env.step(push)
            yield env.data.qpos.copy(), env.data.qvel.copy(), float(reward), bool(ended)


def compare_steps(env: Any, steps: int) -> dict[str, Any]:
    """Steps of random actions, each from the same state in both: quantiles of the differences.

    Args:
        env: of ``torchrl_perf.envs.mujoco``, ``[N]``.
        steps: of each world.

    Returns:
        ``qpos``, ``qvel`` and ``reward``: median, 99 % quantile and maximum of the absolute differences of a step, the
        largest of a world; ``ends``: steps that only one of the two ends; ``steps``.
    """
    twins, root = Twins(env), env.reset()
    found: dict[str, list[float]] = {"qpos": [], "qvel": [], "reward": []}
    mismatches = 0
    for _ in range(steps):
        root["action"] = env.action_spec.rand()
        before, fresh = (env.state_qpos.clone(), env.state_qvel.clone()), root["is_init"][:, 0]
        stepped, root = env.step_and_maybe_reset(root)
        following = stepped["next"]
        ours = env.simulation.step(_state(env, *before), stepped["action"]).state
        for world, (qpos, qvel, reward, ended) in enumerate(twins.follow(*before, stepped["action"], fresh)):
            found["qpos"].append(float(np.abs(ours["qpos"][world].cpu().numpy() - qpos).max()))
            found["qvel"].append(float(np.abs(ours["qvel"][world].cpu().numpy() - qvel).max()))
            found["reward"].append(abs(float(following["reward"][world]) - reward))
            mismatches += bool(following["terminated"][world]) != ended
    figures = {name: [float(np.quantile(values, q)) for q in (0.5, 0.99, 1.0)] for name, values in found.items()}
    return {**figures, "ends": mismatches, "steps": steps * env.num_envs}


def _state(env: Any, qpos: Tensor, qvel: Tensor) -> dict[str, Tensor]:
    return {**{name: getattr(env, f"state_{name}") for name in env.simulation.names}, "qpos": qpos, "qvel": qvel}


def compare_returns(env: Any, policy: Policy) -> dict[str, Any]:
    """Whole episodes of a fixed policy in both, as many as there are worlds.

    Args:
        env: of ``torchrl_perf.envs.mujoco``, ``[N]``.
        policy: from observations ``[N, O]`` to actions ``[N, D]``.

    Returns:
        ``warp`` and ``c``: mean return and its standard error; ``apart``: the difference in standard errors of it.
    """
    ours, theirs = _on_warp(env, policy), _in_c(env, policy)
    means = {name: (float(np.mean(each)), float(np.std(each) / len(each) ** 0.5)) for name, each in
             (("warp", ours), ("c", theirs))}  # fmt: skip
    error = (means["warp"][1] ** 2 + means["c"][1] ** 2) ** 0.5
    return {**means, "apart": abs(means["warp"][0] - means["c"][0]) / max(error, 1e-12), "episodes": len(ours)}


def _on_warp(env: Any, policy: Policy) -> np.ndarray:
    root, running = env.reset(), torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    returns = torch.zeros(env.num_envs, dtype=torch.float64, device=env.device)
    while bool(running.any()):
        root["action"] = policy(root["observation"])
        stepped, root = env.step_and_maybe_reset(root)
        returns += torch.where(running, stepped["next", "reward"][:, 0].double(), 0.0)
        running &= ~stepped["next", "done"][:, 0]
    return returns.cpu().numpy()


def _in_c(env: Any, policy: Policy) -> np.ndarray:
    limit = {"max_episode_steps": env.max_episode_steps}
    envs: list[Any] = [gymnasium.make(env.gymnasium_id, **limit) for _ in range(env.num_envs)]
    seen = np.stack([each.reset(seed=number)[0] for number, each in enumerate(envs)])
    returns, running = np.zeros(len(envs)), np.ones(len(envs), dtype=bool)
    low, high = envs[0].action_space.low, envs[0].action_space.high
    while running.any():
        actions = policy(torch.as_tensor(seen, dtype=torch.float32, device=env.device)).cpu().numpy()
        for number in np.flatnonzero(running):
            seen[number], reward, ended, cut, _ = envs[number].step(np.clip(actions[number], low, high))
            returns[number] += reward
            running[number] = not (ended or cut)
    return returns
