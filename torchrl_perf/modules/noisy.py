"""A linear layer that explores by noise in its weights."""

import math
from typing import Literal

import torch
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn

from torchrl_perf.functional.exploration import factor_noise
from torchrl_perf.functional.wide import wide_dtype, widened
from torchrl_perf.modules.aligned import aligned_linear

Noise = Literal["shared", "per_row"]


class NoisyLinear(nn.Module):
    """``y = (mu_w + sigma_w * f(e_out) f(e_in)^T) x + mu_b + sigma_b * f(e_out)``, a noisy layer (arXiv:1706.10295).

    The noise is factorised, ``f(e) = sign(e) sqrt(|e|)``, and drawn on the device in each forward pass and each replay
    of a graph: there is nothing to reset. With ``"shared"`` noise all rows of a pass see the same weights, as in the
    paper; with ``"per_row"`` each row has its own, so that the envs of a batch explore independently. That costs a
    second matrix product but no memory for weights: the noise is applied to inputs and outputs.

    **When there is noise.** Always while exploring (interaction type RANDOM). With no interaction type set, in training
    mode, as for dropout. With a deterministic one, in training mode if gradients are recorded: TorchRL sets that type
    inside its losses, and without noise there the sigmas would never learn. Evaluation, under
    ``set_exploration_type(DETERMINISTIC)`` and ``torch.no_grad()`` or in eval mode, thus uses the means.

    Args:
        in_features: size of the last dim of the input.
        out_features: size of the last dim of the output.
        sigma: initial scale of the noise; all sigmas start at ``sigma / sqrt(in_features)``.
        noise: ``"shared"`` or ``"per_row"``. A row is one entry of the input's leading dims; with an IQN that is one
            level of one state.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        weight_mu: ``[OUT, IN]``; the names are those of TorchRL's ``NoisyLinear``.
        weight_sigma: ``[OUT, IN]``.
        bias_mu: ``[OUT]``.
        bias_sigma: ``[OUT]``.

    Raises:
        ValueError: for sizes below 1, a negative sigma, another kind of noise.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sigma: float = 0.5,
        noise: Noise = "shared",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(in_features, out_features) < 1:
            raise ValueError(
                f"sizes: expected at least 1, received {in_features} and {out_features}. Remedy: sizes of 1 or more."
            )
        if not 0.0 <= sigma < math.inf:
            raise ValueError(
                f"sigma: expected a number of at least 0, received {sigma}. Remedy: sigma=0.5, for example."
            )
        if noise not in ("shared", "per_row"):
            raise ValueError(f"noise: expected 'shared' or 'per_row', received {noise!r}. Remedy: one of the two.")
        self.in_features, self.out_features, self.sigma, self.noise = in_features, out_features, sigma, noise
        shape = (out_features, in_features)
        self.weight_mu = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.weight_sigma = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias_mu = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        self.bias_sigma = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Redraws the means and sets the sigmas, as in the paper for factorised noise."""
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            for mean in (self.weight_mu, self.bias_mu):
                # uniform numbers of 16 bits have only a few hundred different values
                mean.copy_(torch.empty_like(mean, dtype=wide_dtype(mean.dtype)).uniform_(-bound, bound))
            for sigma in (self.weight_sigma, self.bias_sigma):
                sigma.fill_(self.sigma * bound)

    @property
    def is_noisy(self) -> bool:
        """Whether a forward pass in the present mode has noise."""
        kind = interaction_type()
        if kind is InteractionType.RANDOM:
            return True
        return self.training and (kind is None or torch.is_grad_enabled())

    def forward(self, input: Tensor) -> Tensor:
        """``[*, IN]`` -> ``[*, OUT]``."""
        if not self.is_noisy:
            return aligned_linear(input, self.weight_mu, self.bias_mu)
        rows = () if self.noise == "shared" else input.shape[:-1]
        like = self.weight_mu
        size = (*rows, self.in_features + self.out_features)
        draws = torch.randn(size, device=like.device, dtype=wide_dtype(like.dtype))
        into, out = factor_noise(draws).split([self.in_features, self.out_features], -1)
        if self.noise == "shared":
            weight = _noisy(like, self.weight_sigma, torch.outer(out, into))
            return aligned_linear(input, weight, _noisy(self.bias_mu, self.bias_sigma, out))
        into, out = into.to(like.dtype), out.to(like.dtype)
        mean = aligned_linear(input, like, self.bias_mu)
        return mean + out * aligned_linear(input * into, self.weight_sigma, self.bias_sigma)

    def extra_repr(self) -> str:
        """Sizes, scale and kind of noise."""
        return f"{self.in_features}, {self.out_features}, sigma={self.sigma}, noise={self.noise!r}"


def _noisy(mean: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
    """``mean + sigma * noise``, in the dtype of the mean."""
    return torch.addcmul(widened(mean), widened(sigma), noise).to(mean.dtype)
