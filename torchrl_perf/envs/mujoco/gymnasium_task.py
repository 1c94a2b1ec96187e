"""What Gymnasium's MuJoCo tasks share: their model files, their arguments, and the words of their rewards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_perf.envs.mujoco.env import MuJoCoEnv, State
from torchrl_perf.envs.mujoco.models import gymnasium_asset

__all__ = ["GymnasiumTask"]

POSITIONS = "exclude_current_positions_from_observation"


class GymnasiumTask(MuJoCoEnv):
    """A task of Gymnasium's version 5, by the name of its class: rewards, ends, observations and noise are Gymnasium's.

    Args:
        num_envs: N.
        xml_file: the model in place of the task's: the name of a file in Gymnasium's wheel, or a path.
        **settings: arguments of Gymnasium's env under its names, those of :attr:`usual`, such as
            ``ctrl_cost_weight=0.2``; and further arguments of :class:`MuJoCoEnv`. ``reset_noise`` is another name of
            ``reset_noise_scale``, and ``observed`` is added to what the task observes.

    Raises:
        TypeError: for both names of the noise; as :class:`MuJoCoEnv`.
        ValueError: for a value of another kind than that in :attr:`usual`; as :class:`MuJoCoEnv`.
    """

    model_file: ClassVar[str]
    """Name of a file in Gymnasium's wheel."""
    gymnasium_id: ClassVar[str]
    """The task in Gymnasium's registry, which runs it in MuJoCo's own C code. Of a subclass only where it says so."""
    usual: ClassVar[Mapping[str, Any]]
    """The arguments of Gymnasium's env that change the task, and their defaults."""
    episode_steps: ClassVar[int] = 1000
    noise: ClassVar[float] = 0.0
    """Of the first positions, where Gymnasium's env has no argument for it."""
    observed_quantities: ClassVar[tuple[str, ...]] = ()

    def __init__(self, num_envs: int, *, xml_file: str | Path | None = None, **settings: Any) -> None:
        name, scale = type(self).__name__, "reset_noise_scale"
        if scale in settings and "reset_noise" in settings:
            raise TypeError(f"{name}: expected one of {scale} and reset_noise, received both. Remedy: {scale} alone.")
        if scale in self.usual and "reset_noise" in settings:
            settings[scale] = settings.pop("reset_noise")
        given = {key: settings.pop(key) for key in self.usual if key in settings}
        for key, value in given.items():
            _check(name, key, value, self.usual[key])
        self.chosen = {**self.usual, **given}
        limit = settings.setdefault("max_episode_steps", self.episode_steps)
        noise = settings.pop("reset_noise", self.chosen.get(scale, self.noise))
        observed = settings.pop("observed", ())
        if isinstance(observed, Iterable) and not isinstance(observed, str):  # anything else the base refuses
            observed = (*self.observed_quantities, *observed)
        path = gymnasium_asset(self.model_file) if xml_file is None else _model(xml_file)
        steps = self.chosen["frame_skip"]
        super().__init__(path, num_envs, frame_skip=steps, reset_noise=noise, observed=observed, **settings)
        in_c = {key: value for key, value in given.items() if value != self.usual[key]}
        in_c |= {} if xml_file is None else {"xml_file": str(path)}
        in_c |= {} if limit in (None, self.episode_steps) else {"max_episode_steps": limit}
        if in_c:
            self._settings = in_c  # by the name of the argument: a checkpoint keeps it

    def arguments_in_c(self) -> dict[str, Any]:
        """Return the arguments of Gymnasium's env of the same task, those that are not its defaults."""
        return dict(getattr(self, "_settings", {}))

    @classmethod
    def names_in_c(cls) -> set[str]:
        """Return the names of the arguments that Gymnasium's env has as well."""
        return {*cls.usual, "xml_file", "max_episode_steps"}

    def seen_positions(self, state: State, count: int) -> Tensor:
        """Return the positions that are observed: without the first ``count``, unless these were asked for."""
        return state["qpos"][:, count if self.chosen[POSITIONS] else 0 :]

    def forward_gain(self, before: State, after: State) -> Tensor:
        """Return the weighted mean speed along x of the first joint in a step, ``[N]`` m/s."""
        return self.chosen["forward_reward_weight"] * (after["qpos"][:, 0] - before["qpos"][:, 0]) / self.dt

    def control_cost(self, action: Tensor) -> Tensor:
        """Return the weighted sum of squares of ``action`` ``[N, U]``."""
        return self.chosen["ctrl_cost_weight"] * action.square().sum(-1)

    def within(self, value: Tensor, name: str) -> Tensor:
        """Return where ``value`` is between the ends of the range ``name``, both exclusive."""
        low, high = self.chosen[name]
        return (low < value) & (value < high)

    def is_healthy(self, state: State) -> Tensor:
        """Return in which worlds the robot has not fallen, bool ``[N]``; by default in all."""
        return torch.ones(self.num_envs, dtype=torch.bool, device=self.device)

    def healthy_gain(self, state: State) -> Tensor:
        """Return the reward of robots that have not fallen, ``[N]``."""
        return self.chosen["healthy_reward"] * self.is_healthy(state).to(torch.float32)  # not the default dtype

    def is_terminated(self, state: State) -> Tensor:
        """Return in which worlds the robot has fallen, unless it may."""
        return ~self.is_healthy(state) & self.chosen.get("terminate_when_unhealthy", True)


def _check(task: str, name: str, value: Any, usual: Any) -> None:
    """Refuse a value of another kind than the usual one."""
    if isinstance(usual, bool):
        good, kind = isinstance(value, bool), "True or False"
    elif isinstance(usual, tuple):
        pair = isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_number, value))
        good, kind = pair and value[0] <= value[1], "two numbers, the smaller one first"
    elif name == "main_body":
        good, kind = isinstance(value, int | str) and not isinstance(value, bool), "the number or the name of a body"
    elif name == "frame_skip":
        good, kind = True, ""  # the base has its own words
    else:
        good, kind = _is_number(value) and math.isfinite(value), "a number"
    if not good:
        raise ValueError(f"{task}: expected {name} to be {kind}, received {value!r}. Remedy: such as {usual!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _model(file: Any) -> Path:
    """A file of Gymnasium's wheel by its name, or any other by its path, as Gymnasium takes it."""
    path = Path(file).expanduser()
    return path.absolute() if path.is_file() else gymnasium_asset(str(file))
