"""Worlds of MuJoCo Warp behind functions of torch tensors, which a compiler need not look into.

Dimension key: ``N`` worlds.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_perf.envs.mujoco.models import PhysicsSettings, check_state, has_clock, needed
from torchrl_perf.runtime.warp_program import WarpProgram, conditional_nodes, warn_of_old_driver

__all__ = ["FORCES", "PLACES", "Simulation", "Stepped"]

PLACES = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat"),
    *("subtree_com", "cinert", "cvel"),
)
"""Quantities of MuJoCo that follow from positions and velocities: those of fresh worlds are computed at a reset."""
FORCES = (
    *("cfrc_ext", "cfrc_int", "cacc", "qacc", "qfrc_actuator", "qfrc_constraint", "qfrc_passive", "qfrc_bias"),
    *("actuator_force", "sensordata"),
)
"""Quantities of MuJoCo that follow from forces: zero in fresh worlds, as MuJoCo's own reset leaves them."""
AFTER_CONSTRAINT = ("cfrc_ext", "cfrc_int", "cacc")
"""Those that a step computes only where somebody asks for them."""

UNROLLED = 6
"""Iterations of the solver up to which a graph has all of them, as fast as one that asks whether a world needs more: of
4,096 worlds one does. With 4, Ant takes 11.8 ms a step on an H200 and not 12.3."""


class Stepped(NamedTuple):
    """What a step leaves; new tensors.

    Attributes:
        state: entries ``[N, ...]`` under the names of :attr:`Simulation.names`.
        overflow: int32 ``[N]``, bits of what found no room in the world, 0 for nothing.
    """

    state: dict[str, Tensor]
    overflow: Tensor


