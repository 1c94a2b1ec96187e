"""A deep Q-learning loop as it is often written, with the memory rules that such loops acquire; the package's own."""

import copy
import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_perf.envs import CartPole
from torchrl_perf.runtime import capture
from torchrl_perf.trainers import DQNConfig, DQNTrainer

NUM_ENVS, TRAIN_EVERY, BATCH, CAPACITY, HIDDEN, GAMMA = 8, 4, 32, 2_000, 64, 0.95
HISTORY = 2_000


@dataclass(frozen=True)
class Setting:
    """Memory rules of a loop.

    0 as an interval is never. A cleanup is ``gc.collect()`` and ``torch.cuda.empty_cache()``, or, with ``conditional``,
    the second where 80% of the device is allocated and the first every 5,000 training steps.
    """

    name: str
    keeps_graph: bool = False
    """Store tensors with their graph, in lists without a bound."""
    to_cpu: bool = False
    """Copy each stored tensor to the CPU, and back for training."""
    collects: bool = True
    """Whether a cleanup runs the garbage collector."""
    steps: int = 0
    """Env steps from one cleanup to the next."""
    train_steps: int = 0
    """Training steps from one cleanup to the next."""
    episodes: int = 0
    """Episodes from one cleanup to the next."""
    conditional: bool = False
    """Clean up only where it is due."""
    tolerance: float = 1.0
    """Share of the bound above which a list is trimmed to it."""


LEAKY = Setting("leaky", keeps_graph=True)
AGGRESSIVE = Setting("aggressive", to_cpu=True, steps=50, train_steps=100, episodes=10)
OPTIMISED = Setting("optimised", steps=200, train_steps=2_000, episodes=50, conditional=True, tolerance=1.2)
WITHOUT = {
    "copies": replace(AGGRESSIVE, name="aggressive without copies", to_cpu=False),
    "frequent cleanup": replace(AGGRESSIVE, name="aggressive, rare cleanup", steps=200, train_steps=2_000, episodes=50),
    "garbage collection": replace(AGGRESSIVE, name="aggressive without gc", collects=False),
}
SETTINGS = (LEAKY, AGGRESSIVE, *WITHOUT.values(), OPTIMISED)


