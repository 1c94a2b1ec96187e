"""The package's tasks by name."""

import torch
from torchrl.envs import EnvBase

from torchrl_perf import envs
from torchrl_perf.trainers.config import TASKS, RunConfig, unknown_task

__all__ = ["TASKS", "make_env"]


def make_env(config: RunConfig, device: torch.device) -> EnvBase:
    """The task that the config names, ``num_envs`` times.

    Raises:
        ValueError: for a name that is none of them.
    """
    if config.env not in TASKS:
        raise ValueError(unknown_task(config.env))
    return getattr(envs, config.env)(config.num_envs, device=device)
