"""The colony as durotaxis had it: one at a time, nodes in Python lists, features made into a tensor at each step.

The equations of :class:`torchrl_perf.envs.Durotaxis` with its defaults: linear stiffness, reward by the move of the
centroid. Which nodes are deleted, and how the reward's parts are put together, is given: these are what the original
changed.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from studies.originals.rewards import literal

SIZE, GOAL, CRITICAL, START, LEFTWARD, LONGEST = 400.0, 0.95, 100, 5, 30, 1000
MARGIN, HARDEST = 4.0, 4.99
FEATURES = 11
ENDINGS = {"over": -15.0, "empty": -100.0, "left": -50.0, "success": 500.0}

Choose = Callable[[Tensor, int], set[int]]
Breakdown = Callable[[tuple[float, ...]], dict[str, Any]]


@dataclass
class ColonyLoop:
    """One colony.

    Attributes:
        choose: the k leftmost of the features ``[N, 11]``.
        breakdown: the dict of a step's reward parts.
        device: of the features.
        nodes: ``[x, y, age]`` of each node.
    """

    choose: Choose
    breakdown: Breakdown = literal
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    nodes: list[list[float]] = field(default_factory=list)
    centroid: float = 0.0
    leftward: int = 0
    steps: int = 0

    def reset(self) -> Tensor:
        """A fresh colony near the left edge; its features."""
        self.nodes = sorted(
            [random.uniform(0.0, 0.1 * SIZE), random.uniform(0.4 * SIZE, 0.6 * SIZE), 0.0] for _ in range(START)
        )
        self.begin()
        return self.features()

    def begin(self) -> None:
        """Counts from the nodes as they are."""
        self.centroid, self.leftward, self.steps = self._centre(), 0, 0

    def features(self) -> Tensor:
        """``[N, 11]`` on the device, the columns of :data:`torchrl_perf.envs.durotaxis.features.NODE_FEATURES`."""
        count = max(1, len(self.nodes))
        xs, ys, hard = [n[0] for n in self.nodes], [n[1] for n in self.nodes], [stiffness(n[0]) for n in self.nodes]
        low, span = min(xs, default=0.0), max(xs, default=0.0) - min(xs, default=0.0)
        centre_y, mean = sum(ys) / count, sum(hard) / count
        rows = [
            [
                x / SIZE,
                y / SIZE,
                here / HARDEST,
                (x - self.centroid) / (0.1 * SIZE),
                (y - centre_y) / (0.1 * SIZE),
                (x - low) / span if span > 0 else 0.0,
                age / (age + 10.0),
                float(age == 0),
                GOAL - x / SIZE,
                2.0 * min(y, SIZE - y) / SIZE,
                float(here < mean),
            ]
            for (x, y, age), here in zip(self.nodes, hard, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.float32, device=self.device).reshape(-1, FEATURES)

    def step(self, action: tuple[float, ...], features: Tensor) -> tuple[float, str, dict[str, Any]]:
        """Deletes and spawns.

        Args:
            action: share to delete, gamma, alpha, noise, theta.
            features: what :meth:`features` gave for the colony as it is.

        Returns:
            Reward, how the episode ended ("" if it goes on), and the reward's parts.
        """
        share, gamma, alpha, noise, theta = action
        count = len(self.nodes)
        doomed = self.choose(features, math.floor(np.float32(share) * np.float32(count)))
        parents = [node for index, node in enumerate(self.nodes) if index not in doomed]
        children = []
        for x, y, _ in parents:
            radius = gamma / (1.0 + (alpha / stiffness(x)) ** 2) + noise
            child_x = min(max(x + radius * math.cos(theta), MARGIN), SIZE - MARGIN)
            child_y = min(max(y + radius * math.sin(theta), MARGIN), SIZE - MARGIN)
            children.append([child_x, child_y, 0.0])
        self.nodes = [[x, y, age + 1.0] for x, y, age in parents] + children
        self.steps += 1
        return self._reward()

    def _reward(self) -> tuple[float, str, dict[str, Any]]:
        centre = self._centre()
        moved, self.centroid = centre - self.centroid, centre
        self.leftward = self.leftward + 1 if moved < 0 else 0
        ending = self._ending()
        end = min(max(0.02 * ENDINGS.get(ending, 0.0), -10.0), 10.0)
        move = 5.0 * moved / (GOAL * SIZE)
        total, survival, count = move + end, 0.1, float(len(self.nodes))
        parts = (total, 0.0, 0.0, 0.0, 0.0, 0.0, move, 0.0, 0.0, survival, 0.0, end, count)
        return total, ending, self.breakdown(parts)

    def _ending(self) -> str:
        if not self.nodes:
            return "empty"
        if len(self.nodes) > CRITICAL:
            return "over"
        if max(node[0] for node in self.nodes) >= GOAL * SIZE:
            return "success"
        if self.leftward >= LEFTWARD:
            return "left"
        return "time" if self.steps >= LONGEST else ""

    def _centre(self) -> float:
        return sum(node[0] for node in self.nodes) / len(self.nodes) if self.nodes else 0.0


def stiffness(x: float) -> float:
    """``m floor(x) + b`` of a place cut to the substrate."""
    return 0.01 * math.floor(min(max(x, 0.0), SIZE - 1.0)) + 1.0
