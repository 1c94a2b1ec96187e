"""A task of a legged robot's sizes without its physics, so that the learner is what is timed."""

import math
from typing import ClassVar

from torch import Tensor, nn

from torchrl_perf.envs import DeviceEnv

__all__ = ["Robot"]

_OBSERVATIONS, _ACTIONS = 48, 12


class Robot(DeviceEnv):
    """A damped integrator of its actions, of the sizes that quadrupeds have in Isaac Lab: 48 observations, 12 actions.

    State and observation ``[N, 48]``. Reward: the first coordinate, less 0.1 times the squares of the actions, which
    are clipped to +-1. Initial state uniform in +-0.1; episodes of 1,000 steps.
    """

    num_state = _OBSERVATIONS
    num_reset_noise = _OBSERVATIONS
    default_episode_steps = 1000
    observation_low: ClassVar[tuple[float, ...]] = (-math.inf,) * _OBSERVATIONS
    observation_high: ClassVar[tuple[float, ...]] = (math.inf,) * _OBSERVATIONS
    action_low: ClassVar[tuple[float, ...]] = (-1.0,) * _ACTIONS
    action_high: ClassVar[tuple[float, ...]] = (1.0,) * _ACTIONS

    def initial_state(self, uniform: Tensor) -> Tensor:
        """``[N, 48]`` in [-0.1, 0.1)."""
        return uniform * 0.2 - 0.1

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step; see :meth:`DeviceEnv.dynamics`."""
        action = action.clamp(-1.0, 1.0)
        following = 0.95 * state + 0.05 * nn.functional.pad(action, (0, _OBSERVATIONS - _ACTIONS))
        return following, following[:, 0] - 0.1 * action.square().sum(-1), state[:, 0] > 10.0

    def observe(self, state: Tensor) -> Tensor:
        """The state."""
        return state
