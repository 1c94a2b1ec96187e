"""What the experiments of options_market share: markets in both forms, networks, the trainer, its update."""

import math
from collections import deque
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from studies.originals.market import Bar, MarketLoop, Observation
from studies.originals.options import SerialActor, SerialSelector
from torchrl_perf.envs.market import PARTS, OptionMarket, RegimeSettings
from torchrl_perf.modules.encoders.node_encoder import NodeEncoder
from torchrl_perf.modules.option_actor import OptionActor, OptionNormalHead
from torchrl_perf.objectives.sac import frozen
from torchrl_perf.systems.options_market.config import OPTIONS_MARKET_PRESETS, OptionsMarketConfig
from torchrl_perf.systems.options_market.trainer import OptionsMarketTrainer

ENVS, OBSERVATION, NUM_OPTIONS = 16, 578, 6
STEPS, UPDATES, BATCH = 8, 16, 256
"""Steps of all envs in an iteration of the package, its updates, which are two for each step, and their rows."""
CORRELATION = 0.5


def settings(device: torch.device, **changes: Any) -> OptionsMarketConfig:
    """The original's numbers: 16 envs, two updates of 256 rows for each of their steps, networks of 512 and 512.

    Args:
        device: of everything.
        **changes: replace those.
    """
    small = {"num_envs": ENVS, "num_steps": STEPS, "updates_per_iteration": UPDATES, "minibatch_size": BATCH}
    learning = {
        "actor_learning_rate": 2.5e-4,
        "critic_learning_rate": 2.5e-4,
        "option_learning_rate": 3e-4,
        "gamma": 0.992,
        "tau": 0.005,
        "initial_temperature": 0.05,
        "learn_temperature": False,
        "option_clip": 0.5,
        "option_entropy_coeff": 0.01,
        "hidden_size": 512,
        "sentiment_correlation": CORRELATION,
        # no interval is long enough to judge the options by
        "max_option_share": 1.0,
        "min_options_used": 1,
    }
    sizes = {"capacity": 20_000, "option_capacity": 5_000, "learning_starts": 512, "total_steps": 10**9}
    run = {"device": str(device), "mode": "eager", "logger": "none"}
    preset = OPTIONS_MARKET_PRESETS["OptionMarketOriginal"]
    return replace(preset, **(small | learning | sizes | run | changes))


# -- markets ----------------------------------------------------------------------------------------------------------


def market(
    num_envs: int, device: torch.device, *, steps: int = 0, seed: int = 0
) -> tuple[OptionMarket, TensorDictBase]:
    """A market with both forms of the observation after some random steps, and what is seen of it."""
    regime = RegimeSettings(sentiment_correlation=CORRELATION)
    env = OptionMarket(num_envs, semantics="rules", regime=regime, observation="both", device=device, seed=seed)
    td, draw = env.reset(), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        action = (2 * torch.rand(num_envs, 1, generator=draw) - 1).to(device)
        _, td = env.step_and_maybe_reset(td.set("action", action))
    return env, td


def dicts_of(td: TensorDictBase) -> list[Observation]:
    """The observation of each env as a dict of arrays."""
    arrays = {name: td[name].cpu().numpy() for name in PARTS}
    return [{name: array[index] for name, array in arrays.items()} for index in range(len(td))]


def loops_of(env: OptionMarket) -> list[MarketLoop]:
    """Each env of a market in NumPy, as it is now."""
    names = [name for name in env.market.entries if name != "regime"]
    names += ["cash", "shares", "entry", "peak", "realised", "paid", "held", "idle", "buys", "price", "steps"]
    state = {name: env.get_buffer(f"state_{name}").cpu().numpy().astype(np.float64) for name in names}
    made = []
    for row in range(env.num_envs):
        loop, now = MarketLoop(0), {name: value[row] for name, value in state.items()}
        price = float(now["price"])
        fast, slow, *others = now["averages"]
        loop.closes = deque((price * np.exp(now["path"])).tolist(), maxlen=loop.closes.maxlen)
        loop.averages = [price * (1 + fast), price * (1 + slow), *(price * part for part in others)]
        loop.rows = deque(list(now["window"].astype(np.float32)), maxlen=loop.rows.maxlen)
        loop.clock = int(now["clock"])
        for name in ("cash", "shares", "entry", "peak", "realised", "paid"):
            setattr(loop, name, float(now[name]))
        for name in ("held", "idle", "steps"):
            setattr(loop, name, int(now[name]))
        bits = int(now["buys"])
        loop.buys.extend(bool(bits >> bar & 1) for bar in reversed(range(20)))
        made.append(loop)
    return made


