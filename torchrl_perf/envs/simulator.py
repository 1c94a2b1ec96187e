"""Batched simulators that reset themselves, in the form of Isaac Lab and mjlab, as TorchRL envs.

Dimension key: ``N`` worlds, ``O`` observed numbers, ``D`` action.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_perf.envs.arguments import read_action

__all__ = ["SimulatorEnv"]

FINAL = ("final_observation", "final_obs")
"""Names in ``extras`` of what a simulator observed before it reset the rows that ended."""
POLICY = "policy"
"""Name of the group of observations that a policy reads; others, such as ``critic``, keep theirs."""
FLAGS = ("done", "terminated", "truncated")


class SimulatorEnv(EnvBase):
    """A batched torch simulator as one TorchRL env ``[N]``, for ``DeviceCollector`` and the trainers.

    The simulator is an object of the form that Isaac Lab's and mjlab's envs have: attributes ``num_envs`` and
    ``device``; ``reset() -> (observations, extras)``; and ``step(action)``, which returns ``observations, reward,
    terminated, time_out, extras`` or, as rsl_rl's wrappers do, ``observations, reward, done, extras`` with
    ``extras["time_outs"]``. It resets rows that end inside its step, so that the observations of a step are of the new
    episode. Observations are a tensor ``[N, O]`` or a dict of such by group, of which ``"policy"`` becomes the key
    ``"observation"``.

    **Final observations.** Where ``extras`` has ``final_observation`` (or ``final_obs``), whose rows that ended hold
    the last observation of their episode, that is what is under "next". Of a simulator without, it is the observation
    before the last step: a time limit then bootstraps from the value of that one, as rsl_rl does.
    :attr:`has_final_observations` says which, after steps in which episodes have ended.

    **Waiting.** A simulator may step outside of torch, where no graph repeats it, so a collector steps it eagerly, and
    a trainer captures all but the collection. With ``in_graphs=True`` it is taken to be functions of tensors, as those
    of the package are. ``torchrl-perf syncs SCRIPT`` names what waits for the host.

    A reset of all rows is the simulator's; a masked one changes nothing, since rows that ended have been reset, and of
    others it is refused, unless ``in_graphs``. The state of a simulator is not saved: a run that goes on begins new
    episodes. A seed goes to its method ``seed``, else to ``reset(seed=)``, else to torch's generators.

    Keys: ``"observation"`` ``[N, O]`` and other groups, ``"action"`` float32 ``[N, D]``, ``"reward"`` ``[N, 1]``,
    ``"is_init"`` and the done flags bool ``[N, 1]``.

    Args:
        simulator: see above.
        action_size: D; by default the last dim of its ``single_action_space`` or ``action_space``, or ``num_actions``.
        action_bound: greatest absolute value of an action, for algorithms that need bounds; None for those of the
            action space, where it has any. Actions beyond move to the nearest bound.
        in_graphs: whether its step is a function of tensors that a CUDA graph may hold.

    Raises:
        TypeError: for an object without ``num_envs``, ``step`` and ``reset``, actions that are no box of numbers, and
            steps and observations of another form.
        ValueError: where the number of actions is not known; for parts of a step that are no rows of the worlds, or on
            another device; and for a reset of rows that the simulator has not ended.

    Examples:
        >>> env = SimulatorEnv(gymnasium.make("Isaac-Ant-v0", cfg=cfg).unwrapped)
        >>> trainer = PPOTrainer(PPOConfig(env="Ant", num_envs=env.batch_size[0]), env=env)
    """

    resets_inside_step = True
    resumes = False
    """A stored state of a collector does not hold the simulator's: its episodes start over."""

    def __init__(
        self,
        simulator: Any,
        *,
        action_size: int | None = None,
        action_bound: float | None = None,
        in_graphs: bool = False,
    ) -> None:
        if absent := [name for name in ("num_envs", "step", "reset") if not hasattr(simulator, name)]:
            raise TypeError(
                f"simulator: expected an object with num_envs, step and reset, received {type(simulator).__name__} "
                f"without {', '.join(absent)}. Remedy: the unwrapped env of Isaac Lab or mjlab."
            )
        self.num_envs = int(simulator.num_envs)
        super().__init__(device=torch.device(getattr(simulator, "device", "cpu")), batch_size=(self.num_envs,))
        self.simulator, self.in_graphs = simulator, in_graphs
        self.max_episode_steps = _limit_of(simulator)
        self.has_final_observations: bool | None = None
        first = self._grouped(simulator.reset())
        for key, value in first.items():
            self.register_buffer(f"root_{key}", value.clone(), persistent=False)
        self._keys = tuple(first)
        self._make_specs(first, action_size, action_bound)
        self._fresh = True  # the reset above has not been used
        self.register_buffer("_begun", self._all(), persistent=False)  # rows that the simulator has just reset

    # -- specs -----------------------------------------------------------------------------------------------------

    def _make_specs(self, first: Mapping[str, Tensor], size: int | None, bound: float | None) -> None:
        def flag() -> Categorical:
            return Categorical(2, shape=torch.Size((self.num_envs, 1)), dtype=torch.bool, device=self.device)

        batch, device = self.batch_size, self.device
        seen = {key: Unbounded(shape=value.shape, dtype=value.dtype, device=device) for key, value in first.items()}
        self.observation_spec = Composite({**seen, "is_init": flag()}, shape=batch, device=device)
        self.action_spec = _action_spec(self.simulator, self.num_envs, device, size, bound)
        self.reward_spec = Unbounded(shape=torch.Size((self.num_envs, 1)), device=device)
        self.full_done_spec = Composite({name: flag() for name in FLAGS}, shape=batch, device=device)

    def _grouped(self, returned: Any) -> dict[str, Tensor]:
        """Observations by key, of what ``reset`` returned or of a step's first part."""
        found = returned[0] if isinstance(returned, tuple) else returned
        found = {POLICY: found} if isinstance(found, Tensor) else found
        if not isinstance(found, Mapping | TensorDictBase) or POLICY not in found.keys():
            raise TypeError(
                f"observations: expected a tensor or a dict with {POLICY!r}, received {type(found).__name__}. Remedy: "
                "concatenated terms in each group of observations."
            )
        groups = {"observation" if key == POLICY else str(key): value for key, value in found.items()}
        if wrong := [key for key, value in groups.items() if not isinstance(value, Tensor)]:
            raise TypeError(
                f"observations: expected a tensor [N, ...] in each group, received none in {wrong}. Remedy: "
                "concatenate_terms=True there."
            )
        for key, value in groups.items():
            self._check(f"observations of {key!r}", value, least=2)
        return groups

    def _check(self, name: str, value: Any, *, least: int = 1) -> Tensor:
        """Return what is a tensor of rows of the worlds, where the env is."""
        rows = isinstance(value, Tensor) and value.ndim >= least and value.shape[0] == self.num_envs
        if rows and value.device.type == cast("torch.device", self.device).type:
            return value
        found = f"{list(value.shape)} on {value.device.type}" if isinstance(value, Tensor) else type(value).__name__
        form = "[N, ...]" if least > 1 else "[N]"
        raise ValueError(
            f"{name}: expected a tensor {form} with N = {self.num_envs} on {self.device}, received {found}. Remedy: "
            "one row for each world, on the device that the simulator names."
        )

    def _all(self) -> Tensor:
        return torch.ones(self.num_envs, 1, dtype=torch.bool, device=self.device)

    # -- the step --------------------------------------------------------------------------------------------------

    def _roots(self) -> dict[str, Tensor]:
        return {key: getattr(self, f"root_{key}") for key in self._keys}

    def _advance(self, tensordict: TensorDictBase) -> tuple[dict[str, Tensor], Tensor]:
        """Step the simulator; the entries under "next", and which rows ended, bool ``[N, 1]``."""
        shape = self.action_spec.shape
        action = read_action("SimulatorEnv", tensordict, "action", shape, discrete=False, dtype=torch.float32)
        if isinstance(self.action_spec, Bounded):
            action = action.clamp(self.action_spec.space.low, self.action_spec.space.high)
        observed, *parts, extras = _five(self.simulator.step(action))
        names = ("reward", "terminated", "time_out")
        reward, terminated, truncated = (self._check(*each) for each in zip(names, parts, strict=True))
        terminated, truncated = terminated.bool(), truncated.bool()
        if reward.numel() != self.num_envs:
            raise ValueError(
                f"reward: expected one number for each of {self.num_envs} worlds, received {list(reward.shape)}. "
                "Remedy: their sum over terms."
            )
        roots, before = self._grouped(observed), self._roots()
        done = (terminated | truncated).view(-1, 1)
        given = next((extras[name] for name in FINAL if extras.get(name) is not None), None)
        # a simulator may leave them out of steps in which nothing ended
        self.has_final_observations = bool(self.has_final_observations) or given is not None
        last = before if given is None else {**before, **self._grouped(given)}
        following = {key: torch.where(_like(done, new), last[key], new) for key, new in roots.items()}
        for key, value in roots.items():
            before[key].copy_(value)
        entries = {
            **following,
            "is_init": torch.zeros_like(done),
            "reward": reward.to(torch.float32).view(-1, 1).clone(),
            "done": done,
            "terminated": terminated.view(-1, 1).clone(),
            "truncated": truncated.view(-1, 1).clone(),
        }
        self._fresh = False
        self._begun.copy_(done)
        return entries, done

    def _root(self, started: Tensor) -> dict[str, Tensor]:
        """The entries of the next root, of rows that start over where ``started`` bool ``[N, 1]``."""
        flags = {name: torch.zeros_like(started) for name in FLAGS}
        return {**{key: value.clone() for key, value in self._roots().items()}, "is_init": started.clone(), **flags}

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        return TensorDict(self._advance(tensordict)[0], self.batch_size, device=self.device)

    def _step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        entries, done = self._advance(tensordict)
        kept = {key: value for key, value in tensordict.items() if key not in ("reward", "_reset", "next")}
        root = TensorDict({**kept, **self._root(done)}, self.batch_size, device=self.device)
        tensordict.set("next", TensorDict(entries, self.batch_size, device=self.device))
        return tensordict, root

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            if not self._fresh:
                self._take(self.simulator.reset())
            mask = self._all()
        elif not self.in_graphs and bool((mask.view(-1, 1) & ~self._begun).any()):
            raise ValueError(
                "_reset: expected rows that the simulator has ended itself, received others, which it would go on "
                "with. Remedy: a time limit of the simulator in place of a transform's, or a reset of all rows."
            )
        return TensorDict(self._root(mask.view(-1, 1)), self.batch_size, device=self.device)

    def _take(self, returned: Any) -> None:
        """Begin with what a reset of all rows returned."""
        for key, value in self._grouped(returned).items():
            getattr(self, f"root_{key}").copy_(value)
        self._begun.fill_(True)

    def _set_seed(self, seed: int | None) -> None:
        if seed is None:
            return
        if callable(set_seed := getattr(self.simulator, "seed", None)):
            set_seed(seed)
            self._fresh = False
        elif "seed" in inspect.signature(self.simulator.reset).parameters:
            self._take(self.simulator.reset(seed=seed))
            self._fresh = True
        else:
            torch.manual_seed(seed)  # which it may draw from
            self._fresh = False


