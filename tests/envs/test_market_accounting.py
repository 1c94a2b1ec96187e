"""The effect of trades on cash, shares and equity; the result of a policy without an edge; how much to invest."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrl_perf.envs import MarketSettings, OptionMarket, RegimeSettings
from torchrl_perf.envs.market.indicators import WARM_BARS
from torchrl_perf.envs.market.portfolio import Portfolio, execute, marked, rule_trade, target_trade

F64 = torch.float64


def normal_series(count, mean, sigma, rows=1):
    """Prices [rows, ...] of ``count`` log returns that have exactly the mean and the deviation asked for."""
    scores = torch.special.ndtri((torch.arange(count, dtype=F64) + 0.5) / count)
    scores = (scores / scores.std(correction=0)).repeat(rows, 1)
    order = torch.rand(rows, count, dtype=F64).argsort(-1)
    returns = mean + sigma * scores.gather(-1, order)
    flat = torch.zeros(rows, WARM_BARS + 1, dtype=F64)  # before the first bar of a window of 1
    return torch.cat((flat, returns.cumsum(-1)), -1).exp()


def owned(*, cash=1.0, shares=0.0, entry=0.0, held=5, buys=0):
    values = {"cash": cash, "shares": shares, "entry": entry}
    tensors = {name: torch.tensor([value], dtype=F64) for name, value in values.items()}
    counts = {name: torch.tensor([value], dtype=torch.int32) for name, value in (("held", held), ("buys", buys))}
    return Portfolio.fresh(1, F64, torch.device("cpu"))._replace(**tensors, **counts)


def price(value):
    return torch.tensor([value], dtype=F64)


# -- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("semantics", ["target", "rules"])
@pytest.mark.parametrize("given_prices", [False, True])
def test_accounting_identity(semantics, given_prices):
    prices = (0.05 * torch.randn(3, 250, dtype=F64)).cumsum(-1).exp() if given_prices else None
    loud = RegimeSettings(sigma=(0.01, 0.05))
    env = OptionMarket(
        16, prices=prices, semantics=semantics, dtype=F64, max_episode_steps=100, max_weight=2.0, ruin=1e-3, regime=loud
    )
    td, trades = env.reset(), 0
    for _ in range(60):
        td.set("action", 2.4 * torch.rand(16, 1, dtype=F64) - 1.2)
        before = td["price"]
        stepped, td = env.step_and_maybe_reset(td)
        nxt = stepped["next"]
        moved = env.state_shares.unsqueeze(-1) * (nxt["price"] - before) - nxt["cost"]
        torch.testing.assert_close(nxt["equity"] - stepped["equity"], moved, rtol=0, atol=1e-13)
        torch.testing.assert_close(nxt["cost"], env.settings.cost * nxt["traded"].abs(), rtol=0, atol=0)
        torch.testing.assert_close(nxt["reward"], (nxt["equity"] / stepped["equity"]).log(), rtol=0, atol=1e-12)
        flat = env.state_shares == 0
        torch.testing.assert_close(env.state_realised[flat], env.state_cash[flat] - 1.0, rtol=0, atol=1e-12)
        trades += int((nxt["traded"] != 0).sum())
    assert (env.state_paid > 0).all()
    assert trades > 300
    assert (env.state_shares >= 0).all() or semantics == "target"


@settings(max_examples=50, deadline=None)
@given(
    weights=st.lists(st.floats(-3.0, 3.0), min_size=2, max_size=6),
    moves=st.lists(st.floats(0.7, 1.4), min_size=6, max_size=6),
    cost=st.floats(0.0, 0.2),
)
@example(weights=[0.0, 0.0, 0.0, -2.0, 0.0], moves=[1.0, 1.0, 1.0, 1.375, 1.0, 1.0], cost=0.125)
def test_a_target_is_a_weight_of_what_its_cost_leaves(weights, moves, cost):
    chosen = MarketSettings(commission=cost, slippage=0.0, max_weight=3.0)
    now, at = owned(), price(1.0)
    for weight, move in zip(weights, moves, strict=False):
        before = now.cash + now.shares * at
        if float(before) < 0.05:
            return
        traded = target_trade(now, at, torch.tensor([weight], dtype=F64), chosen)
        now, fill = execute(now, at, traded, chosen.cost)
        equity = now.cash + now.shares * at
        torch.testing.assert_close(equity, before - fill.fee, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(now.shares * at, weight * equity, rtol=1e-9, atol=1e-12)
        if weight == 0:
            assert now.shares == now.entry == now.held == 0
        if 0 <= weight <= 1 and equity >= 0:  # a short position may cost more to close than there is
            assert now.cash >= -1e-12
        at = at * move
        now, following = marked(now, at)
        assert now.peak >= following


def test_no_trade_to_the_weight_that_is_there():
    chosen = MarketSettings(dead_band=0.05)
    now = owned(cash=0.5, shares=0.5, entry=1.0)
    for weight, trades in ((0.5, False), (0.549, False), (0.46, False), (0.56, True), (0.44, True)):
        traded = target_trade(now, price(1.0), torch.tensor([weight], dtype=F64), chosen)
        assert (traded != 0).item() is trades


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_a_trade_by_hand():
    # 1 in cash; buy for .5 at 10, cost 1 %: .05 shares, cash .495
    now, fill = execute(owned(held=0), price(10.0), price(0.5), 0.01)
    assert [float(x) for x in (now.cash, now.shares, now.entry, fill.fee, fill.profit)] == pytest.approx(
        [0.495, 0.05, 10.0, 0.005, -0.005]
    )
    now, equity = marked(now, price(12.0))
    assert float(equity) == pytest.approx(0.495 + 0.6)
    assert float(now.peak) == pytest.approx(1.095)
    # twice as many at 12: the entry is the mean
    now, _ = execute(now, price(12.0), price(0.6), 0.01)
    assert float(now.entry) == pytest.approx(11.0)
    assert int(now.held) == 1
    # half of them sold at 13: (13 - 11) * .05
    now, fill = execute(now, price(13.0), price(-0.65), 0.01)
    assert float(fill.profit) == pytest.approx(0.1 - 0.0065)
    assert float(now.entry) == pytest.approx(11.0)
    # through zero into a short position of .05 shares: entry at 9, loss of (9 - 11) * .05
    now, fill = execute(now, price(9.0), price(-0.9), 0.01)
    assert float(fill.profit) == pytest.approx(-0.1 - 0.009)
    assert float(now.shares) == pytest.approx(-0.05)
    assert float(now.entry) == pytest.approx(9.0)
    assert int(now.held) == 0
    # the short position is bought back at 8
    now, fill = execute(now, price(8.0), -now.shares * 8.0, 0.01)
    assert float(fill.profit) == pytest.approx(0.05 - 0.004)
    assert float(now.shares) == float(now.entry) == 0.0
    assert float(now.cash) == pytest.approx(1.0 + float(now.realised))


@pytest.mark.parametrize(
    ("action", "state", "expected"),
    [
        (0.0009, {}, 0.0),
        (-0.0009, {"cash": 0.5, "shares": 0.5, "entry": 1.0}, 0.0),
        (0.5, {}, 0.225),
        (1.0, {}, 0.35),  # the first purchase is capped
        (1.0, {"cash": 0.8, "shares": 0.2, "entry": 1.0}, 0.45),
        (1.0, {"cash": 0.2, "shares": 0.8, "entry": 1.0}, 0.2 / 1.01),  # no more than there is cash for, with its cost
        (1.0, {"cash": 2e-5, "shares": 1.0, "entry": 1.0}, 2e-5 / 1.01),
        (1.0, {"cash": 5e-6, "shares": 1.0, "entry": 1.0}, 0.0),  # rounding is no purchase
        (-0.25, {"cash": 0.6, "shares": 0.4, "entry": 1.0}, -0.1),
        (-1.0, {"cash": 0.6, "shares": 0.4, "entry": 1.0}, -0.4),
        (-1.0, {"cash": 0.6, "shares": 0.4, "entry": 1.0, "held": 1}, 0.0),
        (-1.0, {"cash": 0.6, "shares": 0.4, "entry": 1.0, "held": 2}, -0.4),
        (-1.0, {}, 0.0),
        (0.5, {"buys": 0b11111111111111}, 0.225),  # 14 of 20
        (0.5, {"buys": 0b111111111111111}, 0.0),  # 15 of 20
    ],
)
def test_rules_of_an_action(action, state, expected):
    chosen = MarketSettings(commission=0.01, slippage=0.0)
    traded = rule_trade(owned(**state), price(1.0), torch.tensor([action], dtype=F64), chosen)
    assert float(traded) == pytest.approx(expected, abs=1e-12)


def test_purchases_are_counted():
    words = torch.randint(0, 1 << 20, (200,), dtype=torch.int32)
    now = Portfolio.fresh(200, F64, torch.device("cpu"))._replace(buys=words)
    assert (now.bought_share(F64) * 20).round().int().tolist() == [int(word).bit_count() for word in words]
    now = owned()
    for step in range(25):
        now, _ = execute(now, price(1.0), price(0.001 if step < 22 else 0.0), 0.0)
    assert float(now.bought_share(F64)) == pytest.approx(17 / 20)


def test_realised_reward_by_hand():
    closes = torch.full((WARM_BARS + 5,), 10.0, dtype=F64)
    closes[WARM_BARS + 1 :] = torch.tensor([11.0, 9.0, 9.0, 9.0])
    costs = {"commission": 0.01, "slippage": 0.0, "hold_penalty": 0.002}
    env = OptionMarket(1, prices=closes, window=1, reward="realised_pnl", dtype=F64, max_episode_steps=None, **costs)
    td, rewards = env.reset(), []
    for action in (0.5, 0.0, 0.0, 0.0):
        stepped, td = env.step_and_maybe_reset(td.set("action", torch.full((1, 1), action, dtype=F64)))
        rewards.append(stepped["next", "reward"].item())
    bought = 0.5 / 1.005
    profit = 0.1 * bought - 0.01 * 1.1 * bought
    expected = [-9.5 * 0.01 * bought, 9.5 * 2 * profit, -0.002, -0.002]
    assert rewards == pytest.approx(expected)
    assert stepped["next", "truncated"].item()


def test_ruin():
    closes = torch.full((WARM_BARS + 5,), 10.0, dtype=F64)
    closes[WARM_BARS + 2 :] = 5.2
    closes[-1] = 4.9
    env = OptionMarket(2, prices=closes, window=1, dtype=F64, max_episode_steps=None, commission=0.0, slippage=0.0)
    td = env.reset()
    action = torch.tensor([[1.0], [0.0]], dtype=F64)
    for ended in ([False, False], [False, False], [False, False], [True, False]):
        stepped, td = env.step_and_maybe_reset(td.set("action", action))
        assert stepped["next", "terminated"].squeeze(-1).tolist() == ended
    assert stepped["next", "truncated"].all()
    assert stepped["next", "equity"].squeeze(-1).tolist() == pytest.approx([0.49, 1.0])
    assert td["equity"].tolist() == [[1.0], [1.0]]
    # nothing is left of it, and less
    env = OptionMarket(1, prices=closes, window=1, dtype=F64, max_weight=4.0, max_episode_steps=None)
    td = env.reset()
    for _ in range(2):
        stepped, td = env.step_and_maybe_reset(td.set("action", torch.ones(1, 1, dtype=F64)))
    assert stepped["next", "equity"] < 0
    assert stepped["next", "reward"].item() == pytest.approx(math.log(1e-3))
    assert stepped["next", "observation"].isfinite().all()


# -- without an edge --------------------------------------------------------------------------------------------------


def test_expected_cost_of_a_random_policy_at_a_constant_price():
    cost, rows, steps = 0.02, 4096, 5
    closes = torch.full((WARM_BARS + steps + 1,), 30.0, dtype=F64)
    env = OptionMarket(rows, prices=closes, window=1, dtype=F64, commission=cost, slippage=0.0, max_episode_steps=None)
    td, rewards, costs = env.reset(), [], []
    for _ in range(steps):
        stepped, td = env.step_and_maybe_reset(td.set("action", 2.0 * torch.rand(rows, 1, dtype=F64) - 1.0))
        rewards.append(stepped["next", "reward"])
        costs.append(stepped["next", "cost"])
        assert stepped["next", "observation"].isfinite().all()
    # from cash: E c |w| / (1 + c |w|), w uniform on [-1, 1]
    exact = 1.0 - math.log(1.0 + cost) / cost
    assert float(costs[0].mean()) == pytest.approx(exact, abs=4 * float(costs[0].std()) / rows**0.5)
    # from weight to weight: E log(1 - c |w' - w| / (1 + c w' sign(w' - w))), by the midpoint rule
    grid = (torch.arange(1000, dtype=F64) + 0.5) / 500 - 1.0
    old, new = grid.unsqueeze(0), grid.unsqueeze(1)
    exact = torch.log1p(-cost * (new - old).abs() / (1.0 + cost * new * (new - old).sign())).mean()
    later = torch.stack(rewards[1:])
    spread = float(later.mean(0).std()) / rows**0.5
    assert float(later.mean()) == pytest.approx(float(exact), abs=4 * spread)
    assert spread < 0.01 * abs(float(exact))


def test_a_martingale_takes_the_costs_and_nothing_else():
    sigma = (0.005, 0.02)
    fair = RegimeSettings(mean=(-(sigma[0] ** 2) / 2, -(sigma[1] ** 2) / 2), sigma=sigma)
    rows = 4096
    env = OptionMarket(rows, regime=fair, window=1, max_weight=2.0, max_episode_steps=None, dtype=F64, seed=3)
    td = env.reset()
    for _ in range(15):
        _, td = env.step_and_maybe_reset(td.set("action", 2.0 * torch.rand(rows, 1, dtype=F64) - 1.0))
    paid, left = env.state_paid, td["equity"].squeeze(-1) - 1.0
    gain = left + paid
    assert abs(float(gain.mean())) < 4 * float(gain.std()) / rows**0.5
    assert float(paid.mean()) > 10 * float(gain.std()) / rows**0.5
    assert float(left.mean()) < -0.5 * float(paid.mean())
    idle = OptionMarket(8, regime=fair, window=1, max_episode_steps=None)
    batch = idle.rollout(20, lambda td: td.set("action", torch.zeros(8, 1)))
    assert not batch["next", "reward"].any() and (batch["next", "equity"] == 1).all()


# -- how much to invest -----------------------------------------------------------------------------------------------


def test_growth_is_greatest_at_the_kelly_fraction():
    drift, sigma, steps = 1e-3, 0.02, 1200
    closes = normal_series(steps, drift - sigma**2 / 2, sigma)
    weights = torch.arange(0.0, 5.5, 0.5, dtype=F64)
    env = OptionMarket(
        len(weights),
        prices=closes[0],
        window=1,
        commission=0.0,
        slippage=0.0,
        max_weight=5.0,
        ruin=1e-9,
        max_episode_steps=None,
        dtype=F64,
    )
    assert env.max_episode_steps == steps
    td, total = env.reset(), torch.zeros(len(weights), 1, dtype=F64)
    for _ in range(steps):
        stepped, td = env.step_and_maybe_reset(td.set("action", weights.unsqueeze(-1) / 5.0))
        total += stepped["next", "reward"]
    growth = total.squeeze(-1) / steps
    theory = weights * drift - weights**2 * sigma**2 / 2
    assert float(weights[growth.argmax()]) == drift / sigma**2 == 2.5
    torch.testing.assert_close(growth, theory, rtol=0, atol=3e-5)  # of the order of (w sigma)^4 / 4


def test_the_best_band_without_trades_widens_with_the_cost():
    drift, sigma, rows, steps = 0.005, 0.1, 64, 60
    closes = normal_series(steps, drift - sigma**2 / 2, sigma, rows)
    best, trades = [], []
    for cost in (0.0, 0.002, 0.05):
        growths, counts = [], []
        for band in (0.0, 0.05, 0.2):
            env = OptionMarket(
                rows, prices=closes, starts="first", window=1, max_episode_steps=None, dtype=F64,
                commission=cost, slippage=0.0, dead_band=band, ruin=1e-6,
            )  # fmt: skip
            td, growth, count = env.reset(), 0.0, 0
            for _ in range(steps):
                at = td["price"].squeeze(-1)
                stepped, td = env.step_and_maybe_reset(td.set("action", torch.full((rows, 1), 0.5, dtype=F64)))
                weight = env.state_shares * at / (env.state_cash + env.state_shares * at)
                left = torch.log1p(-(stepped["next", "cost"] / stepped["equity"]))
                growth += float((weight * drift - weight**2 * sigma**2 / 2).mean() + left.mean())
                count += int((stepped["next", "traded"] != 0).sum())
            growths.append(growth)
            counts.append(count)
        assert counts[0] > counts[1] > counts[2]
        best.append(max(range(3), key=growths.__getitem__))
        trades.append(counts[best[-1]])
    assert best == [0, 1, 2]
    assert trades[0] > 2 * trades[1] > 4 * trades[2]
