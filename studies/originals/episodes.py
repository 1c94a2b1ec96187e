"""The training loop of fuel_breaks on fuel breaks: the lists and memory rules of :class:`ListLoop`, maps and masks."""

import copy
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_perf.bench.memory_loops import GAMMA, NUM_ENVS, TRAIN_EVERY, ListLoop, Setting
from torchrl_perf.envs.fuel_breaks import PLANES, FuelBreaks, Landscape
from torchrl_perf.modules import ConvQMap

FORBIDDEN = -1e9
EPSILON, LEARNING_RATE = 0.1, 1e-4


@dataclass(frozen=True)
class Task:
    """What is trained on, the same for all loops.

    Attributes:
        size: rows and columns.
        cells: breaks of an episode, K.
        fires: M.
        hidden_size: channels of the network.
        blocks: its residual blocks.
        base: probability that fire passes a bond.
    """

    size: int = 20
    cells: int = 20
    fires: int = 16
    hidden_size: int = 8
    blocks: int = 1
    base: float = 0.4

    def env(self, device: torch.device, seed: int = 0) -> FuelBreaks:
        """Eight envs; the reward comes at the end of an episode."""
        ground, sweeps = Landscape.uniform(self.base, self.size), self.sweeps
        options = {"budget": self.cells, "fires": self.fires, "sweeps": sweeps, "device": device, "seed": seed}
        return FuelBreaks(NUM_ENVS, landscape=ground, **options)

    @property
    def sweeps(self) -> int:
        """Enough for fires to burn out where the probability is well above the threshold; 26 were seen of 20 x 20."""
        return 2 * self.size

    def network(self, device: torch.device) -> "MaskedMap":
        """A new network for the env's observations."""
        planes = len(PLANES) + 2
        return MaskedMap(ConvQMap(planes, hidden_size=self.hidden_size, blocks=self.blocks, device=device))


class MaskedMap(nn.Module):
    """Values of cells ``[N, H W]`` of planes ``[N, C, H, W]``; those that must not become a break have a low one.

    Args:
        values: the network.
    """

    def __init__(self, values: ConvQMap) -> None:
        super().__init__()
        self.values = values

    def forward(self, planes: Tensor) -> Tensor:
        """The plane before the last holds the breaks; fuel is 0 where nothing burns."""
        return self.values(planes).masked_fill(~allowed(planes), FORBIDDEN)


def allowed(planes: Tensor) -> Tensor:
    """Bool ``[N, H W]``: cells that may become a break, of planes ``[N, C, H, W]``."""
    return ((planes[:, -2] == 0) & (planes[:, PLANES.index("fuel")] > 0)).flatten(1)


class BreakLoop(ListLoop):
    """Act on each of eight envs, remember each transition on its own, replay every fourth step, clean up.

    Args:
        setting: the memory rules.
        device: of envs and network.
        task: what is trained on.
        seed: of network, envs, exploration and replay.

    Attributes:
        burned: mean burned fraction of each episode that has ended.
    """

    def __init__(self, setting: Setting, device: torch.device, task: Task, seed: int = 0) -> None:
        super().__init__(setting, device)
        torch.manual_seed(seed)
        random.seed(seed)
        self.task = task
        self.env = task.env(device, seed)  # pyright: ignore[reportAttributeAccessIssue]
        self.net = task.network(device)  # pyright: ignore[reportAttributeAccessIssue]
        self.target = copy.deepcopy(self.net)
        self.adam = torch.optim.Adam(self.net.parameters(), lr=LEARNING_RATE)
        self.td = self.env.reset()
        self.burned: list[float] = []

    def advance(self) -> int:
        """One step of all envs, and a training step every fourth time; returns the episodes that were finished."""
        observation = self.td["observation"]
        values = self.net(observation)
        cells = torch.rand_like(values).masked_fill(~allowed(observation), -1.0).argmax(-1)
        explores = torch.rand(NUM_ENVS, device=self.device) < EPSILON
        action = torch.where(explores, cells, values.argmax(-1))
        following, self.td = self.env.step_and_maybe_reset(self.td.set("action", action))
        nexts = following["next"]
        done = nexts["done"]
        for n in range(NUM_ENVS):
            self.remember(observation[n], action[n], nexts["reward"][n], nexts["observation"][n], done[n], values[n])
        self.count += 1
        before, ended = self.finished, int(done.sum())
        self.finished += ended
        if ended:
            self.burned += nexts["burned"][done].tolist()
        if self.count % TRAIN_EVERY == 0:
            self.train()
        return before

    def episode(self) -> None:
        """An episode of each env, with the cleanup that is due."""
        for _ in range(self.task.cells):
            self.step()


class ImageLearner:
    """The update of a network of cell values on images: what all ways to a batch share.

    Args:
        network: online network, of planes.
        device: of everything.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self.network = network
        self.target = copy.deepcopy(network).requires_grad_(False)
        capturable = device.type == "cuda"
        self.adam = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, capturable=capturable)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Squared temporal differences of observation, action, reward, next_observation, done (arXiv:1312.5602)."""
        with torch.no_grad():
            value = self.target(batch["next_observation"]).amax(-1)
            goal = batch["reward"].view(-1) + GAMMA * value * ~batch["done"].view(-1)
        chosen = self.network(batch["observation"]).gather(-1, batch["action"].view(-1, 1)).squeeze(-1)
        return F.mse_loss(chosen, goal)

    def update(self, batch: dict[str, Tensor]) -> Tensor:
        """One step of Adam; the loss, 0-d."""
        self.adam.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.adam.step()
        return loss.detach()


def stacked(rows: list[tuple[Tensor, ...]], device: torch.device) -> dict[str, Tensor]:
    """A batch of transitions that lie in a list, each tensor on its own, stacked and then brought to the device."""
    names = ("observation", "action", "reward", "next_observation", "done")
    columns = zip(names, zip(*rows, strict=True), strict=True)
    return {name: torch.stack(column).to(device) for name, column in columns}
