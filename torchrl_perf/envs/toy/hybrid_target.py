"""A task for hybrid actions whose optimum is known in closed form."""

from __future__ import annotations

from typing import ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, TensorSpec

from torchrl_perf.envs.device_env import DeviceEnv
from torchrl_perf.envs.drawing import GREEN, PALE, RED, Line

__all__ = ["HybridTarget"]

_AXES = 2
_REACH = 0.5


class HybridTarget(DeviceEnv):
    """Bring a point of the square [-1, 1]^2 to its centre, along one axis at a time.

    Each step names an axis and, for each axis, a displacement within +-0.5; the point moves along the named axis alone.
    The reward is minus the distance ``|x| + |y|`` after the step. Episodes are truncated after 8 steps and never
    terminate. A policy has to learn both parts, the choice of the axis and the size of the displacement.

    **Optimum.** Along an axis at distance ``d`` there are ``floor(d / 0.5)`` full moves and one of the rest. Moves
    along the two axes may be taken in any order, and each shortens the distance of all steps after it, so that the
    longest first is best: always along the farther axis (its next move is the longer one, or both are full), straight
    to 0 where that is within reach. :meth:`optimal_return` sums it up. Its mean over initial states is -19/24, about
    -0.792. A policy that does not move gets -8 on average.

    State and observation [N, 2]: the position. Initial position uniform in the square. Keys read: ("action",
    "discrete") int64 [N], the axis, and ("action", "continuous") float [N, 2], the displacements (clipped to +-0.5).
    Other keys, arguments and the rest of the behaviour are those of :class:`DeviceEnv`.
    """

    scene_half_width = 1.6
    num_state = _AXES
    num_reset_noise = _AXES
    default_episode_steps = 8
    observation_low: ClassVar[tuple[float, ...]] = (-float("inf"),) * _AXES
    observation_high: ClassVar[tuple[float, ...]] = (float("inf"),) * _AXES
    action_low: ClassVar[tuple[float, ...]] = (-_REACH,) * _AXES
    action_high: ClassVar[tuple[float, ...]] = (_REACH,) * _AXES

    def make_action_spec(self) -> TensorSpec:
        """Return the spec of ("action", "discrete") and ("action", "continuous")."""
        parts = Composite(
            discrete=Categorical(_AXES, shape=self.batch_size, dtype=torch.int64, device=self.device),
            continuous=self._box(self.action_low, self.action_high),
            shape=self.batch_size,
            device=self.device,
        )
        return Composite(action=parts, shape=self.batch_size, device=self.device)

    def _check_action(self, tensordict: TensorDictBase) -> Tensor:
        """Return both parts as one tensor [N, 1 + 2]; raise where a shape or dtype does not match the spec."""
        columns = []
        for name, shape, is_float in (("discrete", (self.num_envs,), False), ("continuous", (self.num_envs, 2), True)):
            part = tensordict.get(("action", name), None)
            if part is None:
                keys = sorted(map(str, tensordict.keys(True, True)))
                raise KeyError(
                    f"HybridTarget expected ('action', {name!r}), received {keys}. Remedy: run a policy that writes it."
                )
            if part.shape != shape or part.is_floating_point() != is_float or part.dtype == torch.bool:
                raise ValueError(
                    f"HybridTarget expected ('action', {name!r}) {shape} of {'floats' if is_float else 'integers'}, "
                    f"received {tuple(part.shape)} {part.dtype}. Remedy: fit the policy to env.full_action_spec."
                )
            columns.append(part.to(self.dtype).reshape(self.num_envs, -1))
        return torch.cat(columns, -1)

    def scene(self, state: dict[str, Tensor]) -> list[Line]:
        """Return the square's axes, its centre and the point."""
        point = state["state"]
        zero = torch.zeros_like(point)
        across, up = (zero + zero.new_tensor(end) for end in ((1.0, 0.0), (0.0, 1.0)))
        axes = [Line(-end, end, 0.005, PALE) for end in (across, up)]
        return [*axes, Line(zero, zero, 0.06, GREEN), Line(point, point, 0.05, RED)]

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Map ``uniform`` [N, 2] in [0, 1) to positions in [-1, 1); returns [N, 2]."""
        return uniform * 2.0 - 1.0

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move along one axis; ``action`` [N, 3] is the axis and the two displacements."""
        axis, displacement = action[:, :1], action[:, 1:].clamp(-_REACH, _REACH)
        named = axis == torch.arange(_AXES, device=axis.device)
        position = state + torch.where(named, displacement, 0.0)
        reward = -position.abs().sum(-1)
        return position, reward, torch.zeros_like(reward, dtype=torch.bool)

    def observe(self, state: Tensor) -> Tensor:
        """Return ``state`` [N, 2]."""
        return state

    @staticmethod
    def optimal_action(state: Tensor) -> tuple[Tensor, Tensor]:
        """The best action in each state: the axis [*] int64 and the displacements [*, 2], for ``state`` [*, 2]."""
        return state.abs().argmax(-1), -state.clamp(-_REACH, _REACH)

    @staticmethod
    def optimal_return(state: Tensor, steps: int = 8) -> Tensor:
        """Greatest undiscounted return of ``steps`` steps from each state, closed form.

        With the moves ``m_1 >= m_2 >= ...`` of both axes in descending order, the step t leaves ``L - m_1 - ... - m_t``
        of the initial distance ``L``, so that the return is ``-sum_t (L - sum_{i <= t} m_i)``.

        Args:
            state: [*, 2], positions in [-1, 1]^2.
            steps: steps of the episode.

        Returns:
            [*], at most 0.
        """
        distance = state.abs()
        # an axis of the square holds at most two full moves
        moves = [(distance - _REACH * i).clamp(0.0, _REACH) for i in range(2)]
        moves = torch.cat(moves, -1).sort(-1, descending=True).values
        rest = distance.sum(-1, keepdim=True) - moves.cumsum(-1)
        return -rest[..., :steps].sum(-1)