def same_steps(device: torch.device, count: int = 8, steps: int = 24) -> tuple[list[Tensor], list[Tensor]]:
    """Observations, rewards and equities of the same bars and the same actions, in NumPy and in tensors.

    Returns:
        Of either, for each step: observations ``[count, 578]``, rewards and equities ``[count]``.
    """
    env, td = market(count, device, steps=12)
    loops, draw = loops_of(env), torch.Generator().manual_seed(9)
    one: list[Tensor] = []
    other: list[Tensor] = []
    for _ in range(steps):
        # buys and sales, some of them of nothing or of all
        action = (2.4 * torch.rand(count, 1, generator=draw) - 1.2).clamp(-1.0, 1.0)
        action = torch.where(torch.rand(count, 1, generator=draw) < 0.2, 0.0, action)
        before = td["price"].double().cpu()
        stepped, td = env.step_and_maybe_reset(td.set("action", action.to(device)))
        after = stepped["next"].cpu()
        returns = (after["price"].double() / before).log().squeeze(-1)
        sentiment = after["regime"][:, 0].double().clamp(1e-7, 1 - 1e-7)
        scores = math.sqrt(2) * torch.erfinv(2 * sentiment - 1)
        found = [
            loop.step(float(action[row]), Bar(float(returns[row]), float(scores[row])))
            for row, loop in enumerate(loops)
        ]
        seen = [np.concatenate([observation[name].ravel() for name in PARTS]) for observation, *_ in found]
        one += [torch.from_numpy(np.array(seen)), torch.tensor([reward for _, reward, *_ in found])]
        one.append(torch.tensor([loop.equity for loop in loops]))
        other += [after["observation"], after["reward"].squeeze(-1), after["equity"].squeeze(-1)]
    return one, other


# -- networks ---------------------------------------------------------------------------------------------------------


class WindowEncoder(nn.Module):
    """The transformer on the 24 bars of the window, and what else is seen beside it.

    Four layers of 256 with 8 heads and perceptrons of 1,024: about 3.3 million parameters.

    Args:
        others: numbers beside the window.
        precision: of its layers.
    """

    bars, columns, width = 24, 23, 256

    def __init__(self, others: int, precision: str = "tf32") -> None:
        super().__init__()
        self.place = nn.Parameter(0.02 * torch.randn(self.bars, self.width))
        self.embed = nn.Linear(self.columns, self.width)
        self.encoder = NodeEncoder(
            self.width, others, width=self.width, num_heads=8, groups=0, feedforward=1024, precision=precision
        )
        self.out_features = self.width + others

    def forward(self, row: Tensor) -> Tensor:
        """``[*, 552 + others]`` -> ``[*, 256 + others]``."""
        size = self.bars * self.columns
        window, others = row[..., :size].unflatten(-1, (self.bars, self.columns)), row[..., size:]
        tokens = self.embed(window) + self.place
        exists = torch.ones(tokens.shape[:-1], dtype=torch.bool, device=row.device)
        return torch.cat([self.encoder.graph_embedding(tokens, exists, others), others], -1)


def head_of(actor: nn.Module) -> OptionNormalHead:
    """The network of an actor: rows and options -> location, scale, low, high, unit."""
    return next(module for module in actor.modules() if isinstance(module, OptionNormalHead))


def serial_actor(actor: OptionActor, device: torch.device) -> SerialActor:
    """The original's form of an actor."""
    head = head_of(actor)
    return SerialActor(lambda rows, options: head(rows, options)[:4], device)


