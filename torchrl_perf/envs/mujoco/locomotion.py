"""Gymnasium's robots that walk, run, swim and stand up (version 5), on MuJoCo Warp.

Dimension key: ``N`` worlds, ``U`` actuators, ``O`` observed numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_perf.envs.mujoco.env import State
from torchrl_perf.envs.mujoco.gymnasium_task import POSITIONS, GymnasiumTask
from torchrl_perf.envs.mujoco.models import PhysicsSettings

__all__ = ["FEW_ITERATIONS", "Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "Swimmer", "Walker2d"]


FEW_ITERATIONS = PhysicsSettings(iterations=5, ls_iterations=10)
"""Of robots whose solver needs no more: steps of random actions agree with MuJoCo's C code as well as with the models'
own limits of 50 or 100. All worlds wait for the one that needs most."""


class HalfCheetah(GymnasiumTask):
    """Gymnasium's ``HalfCheetah-v5`` on MuJoCo Warp: run forward with a planar robot of six joints.

    Observation ``[N, 17]``: positions without x, velocities. Reward: speed along x minus 0.1 times the squared action.
    Never terminates. Wawrzynski, "A cat-like robot real-time learning to run", 2009.
    """

    model_file = "half_cheetah.xml"
    gymnasium_id = "HalfCheetah-v5"
    usual: ClassVar[Mapping[str, Any]] = {
        "frame_skip": 5,
        "forward_reward_weight": 1.0,
        "ctrl_cost_weight": 0.1,
        "reset_noise_scale": 0.1,
        POSITIONS: True,
    }
    default_physics = FEW_ITERATIONS

    def features(self, state: State) -> Tensor:
        """Return positions without x, and velocities."""
        return torch.cat([self.seen_positions(state, 1), state["qvel"]], -1)

    def reward(self, before: State, action: Tensor, after: State) -> Tensor:
        """Return the speed minus the cost of control."""
        return self.forward_gain(before, after) - self.control_cost(action)


class Swimmer(GymnasiumTask):
    """Gymnasium's ``Swimmer-v5`` on MuJoCo Warp: swim forward with a chain of three links.

    Observation ``[N, 8]``: positions without x and y, velocities. Reward: speed along x minus 1e-4 times the squared
    action. Never terminates. Coulom, "Reinforcement learning using neural networks", 2002.
    """

    model_file = "swimmer.xml"
    gymnasium_id = "Swimmer-v5"
    usual: ClassVar[Mapping[str, Any]] = {**HalfCheetah.usual, "frame_skip": 4, "ctrl_cost_weight": 1e-4}

    def features(self, state: State) -> Tensor:
        """Return positions without x and y, and velocities."""
        return torch.cat([self.seen_positions(state, 2), state["qvel"]], -1)

    def reward(self, before: State, action: Tensor, after: State) -> Tensor:
        """Return the speed minus the cost of control."""
        return self.forward_gain(before, after) - self.control_cost(action)

    def draw_pose(self) -> tuple[Tensor, Tensor]:
        """Return positions and velocities of uniform noise."""
        return self.around(self.reset_noise), self.uniform(-self.reset_noise, self.reset_noise, self.model.nv)


class Hopper(GymnasiumTask):
    """Gymnasium's ``Hopper-v5`` on MuJoCo Warp: hop forward on one leg without falling.

    Observation ``[N, 11]``: positions without x, velocities within +-10. Reward: 1 while healthy plus speed along x
    minus 1e-3 times the squared action. Terminates when the torso is below 0.7 m, leans more than 0.2 rad, or a number
    of the state beyond x leaves +-100. Erez, Tassa and Todorov, "Infinite-horizon model predictive control for
    periodic tasks with contacts", 2011.
    """

    model_file = "hopper.xml"
    gymnasium_id = "Hopper-v5"
    usual: ClassVar[Mapping[str, Any]] = {
        **Swimmer.usual,
        "ctrl_cost_weight": 1e-3,
        "healthy_reward": 1.0,
        "terminate_when_unhealthy": True,
        "healthy_state_range": (-100.0, 100.0),
        "healthy_z_range": (0.7, math.inf),
        "healthy_angle_range": (-0.2, 0.2),
        "reset_noise_scale": 5e-3,
    }
    default_physics = FEW_ITERATIONS

    def features(self, state: State) -> Tensor:
        """Return positions without x, and clipped velocities."""
        return torch.cat([self.seen_positions(state, 1), state["qvel"].clamp(-10, 10)], -1)

    def is_healthy(self, state: State) -> Tensor:
        """Return in which worlds the robot has not fallen, bool ``[N]``."""
        upright = self.within(state["qpos"][:, 1], "healthy_z_range")
        upright = upright & self.within(state["qpos"][:, 2], "healthy_angle_range")
        if "healthy_state_range" not in self.usual:
            return upright
        rest = torch.cat([state["qpos"][:, 2:], state["qvel"]], -1)
        return upright & self.within(rest, "healthy_state_range").all(-1)

    def reward(self, before: State, action: Tensor, after: State) -> Tensor:
        """Return 1 while healthy plus the speed minus the cost of control."""
        return self.forward_gain(before, after) + self.healthy_gain(after) - self.control_cost(action)

    def draw_pose(self) -> tuple[Tensor, Tensor]:
        """Return positions and velocities of uniform noise."""
        return self.around(self.reset_noise), self.uniform(-self.reset_noise, self.reset_noise, self.model.nv)


class Walker2d(Hopper):
    """Gymnasium's ``Walker2d-v5`` on MuJoCo Warp: walk forward on two planar legs without falling.

    Observation ``[N, 17]``: positions without x, velocities within +-10. Reward as :class:`Hopper`. Terminates when
    the torso leaves 0.8 to 2 m or leans more than 1 rad.
    """

    model_file = "walker2d_v5.xml"
    gymnasium_id = "Walker2d-v5"
    usual: ClassVar[Mapping[str, Any]] = {
        **{name: value for name, value in Hopper.usual.items() if name != "healthy_state_range"},
        "healthy_z_range": (0.8, 2.0),
        "healthy_angle_range": (-1.0, 1.0),
    }


class Ant(GymnasiumTask):
    """Gymnasium's ``Ant-v5`` on MuJoCo Warp: run forward on four legs.

    Observation ``[N, 105]``: positions without x and y, velocities, external forces on each body within +-1. Reward: 1
    while healthy plus speed of the torso along x minus 0.5 times the squared action and 5e-4 times the squared forces.
    Terminates when the torso leaves 0.2 to 1 m. Schulman et al., arXiv:1506.02438.
    """

    model_file = "ant.xml"
    gymnasium_id = "Ant-v5"
    usual: ClassVar[Mapping[str, Any]] = {
        **HalfCheetah.usual,
        "ctrl_cost_weight": 0.5,
        "contact_cost_weight": 5e-4,
        "healthy_reward": 1.0,
        "main_body": 1,
        "terminate_when_unhealthy": True,
        "healthy_z_range": (0.2, 1.0),
        "contact_force_range": (-1.0, 1.0),
        "include_cfrc_ext_in_observation": True,
    }
    default_physics = FEW_ITERATIONS
    observed_quantities = ("xpos", "cfrc_ext")

    def __init__(self, num_envs: int, **settings: Any) -> None:
        super().__init__(num_envs, **settings)
        body = self.chosen["main_body"]
        try:  # here, since a compiler cannot look into the model
            self.main_body = int(self.model.body(body).id)
        except (KeyError, IndexError) as error:
            names = filter(None, (self.model.body(number).name for number in range(self.model.nbody)))
            raise ValueError(
                f"Ant: expected main_body to be one of {', '.join(names)}, or its number, received {body!r}. Remedy: "
                "the torso's."
            ) from error

    def _forces(self, state: State) -> Tensor:
        return state["cfrc_ext"].clamp(*self.chosen["contact_force_range"]).flatten(1)

    def features(self, state: State) -> Tensor:
        """Return positions without x and y, velocities, and forces on all bodies but the world."""
        forces = [self._forces(state)[:, 6:]] if self.chosen["include_cfrc_ext_in_observation"] else []
        return torch.cat([self.seen_positions(state, 2), state["qvel"], *forces], -1)

    def is_healthy(self, state: State) -> Tensor:
        """Return in which worlds the torso is between 0.2 and 1 m, bool ``[N]``."""
        height, (low, high) = state["qpos"][:, 2], self.chosen["healthy_z_range"]
        return (height >= low) & (height <= high)

    def reward(self, before: State, action: Tensor, after: State) -> Tensor:
        """Return 1 while healthy plus the speed minus the costs of control and contacts."""
        speed = (after["xpos"][:, self.main_body, 0] - before["xpos"][:, self.main_body, 0]) / self.dt
        contact_cost = self.chosen["contact_cost_weight"] * self._forces(after).square().sum(-1)
        gains = self.chosen["forward_reward_weight"] * speed + self.healthy_gain(after)
        return gains - self.control_cost(action) - contact_cost


class _HumanoidBase(GymnasiumTask):
    """The observation of Gymnasium's two humanoids."""

    usual: ClassVar[Mapping[str, Any]] = {
        "frame_skip": 5,
        "ctrl_cost_weight": 0.1,
        "reset_noise_scale": 1e-2,
        POSITIONS: True,
        **{f"include_{name}_in_observation": True for name in ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")},
    }
    observed_quantities = ("xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")

    def __init__(self, num_envs: int, **settings: Any) -> None:
        super().__init__(num_envs, **settings)
        masses = torch.as_tensor(self.model.body_mass, dtype=torch.float32).to(self.device)
        self.register_buffer("mass_shares", masses / masses.sum(), persistent=False)

    def features(self, state: State) -> Tensor:
        """Return positions, velocities, inertias, velocities of bodies, joint torques and external forces."""
        parts = [self.seen_positions(state, 2), state["qvel"]]
        for name in ("cinert", "cvel", "qfrc_actuator", "cfrc_ext"):
            if self.chosen[f"include_{name}_in_observation"]:
                first = 6 if name == "qfrc_actuator" else 1  # the root's joint, and the world
                parts.append(state[name][:, first:].flatten(1))
        return torch.cat(parts, -1)

    def impact_cost(self, state: State, kind: str) -> Tensor:
        """Return the weighted squared external forces, within the range of their cost, ``[N]``."""
        forces = state["cfrc_ext"].square().flatten(1).sum(-1)
        return (self.chosen[f"{kind}_cost_weight"] * forces).clamp(*self.chosen[f"{kind}_cost_range"])

    def draw_pose(self) -> tuple[Tensor, Tensor]:
        """Return positions and velocities of uniform noise."""
        return self.around(self.reset_noise), self.uniform(-self.reset_noise, self.reset_noise, self.model.nv)


class Humanoid(_HumanoidBase):
    """Gymnasium's ``Humanoid-v5`` on MuJoCo Warp: walk forward on two legs without falling.

    Observation ``[N, 348]``: positions without x and y, velocities, inertia and velocity of each body about the centre
    of mass, torques of actuators, external forces. Reward: 5 while healthy plus 1.25 times the speed of the centre of
    mass along x minus 0.1 times the squared action and 5e-7 times the squared forces (at most 10). Terminates when the
    torso leaves 1 to 2 m. The model asks for the PGS solver, which MuJoCo Warp lacks: Newton's is taken.
    Tassa, Erez and Todorov, "Synthesis and stabilization of complex behaviors", 2012.
    """

    model_file = "humanoid.xml"
    gymnasium_id = "Humanoid-v5"
    usual: ClassVar[Mapping[str, Any]] = {
        **_HumanoidBase.usual,
        "forward_reward_weight": 1.25,
        "contact_cost_weight": 5e-7,
        "contact_cost_range": (-math.inf, 10.0),
        "healthy_reward": 5.0,
        "terminate_when_unhealthy": True,
        "healthy_z_range": (1.0, 2.0),
    }
    default_physics = FEW_ITERATIONS

    def _centre(self, state: State) -> Tensor:
        return (state["xipos"][:, :, 0] * self.mass_shares).sum(-1)

    def is_healthy(self, state: State) -> Tensor:
        """Return in which worlds the torso is between 1 and 2 m, bool ``[N]``."""
        return self.within(state["qpos"][:, 2], "healthy_z_range")

    def reward(self, before: State, action: Tensor, after: State) -> Tensor:
        """Return 5 while healthy plus the weighted speed minus the costs of control and impacts."""
        speed = (self._centre(after) - self._centre(before)) / self.dt
        gains = self.chosen["forward_reward_weight"] * speed + self.healthy_gain(after)
        return gains - self.control_cost(action) - self.impact_cost(after, "contact")


class HumanoidStandup(_HumanoidBase):
    """Gymnasium's ``HumanoidStandup-v5`` on MuJoCo Warp: get up from lying on the back.

    Observation ``[N, 348]`` as :class:`Humanoid`. Reward: height of the torso over the time step of physics plus 1
    minus 0.1 times the squared action and 5e-7 times the squared forces (at most 10). Never terminates. Newton's solver
    in place of PGS, as :class:`Humanoid`.
    """

    model_file = "humanoidstandup.xml"
    gymnasium_id = "HumanoidStandup-v5"
    usual: ClassVar[Mapping[str, Any]] = {
        **_HumanoidBase.usual,  # uph_cost_weight is none: Gymnasium takes it and leaves it unread
        "impact_cost_weight": 0.5e-6,
        "impact_cost_range": (-math.inf, 10.0),
    }

    def reward(self, before: State, action: Tensor, after: State) -> Tensor:
        """Return the height over the time step plus 1 minus the costs of control and impacts."""
        height = after["qpos"][:, 2] / float(self.model.opt.timestep)
        return height + 1 - self.control_cost(action) - self.impact_cost(after, "impact")
