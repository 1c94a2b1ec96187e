"""How well a learned dynamical system predicts the true one, up to a change of coordinates.

Dimension key: ``N`` envs, ``T`` steps, ``S`` numbers of the learned state, ``L`` of the true one, ``D`` of the action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import TensorSpec
from torchrl.envs import TransformedEnv

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs.latent_field import LatentField
from torchrl_perf.runtime.seeds import seeded
from torchrl_perf.systems.active_dynamics.picture import PhasePortrait
from torchrl_perf.systems.active_dynamics.seq_vae import BeliefFilter, FilteredPolicy, SeqVAE, UniformInputs

__all__ = [
    "Alignment",
    "PredictionFigures",
    "ProbeInputs",
    "Scores",
    "evaluate",
    "fit_alignment",
    "make_portrait",
    "prediction_scores",
    "record",
]

RIDGE = 1e-6
AlignmentKind = Literal["linear", "procrustes"]


class Alignment(NamedTuple):
    """An affine map from learned states to true ones, ``z = x @ weight + bias``.

    Attributes:
        weight: ``[S, L]``.
        bias: ``[L]``.
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, latent: Tensor) -> Tensor:
        """``[*, S]`` -> ``[*, L]``."""
        return latent @ self.weight + self.bias


def fit_alignment(learned: Tensor, true: Tensor, kind: AlignmentKind = "linear") -> Alignment:
    """The map from learned states to true ones with the least squared error; without a host read if linear.

    Args:
        learned: ``[*, S]``.
        true: ``[*, L]``.
        kind: ``"linear"``: any affine map; ``"procrustes"``: rotation or reflection, one scale, and a shift, S = L.

    Raises:
        ValueError: for an unknown kind, or ``"procrustes"`` of spaces of different size.
    """
    x, y = learned.reshape(-1, learned.shape[-1]).double(), true.reshape(-1, true.shape[-1]).double()
    shift, target = x.mean(0), y.mean(0)
    x, y = x - shift, y - target
    if kind == "linear":
        scatter = x.mT @ x
        ridge = (
            RIDGE * scatter.diagonal().mean().clamp_min(RIDGE) * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        )
        weight = torch.cholesky_solve(x.mT @ y, torch.linalg.cholesky_ex(scatter + ridge)[0])
    elif kind == "procrustes" and x.shape[-1] == y.shape[-1]:
        left, values, right = torch.linalg.svd(x.mT @ y)
        weight = (values.sum() / x.square().sum().clamp_min(RIDGE)) * (left @ right)
    else:
        raise ValueError(
            f"fit_alignment: expected 'linear', or 'procrustes' of spaces of one size, received {kind!r} with "
            f"{list(learned.shape)} and {list(true.shape)}. Remedy: kind='linear'."
        )
    return Alignment(weight.to(learned.dtype), (target - shift @ weight).to(learned.dtype))


class Scores(NamedTuple):
    """R^2 of the true state 0 to k steps ahead, each ``[k + 1]``: 1 is perfect, 0 is the mean.

    Attributes:
        r2: of the model's prediction from the belief.
        persistence: of the belief itself, as if nothing moved: the same information without dynamics.
        still: of the true present state, as if nothing moved.
    """

    r2: Tensor
    persistence: Tensor
    still: Tensor


@torch.no_grad()
def prediction_scores(model: SeqVAE, batch: TensorDictBase, horizon: int, alignment: Alignment) -> Scores:
    """Predict from each belief with the actions that were taken; without a host read.

    Args:
        model: the autoencoder.
        batch: ``[N, T]`` with "belief", "action", "latent" (the true one) and "is_init"; predictions across the end of
            an episode do not count.
        horizon: k, below T.
        alignment: from learned to true states.

    Raises:
        ValueError: for a horizon that the batch does not have.
    """
    belief, action, latent, is_init = (cast("Tensor", batch.get(k)) for k in ("belief", "action", "latent", "is_init"))
    steps = belief.shape[1]
    if not 0 < horizon < steps:
        raise ValueError(
            f"horizon: expected from 1 to {steps - 1}, one less than the batch has, received {horizon}. Remedy: a "
            "shorter horizon, or longer batches."
        )
    count = steps - horizon
    begin = belief[:, :count]
    windows = action.unfold(1, horizon, 1)[:, :count].transpose(-1, -2)  # [N, count, k, D]
    ahead = torch.cat((begin.unsqueeze(2), model.predict(begin, windows)), 2)
    true = latent.unfold(1, horizon + 1, 1).transpose(-1, -2)  # [N, count, k + 1, L]
    episode = is_init.squeeze(-1).to(torch.int64).cumsum(1).unfold(1, horizon + 1, 1)
    valid = (episode == episode[..., :1]).unsqueeze(-1)
    still = true[:, :, :1].expand_as(true)
    guess = alignment(begin).unsqueeze(2).expand_as(true)
    return Scores(*(_r_squared(found, true, valid) for found in (alignment(ahead), guess, still)))


def _r_squared(found: Tensor, true: Tensor, valid: Tensor) -> Tensor:
    """``1 - sum |found - true|^2 / sum |true - mean|^2`` for each step ahead, ``[k + 1]``."""
    count = valid.sum((0, 1, 3)).clamp_min(1).unsqueeze(-1)
    mean = torch.where(valid, true, 0.0).sum((0, 1)) / count
    error = torch.where(valid, (found - true).square(), 0.0).sum((0, 1, 3))
    spread = torch.where(valid, (true - mean).square(), 0.0).sum((0, 1, 3))
    return 1.0 - error / spread


