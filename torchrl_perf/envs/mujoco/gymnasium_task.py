"""What Gymnasium's MuJoCo tasks share: their model files, and the words of their rewards."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from torchrl_perf.envs.mujoco.env import MuJoCoEnv, State
from torchrl_perf.envs.mujoco.models import gymnasium_asset

__all__ = ["GymnasiumTask"]


class GymnasiumTask(MuJoCoEnv):
    """A task of Gymnasium's version 5, by the name of its class: rewards, ends, observations and noise are Gymnasium's.

    Args:
        num_envs: N.
        **settings: further arguments of :class:`MuJoCoEnv`; ``frame_skip``, ``max_episode_steps`` and ``reset_noise``
            are Gymnasium's by default.
    """

    model_file: ClassVar[str]
    """Name of a file in Gymnasium's wheel."""
    gymnasium_id: ClassVar[str]
    """The task in Gymnasium's registry, which runs it in MuJoCo's own C code."""
    steps_of_physics: ClassVar[int] = 5
    episode_steps: ClassVar[int] = 1000
    noise: ClassVar[float] = 0.1
    observed_quantities: ClassVar[tuple[str, ...]] = ()
    control_weight: ClassVar[float] = 0.1
    """Of the sum of squared actions, which is taken off the reward."""

    def __init__(self, num_envs: int, **settings: Any) -> None:
        usual = {
            "frame_skip": self.steps_of_physics,
            "max_episode_steps": self.episode_steps,
            "reset_noise": self.noise,
            "observed": self.observed_quantities,
        }
        super().__init__(gymnasium_asset(self.model_file), num_envs, **{**usual, **settings})

    def forward_speed(self, before: State, after: State) -> Tensor:
        """Return the mean speed along x of the first joint in a step, ``[N]`` m/s."""
        return (after["qpos"][:, 0] - before["qpos"][:, 0]) / self.dt

    def control_cost(self, action: Tensor) -> Tensor:
        """Return ``control_weight`` times the sum of squares of ``action`` ``[N, U]``."""
        return self.control_weight * action.square().sum(-1)
