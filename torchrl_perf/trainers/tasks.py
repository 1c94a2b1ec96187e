"""The env that a config names: a task of the package, or any other that has a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchrl_perf.envs import registry
from torchrl_perf.registry import TASKS
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.env_arguments import env_arguments

if TYPE_CHECKING:
    from torchrl_perf.envs.from_callable import Made

__all__ = ["TASKS", "fitting_rows", "make_env"]


def make_env(config: RunConfig, device: torch.device, **arguments: Any) -> Made:
    """The env that the config names, ``num_envs`` times: in tensors, or what makes those that step on the CPU.

    Args:
        config: names the env, and its arguments in ``env_args``.
        device: of an env in tensors.
        **arguments: of the env, in place of those.

    Raises:
        ValueError: for a name that is none, arguments that the env does not take, and groups or processes of an env in
            tensors.
        ImportError: for an env whose package is absent.
    """
    chosen = {**env_arguments(config.env_args), **arguments}
    made = registry.make(config.env, config.num_envs, device=lambda: device, arguments=chosen)
    if made.env is not None and (config.env_groups != 1 or config.env_processes):
        name = "env_groups" if config.env_groups != 1 else "env_processes"
        raise ValueError(
            f"{name}: expected an env that steps on the CPU, such as Gymnasium's, received {config.env}, which is in "
            "tensors. Remedy: leave it out."
        )
    return made


def fitting_rows(config: RunConfig, rows: int) -> int:
    """The least number of rows, from ``rows`` on, that the config's env can have.

    Args:
        config: names the env, and its arguments in ``env_args``.
        rows: how many are wanted.
    """
    if config.env_class:  # of a system
        return rows
    return registry.fitting_rows(config.env, rows, env_arguments(config.env_args))
