"""A policy from a run or a checkpoint, ready to act: no env, no trainer."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.modules.chains import class_name
from torchrl_perf.registry import ALGORITHMS, ROBOTS, SYSTEMS, entry_of
from torchrl_perf.run_layout import CHECKPOINTS, CONFIG
from torchrl_perf.runtime.files import CheckpointError, save_checkpoint
from torchrl_perf.runtime.precision import Acceleration
from torchrl_perf.trainers.blueprints import Blueprint, blueprint_of
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.device import acceleration_of, resolve_device
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder, read_checkpoint
from torchrl_perf.trainers.run.saved_specs import SavedSpecs
from torchrl_perf.zoo import run_path

__all__ = ["GreedyPolicy", "LoadedPolicy", "SavedRun", "load_policy", "policy_of", "read_run", "save_policy"]

Which = Literal["newest", "best"]
MUJOCO = "torchrl_perf.envs.mujoco"


class GreedyPolicy(TensorDictModuleBase):
    """A policy that never explores and records no gradient, whatever is set around the call.

    Keys read and written are those of the policy. It is shared, not copied.

    Args:
        policy: a TensorDict module.
    """

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.in_keys, self.out_keys = list(policy.in_keys), list(policy.out_keys)  # pyright: ignore

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the best action that the policy knows, and what else the policy writes.

        Args:
            tensordict: ``[*batch]``, with the policy's ``in_keys``.
        """
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            return self.policy(tensordict)


class LoadedPolicy(GreedyPolicy):
    """What :func:`load_policy` returns: a :class:`GreedyPolicy` that knows where it comes from.

    Args:
        policy: with the parameters of the checkpoint.
        run: what the checkpoint says of its run.

    Attributes:
        config: settings of the run.
        specs: of one row of its env, ``[1]``: ``observation_spec``, ``full_action_spec``.
        path: the checkpoint.
        steps: env steps that it has learnt from.
    """

    def __init__(self, policy: nn.Module, run: "SavedRun") -> None:
        super().__init__(policy)
        self.acceleration = acceleration_of(run.config)
        self.config, self.specs, self.path, self.steps = run.config, run.specs, run.path, run.steps

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the action for rows ``[*batch]``, and what else the policy writes.

        Args:
            tensordict: with the policy's ``in_keys``, on its device.
        """
        with self.acceleration.active(self.specs.device):
            return super().forward(tensordict)


class SavedRun:
    """A checkpoint and what it says of its run.

    Args:
        path: the file.
        state: what it holds.
        device: of networks.

    Attributes:
        config: settings of the run.
        specs: of one row of its env.
        plain_specs: the same as plain values.
        env: name of its env.
        given: whether the env came from Python, and not from the settings.
        robot: name of the env, if it is one of the package on MuJoCo Warp, and no other of this name; else empty.
        arguments: of the env's constructor, as far as it keeps them.
        steps: env steps taken.

    Raises:
        CheckpointError: for a checkpoint that says too little, or of an algorithm that is unknown.
    """

    def __init__(self, path: Path, state: Mapping[str, Any], device: torch.device) -> None:
        made_of = state.get("made_of", {})
        env, settings = made_of.get("env", {}), dict(state.get("settings", {}))
        if not settings or "plain_specs" not in env:
            raise CheckpointError(
                f"{path}: expected a checkpoint with the settings and specs of its run, received one of an earlier "
                "release, without them. Remedy: go on with the run for one more iteration (--resume), which writes one."
            )
        algorithm = settings.pop("algorithm", "")
        if algorithm not in {**ALGORITHMS, **SYSTEMS}:
            raise CheckpointError(
                f"{path}: expected a checkpoint of one of {', '.join((*ALGORITHMS, *SYSTEMS))}, received one of "
                f"{algorithm!r}. Remedy: the trainer that has saved it; a registered algorithm has a line in "
                "torchrl_perf/registry.py."
            )
        kind: type[RunConfig] = entry_of(algorithm).load("config")
        self.path, self.state, self.device = path, state, device
        self.config = kind.from_dict(settings)
        self.plain_specs: dict[str, Any] = env["plain_specs"]
        self.specs = SavedSpecs(self.plain_specs, device)
        self.given = bool(env.get("given"))
        self.env: str = _label(self.config, env.get("name", self.config.env), self.given)
        is_ours = str(env.get("module", "")).startswith(MUJOCO) and env.get("name") in ROBOTS
        self.robot: str = env["name"] if is_ours else ""
        self.arguments: Mapping[str, Any] = env.get("arguments", {})
        self.networks: Mapping[str, Mapping[str, str]] = made_of.get("networks", {})

    @property
    def steps(self) -> int:
        """Env steps that the run had taken."""
        return int(self.state["counters"]["iterations_done"]) * self.config.batch_size

    @property
    def blueprint(self) -> Blueprint:
        """How its policy and env are made."""
        return blueprint_of(self.config)


def _label(config: RunConfig, name: str, given: bool) -> str:
    """What a run's env is called: by its name of the settings, unless that is the place of a class."""
    named = config.env.removeprefix("gym:")
    is_place = ":" in named and not named.startswith("vmas:")
    return name if given or config.env_class or is_place else named


