"""The training loop of options_market: NumPy envs, one by one before its rewrite, in batches of arrays after."""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from studies.originals.dict_replay import ArrayReplay, DequeReplay, Row, flatten_each, flatten_keys
from studies.originals.market import MarketLoop
from studies.originals.options import SerialActor, SerialSelector, end_probability

Batch = dict[str, Tensor]
Update = Callable[[Batch, Batch], dict[str, Tensor]]
log = logging.getLogger(__name__)
log.setLevel(logging.CRITICAL)


@dataclass
class Running:
    """The option that runs in an env.

    Attributes:
        option: its index.
        age: steps that it has executed; 0 where none runs.
        start: what is kept of its choice.
        returns: discounted reward so far.
    """

    option: int = 0
    age: int = 0
    start: Row = field(default_factory=dict)
    returns: float = 0.0


@dataclass(frozen=True)
class LoopSettings:
    """Numbers of the loop.

    Attributes:
        num_envs: envs.
        batched: what the rewrite changed: one pass for all envs, NumPy arrays as replay.
        capacity: rows of the replay of steps.
        option_capacity: rows of the replay of options.
        batch_size: rows of an update.
        updates: after each step of all envs.
        gamma: discount of a step.
        reward_scale: what stored rewards are multiplied by.
        correlation: of the sentiment.
    """

    num_envs: int = 16
    batched: bool = False
    capacity: int = 100_000
    option_capacity: int = 10_000
    batch_size: int = 256
    updates: int = 2
    gamma: float = 0.992
    reward_scale: float = 100.0
    correlation: float = 0.5


class LoopTraining:
    """SAC with options, step by step.

    Args:
        selector: chooses options.
        actor: chooses the size of orders.
        update: one update from a batch of steps and one of options; returns what is logged, 0-d tensors.
        settings: numbers of the loop.
        device: of networks and batches.
        seed: of the markets.

    Attributes:
        rewards: of all steps, not scaled.
        records: what was logged, by name.
    """

    def __init__(
        self,
        selector: SerialSelector,
        actor: SerialActor,
        update: Update,
        settings: LoopSettings,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.selector, self.actor, self.update, self.settings, self.device = selector, actor, update, settings, device
        seeds = [settings.num_envs * seed + index for index in range(settings.num_envs)]
        self.envs = [MarketLoop(number, settings.correlation) for number in seeds]
        self.observations = [env.observe() for env in self.envs]
        self.running = [Running() for _ in self.envs]
        self.replay: DequeReplay | ArrayReplay | None = None
        self.choices: DequeReplay | ArrayReplay | None = None
        self.action_buffer = np.zeros((settings.num_envs, 1), np.float32)
        self.rewards: list[float] = []
        self.records: dict[str, list[float]] = {}

    def step(self) -> None:
        """One step of all envs; steps and options that ended are kept."""
        batched = self.settings.batched
        flat = (flatten_keys if batched else flatten_each)(self.observations)
        self.choose(flat)
        options = [running.option for running in self.running]
        if batched:
            self.action_buffer[:] = self.actor.predict_all(flat, options)
            actions = self.action_buffer
        else:
            actions = np.array([self.actor.predict_one(row, o) for row, o in zip(flat, options, strict=True)])
        results = [env.step(float(action[0])) for env, action in zip(self.envs, actions, strict=True)]
        after = (flatten_keys if batched else flatten_each)([result[0] for result in results])
        rows = []
        for index, (observation, reward, terminated, truncated) in enumerate(results):
            running = self.running[index]
            scaled = reward * self.settings.reward_scale
            running.returns += self.settings.gamma**running.age * scaled
            running.age += 1
            log.debug(f"env {index}: option {running.option}, reward {reward:.6f}")
            row = self.row(flat[index], after[index], running, terminated)
            rows.append(row | {"action": actions[index].copy(), "reward": np.float32([scaled])})
            self.rewards.append(reward)
            self.observations[index] = observation
            if terminated or truncated:
                self.close(running, after[index], terminated)
                self.running[index] = Running()
                self.observations[index] = self.envs[index].begin()
        if self.replay is None:
            self.replay = self.make(self.settings.capacity, rows[0])
        self.replay.add(rows)

    def row(self, before: np.ndarray, after: np.ndarray, running: Running, terminated: bool) -> Row:
        """A transition without action and reward."""
        return {
            "observation": before,
            "active_option": running.option,
            "next_observation": after,
            "option": running.option,
            "option_age": running.age,
            "terminated": np.array([terminated]),
        }

    def choose(self, flat: np.ndarray) -> None:
        """Ends options, and chooses new ones where none runs."""
        due = []
        for index, running in enumerate(self.running):
            chance = end_probability(running.option, running.age, self.observations[index]) if running.age else 0.0
            if random.random() < chance:
                self.close(running, flat[index], False)
                self.running[index] = Running()
            if not self.running[index].age:
                due.append(index)
        if not due:
            return
        seen = [self.observations[index] for index in due]
        if self.settings.batched:
            found = list(zip(*self.selector.select_all(seen), strict=True))
        else:
            found = [self.selector.select_one(observation) for observation in seen]
        for index, (option, log_prob, allowed) in zip(due, found, strict=True):
            start = {
                "observation": flat[index],
                "active_option": option,
                "option_log_prob": np.float32(log_prob),
                "option_available": np.array(allowed),
            }
            self.running[index] = Running(option, 0, start)

    def close(self, running: Running, after: np.ndarray, terminated: bool) -> None:
        """Keeps an option that has ended, with its return."""
        row = running.start | {
            "returns": np.float32([running.returns]),
            "gamma": np.float32([self.settings.gamma**running.age]),
            "next_observation": after,
            "terminated": np.array([terminated]),
        }
        if self.choices is None:
            self.choices = self.make(self.settings.option_capacity, row)
        self.choices.add([row])

    def make(self, capacity: int, example: Row) -> DequeReplay | ArrayReplay:
        """A replay of either kind."""
        return ArrayReplay(capacity, example) if self.settings.batched else DequeReplay(capacity)

    def learn(self) -> None:
        """The updates that follow a step; each of their numbers is read."""
        assert self.replay is not None and self.choices is not None
        size = self.settings.batch_size
        for _ in range(self.settings.updates):
            numbers = self.update(self.replay.sample(size, self.device), self.choices.sample(size, self.device))
            for name, value in numbers.items():
                self.records.setdefault(name, []).append(value.item())

    def fill(self, steps: int) -> None:
        """Steps without updates, and more where no option has ended yet."""
        for _ in range(steps):
            self.step()
        while self.choices is None:
            self.step()

    def iteration(self, steps: int) -> Any:
        """Some steps of all envs, each followed by its updates."""
        for _ in range(steps):
            self.step()
            self.learn()
