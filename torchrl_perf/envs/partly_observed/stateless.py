"""CartPole and Pendulum without their velocities, and with noise on what is left."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from torchrl_perf.envs.classic_control.cartpole import CartPole
from torchrl_perf.envs.classic_control.pendulum import Pendulum
from torchrl_perf.envs.device_env import DeviceEnv
from torchrl_perf.envs.drawing import Line

_Task = DeviceEnv if TYPE_CHECKING else object  # the task comes behind, as the next base

__all__ = ["NoisyStatelessCartPole", "NoisyStatelessPendulum", "StatelessCartPole", "StatelessPendulum"]

_LEAST = 2.0**-24  # of a uniform number, so that its normal one is finite


def normal(uniform: Tensor) -> Tensor:
    """Standard normal numbers of uniform ones in [0, 1)."""
    return torch.erfinv(2.0 * uniform.clamp(_LEAST, 1.0 - _LEAST) - 1.0) * math.sqrt(2.0)


def check_sigma(name: str, sigma: float) -> None:
    """Refuse a noise that is negative or not finite."""
    if isinstance(sigma, bool) or not isinstance(sigma, int | float) or not 0 <= sigma < math.inf:
        raise ValueError(f"{name}: expected sigma of at least 0, received {sigma!r}. Remedy: sigma=0.1.")


class StatelessCartPole(CartPole):
    """``CartPole`` that shows positions alone: the velocities of cart and pole have to be told from earlier steps.

    State [N, 4] and rules are those of :class:`CartPole`: 1 a step, 500 steps. Observation [N, 2]: position of the
    cart, angle of the pole. POPGym's ``PositionOnlyCartPole`` (arXiv:2303.01859, "Stateless CartPole" there) lasts
    200, 400 or 600 steps, and divides its rewards by that number.
    """

    observation_low: ClassVar[tuple[float, ...]] = CartPole.observation_low[::2]
    observation_high: ClassVar[tuple[float, ...]] = CartPole.observation_high[::2]

    def observe(self, state: Tensor) -> Tensor:
        """Map ``state`` [N, 4] to positions [N, 2]."""
        return state[:, :4:2]


class StatelessPendulum(Pendulum):
    """``Pendulum`` that shows its angle alone: the velocity has to be told from earlier steps.

    State [N, 2] and rules are those of :class:`Pendulum`. Observation [N, 2]: cos and sin of the angle. POPGym's
    ``PositionOnlyPendulum`` (arXiv:2303.01859, "Stateless Pendulum" there) scales its rewards to returns in [-1, 1].
    """

    observation_low: ClassVar[tuple[float, ...]] = Pendulum.observation_low[:2]
    observation_high: ClassVar[tuple[float, ...]] = Pendulum.observation_high[:2]

    def observe(self, state: Tensor) -> Tensor:
        """Map ``state`` [N, 2] to cos and sin of the angle [N, 2]."""
        return super().observe(state)[:, :2]


class _Noisy(_Task):
    """Normal noise on the two entries of an observation, clipped to its bounds; beside a task without velocities.

    The state is that of the task, and behind it the noise of the present observation in units of ``sigma``.
    """

    def __init__(self, num_envs: int, *, sigma: float = 0.1, **options: Any) -> None:
        check_sigma(type(self).__name__, sigma)
        self.sigma = float(sigma)
        super().__init__(num_envs, **options)

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Map ``uniform`` [N, S] in [0, 1) to a state [N, S]."""
        return torch.cat((super().initial_state(uniform[:, :-2]), normal(uniform[:, -2:])), -1)

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """That of the task, with new noise; see :meth:`DeviceEnv.dynamics`."""
        moved, reward, terminated = super().dynamics(state[:, :-2], action)
        return torch.cat((moved, torch.randn_like(state[:, -2:])), -1), reward, terminated

    def observe(self, state: Tensor) -> Tensor:
        """Map ``state`` [N, S] to a noisy observation [N, 2]."""
        noisy = super().observe(state[:, :-2]) + self.sigma * state[:, -2:]
        low, high = self.observation_low, self.observation_high
        return torch.stack([x.clamp(*bounds) for x, *bounds in zip(noisy.unbind(-1), low, high, strict=True)], -1)

    def scene(self, state: dict[str, Tensor]) -> list[Line]:
        """Return what the task draws."""
        return super().scene({"state": state["state"][:, :-2]})


class NoisyStatelessCartPole(_Noisy, StatelessCartPole):
    """:class:`StatelessCartPole` with normal noise on its observation, clipped to its bounds (arXiv:2303.01859).

    State [N, 6]: that of :class:`CartPole`, and the noise of the present observation in units of ``sigma``, drawn anew
    at each step from the default generator of the env's device. Observation [N, 2]: noisy positions.

    Args:
        num_envs: number of envs N.
        sigma: standard deviation of the noise, of both entries; POPGym's tasks have 0.1, 0.2 and 0.3.
        options: those of :class:`~torchrl_perf.envs.DeviceEnv`.

    Raises:
        ValueError: for a negative ``sigma``.
    """

    num_state = 6
    num_reset_noise = 6


class NoisyStatelessPendulum(_Noisy, StatelessPendulum):
    """:class:`StatelessPendulum` with normal noise on its observation, clipped to its bounds (arXiv:2303.01859).

    State [N, 4]: that of :class:`Pendulum`, and the noise of the present observation in units of ``sigma``, drawn anew
    at each step from the default generator of the env's device. Observation [N, 2]: noisy cos and sin of the angle.

    Args:
        num_envs: number of envs N.
        sigma: standard deviation of the noise, of both entries; POPGym's tasks have 0.1, 0.2 and 0.3.
        options: those of :class:`~torchrl_perf.envs.DeviceEnv`.

    Raises:
        ValueError: for a negative ``sigma``.
    """

    num_state = 4
    num_reset_noise = 4
