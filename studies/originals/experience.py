"""How marine brought experience from its envs to its replay buffer, before and after its rewrite.

A step of ``E`` envs with ``R`` robots is a dict of tensors: observation and next observation ``[E, R, O]``, action
``[E, R]`` or ``[E, R, D]``, reward ``[E, R]``, done, goal, collision and active ``[E, R]`` bool. A row is kept where
the robot was active before the step.
"""

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

NAMES = ("observation", "action", "reward", "next_observation", "done", "active", "goal", "collision")
STORED = NAMES[:5]


class ListReplay:
    """A deque of transitions in NumPy, sampled at random and stacked.

    Args:
        capacity: number of rows.
    """

    def __init__(self, capacity: int) -> None:
        self.rows: deque[tuple[Any, ...]] = deque(maxlen=capacity)

    def add(self, row: tuple[Any, ...]) -> None:
        """Appends a transition."""
        self.rows.append(row)

    def sample(self, batch_size: int, device: torch.device) -> dict[str, Tensor]:
        """Rows drawn without replacement, stacked and brought to the device."""
        chosen = random.sample(self.rows, batch_size)
        columns = zip(STORED, zip(*chosen, strict=True), strict=True)
        return {name: torch.from_numpy(np.array(column)).to(device) for name, column in columns}


def insert_by_robot(step: dict[str, Tensor], replay: ListReplay) -> None:
    """Before: each entry of each robot is brought to the host on its own."""
    num_envs, num_robots = step["active"].shape
    for env in range(num_envs):
        for robot in range(num_robots):
            if not step["active"][env, robot].item():
                continue
            replay.add(tuple(step[name][env, robot].cpu().numpy() for name in STORED))


def insert_whole(step: dict[str, Tensor], replay: ListReplay) -> dict[str, list[Any]]:
    """After: each entry is brought to the host once, and filtered there.

    Returns:
        The events of the step as lists, for its log.
    """
    host = {name: step[name].cpu().numpy() for name in NAMES}
    active = host["active"].astype(bool)
    kept = [host[name][active] for name in STORED]
    for row in zip(*kept, strict=True):
        replay.add(row)
    return {name: host[name].tolist() for name in ("reward", "done", "goal", "collision")}
