"""All breaks at once: a network scores the cells of a landscape it never saw, learnt by the policy gradient.

Dimension key: ``B`` landscapes of an iteration, ``S`` placements of each, ``K`` breaks, ``C`` planes, ``H``, ``W``
cells.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_perf.envs.fuel_breaks import FuelBreaks, first_cells
from torchrl_perf.modules.values.conv_q import ConvQMap
from torchrl_perf.runtime import capture
from torchrl_perf.trainers.run.state import load_random_state, random_state

__all__ = ["OneShotConfig", "OneShotTrainer", "draw_orders", "order_log_prob"]

LEAST = 1e-9
LOWEST = -1e9
"""Score of a cell that may not become a break."""


@dataclass(frozen=True)
class OneShotConfig:
    """Every choice of an :class:`OneShotTrainer`.

    Raises:
        ValueError: for numbers outside what is described.
    """

    iterations: int = 4_000
    """Updates of the whole run, over which step size and entropy's weight fall to 0."""
    rows: int = 64
    """Landscapes of an iteration (B)."""
    samples: int = 16
    """Placements that are drawn for each of them and judged by the same fires (S), at least 2."""
    fires: int = 32
    """Fires that each is judged by, at most 64."""
    learning_rate: float = 2e-3
    """Adam's step size at the start."""
    entropy_coeff: float = 0.05
    """Weight of the entropy of the first cell at the start."""
    max_grad_norm: float = 1.0
    """Greatest norm of the gradient."""
    hidden_size: int = 32
    """Channels of the network."""
    blocks: int = 6
    """Its residual blocks."""
    seed: int = 0
    """Of network, landscapes, placements and fires."""

    def __post_init__(self) -> None:
        """Checks every value."""
        counts = {"iterations": 1, "rows": 1, "samples": 2, "fires": 1, "hidden_size": 1, "blocks": 0}
        for name, least in counts.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, received {value}. Remedy: {least} or more.")
        for name in ("learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name}: expected a positive number, received {value}. Remedy: its default.")
        if not 0 <= self.entropy_coeff < math.inf:
            raise ValueError(
                f"entropy_coeff: expected a number >= 0, received {self.entropy_coeff}. Remedy: its default."
            )


def draw_orders(scores: Tensor, count: int) -> Tensor:
    """Draw ``count`` different cells one after the other, each in proportion to ``exp(score)`` among those left.

    Cells with the greatest score plus Gumbel noise are such a draw (arXiv:1903.06059).

    Args:
        scores: ``[*, H W]``; cells that may not be drawn have a very low one.
        count: K.

    Returns:
        Cells int64 ``[*, K]``, in the order in which they were drawn.
    """
    noise = -(-(torch.rand_like(scores).clamp_min(LEAST).log())).clamp_min(LEAST).log()
    return (scores + noise).topk(count, -1).indices


def order_log_prob(scores: Tensor, order: Tensor) -> Tensor:
    """Log-probability ``[*]`` with which :func:`draw_orders` draws the cells ``order`` [*, K] in this order.

    It is that of Plackett (1975) and Luce (1959): ``sum_k (s_k - log sum_{j not drawn before k} exp(s_j))``.
    """
    drawn = scores.gather(-1, order)
    rest = scores.scatter(-1, order, -math.inf).logsumexp(-1, keepdim=True)
    left = torch.logaddexp(drawn.flip(-1).logcumsumexp(-1).flip(-1), rest)
    return (drawn - left).sum(-1)