def load_policy(
    run_or_checkpoint: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    *,
    which: Which = "newest",
    actor: nn.Module | None = None,
) -> LoadedPolicy:
    """The policy of a run, greedy, for any number of rows; it equals the trainer's actor bit for bit.

    Neither env nor trainer is made, so that the packages that the env needs need not be there.

    Args:
        run_or_checkpoint: folder of a run, a file of its checkpoints, or ``zoo:NAME``, a policy of the package.
        device: of the policy.
        which: the newest checkpoint of a folder that can be read, or the one that was marked as the best.
        actor: the network that the run was given, for one that was made with a network from Python; its parameters are
            overwritten, in place.

    Returns:
        A TensorDict module without gradients that reads the observation and writes the action.

    Example:
        >>> policy = load_policy("runs/ppo-CartPole-0")
        >>> policy(TensorDict({"observation": observation}, [5]))["action"]  # observation [5, 4]

    Raises:
        FileNotFoundError: for a path where nothing is, an unknown name, and a run without checkpoints.
        CheckpointError: a ValueError, for a file that is damaged, foreign or of an earlier release, and for networks
            that are not the algorithm's own where no ``actor`` is given.
    """
    return policy_of(read_run(run_or_checkpoint, device, which=which), actor)


def save_policy(
    run_or_checkpoint: str | os.PathLike[str], path: str | os.PathLike[str], *, which: Which = "newest"
) -> Path:
    """Writes the policy of a run alone, to a file that :func:`load_policy` takes.

    Optimisers, critics, targets, replay buffer and envs stay out of it: it is small, and no run goes on from it.

    Args:
        run_or_checkpoint: folder of a run, a file of its checkpoints, or ``zoo:NAME``, a policy of the package.
        path: the file to write, whole or not at all.
        which: as for :func:`load_policy`.

    Returns:
        The path that was written.

    Raises:
        FileNotFoundError: for a path where nothing is, an unknown name, and a run without checkpoints.
        CheckpointError: a ValueError, for a file that cannot be read.
        OSError: if the file cannot be written.
    """
    run = read_run(run_or_checkpoint, which=which)
    parts: dict[str, dict[str, Any]] = {}
    for part, within in run.blueprint.weights_of(run.config).values():
        names = {f"{within}.", f"{within}_params."} if within else {""}
        held = run.state["parts"].get(part, {})
        found = {key: value for key, value in held.items() if key.startswith(tuple(names))}
        parts[part] = parts.get(part, {}) | found
    kept = {name: run.state[name] for name in ("format", "version", "made_by", "settings")}
    networks = {part: run.networks[part] for part in parts if part in run.networks}
    made_of = {**run.state["made_of"], "networks": networks}
    counters = {"iterations_done": run.state["counters"]["iterations_done"]}
    return save_checkpoint({**kept, "made_of": made_of, "parts": parts, "counters": counters}, path)


def policy_of(run: SavedRun, actor: nn.Module | None = None) -> LoadedPolicy:
    """The policy of a checkpoint that has been read.

    Args:
        run: what :func:`read_run` gives.
        actor: as for :func:`load_policy`.

    Raises:
        CheckpointError: as for :func:`load_policy`.
    """
    policy = run.blueprint.policy(run.specs, run.config) if actor is None else actor.to(run.device)
    _accelerate(policy, acceleration_of(run.config))
    _load(policy, run, given=actor is not None)
    return LoadedPolicy(policy.requires_grad_(False), run).eval()


