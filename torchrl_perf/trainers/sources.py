"""Where a trainer's transitions come from: an env in tensors, envs that step on the CPU, or a collector."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_perf.collectors.env_state import chain
from torchrl_perf.collectors.stepping import resets_inside_step
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.device import resolve_device
from torchrl_perf.trainers.env_arguments import env_arguments
from torchrl_perf.transforms.action_bounds import ActionBounds, bounds_of

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

    from torchrl_perf.envs.from_callable import Made

__all__ = [
    "Source",
    "check_parts",
    "device_of",
    "find_source",
    "given_source",
    "gymnasium_source",
    "host_collector",
    "source_of",
]

MakeEnv = Callable[[Any, torch.device], "EnvBase | Made"]
OF_VECTOR_ENVS = ("num_envs", "vectorization_mode", "vector_kwargs")
"""Arguments of ``gymnasium.make_vec`` that say how envs are stepped, and not what they are."""


@dataclass(frozen=True)
class Source:
    """What a trainer was given, or made as its config says."""

    specs: Any
    """What has ``observation_spec``, ``action_spec`` and ``batch_size``: the env, or what is known of CPU envs."""
    env: EnvBase | None = None
    """In tensors; None where the envs step on the CPU."""
    vector_envs: list[VectorEnv] = field(default_factory=list)
    """Gymnasium vector envs, for a collector that the trainer makes."""
    collector: BaseCollector | None = None
    """That was given."""
    own: bool = False
    """Whether env or collector were given, and the env not made as the config says."""
    label: str = ""
    """Name of the env's class, for folders; empty where the config's or the class's own serves."""
    frames: int = 1
    """Frames of an observation that is a stack of them."""
    max_episode_steps: int | None = None
    """Steps after which an episode of vector envs is truncated, as far as they say."""
    again: Callable[[int], Source] | None = None
    """Makes so many other envs of the same kind; None where only who has made these can, and for the config's own."""

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Within it an error closes the vector envs, whose processes would outlive the trainer that was not made."""
        try:
            yield
        except BaseException:
            for envs in self.vector_envs:
                with contextlib.suppress(Exception):  # the first error is the one to report
                    envs.close()
            raise


def device_of(config: RunConfig, env: Any, collector: BaseCollector | None) -> torch.device:
    """The device of what was given, or else the config's.

    Raises:
        ValueError: for CUDA where there is none.
    """
    given: Any = collector if collector is not None else env if isinstance(env, EnvBase) else None
    return resolve_device(config.device if given is None or given.device is None else str(given.device))


def find_source(
    config: RunConfig, device: torch.device, *, env: Any, collector: BaseCollector | None, make_env: MakeEnv
) -> Source:
    """The source of a trainer's arguments.

    Args:
        config: settings of the run.
        device: of policy and updates.
        env: a TorchRL env ``[N]``; a ``gymnasium.vector.VectorEnv`` or a list of them; a class or function that makes
            an env of any kind; None for the config's.
        collector: that collects, or None.
        make_env: makes the config's env.

    Raises:
        ValueError: for what is none of these, and envs that cannot be made.
    """
    if collector is not None:
        inner = env if env is not None else getattr(collector, "env", None)
        envs = [group.envs for group in getattr(collector, "groups", ())]
        specs = inner if inner is not None else getattr(collector, "specs", None)
        return Source(specs, inner, [], collector, own=True, again=_same_id(envs, device))
    options: dict[str, Any] = {"groups": config.env_groups, "processes": config.env_processes}
    if env is None:
        return source_of(make_env(config, device), config.num_envs, device, **options)
    found = replace(source_of(_made_of(env, config, device), config.num_envs, device, **options), own=True)
    if isinstance(env, EnvBase):
        return found
    if not callable(env):  # vector envs
        return replace(found, again=_same_id(found.vector_envs, device))
    return replace(found, again=lambda rows: source_of(_made_of(env, config.for_rows(rows), device), rows, device))


def source_of(made: Any, num_envs: int, device: torch.device, *, groups: int = 1, processes: bool = False) -> Source:
    """The source of an env, or of what makes one.

    Args:
        made: a TorchRL env, a list of Gymnasium vector envs, or a :class:`~torchrl_perf.envs.from_callable.Made`.
        num_envs: N, of vector envs that are made here.
        device: of policy and batches.
        groups: vector envs that are made, see :func:`~torchrl_perf.collectors.vector_envs.vector_envs`.
        processes: whether each of their envs steps in a process of its own.
    """
    if isinstance(made, EnvBase):
        return _of_tensors(made)
    if isinstance(made, list):
        return _of_vector_envs(made, device)
    if made.env is not None:
        return replace(_of_tensors(made.env), label=made.label)
    from torchrl_perf.collectors.vector_envs import vector_envs

    envs = vector_envs(made, num_envs, groups=groups, processes=processes)
    found = _of_vector_envs(envs, device)
    limit = found.max_episode_steps or made.max_episode_steps
    return replace(found, label=made.label, frames=made.frames, max_episode_steps=limit)


def _of_tensors(env: EnvBase) -> Source:
    """The source of a TorchRL env, which gets actions within its bounds as vector envs do.

    Envs that reset inside their step see to that themselves, as those of this package do.
    """
    if not resets_inside_step(chain(env)[-1]) and bounds_of(env):
        env = TransformedEnv(env, ActionBounds(env), auto_unwrap=False)
    return Source(env, env)


def given_source(env: Any, device: torch.device) -> Source:
    """The source of an env that is there already.

    Args:
        env: a TorchRL env ``[N]``, a ``gymnasium.vector.VectorEnv`` or a list of them.
        device: of policy and batches, for vector envs.

    Raises:
        ValueError: for anything else.
    """
    if (found := _ready(env)) is None:
        raise ValueError(
            f"env: expected a TorchRL env with a batch_size or a gymnasium.vector.VectorEnv, received "
            f"{type(env).__name__}. Remedy: CartPole(num_envs) or gymnasium.make_vec('CartPole-v1', num_envs=8)."
        )
    return source_of(found, 0, device)


def gymnasium_source(name: str, num_envs: int, device: torch.device, **arguments: Any) -> Source:
    """The source of a vector env of one of Gymnasium's ids, as ``gymnasium.make_vec`` makes it.

    Args:
        name: the id.
        num_envs: N.
        device: of policy and batches.
        **arguments: of ``gymnasium.make_vec``.

    Raises:
        TypeError: for arguments that the env does not take.
    """
    import gymnasium

    envs = gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode="sync", **arguments)
    return _of_vector_envs([envs], device)


def host_collector(source: Source, policy: nn.Module, **options: Any) -> Any:
    """A ``HostCollector`` of the source's vector envs, which get actions within their bounds.

    Args:
        source: with vector envs.
        policy: acts for them.
        **options: of the collector.
    """
    from torchrl_perf.collectors.host_collector import HostCollector

    return HostCollector(source.vector_envs, policy, clip_actions=True, **options)


def check_parts(source: Source, collector: Any, policy: nn.Module, config: Any) -> None:
    """Refuse an env or a collector that does not fit the config or the policy.

    Args:
        source: of the trainer.
        collector: that was given, or made for the source.
        policy: of the trainer.
        config: whose ``num_streams``, ``rows_per_iteration`` and ``rows_in_words`` say how many rows there are.

    Raises:
        ValueError: naming what differs.
    """
    streams, rows, words = config.num_streams, config.rows_per_iteration, config.rows_in_words
    if source.env is not None and source.env.batch_size != (streams,):
        raise ValueError(
            f"env: expected batch_size [{streams}], the config's {words.removesuffix(' * num_steps')}, received "
            f"{list(source.env.batch_size)}. Remedy: make both the same."
        )
    frames = collector.requested_frames_per_batch
    if frames != rows or getattr(collector, "num_envs", streams) != streams:
        raise ValueError(
            f"collector: expected {streams} envs and frames_per_batch={rows}, the config's {words}, received "
            f"{getattr(collector, 'num_envs', 'other')} envs and {frames}. Remedy: make both the same."
        )
    if collector.policy is not policy:
        raise ValueError(
            f"collector: expected it to act with the trainer's policy, received {type(collector.policy).__name__}. "
            "Remedy: pass the same object to the collector and to the trainer."
        )


def _of_vector_envs(envs: list[VectorEnv], device: torch.device) -> Source:
    from torchrl_perf.collectors.host_spaces import host_specs

    source = Source(None, vector_envs=envs)
    with source.closed_on_error():
        return replace(source, specs=host_specs(envs, device), max_episode_steps=_limit(envs[0]))


def _limit(envs: Any) -> int | None:
    """Steps of an episode of a vector env, by its spec or that of its first env."""
    specs = [getattr(each, "spec", None) for each in (envs, *getattr(envs, "envs", ())[:1])]
    return next((limit for spec in specs if (limit := getattr(spec, "max_episode_steps", None))), None)


def _same_id(envs: list[Any], device: torch.device) -> Callable[[int], Source] | None:
    """Makes vector envs of the id that Gymnasium made others from; None for others, and below wrappers."""
    import gymnasium

    # a wrapper changes what is observed or rewarded, and only who has put it there can do so again
    spec = None if not envs or isinstance(envs[0], gymnasium.vector.VectorWrapper) else envs[0].spec
    if spec is None or spec.additional_wrappers or spec.id not in gymnasium.registry:
        return None
    arguments = {name: value for name, value in dict(spec.kwargs).items() if name not in OF_VECTOR_ENVS}
    return lambda rows: gymnasium_source(spec.id, rows, device, **arguments)


def _made_of(env: Any, config: RunConfig, device: torch.device) -> Any:
    """What an argument ``env=`` stands for."""
    if (found := _ready(env)) is not None:
        return found
    import gymnasium

    from torchrl_perf.envs.from_callable import made_by

    if isinstance(env, gymnasium.Env) or not callable(env):
        raise ValueError(
            f"env: expected a TorchRL env of batch_size [num_envs], a gymnasium.vector.VectorEnv or a list of them, or "
            f"a class or function that makes an env, received {type(env).__name__}. Remedy: a function that makes one, "
            "such as lambda: gymnasium.make('CartPole-v1'), which is called num_envs times."
        )
    return made_by(env, config.num_envs, device=lambda: device, arguments=env_arguments(config.env_args))


def _ready(env: Any) -> Any:
    """An env in tensors, or a list of vector envs; None for anything else."""
    if isinstance(env, EnvBase):
        return env
    from gymnasium.vector import VectorEnv

    several = list(env) if isinstance(env, list | tuple) else [env]
    return several if several and all(isinstance(each, VectorEnv) for each in several) else None
