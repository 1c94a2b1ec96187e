"""The package's tasks by name."""

from typing import get_args

import torch
from torchrl.envs import EnvBase

from torchrl_perf import envs
from torchrl_perf.trainers.config import EnvName, RunConfig

TASKS: tuple[str, ...] = (*get_args(EnvName), "Ferry", "HybridTarget")
"""Names of the tasks."""


def make_env(config: RunConfig, device: torch.device) -> EnvBase:
    """The task that the config names, ``num_envs`` times.

    Raises:
        ValueError: for a name that is none of them.
    """
    if config.env not in TASKS:
        raise ValueError(
            f"env: expected one of {', '.join(TASKS)}, received {config.env!r}. Remedy: one of these, or a trainer "
            "made with env= or collector=."
        )
    return getattr(envs, config.env)(config.num_envs, device=device)
