"""The best trading of a market of regimes, by dynamic programming: what a trader's growth is compared with.

Dimension key: ``K`` regimes, ``G`` nodes (a regime, and where it reverts a distance), ``W`` weights.
"""

import math
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_perf.envs.market.market import LEAST_GROWTH, OptionMarket
from torchrl_perf.envs.market.regime import RegimeMarket
from torchrl_perf.envs.market.settings import RegimeSettings

__all__ = ["BestTrading", "InformedTrader", "best_trading"]

QUANTILES = 200
"""Points at which a normal distribution is averaged."""
REACH = 4.0
"""Deviations from the level of a reverting regime that the nodes cover."""
TOLERANCE = 1e-9
"""Change of the growth rate at which the iteration ends."""
MOST_ROUNDS = 200_000


@dataclass(frozen=True)
class BestTrading:
    """The trading of greatest long-run growth for one who sees the regime.

    Attributes:
        growth: of the log equity in a bar, costs paid.
        weights: float64 ``[W]``, positions in units of the equity that it chooses among.
        regime: int64 ``[G]``, regime of each node.
        gap: float64 ``[G]``, log return since the regime began; 0 where it does not revert.
        target: int64 ``[G, W]``, index of the weight to go to, from each node and present weight.
        by_regime: float64 ``[K]``, growth of a bar without costs and with the weight that is best in it.
    """

    growth: float
    weights: Tensor
    regime: Tensor
    gap: Tensor
    target: Tensor
    by_regime: Tensor


def best_trading(
    regime: RegimeSettings,
    *,
    cost: float,
    max_weight: float = 1.0,
    allow_short: bool = True,
    weights: int = 21,
    places: int = 61,
) -> BestTrading:
    """Relative value iteration over the regime, the distance from its level where it reverts, and the position.

    The trader sees the state that governs the next return, which an env's observation does not tell: no trader of the
    observation does better in the long run, but for what the grids round. Between trades the weight counts as constant,
    which is exact at 0 and 1.

    Args:
        regime: prices.
        cost: of a unit of traded notional, such as ``MarketSettings.cost``.
        max_weight: greatest position in units of the equity.
        allow_short: whether positions may be negative.
        weights: W, an odd number of at least 3 with short positions, so that 0 is among them; else at least 2.
        places: nodes of a regime that reverts.

    Raises:
        ValueError: for fewer weights or places than described, and costs outside ``[0, 1 / max_weight)``.
        RuntimeError: where the growth does not settle: regimes that never mix, or costs that are hardly ever paid back.
    """
    _check(cost, max_weight, allow_short, weights, places)
    wanted = torch.linspace(-max_weight if allow_short else 0.0, max_weight, weights, dtype=torch.float64)
    state, gap, following = _nodes(regime, places)
    mean = torch.tensor(regime.mean, dtype=torch.float64)[state] - _reversion(regime)[state] * gap
    earned = _growth(mean, torch.tensor(regime.sigma, dtype=torch.float64)[state], wanted)
    paid = _trading(wanted, cost)
    value = torch.zeros(len(state), weights, dtype=torch.float64)
    for _ in range(MOST_ROUNDS):
        # [G, from, to]
        options = paid + (earned + following @ value).unsqueeze(1)
        fresh = options.amax(-1)
        change = fresh - value
        value = fresh - fresh.amin()
        if float(change.amax() - change.amin()) < TOLERANCE:
            break
    else:
        raise RuntimeError(
            f"best_trading: expected growth that settles, received {float(change.amin())} to {float(change.amax())} "
            f"after {MOST_ROUNDS} rounds. Remedy: lower costs, or regimes that follow each other."
        )
    growth = 0.5 * float(change.amax() + change.amin())
    places_share = _shares(following, state, len(regime.mean))
    by_regime = torch.zeros(len(regime.mean), dtype=torch.float64).index_add(0, state, places_share * earned.amax(-1))
    return BestTrading(growth, wanted, state, gap, options.argmax(-1), by_regime)


class InformedTrader:
    """A policy that follows a :class:`BestTrading`: it reads the hidden regime out of the env.

    Args:
        env: of ``semantics="target"`` and a synthetic price.
        best: of the same prices and costs.

    Raises:
        ValueError: for an env of another kind, or other bounds of its positions.
    """

    def __init__(self, env: OptionMarket, best: BestTrading) -> None:
        if not isinstance(env.market, RegimeMarket) or env.semantics != "target":
            raise ValueError(
                f"env: expected synthetic prices and semantics='target', received {type(env.market).__name__} and "
                f"{env.semantics!r}. Remedy: OptionMarket(..., semantics='target') without prices."
            )
        if not math.isclose(float(best.weights[-1]), env.settings.max_weight):
            raise ValueError(
                f"best: expected weights up to max_weight = {env.settings.max_weight}, received "
                f"{float(best.weights[-1])}. Remedy: best_trading(..., max_weight=env.settings.max_weight)."
            )
        self.env, self.best = env, best
        self.tables = tuple(table.to(env.device) for table in (best.weights, best.regime, best.gap, best.target))

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes "action" [N, 1] for the env's present state."""
        weights, regime, gap, target = self.tables
        env, market = self.env, self.env.market
        state, shares = env.get_buffer("state_regime"), env.get_buffer("state_shares")
        distance = env.get_buffer("state_gap").double() if market.reverts else torch.zeros_like(state).double()
        far = (gap - distance.unsqueeze(-1)).abs() + torch.where(regime == state.unsqueeze(-1), 0.0, torch.inf)
        value = shares * env.get_buffer("state_price")
        size = (value / (env.get_buffer("state_cash") + value)).double()
        at = (weights - size.unsqueeze(-1)).abs().argmin(-1)
        chosen = weights[target[far.argmin(-1), at]] / env.settings.max_weight
        return tensordict.set("action", chosen.to(env.dtype).unsqueeze(-1))