def serial_selector(trainer: OptionsMarketTrainer) -> SerialSelector:
    """The original's form of a controller."""
    return SerialSelector(trainer.controller.selector, trainer.device)


# -- the update -------------------------------------------------------------------------------------------------------


class PlainUpdate:
    """The losses of a trainer with autograd and ``torch.optim.Adam``: its update as a program has it by itself.

    Args:
        trainer: gives networks, losses and step sizes.
    """

    def __init__(self, trainer: OptionsMarketTrainer) -> None:
        self.trainer, self.loss = trainer, trainer.loss
        config = trainer.config
        self.critic = torch.optim.Adam(list(self.loss.critic.parameters()), lr=config.critic_learning_rate)
        groups = [{name: group[name] for name in ("params", "lr")} for group in trainer.actor_groups()]
        self.actor = torch.optim.Adam(groups)
        self.targets = list(zip(self.loss.target_critic.parameters(), self.loss.critic.parameters(), strict=True))

    def __call__(self, batch: dict[str, Tensor], choices: dict[str, Tensor]) -> dict[str, Tensor]:
        """One update from entries as the original's loop keeps them."""
        sample = self.trainer.controller.write_following(steps_of(batch))
        return self.update(sample, choices_of(choices))

    def update(self, sample: TensorDictBase, choices: TensorDictBase) -> dict[str, Tensor]:
        """One step of critics, actor, controller and targets; returns losses and values, 0-d."""
        loss = self.loss
        with self.trainer.acceleration.active(self.trainer.device):
            action, log_prob, *following = loss.sample(sample, self.trainer.passes.noise(sample))
            critic, _, value = loss.critic_losses(sample, *following)
            self.critic.zero_grad()
            critic.backward()
            self.critic.step()
            with frozen(loss.critic):
                actor, _ = loss.actor_losses(sample, action, log_prob)
            option = cast("Any", loss.option)(choices)
            chosen = option["loss_option_policy"] + option["loss_option_value"] + option["loss_option_entropy"]
            self.actor.zero_grad()
            (actor + chosen).backward()
            self.actor.step()
            with torch.no_grad():
                for target, source in self.targets:
                    target.lerp_(source, self.trainer.config.tau)
        return {"critic": critic.detach(), "actor": actor.detach(), "option": chosen.detach(), "value": value}


def steps_of(batch: dict[str, Tensor]) -> TensorDict:
    """A batch of the original's loop as the losses read it."""
    following = {
        "observation": batch["next_observation"],
        "reward": batch["reward"],
        "terminated": batch["terminated"],
        "option": batch["option"],
        "option_age": batch["option_age"],
    }
    names = ("observation", "action", "active_option")
    rows = len(batch["action"])
    return TensorDict({name: batch[name] for name in names} | {"next": TensorDict(following, [rows])}, [rows])


def choices_of(batch: dict[str, Tensor]) -> TensorDict:
    """The same of options that ended."""
    following = {
        "observation": batch["next_observation"],
        "reward": batch["returns"],
        "terminated": batch["terminated"],
    }
    names = ("observation", "active_option", "option_log_prob", "option_available", "gamma")
    rows = len(batch["gamma"])
    return TensorDict({name: batch[name] for name in names} | {"next": TensorDict(following, [rows])}, [rows])


@torch.no_grad()
def outputs_of(trainer: OptionsMarketTrainer) -> list[Tensor]:
    """What all networks say of fixed rows: values, actions, choices of options and their values."""
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(64, OBSERVATION, generator=draw).to(trainer.device)
    options = torch.arange(64, device=trainer.device) % NUM_OPTIONS
    option = cast("Any", trainer.loss.option)
    with trainer.acceleration.active(trainer.device):
        return [
            cast("Any", trainer.loss.critic).module(rows, rows[:, :1], options),
            *head_of(trainer.loss.actor)(rows, options)[:2],
            trainer.controller.selector(rows),
            option.value(rows),
        ]