class OneShotTrainer:
    """REINFORCE (Williams, 1992) on placements of all breaks at once, each judged beside others of its landscape.

    In an iteration S placements are drawn for each of B landscapes, and burn under the same fires. A placement is
    reinforced by how much less burned than in the mean of the others. Nothing is learnt of values, and an iteration is
    one CUDA graph.

    Args:
        env: gives landscapes, budget and fires; its own episodes are not used.
        config: every choice of the run.

    Attributes:
        network: planes ``[B, C, H, W]`` -> scores ``[B, H W]``.
        iterations_done: updates so far.

    Raises:
        ValueError: for an env whose every cell is to become a break.
    """

    def __init__(self, env: FuelBreaks, config: OneShotConfig | None = None) -> None:
        self.env, self.config = env, config or OneShotConfig()
        if env.budget >= env.height * env.width:
            raise ValueError(
                f"env: expected fewer breaks than cells, received {env.budget} breaks. Remedy: a smaller budget."
            )
        self.iterations_done = 0
        torch.manual_seed(self.config.seed)
        self.network = self._make_network()
        on_cuda = env.device.type == "cuda"
        rate = torch.tensor(self.config.learning_rate, device=env.device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=rate, capturable=on_cuda)
        self._left = torch.ones((), device=env.device)  # share of the run that is left
        self._step = self._ready()

    def step(self) -> dict[str, Tensor]:
        """One update; the means over its placements, 0-d on the device: ``burned`` and ``entropy``."""
        left = max(1.0 - self.iterations_done / self.config.iterations, 0.0)
        self._left.fill_(left)
        self._rate().fill_(self.config.learning_rate * left)
        self.iterations_done += 1
        return self._step()

    def train(self) -> dict[str, float]:
        """All updates that are left; the means of the last one."""
        row: dict[str, Tensor] = {}
        while self.iterations_done < self.config.iterations:
            row = self.step()
        return {name: float(value) for name, value in row.items()}

    @torch.no_grad()
    def place(self, env: FuelBreaks | None = None) -> Tensor:
        """The cells of the highest scores in each landscape of an env, bool ``[L, H, W]``; that of training by default.

        Raises:
            ValueError: for an env with other planes.
        """
        env = env or self.env
        planes = len(env.plane_names)
        if planes != len(self.env.plane_names):
            raise ValueError(
                f"env: expected {len(self.env.plane_names)} planes as in training, received {planes}. Remedy: the "
                "same extra planes."
            )
        number = torch.arange(len(env.burnable()), device=env.device)
        scores = self._scores(env, number)
        return first_cells(scores.view(env.burnable().shape), env.burnable(), env.budget)

    def state_dict(self) -> dict[str, Any]:
        """A copy of network, optimiser, updates done, settings and the state of the random generators."""
        return {
            "network": {name: value.clone() for name, value in self.network.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "iterations_done": self.iterations_done,
            "config": dataclasses.asdict(self.config),
            "random": random_state(self.env.device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, bit for bit as the run that it was taken of would have.

        The generators of torch are those of the process, and are set as well. A state of up to 0.2 has none, and goes
        on with the numbers of the process.

        Raises:
            ValueError: for a network of other sizes.
        """
        sizes = ("hidden_size", "blocks")
        wrong = [name for name in sizes if state["config"][name] != getattr(self.config, name)]
        if wrong:
            raise ValueError(
                f"state: expected the network's own {wrong}, received {[state['config'][name] for name in wrong]}. "
                "Remedy: the same settings."
            )
        rate = self._rate()
        self.network.load_state_dict(state["network"])
        # moments of its own, and the rate that a graph reads
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.optimizer.param_groups[0]["lr"] = rate
        self.iterations_done = state["iterations_done"]
        self._step = self._ready()
        if "random" in state:  # last: what was loaded before it may draw
            load_random_state(state["random"], self.env.device)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _make_network(self) -> nn.Module:
        config, env = self.config, self.env
        network = ConvQMap(
            len(env.plane_names), hidden_size=config.hidden_size, blocks=config.blocks, device=env.device
        )
        nn.init.zeros_(network.head.weight)  # all cells alike, at first
        return network

    def _ready(self) -> Callable[[], dict[str, Tensor]]:
        """An update, on CUDA as a graph that is recorded in the first calls."""
        on_cuda = self.env.device.type == "cuda"
        return capture(self._update, device=self.env.device) if on_cuda else self._update

    def _rate(self) -> Tensor:
        rate = self.optimizer.param_groups[0]["lr"]
        assert isinstance(rate, Tensor)
        return rate

    def _scores(self, env: FuelBreaks, number: Tensor) -> Tensor:
        """``[B, H W]`` of the landscapes ``number`` [B], without breaks."""
        burnable = env.burnable(number)
        none, whole = torch.zeros_like(burnable), torch.ones(len(number), 1, dtype=env.dtype, device=env.device)
        scores = self.network(env.planes(none, whole, number.unsqueeze(-1)).to(torch.float32))
        return scores.masked_fill(~burnable.flatten(1), LOWEST)

    def _update(self) -> dict[str, Tensor]:
        config, env = self.config, self.env
        number = torch.randint(len(env.burnable()), (config.rows,), device=env.device)
        scores = self._scores(env, number)
        several = scores.unsqueeze(1).expand(-1, config.samples, -1)
        order = draw_orders(several.detach(), env.budget)
        breaks = torch.zeros_like(several, dtype=torch.bool).scatter(-1, order, True)
        seed = torch.randint(1 << 62, (config.rows,), device=env.device)
        burned = env.light(
            breaks.view(-1, env.height, env.width),
            landscape_id=number.repeat_interleave(config.samples),
            seed=seed.repeat_interleave(config.samples),
            fires=config.fires,
        ).view(config.rows, config.samples)
        saved = burned.mean(1, keepdim=True) - burned
        advantage = saved / saved.square().mean().sqrt().clamp_min(LEAST)
        log_prob = scores.log_softmax(-1)
        entropy = -(log_prob.exp() * log_prob).sum(-1).mean()
        gain = (advantage * order_log_prob(several, order)).mean()
        loss = -gain - config.entropy_coeff * self._left * entropy
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), config.max_grad_norm)
        self.optimizer.step()
        return {"burned": burned.mean(), "entropy": entropy.detach()}