def read_run(path: str | os.PathLike[str], device: torch.device | str = "cpu", *, which: Which = "newest") -> SavedRun:
    """The checkpoint that a path names.

    Args:
        path: folder of a run, a file of its checkpoints, or ``zoo:NAME``.
        device: where its tensors are put.
        which: as for :func:`load_policy`.

    Raises:
        FileNotFoundError: for a path where nothing is, an unknown name, and a run without checkpoints.
        CheckpointError: a ValueError, for a file that cannot be read.
        ValueError: for a folder that is none of a run, and another ``which``.
    """
    path, device = run_path(path), resolve_device(str(device))
    if which not in ("newest", "best"):
        raise ValueError(f"which: expected 'newest' or 'best', received {which!r}. Remedy: one of them.")
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(
                f"run: expected the folder of a run or one of its checkpoints, received {path}, where nothing is. "
                "Remedy: a folder that is named at the end of a run, such as runs/ppo-CartPole-0."
            )
        return SavedRun(path, read_checkpoint(path, device), device)
    if not (path / CONFIG).is_file():
        raise ValueError(
            f"run: expected the folder of a run, with its {CONFIG}, received {path}. Remedy: a folder that is named at "
            "the end of a run, such as runs/ppo-CartPole-0."
        )
    folder = CheckpointFolder(path / CHECKPOINTS)
    if which == "best":
        if not folder.best.is_file():
            raise FileNotFoundError(
                f"run: expected a checkpoint that was marked as the best in {folder.path}, received none. Remedy: the "
                "newest, or a run with eval_interval or checkpoint_interval, which mark one."
            )
        return SavedRun(folder.best, read_checkpoint(folder.best, device), device)
    file, state = folder.load_newest(device)
    return SavedRun(file, state, device)


def _accelerate(policy: nn.Module, acceleration: Acceleration) -> None:
    """Networks in the run's precision, as the trainer has them."""
    acceleration.policy(getattr(policy, "actor", policy))
    acting = policy[-1] if isinstance(policy, TensorDictSequential) else policy
    network = getattr(acting, "network", None)
    if isinstance(network, nn.Module):
        acceleration.module(network)


def _load(policy: nn.Module, run: SavedRun, *, given: bool) -> None:
    """Parameters of a checkpoint into the modules of a policy."""
    modules = dict(policy.named_modules())
    for path, (part, within) in run.blueprint.weights_of(run.config).items():
        module = modules.get(path)
        if module is None:
            continue  # an optional part that these settings leave out
        saved = _tensors_within(run.state["parts"].get(part, {}), within)
        if differs := _difference(module, saved, _within(run.networks.get(part, {}), within)):
            own, received = differs
            whose = "the network that was given" if given else f"{run.config.algorithm}'s own network"
            raise CheckpointError(
                f"{run.path}: expected {whose} in {part}, {own}, received {received}. Remedy: load_policy(path, "
                "actor=network) with a network like the one that the run was made with."
            )
        module.load_state_dict(saved)


def _within(names: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The entries at a path and below it, by their names from there."""
    prefix = f"{path}." if path else ""
    below = {key.removeprefix(prefix): value for key, value in names.items() if key.startswith(prefix)}
    return below | ({"": names[path]} if path in names else {})


def _tensors_within(state: Mapping[str, Any], path: str) -> dict[str, torch.Tensor]:
    """The same of a state; below a loss the parameters of a network have the name that TorchRL gives them."""
    found = _within(state, path) or _within(state, f"{path}_params")
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


def _difference(
    module: nn.Module, saved: Mapping[str, torch.Tensor], classes: Mapping[str, str]
) -> tuple[str, str] | None:
    """What a module has, and what the one that was saved has in its place; None where both are alike."""
    own = {path: class_name(each) for path, each in module.named_modules()}
    for path in sorted({*own, *classes}) if classes else ():
        if own.get(path) != classes.get(path):
            return f"{own.get(path, 'nothing')} at {path or 'its top'}", classes.get(path, "nothing")
    shapes = {key: list(value.shape) for key, value in module.state_dict().items()}
    received = {key: list(value.shape) for key, value in saved.items()}
    for key in sorted({*shapes, *received}):
        if shapes.get(key) != received.get(key):
            return f"{key} of {shapes.get(key, 'no shape')}", str(received.get(key, "none"))
    return None