class ListLoop:
    """One transition of one env an item, in Python lists: act, step, remember, replay, clean up as the setting says.

    Args:
        setting: the rules.
        device: of envs and network.
    """

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self.setting, self.device = setting, device
        torch.manual_seed(0)
        random.seed(0)
        self.env = CartPole(NUM_ENVS, device=device)
        layers = [nn.Linear(4, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2)]
        self.net = nn.Sequential(*layers).to(device)
        self.target = copy.deepcopy(self.net)
        self.adam = torch.optim.Adam(self.net.parameters(), lr=1e-4)
        self.memory: list[tuple[Tensor, ...]] = []
        self.losses: list[Any] = []
        self.td = self.env.reset()
        self.count = self.trained = self.finished = 0

    def step(self) -> None:
        """One step of all envs, a training step every fourth time, and the cleanup that is due."""
        self.clean_up(self.advance())

    def warm_up(self) -> None:
        """A few steps without a cleanup, and their last transitions again until the list is full."""
        for _ in range(5 * TRAIN_EVERY):
            self.advance()
        latest = self.memory[-NUM_ENVS:]
        self.memory += latest * ((CAPACITY - len(self.memory)) // len(latest))

    def advance(self) -> int:
        """One step of all envs, and a training step every fourth time; returns the episodes that were finished."""
        observation = self.td["observation"]
        values = self.net(observation)
        greedy = values.argmax(-1)
        action = torch.where(torch.rand(NUM_ENVS, device=self.device) < 0.1, torch.randint_like(greedy, 2), greedy)
        following, self.td = self.env.step_and_maybe_reset(self.td.set("action", action))
        nexts = following["next"]
        done = nexts["done"]
        for n in range(NUM_ENVS):
            self.remember(observation[n], action[n], nexts["reward"][n], nexts["observation"][n], done[n], values[n])
        self.count += 1
        before, self.finished = self.finished, self.finished + int(done.sum())
        if self.count % TRAIN_EVERY == 0 and len(self.memory) >= BATCH:
            self.train()
        return before

    def remember(self, *transition: Tensor) -> None:
        """Appends a transition, and trims the list."""
        setting = self.setting
        if not setting.keeps_graph:
            transition = transition[:-1]
            transition = tuple(value.cpu().detach() if setting.to_cpu else value.detach() for value in transition)
        self.memory.append(transition)
        if not setting.keeps_graph and len(self.memory) > CAPACITY * setting.tolerance:
            self.memory = self.memory[-CAPACITY:]

    def train(self) -> None:
        """One step of Adam on 32 transitions."""
        chosen = random.sample(self.memory, BATCH)
        observation, action, reward, following, done = (
            torch.stack([row[k].detach() for row in chosen]).to(self.device) for k in range(5)
        )
        with torch.no_grad():
            value = self.target(following).amax(-1)
            goal = reward.squeeze(-1) + GAMMA * value * ~done.squeeze(-1)
        loss = F.mse_loss(self.net(observation).gather(-1, action.unsqueeze(-1)).squeeze(-1), goal)
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        self.trained += 1
        if self.trained % 200 == 0:
            self.target.load_state_dict(self.net.state_dict())
        if self.setting.keeps_graph:
            self.losses.append((loss, observation))
            return
        self.losses.append(loss.item())
        if len(self.losses) > HISTORY * self.setting.tolerance:
            self.losses = self.losses[-HISTORY:]

    def clean_up(self, finished_before: int) -> None:
        """Whatever is due after this step."""
        setting, trained = self.setting, self.trained if self.count % TRAIN_EVERY == 0 else 0
        due = _due(self.count, setting.steps) or _due(trained, setting.train_steps)
        if setting.episodes:
            due = due or self.finished // setting.episodes > finished_before // setting.episodes
        if not due:
            return
        if not setting.conditional:
            if setting.collects:
                gc.collect()
            empty_cache(self.device)
            return
        if _due(trained, 5_000):
            gc.collect()
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            if torch.cuda.memory_allocated(self.device) > 0.8 * total:
                torch.cuda.empty_cache()


def native(device: torch.device, *, compiles: bool = True) -> tuple[DQNTrainer, Callable[[], None]]:
    """The package's loop with the same envs, network, updates a frame and batch, and its step with a run's logging.

    Args:
        device: of envs and network.
        compiles: whether the graph on CUDA holds compiled functions, which takes half a minute to make.
    """
    config = DQNConfig.without_task(
        num_envs=NUM_ENVS,
        num_steps=TRAIN_EVERY,
        minibatch_size=BATCH,
        updates_per_iteration=1,
        capacity=CAPACITY,
        learning_starts=64,
        total_steps=10**9,
        learning_rate=1e-4,
        gamma=GAMMA,
        loss="l2",
        double=False,
        hidden_size=HIDDEN,
        eps_start=0.1,
        eps_end=0.1,
        device=str(device),
        mode="auto" if compiles else "eager",
        compile_after=0 if compiles else None,
        logger="none",
    )
    trainer = DQNTrainer(config)
    iterate: Callable[[], object] = trainer.step
    if device.type == "cuda" and not compiles:
        for _ in range(config.fill_iterations):
            trainer.step()
        iterate = capture(trainer.iteration, device=device, audit=False)

    def step() -> None:
        iterate()
        trainer.iterations_done += 1
        if trainer.iterations_done % config.log_interval == 0:
            trainer.metrics.flush(trainer.iterations_done)
            trainer.phases.flush()

    return trainer, step


def empty_cache(device: torch.device) -> None:
    """Gives cached blocks back, where there is a cache."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _due(count: int, interval: int) -> bool:
    return bool(interval and count and count % interval == 0)
