"""What a planner maximises where the aim is to learn: how much inputs would say about the model.

Dimension key: ``B`` envs, ``P`` candidates, ``H`` steps of a plan, ``S`` numbers of the latent state, ``D`` of the
action, ``F`` features.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from torchrl_perf.functional.information import (
    a_optimality,
    d_optimality,
    embedding_information_gain,
    ensemble_disagreement,
    fisher_diagonal,
    fisher_matrix,
)
from torchrl_perf.modules.latent_dynamics import LatentDynamics

__all__ = ["InformationKind", "InformationReward"]

InformationKind = Literal["fisher_a", "fisher_d", "embedding", "disagreement", "rnd"]
EMBEDDING = 16
"""Numbers that the random network of ``"rnd"`` gives for a state."""


class InformationReward(nn.Module):
    """Rates plans by what they would say about the dynamics; the ``metric`` of an :class:`ICEMPlanner`.

    * ``"fisher_a"``, ``"fisher_d"``: Fisher information about the last parameters of the field, by its diagonal, on top
      of what past data hold: :func:`~torchrl_perf.functional.a_optimality`, ``d_optimality``.
    * ``"embedding"``: ``logdet(I + P J)`` of the same with the whole matrices.
    * ``"disagreement"``: variance between the members of an ensemble (arXiv:1906.04161).
    * ``"rnd"``: error of a network that learns to predict a random one (arXiv:1810.12894), at the states of the plan.

    Each output of the field has parameters of its own on the same features, and equal information about them: those of
    one are counted, with the mean process variance.

    Args:
        dynamics: shared, not copied.
        kind: of these names.
        discount: weight of a step in relation to the one before it, for the Fisher kinds and the embedding; of the
            others the planner discounts.
        memory: factor on the information of past data at each :meth:`observe`.
        prior: information about each parameter before any data, positive.

    Attributes:
        information: buffer, of past data: ``[F]``, of the embedding ``[F, F]``.
        covariance: buffer ``[F, F]`` of the embedding.

    Raises:
        ValueError: for an unknown kind, numbers outside what is described, disagreement of a single field, or Fisher
            information of an ensemble.
    """

    information: Tensor
    covariance: Tensor

    def __init__(
        self,
        dynamics: LatentDynamics,
        kind: InformationKind = "fisher_d",
        *,
        discount: float = 0.99,
        memory: float = 0.99,
        prior: float = 1.0,
    ) -> None:
        super().__init__()
        if kind not in get_args(InformationKind):
            raise ValueError(f"kind: expected one of {get_args(InformationKind)}, received {kind!r}.")
        if not (0.0 <= discount <= 1.0 and 0.0 <= memory <= 1.0 and prior > 0.0):
            raise ValueError(
                f"InformationReward: expected discount and memory in [0, 1] and a positive prior, received {discount}, "
                f"{memory} and {prior}."
            )
        if kind == "disagreement" and dynamics.num_members < 2:
            raise ValueError(
                f"kind='disagreement': expected an ensemble of at least 2 fields, received kind={dynamics.kind!r} with "
                f"{dynamics.num_members}. Remedy: LatentDynamics(kind='ensemble')."
            )
        self.dynamics, self.kind, self.discount, self.memory, self.prior = dynamics, kind, discount, memory, prior
        device = dynamics.input_matrix.device
        if kind in ("fisher_a", "fisher_d", "embedding"):
            size = dynamics.num_features
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
        before = states[..., :-1, :]
        if self.kind == "disagreement":
            return ensemble_disagreement(self.dynamics.predict_members(before, actions, per_member=False))
        if self.kind == "rnd":
            return self.novelty(states[..., 1:, :])
        sensitivity, variance = self._sensitivity(before), self.dynamics.variance.mean()
        if self.kind == "embedding":
            gained = fisher_matrix(sensitivity, variance, discount=self.discount)
            return embedding_information_gain(self.covariance, gained)
        gained = fisher_diagonal(sensitivity, variance, discount=self.discount)
        known = self.information + self.prior
        return a_optimality(gained, known) if self.kind == "fisher_a" else d_optimality(gained, known)

    @torch.no_grad()
    def observe(self, beliefs: Tensor) -> None:
        """Take up what a batch of data holds, in place; only the Fisher kinds and the embedding remember.

        Args:
            beliefs: ``[*, S]``, states that transitions started from; rows that are not finite are left out.
        """
        if self.kind in ("disagreement", "rnd"):
            return
        # one long trajectory without discount: [rows, 1, F]
        sensitivity = torch.nan_to_num(self._sensitivity(beliefs.reshape(-1, beliefs.shape[-1])), 0.0, 0.0, 0.0)
        rule = fisher_matrix if self.kind == "embedding" else fisher_diagonal
        self.information.mul_(self.memory).add_(rule(sensitivity, self.dynamics.variance.mean()))
        if self.kind == "embedding":
            known = self.information + self.prior * torch.eye(self.information.shape[0], device=self.information.device)
            factor = torch.linalg.cholesky_ex(known)[0]
            self.covariance.copy_(torch.cholesky_inverse(factor))

    def novelty(self, latent: Tensor) -> Tensor:
        """Squared error of the predictor at states ``[*, S]``, the mean over its numbers: ``[*]``."""
        return (self.predictor(latent) - self.target(latent)).square().mean(-1)

    def _sensitivity(self, latent: Tensor) -> Tensor:
        """Of one output's step to its parameters: ``[*, S]`` -> ``[*, 1, F]``."""
        return (self.dynamics.dt * self.dynamics.features(latent)).unsqueeze(-2)


def _network(size: int, device: torch.device) -> nn.Sequential:
    hidden = nn.Linear(size, 32, device=device)
    return nn.Sequential(hidden, nn.Tanh(), nn.Linear(32, EMBEDDING, device=device))
