"""Gymnasium's arms and poles (version 5), on MuJoCo Warp.

Dimension key: ``N`` worlds, ``U`` actuators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_perf.envs.mujoco.env import State
from torchrl_perf.envs.mujoco.gymnasium_task import GymnasiumTask

__all__ = ["InvertedDoublePendulum", "InvertedPendulum", "Pusher", "Reacher"]

GOAL_RADIUS = 0.2
OBJECT_DISTANCE = 0.17
CANDIDATES = 24
"""Places of which the first that is far enough is taken; all are too near once in 1e10 draws."""


class _Bodies(GymnasiumTask):
    """A task that observes bodies by name."""

    def __init__(self, num_envs: int, **settings: Any) -> None:
        self._numbers: dict[str, int] = {}  # of bodies, found as the first state is observed
        super().__init__(num_envs, **settings)

    def body(self, state: State, name: str) -> Tensor:
        """Return the position of a body, ``[N, 3]`` m."""
        if name not in self._numbers:  # a compiler cannot look into the model
            self._numbers[name] = int(self.model.body(name).id)
        return state["xpos"][:, self._numbers[name]]


class Reacher(_Bodies):
    """Gymnasium's ``Reacher-v5`` on MuJoCo Warp: bring the tip of an arm of two joints to a target.

    Observation ``[N, 10]``: cosines and sines of the joints, the target, velocities of the joints, and the way from the
    target to the tip in the plane. Reward: minus their distance minus the squared action. Ends after 50 steps.
    """

    model_file = "reacher.xml"
    gymnasium_id = "Reacher-v5"
    usual: ClassVar[Mapping[str, Any]] = {"frame_skip": 2, "reward_dist_weight": 1, "reward_control_weight": 1}
    episode_steps = 50
    noise = 0.1
    observed_quantities = ("xpos",)

    def _way(self, state: State) -> Tensor:
        return self.body(state, "fingertip") - self.body(state, "target")

    def features(self, state: State) -> Tensor:
        """Return the joints, the target, the joints' velocities and the way."""
        joints = state["qpos"][:, :2]
        parts = [joints.cos(), joints.sin(), state["qpos"][:, 2:], state["qvel"][:, :2], self._way(state)[:, :2]]
        return torch.cat(parts, -1)

    def reward(self, before: State, action: Tensor, after: State) -> Tensor:
        """Return minus the distance minus the cost of control."""
        far = self.chosen["reward_dist_weight"] * self._way(after).norm(dim=-1)
        return -far - self.chosen["reward_control_weight"] * action.square().sum(-1)

    def draw_pose(self) -> tuple[Tensor, Tensor]:
        """Return joints near zero and a target that is uniform in a disc of 0.2 m."""
        radius = GOAL_RADIUS * self.uniform(0, 1, 1).sqrt()
        angle = self.uniform(-math.pi, math.pi, 1)
        goal = torch.cat([radius * angle.cos(), radius * angle.sin()], -1)
        velocity = self.uniform(-0.005, 0.005, self.model.nv - 2)
        return torch.cat([self.around(self.reset_noise)[:, :-2], goal], -1), _padded(velocity, 2)


class Pusher(_Bodies):
    """Gymnasium's ``Pusher-v5`` on MuJoCo Warp: push a cylinder to a goal with an arm of seven joints.

    Observation ``[N, 23]``: positions and velocities of the joints, places of the tip, the cylinder and the goal.
    Reward: minus the distance of cylinder and goal, minus half of that of tip and cylinder, minus 0.1 times the squared
    action. Ends after 100 steps.
    """

    model_file = "pusher_v5.xml"
    gymnasium_id = "Pusher-v5"
    usual: ClassVar[Mapping[str, Any]] = {
        "frame_skip": 5,
        "reward_near_weight": 0.5,
        "reward_dist_weight": 1,
        "reward_control_weight": 0.1,
    }
    episode_steps = 100
    observed_quantities = ("xpos",)

    def features(self, state: State) -> Tensor:
        """Return positions and velocities of the joints, and three places."""
        places = [self.body(state, name) for name in ("tips_arm", "object", "goal")]
        return torch.cat([state["qpos"][:, :7], state["qvel"][:, :7], *places], -1)

    def reward(self, before: State, action: Tensor, after: State) -> Tensor:
        """Return minus both distances minus the cost of control."""
        thing = self.body(after, "object")
        near = self.chosen["reward_near_weight"] * (thing - self.body(after, "tips_arm")).norm(dim=-1)
        far = self.chosen["reward_dist_weight"] * (thing - self.body(after, "goal")).norm(dim=-1)
        return -far - near - self.chosen["reward_control_weight"] * action.square().sum(-1)

    def draw_pose(self) -> tuple[Tensor, Tensor]:
        """Return the arm at rest, and a cylinder in a box of 0.3 x 0.4 m that is not within 0.17 m of the goal."""
        x, y = self.uniform(-0.3, 0, CANDIDATES), self.uniform(-0.2, 0.2, CANDIDATES)
        first = ((x.square() + y.square()).sqrt() > OBJECT_DISTANCE).byte().argmax(-1, keepdim=True)
        place = torch.cat([x.gather(-1, first), y.gather(-1, first)], -1)
        velocity = self.uniform(-0.005, 0.005, self.model.nv - 4)
        return torch.cat([self.around(self.reset_noise)[:, :-4], _padded(place, 2)], -1), _padded(velocity, 4)