@dataclass(frozen=True)
class PredictionFigures:
    """R^2 of the true state 0 to k steps ahead on data that were not trained on, on the host."""

    horizon: int
    """k."""
    r2: tuple[float, ...]
    """Of the model's prediction from the belief."""
    persistence: tuple[float, ...]
    """Of the belief itself, as if nothing moved."""
    still: tuple[float, ...]
    """Of the true present state, as if nothing moved."""
    alignment: Alignment
    """The map from learned to true states."""

    def __str__(self) -> str:
        return (
            f"R^2 {self.horizon} steps ahead {self.r2[-1]:.3f} (persistence {self.persistence[-1]:.3f}, of the true "
            f"state {self.still[-1]:.3f}); of the filter {self.r2[0]:.3f}"
        )


class ProbeInputs(TensorDictModuleBase):
    """Inputs for judging a model: even rows get fresh uniform ones at each step, odd rows keep one.

    This favours neither random nor planned inputs, which tend to stay constant.

    Keys read: the batch size alone. Written: "action" ``[N, D]``.

    Args:
        spec: the action's, ``[N, D]`` with finite bounds.
    """

    def __init__(self, spec: TensorSpec) -> None:
        super().__init__()
        self.fresh = UniformInputs(spec)
        self.in_keys, self.out_keys = self.fresh.in_keys, self.fresh.out_keys
        rows = torch.arange(spec.shape[0], device=spec.device)
        self.register_buffer("holds", (rows % 2 == 1).unsqueeze(-1))
        uniform = torch.rand(spec.shape, device=spec.device)
        self.register_buffer("held", torch.lerp(self.fresh.low, self.fresh.high, uniform))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        fresh = self.fresh(tensordict).get("action")
        return tensordict.set("action", torch.where(cast("Tensor", self.holds), cast("Tensor", self.held), fresh))


@torch.no_grad()
def record(model: SeqVAE, env: LatentField, *, steps: int, seed: int) -> TensorDictBase:
    """A batch ``[N, T]`` under :class:`ProbeInputs` with the beliefs of the filter, the same for each call.

    The random state outside is not changed.

    Args:
        model: the autoencoder.
        env: of its own: it is reset.
        steps: T.
        seed: of start, noise and inputs.
    """
    with seeded(seed, env.device):
        policy = FilteredPolicy(BeliefFilter(model.encoder), ProbeInputs(env.action_spec))
        state = policy.make_state()
        collector = DeviceCollector(
            TransformedEnv(env, state) if state.shapes else env,
            policy,
            frames_per_batch=env.num_envs * steps,
            mode="eager",
        )
        return collector.collect().clone()


def evaluate(
    model: SeqVAE, env: LatentField, *, horizon: int, steps: int, seed: int, kind: AlignmentKind = "linear"
) -> PredictionFigures:
    """Predict on fresh data of probing inputs; the map to the true state is fitted to half of the envs.

    Points start evenly over the square of the env's ``initial_range``. With few steps, predictions are judged all over
    that square, not only on attractors.

    Args:
        model: the autoencoder.
        env: of its own, at least 4 rows; the other half of them is predicted.
        horizon: k.
        steps: of each env, above k; the first quarter, in which the filter settles, does not count.
        seed: names the data.
        kind: of the map, as for :func:`fit_alignment`.
    """
    batch = record(model, env, steps=steps, seed=seed)[:, steps // 4 :]
    fitted, judged = (cast("TensorDictBase", part) for part in batch.chunk(2))
    alignment = fit_alignment(fitted.get("belief"), fitted.get("latent"), kind)
    r2, persistence, still = (tuple(score.tolist()) for score in prediction_scores(model, judged, horizon, alignment))
    return PredictionFigures(horizon, r2, persistence, still, alignment)


@torch.no_grad()
def make_portrait(
    model: SeqVAE, env: LatentField, alignment: Alignment, visited: Tensor | None = None, *, title: str = ""
) -> PhasePortrait:
    """True and learned field on one grid, in true coordinates: the learned one by the inverse of the map.

    Args:
        model: with as many latent numbers as the env, 2.
        env: has the true field; its state is left alone.
        alignment: from learned to true states.
        visited: true states ``[*, 2]`` that were visited, to be shown; None for none.
        title: of the picture.

    Raises:
        ValueError: for a model of another number of latent numbers.
    """
    if model.dynamics.latent_size != 2:
        raise ValueError(
            f"make_portrait: expected a latent state of 2 numbers, received {model.dynamics.latent_size}. Remedy: "
            "latent_size=2."
        )
    extent = 2.0 if visited is None else float(visited.abs().max().clamp(1.5, 4.0))
    axis = torch.linspace(-extent, extent, 25, device=env.device)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    learned = (grid - alignment.bias) @ torch.linalg.pinv(alignment.weight)
    velocity = model.dynamics.field(learned) @ alignment.weight
    points = None if visited is None else visited.reshape(-1, 2).cpu()
    return PhasePortrait(axis.cpu(), env.field(grid).cpu(), velocity.cpu(), points, title)
