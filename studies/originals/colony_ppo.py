"""PPO on one colony after the other, as durotaxis had it, with each of its four optimisations as a switch.

The network is small, so that the optimised parts weigh more here than they did beside the original's residual network.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from studies.originals import advantages as gae
from studies.originals import rewards, sampled, selection
from studies.originals.colony import FEATURES, ColonyLoop

AXES = 5
LOW = torch.tensor([0.0, 0.5, 0.5, 0.05, -torch.pi / 6])
HIGH = torch.tensor([0.5, 15.0, 4.0, 0.5, torch.pi / 6])
GAMMA, LAMBDA, CLIP, EPOCHS, MINIBATCH, ENTROPY = 0.99, 0.95, 0.1, 4, 64, 0.01
SAMPLES = 16
"""Samples of an entropy that is estimated."""


class ColonyNetwork(nn.Module):
    """Mean and scale of five numbers, and a value: a layer on each node, the mean of those that exist, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU())
        self.joint = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * AXES + 1))
        self.register_buffer("low", LOW.clone())
        self.register_buffer("high", HIGH.clone())

    def forward(self, nodes: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[*, M, 11]`` and ``[*, M]`` bool -> loc and scale ``[*, 5]``, value ``[*]``."""
        weight = mask.unsqueeze(-1).to(nodes.dtype)
        pooled = (self.each(nodes) * weight).sum(-2) / weight.sum(-2).clamp_min(1.0)
        loc, log_scale, value = self.joint(pooled).split([AXES, AXES, 1], -1)
        return loc, log_scale.clamp(-4.0, 1.0).exp(), value.squeeze(-1)

    def bounded(self, x: Tensor) -> Tensor:
        """The action for a draw of the normal, within the bounds."""
        return self.low + (self.high - self.low) * x.sigmoid()  # pyright: ignore


def ppo_loss(network: ColonyNetwork, batch: dict[str, Tensor], sampled_entropy: bool) -> Tensor:
    """Clipped loss, value loss and entropy of a minibatch."""
    loc, scale, value = network(batch["nodes"], batch["mask"])
    dist = Normal(loc, scale, validate_args=False)
    ratio = (dist.log_prob(batch["draw"]).sum(-1) - batch["log_prob"]).exp()
    advantage = batch["advantage"]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    entropy = sampled.entropy(loc, scale, SAMPLES) if sampled_entropy else dist.entropy().sum(-1)
    return (value - batch["return"]).square().mean() - surrogate - ENTROPY * entropy.mean()


@dataclass(frozen=True)
class Switches:
    """Which of the original's optimisations are on."""

    partition: bool = False
    template: bool = False
    closed_entropy: bool = False
    tensors: bool = False


class LoopPPO:
    """Collection of a rollout on one colony, advantages, updates.

    Args:
        switches: what is on.
        device: of network and features.
        steps: of a rollout.
        epochs: passes over it.
    """

    def __init__(self, switches: Switches, device: torch.device, steps: int, epochs: int = EPOCHS) -> None:
        self.switches, self.device, self.steps, self.epochs = switches, device, steps, epochs
        choose = selection.by_partition if switches.partition else selection.by_sort
        base = rewards.template()
        breakdown = partial(rewards.from_template, base) if switches.template else rewards.literal
        self.env = ColonyLoop(choose, breakdown, device)
        torch.manual_seed(0)
        self.network = ColonyNetwork().to(device)
        self.initial = copy.deepcopy(self.network.state_dict())
        self.begin()

    def begin(self) -> None:
        """Network, colony and random numbers as in the beginning: what has been learnt changes the size of colonies."""
        torch.manual_seed(0)
        random.seed(0)
        self.network.load_state_dict(self.initial)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3)
        self.features = self.env.reset()

    @torch.no_grad()
    def collect(self) -> dict[str, list[Any]]:
        """One rollout, as lists."""
        rows: dict[str, list[Any]] = {
            name: [] for name in ("nodes", "draw", "log_prob", "value", "reward", "ended", "parts", "next_value")
        }
        for _ in range(self.steps):
            mask = torch.ones(len(self.features), dtype=torch.bool, device=self.device)
            loc, scale, value = self.network(self.features, mask)
            draw = torch.normal(loc, scale)
            action = tuple(self.network.bounded(draw).cpu().tolist())
            log_prob = Normal(loc, scale, validate_args=False).log_prob(draw).sum()
            reward, ending, parts = self.env.step(action, self.features)
            found = (self.features, draw, log_prob, value, reward, bool(ending), parts)
            for name, entry in zip(list(rows)[:7], found, strict=True):
                rows[name].append(entry)
            self.features = self.env.reset() if ending else self.env.features()
        mask = torch.ones(len(self.features), dtype=torch.bool, device=self.device)
        rows["next_value"] = [self.network(self.features, mask)[2]]
        return rows

    def advantages(self, rows: dict[str, list[Any]]) -> tuple[Tensor, Tensor]:
        """Advantages, normalised, and returns ``[T]``, one episode after the other."""
        values = torch.stack(rows["value"])
        rewards_ = torch.tensor(rows["reward"], dtype=torch.float32, device=self.device)
        form: Callable[..., tuple[Tensor, Tensor]] = gae.by_steps if self.switches.tensors else gae.by_list
        ends = [t + 1 for t, ended in enumerate(rows["ended"]) if ended]
        parts, begin = [], 0
        for end in [*ends, *([] if ends and ends[-1] == self.steps else [self.steps])]:
            last = torch.zeros_like(values[:1]) if end in ends else rows["next_value"][0].view(1)
            following = torch.cat([values[begin + 1 : end], last])
            parts.append(form(GAMMA, LAMBDA, values[begin:end], following, rewards_[begin:end]))
            begin = end
        advantage, returns = (torch.cat(column) for column in zip(*parts, strict=True))
        return gae.normalized(advantage), returns

    def update(self, rows: dict[str, list[Any]], advantage: Tensor, returns: Tensor) -> None:
        """Passes over the rollout in minibatches, nodes padded to the largest colony."""
        nodes = nn.utils.rnn.pad_sequence(rows["nodes"], batch_first=True)
        count = torch.tensor([len(row) for row in rows["nodes"]], device=self.device)
        batch = {
            "nodes": nodes,
            "mask": torch.arange(nodes.shape[1], device=self.device) < count.unsqueeze(-1),
            "draw": torch.stack(rows["draw"]),
            "log_prob": torch.stack(rows["log_prob"]),
            "advantage": advantage,
            "return": returns,
        }
        for _ in range(self.epochs):
            for chosen in torch.randperm(self.steps, device=self.device).split(min(MINIBATCH, self.steps)):
                part = {name: value[chosen] for name, value in batch.items()}
                self.optimizer.zero_grad()
                ppo_loss(self.network, part, not self.switches.closed_entropy).backward()
                nn.utils.clip_grad_norm_(self.network.parameters(), 0.5)
                self.optimizer.step()

    def iteration(self) -> None:
        """The first iteration: rollout, advantages, updates."""
        self.begin()
        rows = self.collect()
        self.update(rows, *self.advantages(rows))
