"""The loss of active_dynamics and what it caches, before and after.

The equations of :class:`torchrl_perf.objectives.MultiStepELBOLoss`, for windows that lie within one episode. Dimension
key: ``B`` windows, ``T`` steps, ``M`` samples, ``S`` numbers of the latent state, ``K`` steps ahead.
"""

import torch
from torch import Tensor, nn

from torchrl_perf.functional.losses.elbo import gaussian_kl
from torchrl_perf.systems.active_dynamics.latent_maps import Belief
from torchrl_perf.systems.active_dynamics.seq_vae import SeqVAE


def powers(decay: float, steps: int, device: torch.device) -> Tensor:
    """Before: ``decay^k`` from a list, at each call; not normalised."""
    return torch.tensor([decay**k for k in range(steps)], device=device)


class CachedPowers:
    """After: the first answer for good, whatever is asked for later; not normalised."""

    _cached: Tensor

    def __call__(self, decay: float, steps: int, device: torch.device) -> Tensor:
        """``decay^k`` of the first call."""
        if not hasattr(self, "_cached"):
            self._cached = torch.pow(decay, torch.arange(steps, device=device))
        return self._cached


def mask_anew(steps: int, rate: float, device: torch.device) -> Tensor:
    """Before: a mask ``[T, 1]`` of zeros and ones, one mask for all windows."""
    return torch.bernoulli((1 - rate) * torch.ones((steps, 1), device=device))


class MaskBuffer:
    """After: the same draw into one buffer, from probabilities that are still made at each call."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.buffer = torch.empty((steps, 1), device=device)

    def __call__(self, steps: int, rate: float, device: torch.device) -> Tensor:
        """The buffer, drawn anew."""
        return torch.bernoulli((1 - rate) * torch.ones((steps, 1), device=device), out=self.buffer)


class CachedVariance(nn.Module):
    """A positive variance from a free parameter, computed at each use, or once with its graph and kept.

    Args:
        size: numbers of it.
        cached: after: kept.
        device: of the parameter.
    """

    _cached: Tensor

    def __init__(self, size: int, *, cached: bool, device: torch.device) -> None:
        super().__init__()
        self.raw, self.cached = nn.Parameter(torch.zeros(size, device=device)), cached

    def forward(self) -> Tensor:
        """``softplus(raw) + 1e-5``, as it is or as it once was."""
        if not self.cached:
            return nn.functional.softplus(self.raw) + 1e-5
        if not hasattr(self, "_cached"):
            self._cached = nn.functional.softplus(self.raw) + 1e-5
        return self._cached


class LoopLoss:
    """The loss of windows, weights and mask by the original's ways.

    Args:
        model: the autoencoder.
        steps_ahead: K.
        decay: of the weights.
        samples: M.
        mask_rate: share of masked steps.
        cached: after: weights and mask are those that are kept.
        by_start: predictions from one start after the other, instead of from all at once.

    Attributes:
        beta: weight of the divergences.
    """

    def __init__(
        self,
        model: SeqVAE,
        *,
        steps_ahead: int = 5,
        decay: float = 0.8,
        samples: int = 5,
        mask_rate: float = 0.0,
        cached: bool = False,
        by_start: bool = False,
    ) -> None:
        self.model, self.steps_ahead, self.decay, self.samples = model, steps_ahead, decay, samples
        self.mask_rate, self.cached, self.by_start, self.beta = mask_rate, cached, by_start, 1.0
        self.cached_powers = CachedPowers()
        self.masks: MaskBuffer | None = None

    def __call__(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Reconstruction and weighted divergences, 0-d, of ``[B, T, O]`` and ``[B, T, D]``."""
        steps = observation.shape[1]
        starts = torch.zeros(observation.shape[:2], dtype=torch.bool, device=observation.device)
        belief = self.model.encode(observation, action, starts)
        std = belief.var.sqrt()
        noise = torch.randn(self.samples, *std.shape, device=std.device)
        latent = belief.loc + std * noise
        recon = -self.model.decoder.log_likelihood(observation, latent).mean((0, 1)).sum() / steps
        zero, one = torch.zeros_like(belief.loc[:, 0]), torch.ones_like(belief.var[:, 0])
        start = gaussian_kl(belief.loc[:, 0], belief.var[:, 0], zero, one).mean() / steps
        weights = self.weights(latent.device)
        mixed = self._mixed(latent, action)
        divergences = self._by_start(belief, mixed, action) if self.by_start else self._by_steps(belief, mixed, action)
        total = sum((weight * kl for weight, kl in zip(weights, divergences, strict=False)), start)
        return recon, self.beta * total

    def weights(self, device: torch.device) -> Tensor:
        """``[K]``, which add up to 1."""
        make = self.cached_powers if self.cached else powers
        found = make(self.decay, self.steps_ahead, device)
        return found / found.sum()

    def mask(self, steps: int, device: torch.device) -> Tensor:
        """``[T, 1]``."""
        if not self.cached:
            return mask_anew(steps, self.mask_rate, device)
        # two buffers would be right: autograd may still need the mask of the loss before
        self.masks = MaskBuffer(steps, device) if self.masks is None else self.masks
        return self.masks(steps, self.mask_rate, device)

    def _mixed(self, latent: Tensor, action: Tensor) -> Tensor:
        if self.mask_rate == 0.0:
            return latent
        mask = self.mask(latent.shape[2], latent.device)
        mixed = [latent[:, :, 0]]
        for t in range(1, latent.shape[2]):
            predicted = self.model.dynamics(mixed[-1], action[:, t - 1])
            mixed.append(mask[t] * latent[:, :, t] + (1 - mask[t]) * predicted)
        return torch.stack(mixed, 2)

    def _by_steps(self, belief: Belief, start: Tensor, action: Tensor) -> list[Tensor]:
        """Divergence of each number of steps ahead, all starts at once."""
        dynamics, steps, state, found = self.model.dynamics, action.shape[1], start[:, :, :-1], []
        for ahead in range(1, min(self.steps_ahead, steps - 1) + 1):
            mean, variance = dynamics(state, action[:, ahead - 1 : steps - 1]), dynamics.variance
            kl = gaussian_kl(belief.loc[:, ahead:], belief.var[:, ahead:], mean, variance)
            found.append(kl.sum(-1).mean() / steps)
            state = (mean + variance.sqrt() * torch.randn_like(mean))[:, :, :-1]
        return found

    def _by_start(self, belief: Belief, start: Tensor, action: Tensor) -> list[Tensor]:
        """The same, one start after the other; the same random numbers."""
        dynamics, steps, (samples, rows, _, size) = self.model.dynamics, action.shape[1], start.shape
        most = min(self.steps_ahead, steps - 1)
        noise = [torch.randn(samples, rows, steps - k - 1, size, device=start.device) for k in range(most)]
        sums: list[list[Tensor]] = [[] for _ in range(most)]
        for t in range(steps - 1):
            state = start[:, :, t]
            for k in range(min(most, steps - 1 - t)):
                mean, variance = dynamics(state, action[:, t + k]), dynamics.variance
                sums[k].append(gaussian_kl(belief.loc[:, t + k + 1], belief.var[:, t + k + 1], mean, variance).mean())
                state = mean + variance.sqrt() * noise[k][:, :, t]
        return [torch.stack(parts).sum() / steps for parts in sums]
