"""The objective of a planner that learns: how informative inputs would be about the model.

Dimension key: ``B`` envs, ``P`` candidates, ``H`` steps of a plan, ``S`` numbers of the latent state, ``D`` of the
action, ``F`` features.
"""

from collections.abc import Sequence
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from torchrl_perf.functional.losses.information import (
    a_optimality,
    d_optimality,
    ensemble_disagreement,
    fisher_diagonal,
    fisher_matrix,
    information_gain,
)
from torchrl_perf.functional.wide import widened
from torchrl_perf.systems.active_dynamics.latent_dynamics import LatentDynamics

__all__ = ["InformationKind", "InformationReward"]

InformationKind = Literal["fisher_a", "fisher_d", "embedding", "disagreement", "rnd", "goal"]
EMBEDDING = 16
"""Number of outputs of the random network of ``"rnd"``."""


class InformationReward(nn.Module):
    """Rates plans by how informative they are about the dynamics; the ``metric`` of an :class:`ICEMPlanner`.

    * ``"fisher_a"``, ``"fisher_d"``: Fisher information about the last parameters of the field, by its diagonal, on top
      of what past data hold: :func:`~torchrl_perf.functional.a_optimality`, ``d_optimality``.
    * ``"embedding"``: ``logdet(I + J P J^T / v)``, the same D-optimality with the whole matrices. The diagonal treats
      correlated features as independent, and assumes that the effect of a constant input can be told from the field's.
    * ``"disagreement"``: variance between the members of an ensemble (arXiv:1906.04161).
    * ``"rnd"``: error of a network that learns to predict a random one (arXiv:1810.12894), at the states of the plan.

    * ``"goal"``: no information, minus the squared distance from a goal at the states of the plan.

    Each output of the field has separate parameters on the same features, with equal information about them: only those
    of one are counted, with the mean process variance. The information of past data is accumulated by :meth:`observe`,
    or, since the model's coordinates move while it learns, recomputed by :meth:`assess`.

    Args:
        dynamics: shared, not copied.
        kind: of these names.
        discount: weight of a step in relation to the one before it, for the Fisher kinds and the embedding; for the
            others the planner discounts.
        memory: factor on the information of past data at each :meth:`observe`.
        prior: information about each parameter before any data, positive.
        inputs: whether the input matrix is among the parameters, besides those of the field.
        input_cost: subtracted for each step of a plan, times the square of its input.
        goal: a point ``[S]`` in the model's coordinates, for "goal", or beside information with its weight.
        goal_weight: subtracted for each step of a plan, times the squared distance from the goal; of "goal" it is 1.
        region: half the width of a square around the origin of the model's coordinates.
        region_weight: subtracted for each step of a plan, times the squared distance from that square.

    Attributes:
        information: buffer, of past data: ``[F]``, of the embedding ``[F, F]``.
        covariance: buffer ``[F, F]`` of the embedding.

    Raises:
        ValueError: for an unknown kind, numbers outside what is described, disagreement of a single field, or Fisher
            information of an ensemble.
    """

    information: Tensor
    covariance: Tensor
    goal: Tensor

    def __init__(  # noqa: PLR0913  what a plan gains and what it costs
        self,
        dynamics: LatentDynamics,
        kind: InformationKind = "fisher_d",
        *,
        discount: float = 0.99,
        memory: float = 0.99,
        prior: float = 1.0,
        inputs: bool = False,
        input_cost: float = 0.0,
        goal: Sequence[float] | None = None,
        goal_weight: float = 0.0,
        region: float = 1.5,
        region_weight: float = 0.0,
    ) -> None:
        super().__init__()
        if kind not in get_args(InformationKind):
            raise ValueError(
                f"kind: expected one of {get_args(InformationKind)}, received {kind!r}. Remedy: one of these."
            )
        if not (0.0 <= discount <= 1.0 and 0.0 <= memory <= 1.0 and prior > 0.0 and input_cost >= 0.0):
            raise ValueError(
                "InformationReward: expected discount and memory in [0, 1], a positive prior and a cost of at least 0, "
                f"received {discount}, {memory}, {prior} and {input_cost}. Remedy: discount and memory from 0 to 1, a "
                "prior above 0, and a cost that is not negative."
            )
        if kind == "disagreement" and dynamics.num_members < 2:
            raise ValueError(
                f"kind='disagreement': expected an ensemble of at least 2 fields, received kind={dynamics.kind!r} with "
                f"{dynamics.num_members}. Remedy: LatentDynamics(kind='ensemble')."
            )
        self.dynamics, self.kind, self.discount, self.memory, self.prior = dynamics, kind, discount, memory, prior
        self.inputs, self.input_cost = inputs, input_cost
        device = dynamics.input_matrix.device
        self.goal_weight = 1.0 if kind == "goal" else goal_weight
        self.region, self.region_weight = region, region_weight
        if self.goal_weight and (goal is None or len(goal) != dynamics.latent_size):
            raise ValueError(
                f"goal: expected a point of {dynamics.latent_size} numbers, received {goal!r}. Remedy: goal=(1.0, 0.0)."
            )
        if self.goal_weight:
            self.register_buffer("goal", torch.tensor(goal, device=device), persistent=False)
        if kind in ("fisher_a", "fisher_d", "embedding"):
            size = dynamics.num_features + (dynamics.input_matrix.shape[-1] if inputs else 0)
            shape = (size, size) if kind == "embedding" else (size,)
            self.register_buffer("information", torch.zeros(shape, device=device))
            if kind == "embedding":
                self.register_buffer("covariance", torch.eye(size, device=device) / prior)
        if kind == "rnd":
            self.target, self.predictor = (_network(dynamics.latent_size, device) for _ in range(2))
            self.target.requires_grad_(False)

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        """Rewards ``[B, P, H]``, or returns ``[B, P]`` of the Fisher kinds and the embedding.

        Args:
            states: ``[B, P, H + 1, S]``, the present one first.
            actions: ``[B, P, H, D]``.
        """
        gained = self._information(states, actions)
        if not (self.input_cost or self.goal_weight or self.region_weight):
            return gained
        paid = self.input_cost * actions.square().sum(-1)
        if self.goal_weight:
            paid = paid + self.goal_weight * (states[..., 1:, :] - self.goal).square().sum(-1)
        if self.region_weight:
            beyond = (states[..., 1:, :].abs() - self.region).clamp_min(0.0)
            paid = paid + self.region_weight * beyond.square().sum(-1)
        if not self.remembers:
            return gained - paid
        weights = self.discount ** torch.arange(paid.shape[-1], device=paid.device, dtype=paid.dtype)
        return gained - (paid * weights).sum(-1)

    def _information(self, states: Tensor, actions: Tensor) -> Tensor:
        """What :meth:`forward` returns, without the costs."""
        before = states[..., :-1, :]
        if self.kind == "goal":
            return torch.zeros_like(before[..., 0])
        if self.kind == "disagreement":
            return ensemble_disagreement(self.dynamics.predict_members(before, actions, per_member=False))
        if self.kind == "rnd":
            return self.novelty(states[..., 1:, :])
        sensitivity, variance = self._sensitivity(before, actions), self.dynamics.variance.mean()
        if self.kind == "embedding":
            return information_gain(self.covariance, sensitivity, variance, discount=self.discount)
        gained = fisher_diagonal(sensitivity, variance, discount=self.discount)
        known = self.information + self.prior
        return a_optimality(gained, known) if self.kind == "fisher_a" else d_optimality(gained, known)

    @torch.no_grad()
    def observe(self, beliefs: Tensor, actions: Tensor | None = None) -> None:
        """Add the information of a batch, in place; only the Fisher kinds and the embedding remember.

        Args:
            beliefs: ``[*, S]``, states that transitions started from; rows that are not finite are left out.
            actions: ``[*, D]``; needed only with ``inputs``.
        """
        if self.remembers:
            self._know(self.information * self.memory + self._held(beliefs, actions))

    @torch.no_grad()
    def assess(self, beliefs: Tensor, actions: Tensor, steps: Tensor | float) -> None:
        """Replace the information by that of a number of steps like these, computed with the present model.

        Args:
            beliefs: ``[*, S]``, a sample of the states that transitions started from.
            actions: ``[*, D]``.
            steps: how many steps the sample represents, a number or 0-d.
        """
        if self.remembers:
            rows = beliefs.numel() // beliefs.shape[-1]
            self._know(self._held(beliefs, actions) * (steps / rows))

    @property
    def remembers(self) -> bool:
        """Whether past data count, as they do for the Fisher kinds and the embedding."""
        return self.kind not in ("disagreement", "rnd", "goal")

    def _held(self, beliefs: Tensor, actions: Tensor | None) -> Tensor:
        """Information that transitions hold, shaped as :attr:`information`."""
        flat = None if actions is None else actions.reshape(-1, actions.shape[-1])
        # one long trajectory without discount: [rows, 1, F]
        sensitivity = self._sensitivity(beliefs.reshape(-1, beliefs.shape[-1]), flat)
        rule = fisher_matrix if self.kind == "embedding" else fisher_diagonal
        sensitivity = torch.where(sensitivity.isfinite().all(-1, keepdim=True), sensitivity, 0.0)
        return rule(sensitivity, self.dynamics.variance.mean())

    def _know(self, information: Tensor) -> None:
        self.information.copy_(information)
        if self.kind == "embedding":
            information = widened(information)  # torch has no factorisation in 16 bits
            unit = torch.eye(information.shape[0], dtype=information.dtype, device=information.device)
            factor = torch.linalg.cholesky_ex(information + self.prior * unit)[0]
            self.covariance.copy_(torch.cholesky_solve(unit, factor))

    def novelty(self, latent: Tensor) -> Tensor:
        """Squared error of the predictor at states ``[*, S]``, the mean over its numbers: ``[*]``."""
        return (self.predictor(latent) - self.target(latent)).square().mean(-1)

    def _sensitivity(self, latent: Tensor, action: Tensor | None) -> Tensor:
        """Of one output's step to its parameters: ``[*, S]`` and ``[*, D]`` -> ``[*, 1, F]``."""
        parts = self.dynamics.features(latent)
        if self.inputs:
            parts = torch.cat((parts, cast("Tensor", action)), -1)
        return (self.dynamics.dt * parts).unsqueeze(-2)


def _network(size: int, device: torch.device) -> nn.Sequential:
    hidden = nn.Linear(size, 32, device=device)
    return nn.Sequential(hidden, nn.Tanh(), nn.Linear(32, EMBEDDING, device=device))
