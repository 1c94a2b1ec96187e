"""MuJoCo models for MuJoCo Warp: where they come from, the settings that replace theirs, and what Warp cannot take."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torchrl_perf.envs.registry import INSTALL, module_of

__all__ = [
    "PhysicsSettings",
    "Start",
    "check_state",
    "gymnasium_asset",
    "has_clock",
    "load_model",
    "needed",
    "start_of",
]

INTEGRATORS = {"euler": "mjINT_EULER", "rk4": "mjINT_RK4", "implicitfast": "mjINT_IMPLICITFAST"}
CONES = {"pyramidal": "mjCONE_PYRAMIDAL", "elliptic": "mjCONE_ELLIPTIC"}
SOLVERS = {"newton": "mjSOL_NEWTON", "cg": "mjSOL_CG"}


@dataclass(frozen=True)
class PhysicsSettings:
    """What replaces the settings of a model, and the sizes of the buffers of MuJoCo Warp; None keeps the model's own.

    Attributes:
        integrator: ``"euler"``, ``"rk4"`` (four evaluations of the forces a step) or ``"implicitfast"``.
        solver: ``"newton"`` or ``"cg"``; MuJoCo Warp has no PGS, for which Newton is taken.
        cone: ``"pyramidal"`` or ``"elliptic"`` friction.
        timestep: seconds of a physics step.
        iterations: most iterations of the solver.
        ls_iterations: most iterations of its line search.
        nconmax: contacts that there is room for, for each world; worlds share the room.
        njmax: rows of constraints that there is room for in each world.
        deterministic: whether MuJoCo Warp is asked to fix the order of contacts and sums on CUDA; slower, and physics
            need not repeat bit for bit all the same.
    """

    integrator: Literal["euler", "rk4", "implicitfast"] | None = None
    solver: Literal["newton", "cg"] | None = None
    cone: Literal["pyramidal", "elliptic"] | None = None
    timestep: float | None = None
    iterations: int | None = None
    ls_iterations: int | None = None
    nconmax: int | None = None
    njmax: int | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown choice, numbers below their least and what is no number."""
        for name, known in (("integrator", INTEGRATORS), ("solver", SOLVERS), ("cone", CONES)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or value not in known):
                raise ValueError(
                    f"{name}: expected one of {', '.join(known)}, received {value!r}. Remedy: one of these, or None, "
                    "which is the model's own."
                )
        for name in ("timestep", "iterations", "ls_iterations", "nconmax", "njmax"):
            value, kinds = getattr(self, name), (int, float) if name == "timestep" else (int,)
            if value is not None and (type(value) not in kinds or not 0 < value < math.inf):
                word = "number" if name == "timestep" else "integer"
                raise ValueError(f"{name}: expected a positive {word}, received {value!r}. Remedy: None, or more.")
        if not isinstance(self.deterministic, bool):
            raise ValueError(
                f"deterministic: expected True or False, received {self.deterministic!r}. Remedy: one of these."
            )

    def apply(self, model: Any) -> Any:
        """Write the settings into ``model.opt`` and return the model; PGS becomes Newton."""
        mujoco = needed("mujoco")
        if self.solver is None and model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
            # the same minimum, found by a method that Warp has; limited iterations of PGS stop before it
            model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
        enums = {
            "integrator": ("mjtIntegrator", INTEGRATORS),
            "solver": ("mjtSolver", SOLVERS),
            "cone": ("mjtCone", CONES),
        }
        for name, (enum, known) in enums.items():
            if (value := getattr(self, name)) is not None:
                setattr(model.opt, name, getattr(getattr(mujoco, enum), known[value]))
        for name in ("timestep", "iterations", "ls_iterations"):
            if (value := getattr(self, name)) is not None:
                setattr(model.opt, name, value)
        return model

    @classmethod
    def of(cls, base: PhysicsSettings, **changes: Any) -> PhysicsSettings:
        """``base`` with those of ``changes`` that are not None.

        Raises:
            TypeError: for a name that is no setting.
        """
        known = {each.name for each in fields(cls)}
        if unknown := sorted(changes.keys() - known):
            raise TypeError(f"expected settings among {sorted(known)}, received {unknown}. Remedy: one of these names.")
        values = {name: getattr(base, name) for name in known}
        return cls(**{**values, **{name: value for name, value in changes.items() if value is not None}})


def needed(package: str) -> Any:
    """Import a package of the extra ``mujoco-warp``.

    Raises:
        ImportError: with what installs it.
    """
    return module_of(package, INSTALL["mujoco_warp"])


def gymnasium_asset(name: str) -> Path:
    """A model file inside of Gymnasium's wheel, such as ``"half_cheetah.xml"``.

    Raises:
        FileNotFoundError: for a name that Gymnasium does not ship.
    """
    import gymnasium

    # not by an import of gymnasium.envs.mujoco, which loads its renderer
    folder = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
    path = folder / name
    if not path.is_file():
        known = sorted(each.name for each in folder.glob("*.xml"))
        raise FileNotFoundError(
            f"model: expected one of {known}, received {name!r}. Remedy: gymnasium of version 1.1 on."
        )
    return path


