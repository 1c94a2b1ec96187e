"""Where a trainer's transitions come from: an env in tensors, envs that step on the CPU, or a collector."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase

from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.device import resolve_device
from torchrl_perf.trainers.env_arguments import env_arguments

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

    from torchrl_perf.envs.from_callable import Made

__all__ = ["Source", "check_parts", "device_of", "find_source", "host_collector"]

MakeEnv = Callable[[Any, torch.device], "EnvBase | Made"]


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
        return Source(inner if inner is not None else getattr(collector, "specs", None), inner, [], collector, True)
    own = env is not None
    made = make_env(config, device) if env is None else _made_of(env, config, device)
    if isinstance(made, EnvBase):
        return Source(made, made, own=own)
    if isinstance(made, list):
        return _of_vector_envs(made, device, own=True)
    if made.env is not None:
        return Source(made.env, made.env, own=own, label=made.label)
    from torchrl_perf.collectors.vector_envs import vector_envs

    envs = vector_envs(made, config.num_envs, groups=config.env_groups, processes=config.env_processes)
    return _of_vector_envs(envs, device, own=own, label=made.label, frames=made.frames)


def host_collector(source: Source, policy: nn.Module, **options: Any) -> Any:
    """A ``HostCollector`` of the source's vector envs.

    Args:
        source: with vector envs.
        policy: acts for them.
        **options: of the collector.
    """
    from torchrl_perf.collectors.host_collector import HostCollector

    return HostCollector(source.vector_envs, policy, **options)


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


def _of_vector_envs(
    envs: list[VectorEnv], device: torch.device, *, own: bool, label: str = "", frames: int = 1
) -> Source:
    from torchrl_perf.collectors.host_spaces import host_specs

    source = Source(None, None, envs, None, own, label, frames)
    with source.closed_on_error():
        return Source(host_specs(envs, device), None, envs, None, own, label, frames)


def _made_of(env: Any, config: RunConfig, device: torch.device) -> Any:
    """What an argument ``env=`` stands for."""
    if isinstance(env, EnvBase):
        return env
    import gymnasium
    from gymnasium.vector import VectorEnv

    from torchrl_perf.envs.from_callable import made_by

    several = list(env) if isinstance(env, list | tuple) else [env]
    if several and all(isinstance(each, VectorEnv) for each in several):
        return several
    if isinstance(env, gymnasium.Env) or not callable(env):
        raise ValueError(
            f"env: expected a TorchRL env of batch_size [num_envs], a gymnasium.vector.VectorEnv or a list of them, or "
            f"a class or function that makes an env, received {type(env).__name__}. Remedy: a function that makes one, "
            "such as lambda: gymnasium.make('CartPole-v1'), which is called num_envs times."
        )
    return made_by(env, config.num_envs, device=lambda: device, arguments=env_arguments(config.env_args))
