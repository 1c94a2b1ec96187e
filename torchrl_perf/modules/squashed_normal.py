"""A tanh-squashed normal distribution without host waits, and the layer that gives it its parameters."""

import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints
from torch.nn import functional as F

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


def _noise(shape: torch.Size, like: Tensor) -> Tensor:
    return torch.randn(shape, dtype=like.dtype, device=like.device)


class SquashedNormal(Distribution):
    """``a = (high + low) / 2 + (high - low) / 2 * tanh(x)`` with ``x ~ Normal(loc, scale)`` (arXiv:1812.05905, app. C).

    Each row of D actions is one event. The density of ``a`` is that of ``x`` over ``|da/dx|``, with
    ``log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2 x))``, which is exact for every ``x``. Nothing is validated and
    nothing waits for the host, so that it compiles as one graph and can be captured.

    TorchRL's ``TanhNormal`` asks the host about its bounds whenever it is made. Values agree in the interior; at the
    bounds this one goes on with ``x`` itself in :meth:`rsample_and_log_prob`, and with the nearest action inside the
    bounds, one rounding step of tanh away, in :meth:`log_prob`.

    Args:
        loc: ``[*, D]`` mean of ``x``, floating point.
        scale: ``[*, D]`` standard deviation of ``x``, positive.
        low: least action, a number or a tensor that broadcasts to ``[*, D]``.
        high: greatest action, likewise; greater than ``low``.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"loc": constraints.real_vector, "scale": constraints.positive}
    support = constraints.real_vector  # pyright: ignore[reportAssignmentType]  (torch declares a property)
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, low: Tensor | float = -1.0, high: Tensor | float = 1.0) -> None:
        self.loc, self.scale = loc, scale
        self.low, self.high = low, high
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)

    @property
    def _middle(self) -> Tensor | float:
        return (self.high + self.low) / 2

    @property
    def _half_width(self) -> Tensor | float:
        return (self.high - self.low) / 2

    def expand(self, batch_shape: Any, _instance: Any = None) -> "SquashedNormal":
        """The same distribution for ``batch_shape`` rows."""
        shape = torch.Size(batch_shape) + self.event_shape
        low, high = (bound.expand(shape) if isinstance(bound, Tensor) else bound for bound in (self.low, self.high))
        return SquashedNormal(self.loc.expand(shape), self.scale.expand(shape), low, high)

    def _squash(self, x: Tensor) -> Tensor:
        action = self._middle + self._half_width * torch.tanh(x)
        # rounding of middle + half width may lie outside of the bounds
        return action.clamp(self.low, self.high)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def _log_jacobian(self, x: Tensor) -> Tensor:
        """``log |da/dx|``, ``[*, D]``."""
        half = self._half_width
        log_half = half.log() if isinstance(half, Tensor) else math.log(half)
        return 2 * (math.log(2) - x - F.softplus(-2 * x)) + log_half

    @property
    def deterministic_sample(self) -> Tensor:
        """``[*, D]`` the squashed mean: what TorchRL takes under ``ExplorationType.DETERMINISTIC``."""
        return self._squash(self.loc)

    @property
    def median(self) -> Tensor:
        """``[*, D]`` the median of each action, which is the squashed mean since tanh is monotone."""
        return self._squash(self.loc)

    @property
    def mode(self) -> Tensor:
        """``[*, D]`` the squashed mode of ``x``, as TorchRL's ``TanhNormal`` has it.

        Not the greatest density of the action, which lies at the bounds where the scale is large.
        """
        return self._squash(self.loc)

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """``[*sample_shape, *, D]`` actions, differentiable in ``loc`` and ``scale``."""
        shape = torch.Size(sample_shape) + self.loc.shape
        return self._squash(self.loc + self.scale * _noise(shape, self.loc))

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """``[*sample_shape, *, D]`` actions without a gradient."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def rsample_and_log_prob(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Actions ``[*sample_shape, *, D]`` and their log-probabilities ``[*sample_shape, *]``, from the same ``x``.

        No inverse of tanh is taken: values and gradients are those of the ``x`` that was drawn, at the bounds too.

        Args:
            sample_shape: leading dims of the draw.
            noise: ``[*sample_shape, *, D]`` standard normal numbers instead of fresh ones.
        """
        if noise is None:
            noise = _noise(torch.Size(sample_shape) + self.loc.shape, self.loc)
        x = self.loc + self.scale * noise
        log_prob = -0.5 * noise.square() - self.scale.log() - _HALF_LOG_TAU - self._log_jacobian(x)
        return self._squash(x), log_prob.sum(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability ``[*]`` of actions ``[*, D]``; those at or beyond a bound count as the nearest inside."""
        limit = 1 - torch.finfo(self.loc.dtype).eps
        y = ((value - self._middle) / self._half_width).clamp(-limit, limit)
        x = 0.5 * (torch.log1p(y) - torch.log1p(-y))
        noise = (x - self.loc) / self.scale
        return (-0.5 * noise.square() - self.scale.log() - _HALF_LOG_TAU - self._log_jacobian(x)).sum(-1)


class SquashedNormalHead(nn.Module):
    """Splits a network's output into the parameters of a :class:`SquashedNormal`, and holds its bounds.

    The bounds are buffers, so that ``.to(device)`` moves them and ``state_dict`` holds them; they travel to the
    distribution with the other parameters: ``param_keys=SquashedNormalHead.param_keys`` of a
    :class:`~torchrl_perf.modules.DeviceActor`.

    The logarithm of the scale is squashed smoothly into its range: a clamp would stop the gradient outside of it.

    Args:
        low: ``[D]`` least actions.
        high: ``[D]`` greatest actions.
        log_scale_min: least logarithm of the scale, before squashing of the action.
        log_scale_max: greatest one.

    Raises:
        ValueError: for bounds of different shapes, infinite ones, and such that leave no room between them.
    """

    param_keys: ClassVar[list[str]] = ["loc", "scale", "low", "high"]
    """Names of the outputs, which are the arguments of :class:`SquashedNormal`."""

    def __init__(self, low: Tensor, high: Tensor, *, log_scale_min: float = -5.0, log_scale_max: float = 2.0) -> None:
        super().__init__()
        if low.shape != high.shape or low.ndim != 1:
            raise ValueError(f"low, high: expected one shape [D], received {list(low.shape)} and {list(high.shape)}.")
        if not bool((low.isfinite() & high.isfinite() & (low < high)).all()):
            raise ValueError(
                f"low, high: expected finite bounds with low < high, received low {low} and high {high}. Remedy: "
                "bound the action spec, for example by a transform of the env."
            )
        if not log_scale_min < log_scale_max:
            raise ValueError(
                f"log_scale_min: expected less than log_scale_max, received {log_scale_min} and {log_scale_max}."
            )
        self.register_buffer("low", low.detach().clone())
        self.register_buffer("high", high.detach().clone())
        self.log_scale_min, self.log_scale_max = log_scale_min, log_scale_max

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``[*, 2 D]`` -> location, scale, low and high, each ``[*, D]`` (the bounds are expanded views)."""
        loc, raw = x.chunk(2, -1)
        span = 0.5 * (self.log_scale_max - self.log_scale_min)
        scale = (self.log_scale_min + span * (torch.tanh(raw) + 1)).exp()
        low, high = cast("Tensor", self.low), cast("Tensor", self.high)
        return loc, scale, low.expand_as(loc), high.expand_as(loc)
