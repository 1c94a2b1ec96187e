"""What torch.optim keeps of hooks around a step, which it shows nowhere."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim import optimizer as module

__all__ = ["has_step_hooks", "step_hooks"]

Hook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Hook], list[Hook]]:
    """What is called before and behind a step of an optimiser, that of all optimisers among it, in order."""
    before = chain(module._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values())
    behind = chain(optimizer._optimizer_step_post_hooks.values(), module._global_optimizer_post_hooks.values())
    return list(before), list(behind)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something is called before or behind a step."""
    return any(step_hooks(optimizer))
