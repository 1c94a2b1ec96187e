"""A tanh-squashed normal distribution without host waits, and the layer that gives it its parameters."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints
from torch.nn import functional as F

from torchrl_perf.functional.wide import result_dtype, wide_dtype, widened
from torchrl_perf.runtime.draws import normal

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


def _noise(shape: torch.Size, like: Tensor) -> Tensor:
    """Standard normal numbers on the device of a tensor, in float64 for float64 and in float32 for any other."""
    return normal(shape, dtype=wide_dtype(like.dtype), device=like.device)


def rounded(value: Tensor, *inputs: Any) -> Tensor:
    """A result cast to the dtype that its inputs promote to, if that has 16 bits. The first input has dims."""
    if inputs[0].dtype is torch.float32:
        return value
    dtype = result_dtype(part for part in inputs if isinstance(part, Tensor))
    return value if dtype in (torch.float32, torch.float64) else value.to(dtype)


def normal_parameters(loc: Any, scale: Any, *bounds: Tensor | float) -> tuple[Tensor, Tensor]:
    """Location and scale in the shape that they and the bounds broadcast to.

    Args:
        loc: ``[*, D]``.
        scale: ``[*, D]``, a number, or a function of ``loc``, as for TorchRL's ``TanhNormal``.
        bounds: tensors or numbers.

    Raises:
        ValueError: for a location that is not a floating-point tensor of at least one dim, and shapes that do not fit.
    """
    if not isinstance(loc, Tensor) or not loc.is_floating_point() or loc.ndim < 1:
        received = f"{loc.dtype} {list(loc.shape)}" if isinstance(loc, Tensor) else type(loc).__name__
        raise ValueError(f"loc: expected floating point [*, D], received {received}. Remedy: unsqueeze(-1) for D = 1.")
    if not isinstance(scale, Tensor):
        scale = scale(loc) if callable(scale) else torch.full_like(loc, scale)
    shapes = [part.shape for part in (scale, *bounds) if isinstance(part, Tensor)]
    if all(shape == loc.shape for shape in shapes):
        return loc, scale
    try:
        shape = torch.broadcast_shapes(loc.shape, *shapes)
    except RuntimeError as error:
        raise ValueError(
            f"expected loc, scale and bounds that broadcast, received {list(loc.shape)} and {[*map(list, shapes)]}. "
            "Remedy: shapes [*, D] for loc and scale, [D] for the bounds."
        ) from error
    return loc.expand(shape), scale.expand(shape)


class SquashedNormal(Distribution):
    """``a = (high + low) / 2 + (high - low) / 2 * tanh(x)`` with ``x ~ Normal(loc, scale)`` (arXiv:1812.05905, app. C).

    Each row of D actions is one event. The density of ``a`` is that of ``x`` over ``|da/dx|``, with
    ``log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2 x))``, which is exact for every ``x``. Nothing is validated and
    nothing waits for the host, so that it compiles as one graph and can be captured.

    TorchRL's ``TanhNormal`` asks the host about its bounds, unless a graph is being recorded. Values agree in the
    interior. At the bounds, :meth:`rsample_and_log_prob` uses the drawn ``x`` itself, and :meth:`log_prob` the nearest
    action inside the bounds, one rounding step of tanh away.

    Parameters of 16 bits are computed with in float32, and results rounded to what the arguments promote to.

    Args:
        loc: ``[*, D]`` mean of ``x``, floating point.
        scale: ``[*, D]`` standard deviation of ``x``, positive; or a number, or a function that makes it of ``loc``.
        low: least action, a number or a tensor; all four broadcast.
        high: greatest action, likewise; greater than ``low``.
        validate_args: check arguments and values as torch does, which waits for the host; not by default.
        tanh_loc: squash the mean first, ``upscale * tanh(loc / upscale)`` and the middle of the bounds, as TorchRL.
        upscale: as above.

    Raises:
        ValueError: for arguments that do not broadcast, a location that is not floating point, and numbers as bounds
            that leave no room between them.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"loc": constraints.real_vector, "scale": constraints.positive}
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor | float,
        low: Tensor | float = -1.0,
        high: Tensor | float = 1.0,
        validate_args: bool | None = None,
        *,
        tanh_loc: bool = False,
        upscale: Tensor | float = 5.0,
    ) -> None:
        if not isinstance(low, Tensor) and not isinstance(high, Tensor) and not low < high:
            raise ValueError(
                f"expected low < high, received {low} and {high}. Remedy: upscale= by name, with tanh_loc."
            )
        if tanh_loc:
            loc = squashed_loc(loc, upscale, (high + low) / 2)
        self.loc, self.scale = normal_parameters(loc, scale, low, high)
        self.low, self.high = low, high
        self._wide_loc, self._wide_scale = widened(self.loc), widened(self.scale)
        self._wide_bounds = _wide(low), _wide(high)
        super().__init__(self.loc.shape[:-1], self.loc.shape[-1:], validate_args=bool(validate_args))

    @property
    def support(self) -> Any:
        """The bounds."""
        return constraints.independent(constraints.interval(self.low, self.high), 1)

    @property
    def _middle(self) -> Tensor | float:
        low, high = self._wide_bounds
        return (high + low) / 2

    @property
    def _half_width(self) -> Tensor | float:
        low, high = self._wide_bounds
        return (high - low) / 2

    def expand(self, batch_shape: Any, _instance: Any = None) -> "SquashedNormal":
        """The same distribution for ``batch_shape`` rows."""
        return SquashedNormal(*self._expanded(batch_shape), validate_args=self._validate_args)

    def _expanded(self, batch_shape: Any) -> tuple[Any, ...]:
        shape = torch.Size(batch_shape) + self.event_shape
        low, high = (bound.expand(shape) if isinstance(bound, Tensor) else bound for bound in (self.low, self.high))
        return self.loc.expand(shape), self.scale.expand(shape), low, high

    def _squash(self, x: Tensor) -> Tensor:
        action = self._middle + self._half_width * torch.tanh(x)
        action = rounded(action, self.loc, self.scale, self.low, self.high)
        # the rounded middle + half width may lie outside of the bounds
        return action.clamp(self.low, self.high)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def _log_jacobian(self, x: Tensor) -> Tensor:
        """``log |da/dx|``, ``[*, D]``."""
        half = self._half_width
        log_half = half.log() if isinstance(half, Tensor) else math.log(half)
        return 2 * (math.log(2) - x - F.softplus(-2 * x)) + log_half

    @property
    def deterministic_sample(self) -> Tensor:
        """``[*, D]`` the squashed mean, which TorchRL uses under ``ExplorationType.DETERMINISTIC``."""
        return self._squash(self._wide_loc)

    @property
    def median(self) -> Tensor:
        """``[*, D]`` the median of each action, which is the squashed mean since tanh is monotone."""
        return self._squash(self._wide_loc)

    @property
    def mode(self) -> Tensor:
        """``[*, D]`` the squashed mode of ``x``, as in TorchRL's ``TanhNormal``.

        It is not the maximum of the action's density, which for a large scale lies at the bounds.
        """
        return self._squash(self._wide_loc)

    def rsample(self, sample_shape: torch.Size | Sequence[int] = ()) -> Tensor:
        """``[*sample_shape, *, D]`` actions, differentiable in ``loc`` and ``scale``."""
        shape = torch.Size(sample_shape) + self.loc.shape
        return self._squash(self._wide_loc + self._wide_scale * _noise(shape, self.loc))

    def sample(self, sample_shape: torch.Size | Sequence[int] = ()) -> Tensor:
        """``[*sample_shape, *, D]`` actions without a gradient."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def rsample_and_log_prob(
        self, sample_shape: torch.Size | Sequence[int] = (), *, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Actions ``[*sample_shape, *, D]`` and their log-probabilities ``[*sample_shape, *]``, from the same ``x``.

        No inverse of tanh is computed: values and gradients are those of the drawn ``x``, at the bounds too.

        Args:
            sample_shape: leading dims of the draw.
            noise: ``[*sample_shape, *, D]`` standard normal numbers instead of fresh ones.
        """
        if noise is None:
            noise = _noise(torch.Size(sample_shape) + self.loc.shape, self.loc)
        noise = widened(noise)
        x = self._wide_loc + self._wide_scale * noise
        log_prob = -0.5 * noise.square() - self._wide_scale.log() - _HALF_LOG_TAU - self._log_jacobian(x)
        return self._squash(x), rounded(log_prob.sum(-1), self.loc, self.scale, self.low, self.high)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability ``[*]`` of actions ``[*, D]``; those at or beyond a bound count as the nearest inside."""
        if self._validate_args:
            self._validate_sample(value)
        limit = 1 - torch.finfo(self.loc.dtype).eps
        if value.dtype is not self.loc.dtype and value.is_floating_point():
            limit = min(limit, 1 - torch.finfo(value.dtype).eps)
        y = ((widened(value) - self._middle) / self._half_width).clamp(-limit, limit)
        x = 0.5 * (torch.log1p(y) - torch.log1p(-y))
        noise = (x - self._wide_loc) / self._wide_scale
        log_prob = -0.5 * noise.square() - self._wide_scale.log() - _HALF_LOG_TAU - self._log_jacobian(x)
        return rounded(log_prob.sum(-1), self.loc, self.scale, self.low, self.high, value)


def _wide(bound: Tensor | float) -> Tensor | float:
    return widened(bound) if isinstance(bound, Tensor) else bound


def squashed_loc(loc: Tensor, upscale: Tensor | float, middle: Tensor | float | None = None) -> Tensor:
    """``upscale * tanh(loc / upscale) + middle``, as TorchRL squashes a mean, in the dtype of the mean."""
    wide = widened(loc)
    upscale = upscale.to(wide.device, wide.dtype) if isinstance(upscale, Tensor) else upscale
    squashed = upscale * torch.tanh(wide / upscale)
    return (squashed if middle is None else squashed + middle).to(loc.dtype)


def positive_scale(raw: Tensor, log_min: float, log_max: float) -> Tensor:
    """``exp`` of a number that is squashed smoothly between two logarithms, in the dtype of the number.

    A clamp would stop the gradient outside.
    """
    span = 0.5 * (log_max - log_min)
    return (log_min + span * (torch.tanh(widened(raw)) + 1)).exp().to(raw.dtype)


class SquashedNormalHead(nn.Module):
    """Splits a network's output into the parameters of a :class:`SquashedNormal`, and holds its bounds.

    The bounds are buffers, so that ``.to(device)`` moves them and ``state_dict`` holds them; they are passed to the
    distribution with the other parameters: give a :class:`~torchrl_perf.modules.DeviceActor`
    ``param_keys=SquashedNormalHead.param_keys``.

    The logarithm of the scale is squashed smoothly into its range, see :func:`positive_scale`.

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
            raise ValueError(
                f"low, high: expected one shape [D], received {list(low.shape)} and {list(high.shape)}. Remedy: one "
                "bound for each action in both."
            )
        if not bool((low.isfinite() & high.isfinite() & (low < high)).all()):
            raise ValueError(
                f"low, high: expected finite bounds with low < high, received low {low} and high {high}. Remedy: "
                "bound the action spec, for example by a transform of the env."
            )
        if not log_scale_min < log_scale_max:
            raise ValueError(
                f"log_scale_min: expected less than log_scale_max, received {log_scale_min} and {log_scale_max}. "
                "Remedy: lower log_scale_min or raise log_scale_max."
            )
        self.register_buffer("low", low.detach().clone())
        self.register_buffer("high", high.detach().clone())
        self.log_scale_min, self.log_scale_max = log_scale_min, log_scale_max

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``[*, 2 D]`` -> location, scale, low and high, each ``[*, D]`` (the bounds are expanded views)."""
        loc, raw = x.chunk(2, -1)
        scale = positive_scale(raw, self.log_scale_min, self.log_scale_max)
        low, high = cast("Tensor", self.low), cast("Tensor", self.high)
        return loc, scale, low.expand_as(loc), high.expand_as(loc)
