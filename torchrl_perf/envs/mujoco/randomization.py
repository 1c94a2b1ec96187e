"""Domain randomisation of MuJoCo worlds: masses, friction and gains of their own, as tensors.

Dimension key: ``N`` worlds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrl_perf.envs.mujoco.models import needed

__all__ = ["Randomization"]

MUSCLE_FORCE = (2, 3)
"""Places in a muscle's parameters of its peak force, and of the scale that it follows from where that is negative."""


class Randomization:
    """Factors of a model's masses, friction and gains, drawn anew for each world at each start of an episode.

    Each is uniform in ``[1 - noise, 1 + noise]``: one a body for its mass and inertia, one a world for the friction of
    all its geoms and pairs, and one an actuator for its gain and bias, of a muscle for its peak force. What the
    compiler of MuJoCo derives from masses beside inertias and masses of subtrees, the softness of constraints, stays
    that of the model.

    Args:
        model: a ``mujoco.MjModel``.
        mass_noise: of bodies, 0 for none, below 1.
        friction_noise: of worlds, likewise.
        gain_noise: of actuators, likewise.
        device: where factors are drawn.

    Raises:
        ValueError: for a noise that is no number in [0, 1).
        NotImplementedError: for a noise of what has no factor here: actuators of other kinds than fixed, affine and
            muscles, and the friction of flexes.
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
        _check_kinds(model, friction=friction_noise > 0, gain=gain_noise > 0)
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
        self._gains = _gains(model).to(device) if gain_noise else None

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
        if self._gains is not None:
            factor = self._factors("gain", num_worlds, len(self._gains)).unsqueeze(-1)
            factor = torch.where(self._gains, factor, 1.0)
            drawn.update({name: base[name] * factor for name in ("actuator_gainprm", "actuator_biasprm")})
        return drawn

    def _factors(self, kind: str, num_worlds: int, count: int) -> Tensor:
        noise = self._noises[kind]
        return 1 - noise + 2 * noise * torch.rand(num_worlds, count, dtype=torch.float32, device=self._below.device)


def _check_kinds(model: Any, *, friction: bool, gain: bool) -> None:
    """Refuse noise of what would not feel it, or would become something else by it."""
    mujoco = needed("mujoco")
    if friction and model.nflex:
        raise NotImplementedError(
            "friction_noise: expected geoms alone, since MuJoCo Warp has one friction of a flex for all worlds, "
            f"received a model with {model.nflex} flexes. Remedy: friction_noise=0."
        )
    known = {
        "gaintype": (mujoco.mjtGain, "FIXED", "AFFINE", "MUSCLE"),
        "biastype": (mujoco.mjtBias, "NONE", "AFFINE", "MUSCLE"),
    }
    for name, (enum, *kinds) in known.items() if gain else ():
        taken = {int(getattr(enum, f"{enum.__name__[:2]}{enum.__name__[3:].upper()}_{kind}")) for kind in kinds}
        other = sorted({enum(kind).name for kind in getattr(model, f"actuator_{name}") if int(kind) not in taken})
        if other:
            raise NotImplementedError(
                f"gain_noise: expected actuators whose {name} is one of {', '.join(kinds).lower()}, received "
                f"{', '.join(other)}. Remedy: gain_noise=0, or motor, position, velocity and muscle in the model."
            )


def _gains(model: Any) -> Tensor:
    """Bool ``[A, 10]`` of actuators and their parameters: those that a force is proportional to."""
    muscles = model.actuator_gaintype == needed("mujoco").mjtGain.mjGAIN_MUSCLE
    gains = torch.ones(model.actuator_gainprm.shape, dtype=torch.bool)
    for actuator in muscles.nonzero()[0].tolist():  # ranges and shapes of their curves are no gains
        gains[actuator] = False
        gains[actuator, list(MUSCLE_FORCE)] = True
    return gains


def _tensor(model: Any, name: str, device: torch.device) -> Tensor:
    return torch.as_tensor(getattr(model, name), dtype=torch.float32).to(device)


def _descendants(model: Any) -> Tensor:
    """Float ``[B, B]`` of bodies: 1 where the second is below the first, or is it."""
    below = torch.eye(model.nbody, dtype=torch.float32)
    for body in range(model.nbody - 1, 0, -1):  # a body has a larger number than its parent
        below[int(model.body_parentid[body])] += below[body]
    return below
