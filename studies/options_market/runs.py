"""The loops of options_market: the original's, its rewrite, and the package's, with one set of numbers."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from studies.options_market.agents import CORRELATION, PlainUpdate, serial_actor, serial_selector
from studies.originals.options_loop import LoopSettings, LoopTraining
from studies.sitting import Sitting
from torchrl_perf.runtime import capture
from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.systems.options_market.trainer import OptionsMarketTrainer

BEFORE, AFTER, EAGER, WHOLE, COMPILED = (
    *("one env after the other", "the original's batches", "package"),
    *("package, in a graph", "package, compiled"),
)


class PackageLoop:
    """The package's loop with a filled buffer.

    Args:
        config: of the run; the mode is replaced.
        mode: "eager", "whole" (an eager iteration in one graph), or "compiled" (and in a graph).
    """

    def __init__(self, config: OptionsMarketConfig, mode: str) -> None:
        self.trainer = OptionsMarketTrainer(replace(config, mode="graph" if mode == "compiled" else "eager"))
        self.frames, self.graph = config.batch_size, None
        for _ in range(config.fill_iterations):
            self.trainer.step()
        self.iteration: Callable[[], Any] = self.trainer.step
        if mode == "whole":
            self.iteration = self.graph = capture(self.trainer.iteration, device=self.trainer.device, audit=False)
        for _ in range(4 if mode != "eager" else 0):
            self.iteration()

    def close(self) -> None:
        """Releases the graph and the trainer."""
        if self.graph is not None:
            self.graph.release()
        self.trainer.close()
        gc.collect()


def sizes(sitting: Sitting, **changes: Any) -> dict[str, Any]:
    """What a sitting's configs change: small networks where it is quick, a replay of 200,000 rows on CUDA."""
    small: dict[str, Any] = {"hidden_size": 32, "minibatch_size": 32, "learning_starts": 128}
    small |= {"num_steps": 2, "updates_per_iteration": 4}
    large = {"capacity": 200_000, "option_capacity": 50_000}
    return (small if sitting.quick else large if sitting.cuda else {}) | changes


def original(config: OptionsMarketConfig, device: torch.device, batched: bool, seed: int = 0) -> LoopTraining:
    """The original's loop, filled, with networks of its own that begin as the package's."""
    trainer = OptionsMarketTrainer(replace(config, seed=seed))
    numbers = LoopSettings(
        num_envs=config.num_envs,
        batched=batched,
        capacity=config.capacity,
        option_capacity=config.option_capacity,
        batch_size=config.minibatch_size,
        updates=config.updates_per_iteration // config.num_steps,
        gamma=config.gamma,
        reward_scale=config.reward_scale,
        correlation=CORRELATION,
    )
    actor: Any = trainer.loss.actor
    update = PlainUpdate(trainer)
    loop = LoopTraining(serial_selector(trainer), serial_actor(actor, device), update, numbers, device, seed)
    loop.fill(config.fill_iterations * config.num_steps)
    return loop


def size_note(sitting: Sitting) -> str:
    """What a remark says of the sitting."""
    return "small networks" if sitting.quick else "" if sitting.cuda else "on a CPU"
