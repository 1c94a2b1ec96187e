"""Vector fields on the plane, and the integration of a point that follows one under an input.

Each field is a pure function of points ``[*, 2]``, elementwise over ``*``, and returns velocities ``[*, 2]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "FIELDS",
    "MultiAttractor",
    "VectorField",
    "double_limit_cycle",
    "duffing",
    "flow",
    "limit_cycle",
    "make_field",
    "snowman",
    "van_der_pol",
]

VectorField = Callable[[Tensor], Tensor]
INTEGRATORS = ("euler", "rk4")


def limit_cycle(z: Tensor, d: float = 1.0, w: float = 1.0) -> Tensor:
    """The Hopf normal form: a stable circle of radius ``sqrt(d)``, traversed at angular speed ``w``.

    ``x' = x (d - r^2) - w y``, ``y' = y (d - r^2) + w x``.

    Args:
        z: ``[*, 2]``.
        d: square of the radius.
        w: angular speed, positive for counter-clockwise.

    Returns:
        ``[*, 2]``.
    """
    x, y = z.unbind(-1)
    pull = d - (x * x + y * y)
    return torch.stack((x * pull - w * y, y * pull + w * x), -1)


def double_limit_cycle(z: Tensor, d: float = 1.0, w: float = 1.0) -> Tensor:
    """A circle of radius ``d``; the sense of rotation changes at the radius ``2 d``.

    ``x' = x (d - r) - w y (2 d - r)``, ``y' = y (d - r) + w x (2 d - r)``. In spite of its name it has one stable
    radius, ``r = d``, with angular speed ``w d``.

    Args:
        z: ``[*, 2]``.
        d: radius.
        w: angular speed in units of ``d``.

    Returns:
        ``[*, 2]``.
    """
    x, y = z.unbind(-1)
    radius = (x * x + y * y).sqrt()
    pull, turn = d - radius, w * (2.0 * d - radius)
    return torch.stack((x * pull - y * turn, y * pull + x * turn), -1)


def van_der_pol(z: Tensor, mu: float = 1.0, w: float = 1.0) -> Tensor:
    """The Van der Pol oscillator ``x' = y``, ``y' = mu (1 - x^2) y - w x``.

    For ``mu = w = 1`` its cycle has the amplitude 2.0086 and the period 6.6633.

    Args:
        z: ``[*, 2]``.
        mu: strength of the damping.
        w: stiffness.

    Returns:
        ``[*, 2]``.
    """
    x, y = z.unbind(-1)
    return torch.stack((y, mu * (1.0 - x * x) * y - w * x), -1)


def duffing(z: Tensor, a: float = -0.1, b: float = -0.1, c: float = 0.1) -> Tensor:
    """The unforced Duffing oscillator ``x' = y``, ``y' = a y - x (b + c x^2)``.

    For ``a < 0`` (damping) and ``b < 0 < c`` it comes to rest in one of two wells, at ``(+-sqrt(-b / c), 0)``.

    Args:
        z: ``[*, 2]``.
        a: minus the damping.
        b: linear stiffness.
        c: cubic stiffness.

    Returns:
        ``[*, 2]``.
    """
    x, y = z.unbind(-1)
    return torch.stack((y, a * y - x * (b + c * x * x)), -1)


def snowman(z: Tensor, d: float = 1.0, w: float = 1.0, beta: float = 10.0) -> Tensor:
    """Two circles of radius ``d`` that touch at the origin, traversed in opposite senses.

    The circle around ``(d, 0)`` is a Hopf normal form of angular speed ``w``, the one around ``(-d, 0)`` its mirror
    image; ``sigmoid(beta x)`` blends the two. No trajectory crosses the line ``x = 0`` by itself.

    Args:
        z: ``[*, 2]``.
        d: radius of each circle, and distance of its centre from the origin.
        w: angular speed of the right one.
        beta: sharpness of the blend.

    Returns:
        ``[*, 2]``.
    """
    x, y = z.unbind(-1)
    share = torch.sigmoid(beta * x).unsqueeze(-1)
    right = limit_cycle(torch.stack((x - d, y), -1), d * d, w)
    left = limit_cycle(torch.stack((x + d, y), -1), d * d, -w)
    return share * right + (1.0 - share) * left


class MultiAttractor(nn.Module):
    """A random smooth field with several attractors: Gaussian processes on a grid, read by bilinear interpolation.

    Both components are drawn from a Gaussian process with the kernel ``exp(-|z - z'|^2 / (2 length^2))`` on a square
    grid. A pull towards the origin, ``-r^2 z / extent^2``, keeps trajectories inside. Beyond the grid the velocity is
    that of the nearest point of its border, plus a pull back to that point.

    Args:
        n_grid: grid points along each axis, at least 2.
        seed: names the field; it is the same on every device.
        extent: the grid covers ``[-extent, extent]^2``.
        length: length of the kernel.
        amplitude: standard deviation of the random velocities.
        device: of the table.
        dtype: of the table.

    Attributes:
        table: buffer ``[1, 2, n_grid, n_grid]``, velocities by row (y) and column (x).

    Raises:
        ValueError: for fewer than 2 grid points, an extent or a length that is not positive.
    """

    table: Tensor

    def __init__(
        self,
        n_grid: int = 32,
        *,
        seed: int = 0,
        extent: float = 2.0,
        length: float = 0.5,
        amplitude: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if n_grid < 2 or not (extent > 0 and length > 0):
            raise ValueError(
                f"MultiAttractor: expected n_grid of at least 2 and a positive extent and length, received {n_grid}, "
                f"{extent} and {length}. Remedy: n_grid of 2 or more and positive lengths."
            )
        self.extent = extent
        axis = torch.linspace(-extent, extent, n_grid, dtype=torch.float64)
        # The kernel is a product of one for each axis, and so is its square root.
        kernel = torch.exp(-((axis.unsqueeze(-1) - axis) ** 2) / (2.0 * length**2))
        values, vectors = torch.linalg.eigh(kernel)
        root = vectors * values.clamp(min=0.0).sqrt()
        generator = torch.Generator().manual_seed(seed)
        white = torch.randn(2, n_grid, n_grid, dtype=torch.float64, generator=generator)
        place = torch.stack(torch.meshgrid(axis, axis, indexing="xy"))
        pull = place * place.square().sum(0) / extent**2
        table = amplitude * (root @ white @ root.T) - pull
        self.register_buffer("table", table.unsqueeze(0).to(device=device, dtype=dtype))

    def forward(self, z: Tensor) -> Tensor:
        """Velocities ``[*, 2]`` at points ``[*, 2]``."""
        inside = z.clamp(-self.extent, self.extent)
        grid = (inside / self.extent).reshape(1, -1, 1, 2)
        read = nn.functional.grid_sample(self.table, grid, mode="bilinear", padding_mode="border", align_corners=True)
        return read.view(2, -1).T.reshape(z.shape) + (inside - z)


FIELDS: dict[str, tuple[VectorField | type[MultiAttractor], float]] = {
    "limit_cycle": (limit_cycle, 1.0),
    "double_limit_cycle": (double_limit_cycle, 1.0),
    "van_der_pol": (van_der_pol, 2.03),
    "duffing": (duffing, 1.0),
    "snowman": (snowman, 2.0**0.5),
    "multi_attractor": (MultiAttractor, 1.4),
}
"""Fields by name, each with the typical distance of its trajectories from the origin (root mean square)."""


def make_field(
    field: str | VectorField, *, seed: int, device: torch.device | None, dtype: torch.dtype
) -> tuple[VectorField, float]:
    """Return a field and the typical distance of its trajectories from the origin.

    Args:
        field: a name in :data:`FIELDS`, or a function of points ``[*, 2]``, such as ``partial(limit_cycle, d=2.0)``.
        seed: names the random field; the other fields have no random numbers.
        device: of the random field, and of the points that a function is tried with.
        dtype: likewise.

    Raises:
        ValueError: for an unknown name, and for a function that does not return velocities ``[*, 2]``.
    """
    if isinstance(field, str):
        if field not in FIELDS:
            raise ValueError(
                f"field: expected one of {sorted(FIELDS)}, received {field!r}. Remedy: one of these names, or a "
                "function of points [*, 2] that returns velocities [*, 2]."
            )
        made, radius = FIELDS[field]
        if isinstance(made, type):
            return made(seed=seed, device=device, dtype=dtype), radius
        return made, radius
    received: Any = field(torch.zeros(3, 2, device=device, dtype=dtype)) if callable(field) else field
    if not isinstance(received, Tensor) or received.shape != (3, 2) or received.dtype != dtype:
        kind = f"{received.dtype} {list(received.shape)}" if isinstance(received, Tensor) else repr(received)
        raise ValueError(
            f"field: expected a name or a function that maps points [3, 2] to velocities {dtype} [3, 2], received "
            f"{kind}. Remedy: stack both components along the last dim."
        )
    return field, 1.0


def flow(
    field: VectorField, z: Tensor, push: Tensor | float, dt: float, *, integrator: str = "euler", substeps: int = 1
) -> Tensor:
    """Follow ``z' = f(z) + push`` for a time ``dt``, the push held constant.

    Args:
        field: f.
        z: ``[*, 2]``.
        push: broadcasts to ``[*, 2]``.
        dt: time.
        integrator: ``"euler"``, or ``"rk4"``, the classical Runge-Kutta method of fourth order.
        substeps: steps that the time is divided into.

    Returns:
        ``[*, 2]``.

    Raises:
        ValueError: for an unknown integrator, or fewer than one substep.
    """
    if integrator not in INTEGRATORS or substeps < 1:
        raise ValueError(
            f"flow: expected an integrator among {list(INTEGRATORS)} and substeps of at least 1, received "
            f"{integrator!r} and {substeps}. Remedy: integrator='rk4', substeps=1."
        )
    h = dt / substeps
    for _ in range(substeps):
        first = field(z) + push
        if integrator == "euler":
            z = z + h * first
            continue
        second = field(z + 0.5 * h * first) + push
        third = field(z + 0.5 * h * second) + push
        fourth = field(z + h * third) + push
        z = z + (h / 6.0) * (first + 2.0 * second + 2.0 * third + fourth)
    return z
