"""Layers that normalise by running statistics: of observations, and of rewards by their discounted return."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_perf.functional.moments import Moments, merged_moments, moments_of
from torchrl_perf.functional.scan import linear_recurrence
from torchrl_perf.modules.wide_buffers import WideBuffers

__all__ = ["DiscountedReturnNormalization", "EmpiricalNormalization", "NormalizedCritic"]

OBSERVATION: tuple[NestedKey, ...] = ("observation",)


class EmpiricalNormalization(WideBuffers):
    """``y = clip((x - mean) / sqrt(variance + eps), -clip, clip)``, with mean and variance of the rows seen so far.

    The name is that of rsl_rl's layer. A call only normalises; :meth:`update` takes rows into the statistics, in place,
    without waiting for the host, so that a captured graph may contain both. Statistics are merged in float64 and are
    those of all rows together, whatever the batches; rows that are not finite never count. Before the first row the
    layer changes nothing.

    All of it is in ``state_dict()``, so that a network with this layer first takes what the env gives, wherever its
    parameters are loaded.

    Args:
        num_features: O.
        in_keys: the entries of a batch that are the input, in the order in which they are concatenated; trainers keep
            the statistics of these.
        eps: added to the variance.
        clip: greatest absolute value of the output; None for no limit.
        device: of the statistics.

    Attributes:
        count: rows so far, float64 0-d.
        mean: ``[O]`` float64.
        squares: ``[O]`` float64, the sum of squared deviations.
        loc: ``[O]`` float32, what is subtracted.
        scale: ``[O]`` float32, what is multiplied with.
        frozen: whether :meth:`update` does nothing.
        merge: makes of the summary of the rows of an update that of several processes' rows; None takes them as they
            are.

    Raises:
        ValueError: for a size below 1, and an ``eps`` or ``clip`` that is not positive.
    """

    wide_buffers: ClassVar[tuple[str, ...]] = ("count", "mean", "squares", "loc", "scale")
    count: Tensor
    mean: Tensor
    squares: Tensor
    loc: Tensor
    scale: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        in_keys: Sequence[NestedKey] = OBSERVATION,
        eps: float = 1e-8,
        clip: float | None = 10.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_features < 1 or not eps > 0 or not (clip is None or clip > 0):
            raise ValueError(
                f"normalization: expected num_features of at least 1, eps and clip above 0, received {num_features}, "
                f"{eps} and {clip}. Remedy: the defaults of eps and clip."
            )
        self.in_keys, self.eps, self.clip = list(in_keys), eps, clip
        self.frozen = False
        self.merge: Callable[[Moments], Moments] | None = None
        self.register_buffer("count", torch.zeros((), dtype=torch.float64, device=device))
        self.register_buffer("mean", torch.zeros(num_features, dtype=torch.float64, device=device))
        self.register_buffer("squares", torch.zeros(num_features, dtype=torch.float64, device=device))
        self.register_buffer("loc", torch.zeros(num_features, device=device))
        self.register_buffer("scale", torch.ones(num_features, device=device))

    @property
    def variance(self) -> Tensor:
        """``[O]`` float64, of all rows so far (the population's); 1 before the first."""
        return torch.where(self.count > 0, self.squares / self.count.clamp_min(1.0), 1.0)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Entries ``[*, O_1], [*, O_2], ...`` of O numbers together -> ``[*, O]``, in their dtype."""
        x = inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1)
        normal = (x - self.loc) * self.scale
        return (normal if self.clip is None else normal.clamp(-self.clip, self.clip)).to(x.dtype)

    @torch.no_grad()
    def update(self, rows: Tensor, valid: Tensor | None = None) -> None:
        """Takes rows into the statistics.

        Args:
            rows: ``[*, O]``.
            valid: bool ``[*]``, the rows that count; all by default.
        """
        if self.frozen:
            return
        found = moments_of(rows, valid)
        found = found if self.merge is None else self.merge(found)
        merged = merged_moments(Moments(self.count, self.mean, self.squares), found)
        self.count.copy_(merged.count)
        self.mean.copy_(merged.mean)
        self.squares.copy_(merged.squares)
        self.loc.copy_(self.mean)
        # before the first row nothing is to change, eps included
        self.scale.copy_(torch.where(self.count > 0, (self.variance + self.eps).rsqrt(), 1.0))

    @torch.no_grad()
    def copy_(self, other: "EmpiricalNormalization") -> None:
        """Takes over the statistics of another layer of the same size, such as those of the actor for the critic's."""
        for name, value in other.named_buffers():
            getattr(self, name).copy_(value)

    def freeze(self) -> None:
        """From now on :meth:`update` does nothing; a graph that was captured before does not see it."""
        self.frozen = True

    def unfreeze(self) -> None:
        """Undoes :meth:`freeze`."""
        self.frozen = False

    def extra_repr(self) -> str:
        """Size, clip."""
        return f"{self.loc.shape[-1]}, clip={self.clip}"


class NormalizedCritic(nn.Module):
    """A critic that is called with observations and an action, the last of its inputs, and normalises the former.

    Args:
        normalization: of the observations.
        network: called with ``[*, O]`` and the action ``[*, D]``.
    """

    def __init__(self, normalization: EmpiricalNormalization, network: nn.Module) -> None:
        super().__init__()
        self.normalization, self.network = normalization, network

    def forward(self, *inputs: Tensor) -> Tensor:
        """Entries ``[*, O_i]`` and the action ``[*, D]`` -> the network's output."""
        *observations, action = inputs
        return self.network(self.normalization(*observations), action)


class DiscountedReturnNormalization(WideBuffers):
    """Rewards divided by the deviation of the discounted return, as Gymnasium's ``NormalizeReward`` does.

    The return of each env so far, ``G_t = r_t + gamma G_(t-1)``, starts anew after the end of an episode. Its variance
    is that of all steps so far, exact over batches (:class:`EmpiricalNormalization`); rewards keep their sign and are
    not centred. Two things differ from Gymnasium: a truncated episode ends the return as well, and a batch of steps is
    taken in one call, so that all its rewards have the same divisor.

    Args:
        num_envs: N.
        gamma: discount of the return.
        eps: added to the variance.
        device: of the state.

    Attributes:
        returns: ``[N, 1]`` float32, those of the running episodes.
        statistics: of the returns.

    Raises:
        ValueError: for fewer than one env, and a gamma outside of [0, 1].
    """

    wide_buffers: ClassVar[tuple[str, ...]] = ("returns",)
    returns: Tensor

    def __init__(
        self, num_envs: int, *, gamma: float, eps: float = 1e-8, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if num_envs < 1 or not 0.0 <= gamma <= 1.0:
            raise ValueError(
                f"normalization: expected at least one env and a gamma in [0, 1], received {num_envs} and {gamma}. "
                "Remedy: the number of envs and the discount of the run."
            )
        self.gamma = gamma
        self.register_buffer("returns", torch.zeros(num_envs, 1, device=device))
        self.statistics = EmpiricalNormalization(1, eps=eps, clip=None, device=device)

    def forward(self, reward: Tensor) -> Tensor:
        """Rewards ``[*, 1]`` -> ``[*, 1]``, divided by the deviation."""
        return (reward * self.statistics.scale).to(reward.dtype)

    @torch.no_grad()
    def update(self, reward: Tensor, done: Tensor, valid: Tensor | None = None) -> None:
        """Takes the steps of all envs into the statistics.

        Args:
            reward: ``[N, T, 1]``; one that is not finite counts as 0.
            done: bool ``[N, T, 1]``, whether the step ended an episode.
            valid: bool ``[N, T]``, the steps that count; all by default.
        """
        if self.statistics.frozen:
            return
        before = torch.cat([torch.zeros_like(done[:, :1]), done[:, :-1]], 1)  # whether the step began an episode
        finite = torch.where(reward.isfinite(), reward, 0.0).to(torch.float32)
        decay = torch.where(before, 0.0, self.gamma).to(torch.float32)
        returns = linear_recurrence(decay, finite, self.returns)
        self.statistics.update(returns, valid)
        self.returns.copy_(torch.where(done[:, -1], 0.0, returns[:, -1]))
