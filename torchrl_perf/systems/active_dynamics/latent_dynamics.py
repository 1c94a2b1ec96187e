"""Models of how a latent state moves under an input.

Dimension key: ``S`` numbers of the latent state, ``D`` of the action, ``F`` features, ``K`` members of an ensemble.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from torchrl_perf.modules.ensemble import EnsembleMLP
from torchrl_perf.modules.mlp import FusedMLP

__all__ = ["DynamicsKind", "LatentDynamics"]

DynamicsKind = Literal["mlp", "linear", "rbf", "ensemble", "rbf_ensemble"]
MAX_CENTRES = 10_000
MIN_VARIANCE = 1e-5


class LatentDynamics(nn.Module):
    """``z' ~ N(z + (f(z) + B a) dt, q dt)``, with a learned field f, input matrix B and process variance q.

    The field is one of

    * ``"mlp"``: two hidden layers of tanh, one kernel on CUDA where no gradient is asked for,
    * ``"linear"``: ``A z + b``,
    * ``"rbf"``: ``sum_f w_f exp(-gamma |z - c_f|^2)`` with fixed centres on a grid, as wide as they are
      apart,
    * ``"ensemble"``: K such perceptrons, all at once as batched matrix products; the model's own prediction is the mean
      over them,
    * ``"rbf_ensemble"``: K sets of weights on the same radial functions. Where there are no data each keeps the weights
      that it began with, so that the members differ there, and only there.

    All but the ensembles are linear in their last parameters: ``f(z) = W^T features(z)``, with the features as the
    sensitivities from which Fisher information is computed.

    Args:
        latent_size: S.
        action_size: D.
        kind: of the field.
        dt: time of a step.
        hidden_size: width of the hidden layers; of the fused kernel 32, 64 or 128.
        num_members: K of the ensemble.
        rbf_range: centres lie evenly in ``[-rbf_range, rbf_range]^S``.
        centres: along each axis, at least 2.
        process_noise: q at the start.
        device: of the parameters.

    Attributes:
        num_members: K, 1 for a single field.
        input_matrix: B, ``[S, D]``, the identity at the start.

    Raises:
        ValueError: for an unknown kind, sizes below 1, numbers that are not positive, too many centres.
    """

    centres: Tensor
    axis: Tensor

    def __init__(  # noqa: PLR0913  a world of several kinds of field
        self,
        latent_size: int = 2,
        action_size: int = 2,
        *,
        kind: DynamicsKind = "rbf",
        dt: float = 0.1,
        hidden_size: int = 32,
        num_members: int = 5,
        rbf_range: float = 2.0,
        centres: int = 5,
        process_noise: float = 0.1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if kind not in get_args(DynamicsKind):
            raise ValueError(
                f"kind: expected one of {get_args(DynamicsKind)}, received {kind!r}. Remedy: one of these."
            )
        if min(latent_size, action_size, hidden_size, num_members) < 1 or not min(dt, rbf_range, process_noise) > 0.0:
            raise ValueError(
                "LatentDynamics: expected sizes of at least 1 and positive dt, rbf_range and process_noise, received "
                f"latent_size={latent_size}, action_size={action_size}, hidden_size={hidden_size}, "
                f"num_members={num_members}, dt={dt}, rbf_range={rbf_range}, process_noise={process_noise}. Remedy: "
                "values in these ranges."
            )
        self.kind, self.dt, self.latent_size, self.hidden_size = kind, dt, latent_size, hidden_size
        self.is_ensemble = kind in ("ensemble", "rbf_ensemble")
        self.num_members = num_members if self.is_ensemble else 1
        self.input_matrix = nn.Parameter(torch.eye(latent_size, action_size, device=device))
        raw = math.log(math.expm1(process_noise))  # the inverse of softplus
        self.raw_noise = nn.Parameter(torch.full((latent_size,), raw, device=device))
        if kind == "ensemble":
            sizes = (hidden_size, hidden_size)
            self.members = EnsembleMLP(
                num_members, latent_size, latent_size, hidden_sizes=sizes, activation="tanh", device=device
            )
        elif kind == "mlp":
            self.net = FusedMLP(latent_size, latent_size, hidden_size=hidden_size, output_gain=0.1, device=device)
        elif kind == "linear":
            self.net = nn.Linear(latent_size, latent_size, device=device)
        else:
            self._make_centres(rbf_range, centres, device)
            count = (self.num_members,) if kind == "rbf_ensemble" else ()
            self.weight = nn.Parameter(0.1 * torch.randn(*count, *self.centres.shape, device=device))

    def _make_centres(self, extent: float, along: int, device: torch.device | str | None) -> None:
        count = along**self.latent_size
        if along < 2 or count > MAX_CENTRES:
            raise ValueError(
                f"latent_size: expected from 2 centres along an axis to {MAX_CENTRES} in all with kind={self.kind!r}, "
                f"received {along}^{self.latent_size}. Remedy: kind='mlp'."
            )
        axis = torch.linspace(-extent, extent, along)
        grid = torch.cartesian_prod(*[axis] * self.latent_size).view(count, self.latent_size)
        self.register_buffer("centres", grid.to(device))
        self.register_buffer("axis", axis.to(device), persistent=False)
        self.gamma = ((along - 1) / (2.0 * extent)) ** 2  # 1 where neighbours are 1 apart

    @property
    def variance(self) -> Tensor:
        """Variance ``q dt`` of a step, ``[S]``; not cached, since an update changes it."""
        return (nn.functional.softplus(self.raw_noise) + MIN_VARIANCE) * self.dt

    @property
    def num_features(self) -> int:
        """F of :meth:`features`.

        Raises:
            ValueError: for an ensemble.
        """
        if self.kind == "rbf":
            return self.centres.shape[0]
        if self.kind == "linear":
            return self.latent_size + 1
        self._refuse_ensemble()
        return self.hidden_size + 1

    def features(self, latent: Tensor) -> Tensor:
        """What the field is linear in: ``[*, S]`` -> ``[*, F]``.

        Raises:
            ValueError: for an ensemble.
        """
        if self.kind == "rbf":
            return self._radial(latent)
        self._refuse_ensemble()
        if self.kind == "mlp":
            for layer in list(self.net.children())[:4]:
                latent = layer(latent)
        return torch.cat((latent, torch.ones_like(latent[..., :1])), -1)

    def field(self, latent: Tensor) -> Tensor:
        """Velocities ``[*, S]`` at ``[*, S]``; of an ensemble their mean."""
        if self.kind == "rbf":
            return self._radial(latent) @ self.weight
        if self.kind == "rbf_ensemble":
            return self._radial(latent) @ self.weight.mean(0)
        return self.members(latent).mean(0) if self.kind == "ensemble" else self.net(latent)

    def _radial(self, latent: Tensor) -> Tensor:
        # exp(-gamma |z - c|^2) on a grid of centres is a product of one factor for each axis
        factors = torch.exp(-self.gamma * (latent.unsqueeze(-1) - self.axis).square())
        found = factors[..., 0, :]
        for index in range(1, self.latent_size):
            found = (found.unsqueeze(-1) * factors[..., index, None, :]).flatten(-2)
        return found

    def forward(self, latent: Tensor, action: Tensor) -> Tensor:
        """The mean of the next state ``[*, S]``, such as a planner's model.

        Args:
            latent: ``[*, S]``.
            action: ``[*, D]``.
        """
        return latent + self.dt * (self.field(latent) + action @ self.input_matrix.mT)

    def predict_members(self, latent: Tensor, action: Tensor, *, per_member: bool = True) -> Tensor:
        """The same for each member separately.

        Args:
            latent: ``[K, *, S]``; without ``per_member`` ``[*, S]``, seen by all.
            action: ``[*, D]``, the same for all.
            per_member: whether each member has a separate state.

        Returns:
            ``[K, *, S]``; K is 1 for a single field.
        """
        push = action @ self.input_matrix.mT
        if self.kind == "ensemble":
            return latent + self.dt * (self.members(latent, per_member=per_member) + push)
        if self.kind == "rbf_ensemble":
            rule = "k...f,kfs->k...s" if per_member else "...f,kfs->k...s"
            return latent + self.dt * (torch.einsum(rule, self._radial(latent), self.weight) + push)
        field = self.field(latent)
        return latent + self.dt * (field if per_member else field.unsqueeze(0)) + self.dt * push

    def _refuse_ensemble(self) -> None:
        if self.is_ensemble:
            raise ValueError(
                f"features: expected a field that is linear in its last parameters, received kind={self.kind!r}. "
                "Remedy: the disagreement of its members, or kind='rbf'."
            )