def _five(returned: Any) -> tuple[Any, ...]:
    """A step of four or five parts as observations, reward, terminated, truncated and extras."""
    if isinstance(returned, tuple) and len(returned) == 5:
        return returned
    if isinstance(returned, tuple) and len(returned) == 4:
        observed, reward, done, extras = returned
        done = torch.as_tensor(done).bool()
        truncated = done & torch.as_tensor(extras["time_outs"]).bool() if "time_outs" in extras else done & False
        return observed, reward, done & ~truncated, truncated, extras
    parts = f"{len(returned)} parts" if isinstance(returned, tuple) else type(returned).__name__
    raise TypeError(
        f"step: expected observations, reward, terminated, time_out and extras, received {parts}. Remedy: a simulator "
        "of the form of Isaac Lab or mjlab."
    )


def _like(mask: Tensor, value: Tensor) -> Tensor:
    return mask.view(-1, *(1,) * (value.ndim - 1))


def _limit_of(simulator: Any) -> int | None:
    limit = getattr(simulator, "max_episode_length", None)
    return int(limit) if isinstance(limit, int | float) else None


def _action_spec(
    simulator: Any, num_envs: int, device: torch.device | None, size: int | None, bound: float | None
) -> Bounded | Unbounded:
    space = getattr(simulator, "single_action_space", None)
    space = getattr(simulator, "action_space", None) if space is None else space
    if any(hasattr(space, name) for name in ("n", "nvec", "spaces")):
        raise TypeError(
            f"action_space: expected a box of floats, received {space}. Remedy: a wrapper of the simulator that takes "
            "floats [N, D], with such a space."
        )
    if size is None:
        size = space.shape[-1] if getattr(space, "shape", None) else getattr(simulator, "num_actions", None)
    if size is None:
        raise ValueError(
            f"action_size: expected an action_space or num_actions of {type(simulator).__name__}, received neither. "
            "Remedy: action_size=."
        )
    shape = torch.Size((num_envs, int(size)))
    if bound is not None:
        return Bounded(-bound, bound, shape=shape, dtype=torch.float32, device=device)
    ends = [
        torch.as_tensor(getattr(space, name, inf)).float().to(device)
        for name, inf in (("low", -torch.inf), ("high", torch.inf))
    ]
    if all(bool(end.isfinite().all()) for end in ends):
        low, high = (end.reshape(-1, shape[-1])[0].expand(shape) if end.ndim else end for end in ends)
        return Bounded(low, high, shape=shape, dtype=torch.float32, device=device)
    return Unbounded(shape=shape, dtype=torch.float32, device=device)