def _reversion(regime: RegimeSettings) -> Tensor:
    return torch.tensor(regime.reversion or (0.0,) * len(regime.mean), dtype=torch.float64)


def _nodes(regime: RegimeSettings, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Regime and gap of the nodes ``[G]``, and the probabilities with which they follow each other ``[G, G]``."""
    grids, reversion = [], _reversion(regime)
    for share, sigma, mean in zip(reversion.tolist(), regime.sigma, regime.mean, strict=True):
        width = REACH * sigma / math.sqrt(1 - (1 - share) ** 2) if share else 0.0
        middle = mean / share if share else 0.0
        grids.append(middle + torch.linspace(-width, width, places if width else 1, dtype=torch.float64))
    state = torch.cat([torch.full((len(grid),), number) for number, grid in enumerate(grids)])
    gap = torch.cat(grids)
    chain = torch.tensor(regime.transition, dtype=torch.float64)
    begins = torch.cat([_at_start(grid) for grid in grids])  # a regime begins with a gap of 0
    following = chain[state][:, state] * begins
    for number, grid in enumerate(grids):
        own = (state == number).nonzero().squeeze(-1)
        lasts = _steps(grid, regime.mean[number], regime.sigma[number], float(reversion[number]))
        following[own.unsqueeze(-1), own] = chain[number, number] * lasts
    return state, gap, following


def _at_start(grid: Tensor) -> Tensor:
    """1 at the node nearest to a gap of 0."""
    return torch.nn.functional.one_hot(grid.abs().argmin(), len(grid)).double()


def _steps(grid: Tensor, mean: float, sigma: float, share: float) -> Tensor:
    """Probabilities ``[P, P]`` of the nodes of a regime that lasts."""
    if len(grid) == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    edges = torch.cat((grid.new_tensor([-math.inf]), 0.5 * (grid[1:] + grid[:-1]), grid.new_tensor([math.inf])))
    expected = grid + mean - share * grid
    below = torch.special.ndtr((edges - expected.unsqueeze(-1)) / sigma)
    return below[:, 1:] - below[:, :-1]


def _growth(mean: Tensor, sigma: Tensor, weights: Tensor) -> Tensor:
    """Expected log growth of a bar ``[G, W]``, bounded as the env's is."""
    points = torch.special.ndtri((torch.arange(QUANTILES, dtype=torch.float64) + 0.5) / QUANTILES)
    points = points / points.square().mean().sqrt()  # of the right variance
    change = (mean.unsqueeze(-1) + sigma.unsqueeze(-1) * points).expm1()
    return (1 + weights[:, None] * change.unsqueeze(1)).clamp_min(LEAST_GROWTH).log().mean(-1)


def _trading(weights: Tensor, cost: float) -> Tensor:
    """Log growth ``[from, to]`` by the cost of a trade: with ``d`` traded, ``w E + d = w' (E - c |d|)``."""
    gap = weights.unsqueeze(0) - weights.unsqueeze(-1)
    traded = gap.abs() / (1 + cost * weights.unsqueeze(0) * gap.sign())
    return torch.log1p(-cost * traded)


def _shares(following: Tensor, state: Tensor, count: int) -> Tensor:
    """Long-run shares ``[G]`` of the nodes within their regime."""
    lazy = 0.5 * (following + torch.eye(len(following), dtype=torch.float64))
    for _ in range(40):
        lazy = lazy @ lazy
        lazy = lazy / lazy.sum(-1, keepdim=True)
    share = lazy.mean(0)
    whole = torch.zeros(count, dtype=torch.float64).index_add(0, state, share)
    return share / whole[state]


def _check(cost: float, max_weight: float, allow_short: bool, weights: int, places: int) -> None:
    if not 0.0 <= cost * max_weight < 1.0:
        raise ValueError(
            f"cost: expected a number in [0, 1 / max_weight), received {cost} with max_weight={max_weight}. Remedy: "
            "MarketSettings.cost."
        )
    if (allow_short and (weights < 3 or weights % 2 == 0)) or weights < 2:
        form = "an odd number >= 3" if allow_short else "a number >= 2"
        raise ValueError(f"weights: expected {form}, received {weights}. Remedy: 21.")
    if places < 3:
        raise ValueError(f"places: expected a number >= 3, received {places}. Remedy: 61.")
