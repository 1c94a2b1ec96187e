"""Domain randomisation of MuJoCo worlds: masses, friction and gains of their own, as tensors.

Dimension key: ``N`` worlds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Randomization"]


class Randomization:
    """Factors of a model's masses, friction and gains, drawn anew for each world at each start of an episode.

    Each is uniform in ``[1 - noise, 1 + noise]``: one a body for its mass and inertia, one a world for the friction of
    all its geoms and pairs, and one an actuator for its gain and bias. What the compiler of MuJoCo derives from masses
    beside inertias and masses of subtrees, the softness of constraints, stays that of the model.

    Args:
        model: a ``mujoco.MjModel``.
        mass_noise: of bodies, 0 for none, below 1.
        friction_noise: of worlds, likewise.
        gain_noise: of actuators, likewise.
        device: where factors are drawn.

    Raises:
        ValueError: for a noise that is no number in [0, 1).
    """

    def __init__(
        self, model: Any, *, mass_noise: float, friction_noise: float, gain_noise: float, device: torch.device
    ) -> None:
        self._noises = {"mass": mass_noise, "friction": friction_noise, "gain": gain_noise}
        for name, noise in self._noises.items():
            if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise < 1:
                raise ValueError(
                    f"{name}_noise: expected a share in [0, 1), received {noise!r}. Remedy: 0.2 for factors from 0.8 "
                    "to 1.2."
                )
        self._base: dict[str, Tensor] = {}
        for noise, names in (
            (mass_noise, ("body_mass", "body_inertia", "body_subtreemass")),
            # pairs that a model lists have friction of their own, in place of that of their geoms
            (friction_noise, ("geom_friction", *(("pair_friction",) if model.npair else ()))),
            (gain_noise, ("actuator_gainprm", "actuator_biasprm")),
        ):
            if noise:
                self._base.update({name: _tensor(model, name, device) for name in names})
        self._below = _descendants(model).to(device)

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of the model that each world has its own of; empty without noise."""
        return tuple(self._base)

    def draw(self, num_worlds: int) -> dict[str, Tensor]:
        """Fields ``[N, ...]`` of new factors; new tensors."""
        drawn: dict[str, Tensor] = {}
        base = self._base
        if "body_mass" in base:
            factor = self._factors("mass", num_worlds, len(base["body_mass"]))
            mass = base["body_mass"] * factor
            drawn["body_mass"] = mass
            drawn["body_inertia"] = base["body_inertia"] * factor.unsqueeze(-1)
            drawn["body_subtreemass"] = (mass.unsqueeze(1) * self._below).sum(-1)
        if "geom_friction" in base:
            factor = self._factors("friction", num_worlds, 1).unsqueeze(-1)
            drawn.update({name: base[name] * factor for name in ("geom_friction", "pair_friction") if name in base})
        if "actuator_gainprm" in base:
            factor = self._factors("gain", num_worlds, len(base["actuator_gainprm"])).unsqueeze(-1)
            drawn.update({name: base[name] * factor for name in ("actuator_gainprm", "actuator_biasprm")})
        return drawn

    def _factors(self, kind: str, num_worlds: int, count: int) -> Tensor:
        noise = self._noises[kind]
        return 1 - noise + 2 * noise * torch.rand(num_worlds, count, dtype=torch.float32, device=self._below.device)


def _tensor(model: Any, name: str, device: torch.device) -> Tensor:
    return torch.as_tensor(getattr(model, name), dtype=torch.float32).to(device)


def _descendants(model: Any) -> Tensor:
    """Float ``[B, B]`` of bodies: 1 where the second is below the first, or is it."""
    below = torch.eye(model.nbody, dtype=torch.float32)
    for body in range(model.nbody - 1, 0, -1):  # a body has a larger number than its parent
        below[int(model.body_parentid[body])] += below[body]
    return below