class Simulation:
    """``num_worlds`` copies of a model in MuJoCo Warp.

    The arrays of Warp are scratch: a step copies a state in, runs ``frame_skip`` physics steps and copies the state
    that follows out, all on the device and without a host wait. Tensors alias the arrays, which are never replaced.

    Args:
        model: a ``mujoco.MjModel``, whose settings have been applied.
        num_worlds: N.
        frame_skip: physics steps of a step.
        observed: quantities beside ``qpos`` and ``qvel`` that a state holds, of :data:`PLACES` and :data:`FORCES`.
        varied: fields of the model, such as ``"body_mass"``, of which each world has its own.
        settings: sizes of buffers, and whether physics repeats.
        device: CUDA with an index, or the CPU.
        record: on CUDA, whether steps outside of a captured function replay a graph of their own.

    Raises:
        ImportError: without MuJoCo Warp.
        NotImplementedError: for what MuJoCo Warp cannot take, with what it says, and as :func:`check_state`.
        ValueError: for an unknown quantity, and worlds that do not fit on the device.
    """

    def __init__(
        self,
        model: Any,
        num_worlds: int,
        *,
        frame_skip: int,
        observed: Sequence[str] = (),
        varied: Sequence[str] = (),
        settings: PhysicsSettings,
        device: torch.device,
        record: bool = True,
    ) -> None:
        warp = needed("warp")
        # by default a banner and a line for each compiled kernel go to the standard output
        warp.config.log_level = max(warp.config.log_level, warp.LOG_WARNING)
        warp.init()
        self._mjw = needed("mujoco_warp")
        observed = _names(observed)
        if not model.nv:
            raise ValueError("model: expected joints, received a model without. Remedy: a joint in one of its bodies.")
        check_state(model)
        self.num_worlds, self.frame_skip = num_worlds, frame_skip
        self.observed = observed
        inner = ("qpos", "qvel", "qacc_warmstart", *(("act",) if model.na else ()))
        if has_clock(model):  # an episode begins at 0, and the arrays go on from whatever ran before
            inner = (*inner, "time")
        self.names = (*inner, *self.observed)
        with warp.ScopedDevice(warp.device_from_torch(device)):
            self.model = self._put(model, varied)
            self._limit(model, settings, device)
            with self._fitting():
                self.data = self._allocate(model, settings)
        self._inputs = {name: warp.to_torch(getattr(self.data, name)) for name in (*inner, "ctrl")}
        self._outputs = {name: warp.to_torch(getattr(self.data, name)) for name in self.names}
        self._overflow = warp.to_torch(self.data.overflow)
        self._varied = {name: warp.to_torch(getattr(self.model, name)) for name in varied}
        self._physics = WarpProgram(self._run, device)
        self._places = WarpProgram(self._place, device)
        self._handle = _register(self)
        with self._fitting():
            self._physics.warm_up(record=record)
            if any(name in PLACES for name in self.observed):
                self._places.warm_up(record=record)
        self._overflow.zero_()

    def _put(self, model: Any, varied: Sequence[str]) -> Any:
        try:
            return self._mjw.put_model(model, batch_sizes=dict.fromkeys(varied, self.num_worlds))
        except NotImplementedError as error:
            raise NotImplementedError(
                f"model: expected what MuJoCo Warp {self._mjw.__version__} takes, received a model with more: "
                f"{error} Remedy: leave it out of the model; integrators are euler, rk4 and implicitfast, solvers "
                "newton and cg."
            ) from error

    def _limit(self, model: Any, settings: PhysicsSettings, device: torch.device) -> None:
        options = self.model.opt
        options.warn_overflow = 0  # counted instead: a print for each world would come at each step
        if settings.deterministic:
            options.deterministic = int(self._mjw.DeterminismType.ALL)
        iterations = int(model.opt.iterations)
        if device.type == "cuda" and (iterations <= UNROLLED or not conditional_nodes()):
            options.graph_conditional = False
            if iterations > UNROLLED:
                warn_of_old_driver(iterations)

    def _allocate(self, model: Any, settings: PhysicsSettings) -> Any:
        sizes = {"nconmax": settings.nconmax, "njmax": settings.njmax}
        return self._mjw.make_data(model, nworld=self.num_worlds, **sizes)

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Within it Warp allocates: its data, and what the first step needs."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            text = " ".join(str(error).split())
            if not isinstance(error, MemoryError) and not re.search("alloc|memory", text, re.IGNORECASE):
                raise
            raise ValueError(
                f"num_envs: expected worlds that fit on the device, received {self.num_worlds}: {text[:200]}. Remedy: "
                "fewer worlds, or smaller nconmax= and njmax=."
            ) from error

    def _run(self) -> None:
        for _ in range(self.frame_skip):
            self._mjw.step(self.model, self.data)
        if any(name in AFTER_CONSTRAINT for name in self.observed):
            self._mjw.rne_postconstraint(self.model, self.data)

    def _place(self) -> None:
        for part in (self._mjw.kinematics, self._mjw.com_pos, self._mjw.com_vel):
            part(self.model, self.data)

    # -- functions of tensors --------------------------------------------------------------------------------------

    def step(self, state: Mapping[str, Tensor], control: Tensor, varied: Mapping[str, Tensor] | None = None) -> Stepped:
        """Step from a state.

        Args:
            state: entries ``[N, ...]`` under :attr:`names`, of which those are read that physics starts from.
            control: ``[N, U]``, clamped by the model's own ranges.
            varied: fields of the model ``[N, ...]``.
        """
        inputs = [control if name == "ctrl" else state[name] for name in self._inputs]
        values = [] if varied is None else [varied[name] for name in self._varied]
        *entries, overflow = torch.ops.torchrl_perf.mujoco_step(self._handle, inputs, values)
        return Stepped(dict(zip(self.names, entries, strict=True)), overflow)

    def at(self, qpos: Tensor, qvel: Tensor) -> dict[str, Tensor]:
        """The state of worlds that start at positions ``[N, Q]`` with velocities ``[N, V]``; new tensors."""
        values = torch.ops.torchrl_perf.mujoco_place(self._handle, qpos, qvel) if self.observed else []
        state = {"qpos": qpos, "qvel": qvel, "qacc_warmstart": torch.zeros_like(qvel)}
        state.update({name: torch.zeros_like(self._outputs[name]) for name in ("act", "time") if name in self._outputs})
        return {**state, **dict(zip(self.observed, values, strict=True))}

    def run(self, control: Tensor) -> None:
        """Step the physics alone, from wherever the arrays are, under ``control`` ``[N, U]``: for measurements."""
        self._inputs["ctrl"].copy_(control)
        self._physics()

    def fields(self) -> dict[str, Tensor]:
        """The fields that each world has its own of, ``[N, ...]``: tensors that alias them."""
        return self._varied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, which would share Warp's arrays or lack them.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "expected worlds of MuJoCo Warp to stay what they are, received a call that copies or pickles them. "
            "Remedy: another env with the same arguments, and its load_state_dict where it is to go on from here."
        )

    # -- behind the operators --------------------------------------------------------------------------------------

    def run_step(self, inputs: list[Tensor], varied: list[Tensor]) -> list[Tensor]:
        """Copy ``inputs`` in, run the physics and return copies of what it leaves, ``overflow`` last."""
        torch._foreach_copy_([*self._inputs.values(), *self._varied.values()], [*inputs, *varied])
        self._physics()
        left = [value.clone() for value in (*self._outputs.values(), self._overflow)]
        self._overflow.zero_()
        return left

    def run_place(self, qpos: Tensor, qvel: Tensor) -> list[Tensor]:
        """Return the observed quantities of worlds at ``qpos`` and ``qvel``; those of forces are zero."""
        if any(name in PLACES for name in self.observed):
            torch._foreach_copy_([self._inputs["qpos"], self._inputs["qvel"]], [qpos, qvel])
            self._places()
        values = {name: self._outputs[name] for name in self.observed}
        return [value.clone() if name in PLACES else torch.zeros_like(value) for name, value in values.items()]

    def sizes(self, names: Sequence[str]) -> list[torch.Size]:
        """The shapes of the entries ``names``, for a tracer."""
        return [self._outputs[name].shape for name in names]