class InvertedPendulum(GymnasiumTask):
    """Gymnasium's ``InvertedPendulum-v5`` on MuJoCo Warp: balance a pole on a cart by pushing the cart.

    Observation ``[N, 4]``: positions and velocities of cart and pole. Reward 1 until the pole leans more than 0.2 rad,
    which terminates.
    """

    model_file = "inverted_pendulum.xml"
    gymnasium_id = "InvertedPendulum-v5"
    usual: ClassVar[Mapping[str, Any]] = {"frame_skip": 2, "reset_noise_scale": 0.01}

    def reward(self, before: State, action: Tensor, after: State) -> Tensor:
        """Return 1 while the pole stands."""
        return self.is_healthy(after).to(torch.float32)

    def is_healthy(self, state: State) -> Tensor:
        """Return in which worlds the pole leans at most 0.2 rad."""
        return state["qpos"][:, 1].abs() <= 0.2

    def draw_pose(self) -> tuple[Tensor, Tensor]:
        """Return positions and velocities of uniform noise."""
        return self.around(self.reset_noise), self.uniform(-self.reset_noise, self.reset_noise, self.model.nv)


class InvertedDoublePendulum(GymnasiumTask):
    """Gymnasium's ``InvertedDoublePendulum-v5`` on MuJoCo Warp: balance two poles, one on the other, on a cart.

    Observation ``[N, 9]``: place of the cart, sines and cosines of the poles, velocities and the constraint force on
    the cart within +-10. Reward: 10 while standing minus penalties of the tip's place and the poles' velocities.
    Terminates when the tip is not above 1 m.
    """

    model_file = "inverted_double_pendulum.xml"
    gymnasium_id = "InvertedDoublePendulum-v5"
    usual: ClassVar[Mapping[str, Any]] = {"frame_skip": 5, "healthy_reward": 10.0, "reset_noise_scale": 0.1}
    observed_quantities = ("site_xpos", "qfrc_constraint")

    def features(self, state: State) -> Tensor:
        """Return the cart, the poles' angles, velocities and the constraint force on the cart."""
        angles = state["qpos"][:, 1:]
        parts = [state["qpos"][:, :1], angles.sin(), angles.cos(), state["qvel"].clamp(-10, 10)]
        return torch.cat([*parts, state["qfrc_constraint"][:, :1].clamp(-10, 10)], -1)

    def reward(self, before: State, action: Tensor, after: State) -> Tensor:
        """Return 10 while standing minus the penalties."""
        x, height = after["site_xpos"][:, 0, 0], after["site_xpos"][:, 0, 2]
        first, second = after["qvel"][:, 1], after["qvel"][:, 2]
        place = 0.01 * x.square() + (height - 2).square()
        speed = 1e-3 * first.square() + 5e-3 * second.square()
        return self.healthy_gain(after) - place - speed

    def is_healthy(self, state: State) -> Tensor:
        """Return in which worlds the tip is above 1 m."""
        return state["site_xpos"][:, 0, 2] > 1


def _padded(values: Tensor, count: int) -> Tensor:
    """``values`` ``[N, X]`` and ``count`` columns of zeros."""
    return torch.cat([values, values.new_zeros(len(values), count)], -1)
