"""Gymnasium's MuJoCo envs beside worlds of MuJoCo Warp: put into the same state, and read in the same words."""

import gymnasium
import numpy as np
import torch


class Worlds:
    """``count`` envs of a task, in MuJoCo's own C code and double precision."""

    def __init__(self, env_id, count, *, cone=None, **arguments):
        self.envs = [gymnasium.make(env_id, **arguments).unwrapped for _ in range(count)]
        for number, env in enumerate(self.envs):
            env.reset(seed=number)
            if cone is not None:
                env.model.opt.cone = cone

    def start(self, qpos, qvel):
        """A reset to given positions and velocities; returns observations ``[N, O]``."""
        for env, place, speed in zip(self.envs, qpos.double().numpy(), qvel.double().numpy(), strict=True):
            env.reset()
            env.set_state(place, speed)
        return np.stack([env._get_obs() for env in self.envs])

    def set(self, qpos, qvel):
        """Positions and velocities in the middle of an episode; derived quantities stay, as between two steps."""
        for env, place, speed in zip(self.envs, qpos.double().numpy(), qvel.double().numpy(), strict=True):
            env.data.qpos[:], env.data.qvel[:] = place, speed

    def step(self, action):
        """Observations, rewards and ends of a step with actions ``[N, U]``."""
        rows = [env.step(each)[:3] for env, each in zip(self.envs, action.numpy(), strict=True)]
        return tuple(np.stack(column) for column in zip(*rows, strict=True))

    def quantities(self, names):
        """A state with these quantities of MuJoCo, as an env on MuJoCo Warp holds it."""
        return {
            name: torch.as_tensor(np.stack([getattr(env.data, name) for env in self.envs]), dtype=torch.float32)
            for name in names
        }
