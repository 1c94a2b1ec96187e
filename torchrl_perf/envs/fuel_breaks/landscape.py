"""Landscapes that fires burn in: terrain, vegetation and wind, uniform, fractal or from rasters.

Dimension key: ``L`` landscapes, ``H``, ``W`` cells, ``C`` planes of a landscape, ``E`` edges of a cell.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_perf.envs.fuel_breaks.fire import edges, ends

__all__ = ["DENSITY", "PLANES", "VEGETATION", "Landscape"]

BASE_PROBABILITY = 0.58
"""p_h of Alexandridis et al.: probability that fire spreads on flat ground without wind."""
VEGETATION = {"agricultural": -0.3, "thicket": 0.0, "pine": 0.4}
"""p_veg of Alexandridis et al."""
DENSITY = {"sparse": -0.4, "normal": 0.0, "dense": 0.3}
"""p_den of Alexandridis et al."""
WIND_SPEED, WIND_DIRECTION = 0.045, 0.131
"""c1 and c2, seconds per metre."""
SLOPE = 0.078
"""a, per degree."""
PLANES = ("elevation", "vegetation", "density", "wind_east", "wind_north", "fuel")
"""Static planes of an observation: hundreds of metres above the landscape's mean, p_veg, p_den, wind in tens of m/s,
and the ignition probability on flat ground without wind, 0 where nothing burns. Further ones follow."""

_RASTERS = ("elevation", "vegetation", "density", "wind_east", "wind_north")
_OCTAVES = 4


@dataclass(frozen=True)
class Landscape:
    """L landscapes of the same size, on the CPU; :meth:`uniform`, :meth:`fractal` and :meth:`from_arrays` make them.

    Row 0 is the northern edge, column 0 the western one.

    Attributes:
        elevation: metres, float64 ``[L, H, W]`` as all rasters.
        vegetation: p_veg of each cell, see :data:`VEGETATION`.
        density: p_den, see :data:`DENSITY`.
        wind_east: wind velocity towards the east, m/s.
        wind_north: wind velocity towards the north, m/s.
        burnable: bool ``[L, H, W]``.
        base: p_h.
        cell_size: side of a cell, metres.
        extra: further planes of an observation by name, which do not affect the fire.
    """

    elevation: Tensor
    vegetation: Tensor
    density: Tensor
    wind_east: Tensor
    wind_north: Tensor
    burnable: Tensor
    base: float = BASE_PROBABILITY
    cell_size: float = 30.0
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check shapes and numbers."""
        shape = self.burnable.shape
        rasters = {**{name: getattr(self, name) for name in _RASTERS}, **self.extra}
        _check_shapes({**rasters, "burnable": self.burnable})
        if len(shape) != 3 or 0 in shape:
            raise ValueError(
                f"burnable: expected [L, H, W] with at least one cell, received {list(shape)}. Remedy: a raster of "
                "[H, W] goes through from_arrays()."
            )
        for name, raster in rasters.items():
            bad = int((~raster.isfinite()).sum())
            if bad:
                raise ValueError(
                    f"{name}: expected finite numbers, received {bad} of {raster.numel()} that are not. Remedy: say "
                    "which number stands for no data, from_arrays(..., nodata=...); such cells do not burn."
                )
        for name in ("vegetation", "density"):
            least = float(getattr(self, name).min())
            if least < -1.0:
                raise ValueError(
                    f"{name}: expected numbers from -1 on, as 1 + {name} is a factor of the probability, received "
                    f"{least}. Remedy: map classes to the numbers of {name.upper()}."
                )
        if not 0.0 <= self.base <= 1.0:
            raise ValueError(
                f"base: expected a probability in [0, 1], received {self.base}. Remedy: a number from 0 to 1."
            )
        if not (self.cell_size > 0.0 and math.isfinite(self.cell_size)):
            raise ValueError(
                f"cell_size: expected metres above 0, received {self.cell_size}. Remedy: the side of a cell in metres."
            )

    @classmethod
    def uniform(cls, p: float = 0.4, size: int | tuple[int, int] = 20) -> Landscape:
        """Flat ground without wind where fire passes each bond with probability ``p``: bond percolation.

        Args:
            p: probability.
            size: H and W, or one number for both.
        """
        height, width = sides(size)
        zero = torch.zeros(1, height, width, dtype=torch.float64)
        return cls(zero, zero, zero, zero, zero, torch.ones(1, height, width, dtype=torch.bool), base=p)

    @classmethod
    def fractal(
        cls,
        seed: int,
        size: int | tuple[int, int] = 20,
        *,
        count: int = 1,
        relief: float = 60.0,
        bare: float = 0.05,
        wind: tuple[float, float] = (0.0, 0.0),
        base: float = BASE_PROBABILITY,
    ) -> Landscape:
        """Hills, patches of vegetation and of density, and bare ground: sums of octaves of smoothed noise.

        Args:
            seed: the same gives the same landscapes on every device; the i-th of several does not depend on ``count``.
            size: H and W, or one number for both.
            count: L.
            relief: metres between the lowest and the highest cell.
            bare: share of the cells that do not burn.
            wind: its velocity towards east and north, m/s, the same everywhere.
            base: p_h.

        Raises:
            ValueError: for a count below 1, a share outside [0, 1).
        """
        if count < 1 or not 0.0 <= bare < 1.0:
            raise ValueError(
                f"expected count >= 1 and bare in [0, 1), received {count} and {bare}. Remedy: at least one "
                "landscape, with bare below 1."
            )
        height, width = sides(size)
        noise = torch.stack([_noise(seed, number, height, width) for number in range(count)])  # [L, 4, H, W]
        heights = noise[:, 0]
        low, high = heights.amin((1, 2), keepdim=True), heights.amax((1, 2), keepdim=True)
        rank = noise.flatten(2).argsort(-1).argsort(-1).view_as(noise)
        share = (rank.double() + 0.5) / (height * width)
        kinds = [
            torch.tensor(list(table.values()), dtype=torch.float64)[(share[:, plane] * 3).long()]
            for plane, table in ((1, VEGETATION), (2, DENSITY))
        ]
        winds = [torch.full_like(heights, speed) for speed in wind]
        elevation = (heights - low) / (high - low).clamp_min(1e-12) * relief
        return cls(elevation, *kinds, *winds, burnable=rank[:, 3] >= round(bare * height * width), base=base)

    @classmethod
    def varied(
        cls,
        seed: int,
        size: int | tuple[int, int] = 20,
        *,
        count: int = 1,
        relief: tuple[float, float] = (20.0, 120.0),
        wind: float = 8.0,
        barriers: float = 0.5,
        bare: float = 0.05,
        base: float = BASE_PROBABILITY,
    ) -> Landscape:
        """Fractal landscapes that differ in relief and wind, some with a river or a road: to learn for unseen ones.

        A river winds from one edge to the other, a road is straight; neither burns, and both have gaps, a fifth of
        their cells, that fire may pass.

        Args:
            seed: the same gives the same landscapes on every device; the i-th of several does not depend on ``count``.
            size: H and W, or one number for both.
            count: L.
            relief: least and greatest metres between the lowest and the highest cell, drawn for each landscape.
            wind: greatest wind speed, m/s; speed and direction are drawn for each landscape.
            barriers: probability of a river, and that of a road.
            bare: share of other cells that do not burn.
            base: p_h.

        Raises:
            ValueError: for a count below 1, and shares or probabilities outside [0, 1).
        """
        if not 0.0 <= barriers <= 1.0:
            raise ValueError(f"barriers: expected a probability, received {barriers}. Remedy: a number in [0, 1].")
        height, width = sides(size)
        ground = cls.fractal(seed, (height, width), count=count, relief=1.0, bare=bare, base=base)
        draws = [_barriers(seed, number, height, width, barriers) for number in range(count)]
        numbers = torch.stack([part for part, _ in draws])  # [L, 3]
        low, high = relief
        speed, angle = wind * numbers[:, 1], 2 * math.pi * numbers[:, 2]

        def everywhere(value: Tensor) -> Tensor:
            return value.view(-1, 1, 1).expand(count, height, width).contiguous()

        return dataclasses.replace(
            ground,
            elevation=ground.elevation * everywhere(low + (high - low) * numbers[:, 0]),
            wind_east=everywhere(speed * angle.cos()),
            wind_north=everywhere(speed * angle.sin()),
            burnable=ground.burnable & ~torch.stack([lines for _, lines in draws]),
        )

    @classmethod
    def from_arrays(
        cls,
        elevation: Any,
        vegetation: Any = 0.0,
        density: Any = 0.0,
        wind: tuple[Any, Any] = (0.0, 0.0),
        *,
        burnable: Any = True,
        base: float = BASE_PROBABILITY,
        cell_size: float = 30.0,
        nodata: float | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Landscape:
        """Landscapes of rasters, as NumPy arrays, tensors or what a GeoTIFF reader returns.

        Args:
            elevation: metres, ``[H, W]``, or ``[L, H, W]`` (bands first) for several landscapes.
            vegetation: p_veg, a raster or one number, as all that follow; a raster ``[H, W]`` serves all landscapes.
            density: p_den.
            wind: its velocity towards east and north, m/s.
            burnable: True where there is fuel.
            base: p_h.
            cell_size: side of a cell, metres.
            nodata: number that stands for missing data; NaN always does. Cells without data in any raster do not burn,
                nor do those that a masked array masks.
            extra: further planes of an observation by name.

        Raises:
            ValueError: for rasters of mismatched shapes, numbers that are not finite, p_veg or p_den below -1.
        """
        named = zip(_RASTERS, (elevation, vegetation, density, *wind), strict=True)
        given: dict[str, Any] = {**dict(named), **(extra or {})}
        rasters = {name: _raster(name, value, nodata) for name, value in given.items()}
        known = {name: part for name, (part, _) in rasters.items()}
        missing = [mask for _, mask in rasters.values()]
        fuel, no_fuel = _raster("burnable", burnable, nodata)
        shape = _common_shape({**known, "burnable": fuel})
        gaps = torch.zeros(shape, dtype=torch.bool)
        for mask in (*missing, no_fuel):
            gaps = gaps | mask
        full = {name: part.expand(shape).contiguous() for name, part in known.items()}
        planes = {name: full.pop(name) for name in extra or {}}
        fuel = (fuel != 0).expand(shape) & ~gaps
        return cls(**full, burnable=fuel, base=base, cell_size=cell_size, extra=planes)

    # -- what an env needs -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """L."""
        return self.burnable.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        """H and W."""
        return self.burnable.shape[1], self.burnable.shape[2]

    def fuel(self) -> Tensor:
        """Ignition probability on flat ground without wind, ``p_h (1 + p_veg) (1 + p_den)``, ``[L, H, W]``."""
        probability = self.base * (1.0 + self.vegetation) * (1.0 + self.density)
        return torch.where(self.burnable, probability.clamp(0.0, 1.0), 0.0)

    def planes(self) -> Tensor:
        """Static planes ``[L, C, H, W]`` of an observation: :data:`PLANES`, then ``extra``."""
        count = self.burnable.sum((1, 2), keepdim=True).clamp_min(1)
        mean = torch.where(self.burnable, self.elevation, 0.0).sum((1, 2), keepdim=True) / count
        known = [
            (self.elevation - mean) / 100.0,
            self.vegetation,
            self.density,
            self.wind_east / 10.0,
            self.wind_north / 10.0,
            self.fuel(),
        ]
        return torch.stack([*known, *self.extra.values()], 1)

    def bond_probabilities(self, neighbours: int = 8) -> Tensor:
        """Probability that a burning cell sets a neighbour alight, with wind and slope.

        ``p = p_h (1 + p_veg) (1 + p_den) p_w p_s``, at most 1, where all factors but the slope's are those of the cell
        that may be set alight. ``p_w = exp(c1 V) exp(c2 V (cos theta - 1))`` with theta between the wind and the
        direction of spread; ``p_s = exp(a slope)``, the slope in degrees, so that it is above 1 uphill.

        Args:
            neighbours: 8 or 4.

        Returns:
            float64 ``[L, 2E, H, W]``: plane e from the owner of an edge (see :func:`edges`) to its other end, plane
            E + e back, both where the owner lies; 0 over the edge of the grid and where either cell does not burn.
        """
        kinds = edges(neighbours)
        count, height, width = self.burnable.shape
        result = torch.zeros(count, 2 * len(kinds), height, width, dtype=torch.float64)
        for number, step in enumerate(kinds):
            first, second = ends(step, height, width)
            a, b = (slice(None), *first), (slice(None), *second)
            result[:, number][a] = self._passage(a, b, step)
            result[:, number + len(kinds)][a] = self._passage(b, a, (-step[0], -step[1]))
        return result

    def _passage(self, source: tuple[slice, ...], target: tuple[slice, ...], step: tuple[int, int]) -> Tensor:
        """Probabilities from the cells ``source`` to those ``target``, a step (rows, columns) away."""
        length = math.hypot(*step)
        climb = self.elevation[target] - self.elevation[source]
        slope = torch.atan(climb / (self.cell_size * length)).rad2deg()
        east, north = self.wind_east[target], self.wind_north[target]
        speed = torch.hypot(east, north)
        along = (east * step[1] - north * step[0]) / length  # rows go south
        wind = torch.exp(WIND_SPEED * speed + WIND_DIRECTION * (along - speed))
        # not from fuel(), which clamps before wind and slope
        still = self.base * (1.0 + self.vegetation[target]) * (1.0 + self.density[target])
        passage = (still * wind * torch.exp(SLOPE * slope)).clamp(0.0, 1.0)
        return torch.where(self.burnable[source] & self.burnable[target], passage, 0.0)


def sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """H and W of a size.

    Raises:
        ValueError: for numbers below 1.
    """
    both = (size, size) if isinstance(size, int) else tuple(size)
    if len(both) != 2 or any(not isinstance(side, int) or isinstance(side, bool) or side < 1 for side in both):
        raise ValueError(
            f"size: expected rows and columns of at least 1, or one number for both, received {size!r}. Remedy: "
            "size=(rows, columns)."
        )
    return both[0], both[1]


def _noise(seed: int, number: int, height: int, width: int) -> Tensor:
    """Four planes of fractal noise ``[4, H, W]`` float64: octaves of half the amplitude and twice the detail."""
    mixed = (seed * 1_000_003 + number * 7_919) % (1 << 62)
    generator = torch.Generator().manual_seed(mixed)
    total = torch.zeros(4, height, width, dtype=torch.float64)
    for octave in range(_OCTAVES):
        cells = 2 ** (octave + 1)
        coarse = torch.randn(1, 4, cells, cells, generator=generator, dtype=torch.float64)
        smooth = F.interpolate(coarse, size=(height, width), mode="bicubic", align_corners=True)
        total += 0.5**octave * smooth[0]
    return total


def _barriers(seed: int, number: int, height: int, width: int, chance: float) -> tuple[Tensor, Tensor]:
    """Three numbers in [0, 1), float64, and the cells of a river and of a road, bool ``[H, W]``, where there are."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + number * 7_919 + 104_729) % (1 << 62))

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    numbers, there = draw(3), draw(2) < chance
    lines = torch.zeros(height, width, dtype=torch.bool)
    for kind in range(2):
        across, place, turn = draw(3)
        coarse, gaps = draw(1, 1, 5) - 0.5, draw(max(height, width)) < 0.2
        along = bool(across < 0.5)
        length, breadth = (width, height) if along else (height, width)
        bend = F.interpolate(coarse, size=length, mode="linear", align_corners=True).view(-1)
        bend = (
            bend * breadth * 0.6 if kind == 0 else (turn - 0.5) * torch.linspace(-0.5, 0.5, length).double() * breadth
        )
        where = ((0.2 + 0.6 * place) * breadth + bend).long().clamp(0, breadth - 1)
        line = (torch.arange(breadth).unsqueeze(-1) == where) & ~gaps[:length]
        lines = lines | ((line if along else line.t()) & there[kind])
    return numbers, lines


def _raster(name: str, value: Any, nodata: float | None) -> tuple[Tensor, Tensor]:
    """A raster as float64 ``[L or 1, H or 1, W or 1]``, missing data replaced by its mean; and a bool mask of those."""
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    mask = np.ma.getmaskarray(array) if isinstance(array, np.ma.MaskedArray) else np.False_
    try:
        numbers = torch.tensor(np.asarray(np.ma.getdata(array), dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: expected a raster of numbers, received {type(value).__name__}. Remedy: a tensor, an array or a "
            "number."
        ) from error
    if numbers.ndim not in (0, 2, 3):
        raise ValueError(
            f"{name}: expected [H, W], [L, H, W] or one number, received {list(numbers.shape)}. Remedy: reshape it, "
            "or pass one number."
        )
    missing = torch.tensor(np.broadcast_to(mask, tuple(numbers.shape)).copy())
    if nodata is not None:
        missing = missing | (numbers.isnan() if math.isnan(nodata) else numbers == nodata)
    shape = (1,) * (3 - numbers.ndim) + tuple(numbers.shape)
    known = numbers[~missing]
    filled = numbers.masked_fill(missing, float(known.mean()) if len(known) else 0.0)
    return filled.view(shape), missing.view(shape)


def _common_shape(rasters: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """The common L, H and W of rasters, some of which are one number or the same for all landscapes."""
    full = {name: tuple(part.shape) for name, part in rasters.items() if part.shape[1:] != (1, 1)}
    if not full:
        return 1, 1, 1
    grid = height, width = next(iter(full.values()))[1:]
    count = max(shape[0] for shape in full.values())
    if any(shape[1:] != grid or shape[0] not in (1, count) for shape in full.values()):
        shown = ", ".join(f"{name} {list(shape)}" for name, shape in full.items())
        raise ValueError(
            f"rasters: expected one shape [L, H, W] for all (or [H, W]), received {shown}. Remedy: resample them to "
            "one grid."
        )
    return count, height, width


def _check_shapes(rasters: Mapping[str, Tensor]) -> None:
    if len({tuple(part.shape) for part in rasters.values()}) > 1:
        shown = ", ".join(f"{name} {list(part.shape)}" for name, part in rasters.items())
        raise ValueError(
            f"rasters: expected one shape [L, H, W] for all, received {shown}. Remedy: from_arrays() expands them."
        )