def load_model(source: Any) -> Any:
    """A ``mujoco.MjModel`` of an MJCF file, an MJCF text or a model.

    Args:
        source: path of an XML or MJB file, a text that begins with ``<``, a ``mujoco.MjSpec``, which is compiled, or a
            ``mujoco.MjModel``, which is copied.

    Raises:
        ImportError: without MuJoCo.
        FileNotFoundError: for a path without a file.
        TypeError: for anything else.
        ValueError: for a file that MuJoCo cannot read, with what it says.
    """
    mujoco = needed("mujoco")
    if isinstance(source, mujoco.MjModel):
        import copy

        return copy.copy(source)
    spec = getattr(mujoco, "MjSpec", ())  # of MuJoCo 3.2 on
    if not isinstance(source, (str, Path, *([spec] if spec else ()))):
        raise TypeError(
            "model: expected the path of an MJCF file, its text, a mujoco.MjSpec or a mujoco.MjModel, received "
            f"{type(source).__name__}. Remedy: one of these."
        )
    try:
        if isinstance(source, spec):
            return source.compile()
        text = str(source)
        if text.lstrip().startswith("<"):
            return mujoco.MjModel.from_xml_string(text)
        path = Path(source).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"model: expected an MJCF file, received {text!r}. Remedy: its path.")
        read = mujoco.MjModel.from_binary_path if path.suffix == ".mjb" else mujoco.MjModel.from_xml_path
        return read(str(path))
    except ValueError as error:
        words = " ".join(str(error).split())
        received = "an MjSpec" if isinstance(source, spec) else repr(str(source)[:80])
        raise ValueError(
            f"model: expected MJCF that MuJoCo reads, received {received}: {words}. Remedy: mend it there."
        ) from error


class Start(NamedTuple):
    """Where episodes of a model begin, before noise; arrays of the model's own.

    Attributes:
        qpos: ``[Q]``.
        qvel: ``[V]``.
        act: ``[A]``, the states of actuators that have one.
    """

    qpos: Any
    qvel: Any
    act: Any


def start_of(model: Any, keyframe: int | str | None) -> Start:
    """The start that a model has, or a keyframe of it; mocap bodies of the model are moved to where it has them.

    Args:
        model: a ``mujoco.MjModel``, which may be changed.
        keyframe: its name or number; None is the model's ``qpos0`` at rest.

    Raises:
        ValueError: for a keyframe that the model does not have, with those that it has.
    """
    import numpy as np

    if keyframe is None:
        return Start(model.qpos0, np.zeros(model.nv), np.zeros(model.na))
    names = [model.key(number).name for number in range(model.nkey)]
    if isinstance(keyframe, str) and keyframe in names:
        number = names.index(keyframe)
    elif type(keyframe) is int and 0 <= keyframe < model.nkey:
        number = keyframe
    else:
        known = ", ".join(name or str(number) for number, name in enumerate(names)) or "none"
        raise ValueError(
            f"keyframe: expected one that the model has ({known}), received {keyframe!r}. Remedy: one of these, or "
            "None for the model's own positions."
        )
    for body in np.flatnonzero(model.body_mocapid >= 0):  # data takes their places from those of the model
        mocap = model.body_mocapid[body]
        model.body_pos[body] = model.key_mpos[number].reshape(-1, 3)[mocap]
        model.body_quat[body] = model.key_mquat[number].reshape(-1, 4)[mocap]
    return Start(model.key_qpos[number], model.key_qvel[number], model.key_act[number])


def has_clock(model: Any) -> bool:
    """Whether a sensor of the model reads the time."""
    return bool((model.sensor_type == needed("mujoco").mjtSensor.mjSENS_CLOCK).any())


def check_state(model: Any) -> None:
    """Refuse a model whose state is more than an env keeps for each world: it would outlive the ends of episodes.

    Raises:
        NotImplementedError: for delays, plasticity, plugins with a state, and bodies that fall asleep.
    """
    mujoco = needed("mujoco")
    if getattr(model, "nhistory", 0):  # of MuJoCo 3.5 on
        raise NotImplementedError(
            "model: expected actuators and sensors without a delay, whose past no state of a world holds, received "
            f"{model.nhistory} numbers of it. Remedy: a model without delay=, and actions that a task delays."
        )
    for name in ("PLASTIC", "PLUGIN"):
        kind = getattr(mujoco.mjtState, f"mjSTATE_{name}", None)
        if kind is not None and (size := mujoco.mj_stateSize(model, kind)):
            raise NotImplementedError(
                f"model: expected a state of positions, velocities and activations, received {size} numbers of "
                f"{name.lower()} state, which no world would begin anew with. Remedy: a model without it."
            )
    sleep = getattr(mujoco.mjtEnableBit, "mjENBL_SLEEP", 0)  # of MuJoCo 3.4 on
    if model.opt.enableflags & int(sleep):
        raise NotImplementedError(
            "model: expected bodies that stay awake, received sleep='enable': one that slept as an episode ended would "
            "sleep on in the next. Remedy: <flag sleep='disable'/>."
        )