def _names(observed: Any) -> tuple[str, ...]:
    """The quantities that are observed, each once, of any iterable of names."""
    known = (*PLACES, *FORCES)
    several = isinstance(observed, Iterable) and not isinstance(observed, str)
    names = tuple(dict.fromkeys(observed)) if several else ()
    if not several or (unknown := [name for name in names if name not in known]):
        received = unknown if several else repr(observed)
        raise ValueError(
            f"observed: expected a sequence of names among {', '.join(known)}, received {received}. Remedy: these; "
            "qpos and qvel are always there."
        )
    return names


_SIMULATIONS: weakref.WeakValueDictionary[int, Simulation] = weakref.WeakValueDictionary()


def _register(simulation: Simulation) -> int:
    handle = max(_SIMULATIONS.keys(), default=0) + 1
    _SIMULATIONS[handle] = simulation
    return handle


@torch.library.custom_op("torchrl_perf::mujoco_step", mutates_args=())
def _step(handle: int, inputs: Sequence[Tensor], varied: Sequence[Tensor]) -> list[Tensor]:
    return _SIMULATIONS[handle].run_step(list(inputs), list(varied))


@_step.register_fake
def _(handle: int, inputs: Sequence[Tensor], varied: Sequence[Tensor]) -> list[Tensor]:
    simulation = _SIMULATIONS[handle]
    overflow = inputs[0].new_empty(simulation.num_worlds, dtype=torch.int32)
    return [inputs[0].new_empty(each) for each in simulation.sizes(simulation.names)] + [overflow]


@torch.library.custom_op("torchrl_perf::mujoco_place", mutates_args=())
def _place(handle: int, qpos: Tensor, qvel: Tensor) -> list[Tensor]:
    return _SIMULATIONS[handle].run_place(qpos, qvel)


@_place.register_fake
def _(handle: int, qpos: Tensor, qvel: Tensor) -> list[Tensor]:
    simulation = _SIMULATIONS[handle]
    return [qpos.new_empty(each) for each in simulation.sizes(simulation.observed)]
