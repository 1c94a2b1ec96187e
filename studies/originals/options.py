"""Options of options_market before its rewrite: rules in Python for one env, a selector that is asked for each env."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from studies.originals.dict_replay import flatten, flatten_keys
from studies.originals.market import Observation

Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rules:
    """When an option of one env may begin and when it ends.

    Attributes:
        name: of the option.
        scale: of the actions.
        min_steps: before which it does not end.
        begins: of an observation, whether it may begin.
        ends: of an observation and the steps that it has run, the probability that it ends.
    """

    name: str
    scale: float
    min_steps: int
    begins: Callable[[Observation], bool]
    ends: Callable[[Observation, int], float]


def hazard(steps: int, longest: float, steepness: float, cap: float = 1.0, certain: bool = True) -> float:
    """Probability of an end by the time that an option has run."""
    if certain and steps >= longest:
        return 1.0
    return min(0.8 / (1 + math.exp(-10 * steepness * (steps / longest - 0.5))), cap)


def _size(observation: Observation) -> float:
    return abs(float(observation["position"][4]))


def _is_open(observation: Observation) -> bool:
    return bool(observation["position"][0] > 0)


def _sentiment(observation: Observation) -> float:
    return float(observation["regime"][0])


def _divergence(observation: Observation) -> float:
    return float(observation["technical"][-1, 6]) / 100


def _rsi(observation: Observation) -> float:
    return float(observation["technical"][-1, 12])


def _may_short(observation: Observation) -> bool:
    below = observation["technical"][-1, 4] < 0
    weak = below or _divergence(observation) < 0 or _rsi(observation) > 0.65
    return bool(_size(observation) < 0.02 and weak and _sentiment(observation) < 0.65)


def _may_follow(observation: Observation) -> bool:
    divergence, sentiment = _divergence(observation), _sentiment(observation)
    return abs(divergence) > 0.015 and (sentiment >= 0.35 if divergence > 0 else sentiment <= 0.65)


def _short_ends(observation: Observation, steps: int) -> float:
    if _size(observation) >= 0.9 * 0.15:
        return 1.0
    return 0.8 if _sentiment(observation) > 0.6 else hazard(steps, 20, 0.4)


def _trend_ends(observation: Observation, steps: int) -> float:
    if abs(_divergence(observation)) < 0.5 * 0.015:
        return 0.85
    return hazard(steps, 50, 0.3, cap=0.15, certain=False)


def _wait_ends(observation: Observation, steps: int) -> float:
    sentiment = _sentiment(observation)
    if steps >= 30:
        return 1.0
    if sentiment > 0.75 or sentiment < 0.3:
        return 0.85
    if observation["sentiment"].max() > 0.75:
        return 0.65
    return 0.75 if abs(_divergence(observation)) > 0.03 else hazard(steps, 30, 0.5, cap=0.5)


OPTIONS = (
    Rules(
        "open_long", 0.8, 5,
        lambda now: _size(now) < 0.02 and _sentiment(now) >= 0.35,
        lambda now, steps: 1.0 if _size(now) >= 0.9 * 0.15 else hazard(steps, 20, 0.4),
    ),
    Rules("open_short", 0.8, 5, _may_short, _short_ends),
    Rules("close", 1.0, 3, _is_open, lambda now, steps: 1.0 if _size(now) < 0.01 else 0.02),
    Rules("trend", 0.6, 10, _may_follow, _trend_ends),
    Rules(
        "scalp", 1.0, 5,
        lambda now: _size(now) <= 0.01 and _rsi(now) < 0.35 and _sentiment(now) >= 0.35,
        lambda now, steps: 1.0 if _size(now) <= 0.01 else hazard(steps, 15, 0.6),
    ),
    Rules("wait", 0.05, 5, lambda now: True, _wait_ends),
)  # fmt: skip
"""The six options in the order of their indices."""


def available(observation: Observation) -> list[bool]:
    """Whether each option may begin: six calls."""
    return [option.begins(observation) for option in OPTIONS]


def end_probability(option: int, steps: int, observation: Observation) -> float:
    """The probability that an option ends which has run for a number of steps."""
    rules = OPTIONS[option]
    return 0.0 if steps < rules.min_steps else rules.ends(observation, steps)


class SerialSelector:
    """Chooses options, one env after the other or all in one pass of the network.

    Args:
        network: ``[*, 578]`` -> logits ``[*, 6]``.
        device: of the network.
        temperature: of the choice.
    """

    def __init__(self, network: Network, device: torch.device, temperature: float = 1.0) -> None:
        self.network, self.device, self.temperature = network, device, temperature

    @torch.no_grad()
    def log_probs(self, state: Tensor, allowed: Sequence[Sequence[bool]]) -> Tensor:
        """``[N, 6]``, ``-inf`` for what is not allowed."""
        logits = self.network(state) / self.temperature
        return logits.masked_fill(~torch.tensor(allowed, device=self.device), -torch.inf).log_softmax(-1)

    def select_one(self, observation: Observation) -> tuple[int, float, list[bool]]:
        """Before: the observation is flattened and copied, the network sees one row, the answer is read.

        Returns:
            The option, the logarithm of its probability, and which ones were allowed.
        """
        allowed = available(observation)
        state = torch.tensor(np.array([flatten(observation)])).to(self.device)
        log_probs = self.log_probs(state, [allowed])
        option = int(torch.multinomial(log_probs.exp(), 1).item())
        return option, log_probs[0, option].item(), allowed

    def select_all(self, observations: list[Observation]) -> tuple[list[int], list[float], list[list[bool]]]:
        """After: one pass of the network; rules and flattening are still a loop."""
        allowed = [available(observation) for observation in observations]
        state = torch.from_numpy(flatten_keys(observations)).to(self.device)
        log_probs = self.log_probs(state, allowed)
        options = torch.multinomial(log_probs.exp(), 1)
        return options.squeeze(-1).tolist(), log_probs.gather(-1, options).squeeze(-1).tolist(), allowed


class SerialActor:
    """The size of an order, one env after the other or all in one pass of the network.

    Args:
        network: rows ``[N, 578]`` and options int64 ``[N]`` -> location, scale, least and greatest action ``[N, 1]``.
        device: of the network.
    """

    def __init__(self, network: Callable[[Tensor, Tensor], tuple[Tensor, ...]], device: torch.device) -> None:
        self.network, self.device = network, device

    @torch.no_grad()
    def act(self, state: Tensor, option: Tensor, *, greedy: bool = False) -> Tensor:
        """``[N, 1]``: a squashed normal number, within the option's range."""
        loc, scale, low, high = self.network(state, option)
        unbounded = loc if greedy else loc + scale * torch.randn_like(loc)
        return low + 0.5 * (high - low) * (1 + torch.tanh(unbounded))

    def predict_one(self, row: np.ndarray, option: int, *, greedy: bool = False) -> np.ndarray:
        """Before: an array of one row is copied twice, and the action is read; ``[1]``."""
        state = torch.tensor(np.array([row])).to(self.device)
        return self.act(state, torch.tensor([option], device=self.device), greedy=greedy).cpu().numpy()[0]

    def predict_all(self, rows: np.ndarray, options: Sequence[int], *, greedy: bool = False) -> np.ndarray:
        """After: one pass, from and to arrays; ``[N, 1]``."""
        state = torch.from_numpy(rows).to(self.device)
        return self.act(state, torch.tensor(options, device=self.device), greedy=greedy).cpu().numpy()
