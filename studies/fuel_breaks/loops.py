"""The loops of fuel_breaks that its memory rules are measured on: lists in four settings, and the package's own."""

import gc
import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from studies.originals.episodes import EPSILON, LEARNING_RATE, Task
from torchrl_perf.bench.memory_loops import (
    AGGRESSIVE,
    BATCH,
    CAPACITY,
    GAMMA,
    LEAKY,
    NUM_ENVS,
    OPTIMISED,
    TRAIN_EVERY,
)
from torchrl_perf.runtime import MemoryGuard, capture, synchronize
from torchrl_perf.systems.fuel_breaks import FuelBreaksConfig, FuelBreaksTrainer
from torchrl_perf.systems.fuel_breaks.trainer import make_fuel_breaks_env

MAIN = (LEAKY, AGGRESSIVE, OPTIMISED)
PACKAGE = "package"
ADDED = {
    "copies": replace(OPTIMISED, name="optimised with copies", to_cpu=True),
    "frequent cleanup": replace(
        AGGRESSIVE, name="optimised, frequent cleanup", to_cpu=False, collects=False, tolerance=OPTIMISED.tolerance
    ),
    "garbage collection": replace(OPTIMISED, name="optimised with gc", conditional=False),
    "trim at each overflow": replace(OPTIMISED, name="optimised, trim at once", tolerance=1.0),
}
"""The optimised rules with one cost of the aggressive ones each."""


class PackageLoop:
    """The package's trainer with the network, updates a frame and batch of the loops on lists.

    A step is four steps of all envs and one update; on CUDA it is one graph. The first steps, in which that is
    recorded, are made at construction.

    Args:
        device: of everything.
        task: what is trained on.
        num_envs: N; capacity and batch grow with it.
        seed: of the run.

    Attributes:
        start_s: seconds until the loop was ready.
        burned: mean burned fraction of the episodes of each interval of the log.
    """

    def __init__(self, device: torch.device, task: Task, *, num_envs: int = NUM_ENVS, seed: int = 0) -> None:
        begin, times = time.perf_counter(), num_envs // NUM_ENVS
        config = FuelBreaksConfig.without_task(
            **{"num_envs": num_envs, "num_steps": TRAIN_EVERY, "minibatch_size": BATCH * times},
            **{"updates_per_iteration": 1, "capacity": CAPACITY * times, "learning_starts": BATCH * times},
            **{"total_steps": 10**9, "learning_rate": LEARNING_RATE, "gamma": GAMMA, "loss": "l2", "double": False},
            **{"eps_start": EPSILON, "eps_end": EPSILON, "target_interval": 200, "reward": "terminal", "n_step": 1},
            **{"size": task.size, "budget": task.cells / task.size**2, "base": task.base, "fires": task.fires},
            **{"hidden_size": task.hidden_size, "blocks": task.blocks, "memory_rule": "allocated"},
            **{"seed": seed, "device": str(device), "mode": "eager", "logger": "none"},
        )
        self.task, self.device = task, device
        self.burned: list[float] = []
        env = make_fuel_breaks_env(config, device, sweeps=task.sweeps, seed=seed)
        self.trainer = FuelBreaksTrainer(config, env=env)
        self.guard = MemoryGuard(device, rule="allocated", gc_interval=config.gc_interval)
        self._graph = capture(self.trainer.iteration, device=device, audit=False) if device.type == "cuda" else None
        for _ in range(config.fill_iterations):
            self.trainer.step()
        for _ in range(4):
            self.step()
        synchronize(device)
        self.flush()
        self.burned.clear()
        self.start_s = time.perf_counter() - begin

    def step(self) -> None:
        """Four steps of all envs and one update, with a run's logging and memory rule."""
        trainer = self.trainer
        (self._graph or trainer.iteration)()
        trainer.iterations_done += 1
        self.guard.after_iteration()
        if trainer.iterations_done % trainer.config.log_interval == 0:
            self.flush()

    def episode(self) -> None:
        """An episode of each env."""
        for _ in range(self.task.cells // TRAIN_EVERY):
            self.step()

    def flush(self) -> dict[str, float]:
        """The metrics of the steps since the last time."""
        row = self.trainer.metrics.flush(self.trainer.iterations_done)
        self.trainer.phases.flush()
        if math.isfinite(share := row.get("fire/burned", math.nan)):
            self.burned.append(share)
        return row

    def close(self) -> None:
        """Releases graph and trainer."""
        if self._graph is not None:
            self._graph.release()
        self.guard.close()
        self.trainer.close()


def seconds_of(call: Callable[[], Any], count: int, device: torch.device) -> float:
    """Wall time of ``count`` calls, to the end of their work on the device."""
    synchronize(device)
    begin = time.perf_counter()
    for number in range(1, count + 1):
        call()
        if number % 50 == 0:
            synchronize(device)  # a replay only queues
    synchronize(device)
    return time.perf_counter() - begin


@contextmanager
def full_collections() -> Any:
    """Counts Python's collections of all generations while it is entered: a list with one entry for each."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(1)

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)
