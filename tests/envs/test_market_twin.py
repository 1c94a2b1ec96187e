"""OptionMarket against itself in scalars: whole observations, rewards and ends, in float64."""

import pytest
import torch
from market_twin import Twin

from torchrl_perf.envs import OptionMarket, RegimeSettings
from torchrl_perf.envs.market.indicators import WARM_BARS
from torchrl_perf.envs.market.regime import next_regime

TOLERANCE = {"rtol": 1e-8, "atol": 1e-9}
LOUD = RegimeSettings(sigma=(0.01, 0.04), mean=(0.001, -0.002), sentiment_correlation=0.6)


def check(twins, stepped, results):
    nxt = stepped["next"]
    seen = torch.tensor([twin.observation() for twin in twins], dtype=torch.float64)
    torch.testing.assert_close(nxt["observation"], seen, **TOLERANCE)
    columns = dict(
        zip(("reward", "traded", "cost", "terminated", "truncated"), zip(*results, strict=True), strict=True)
    )
    for key in ("reward", "traded", "cost"):
        torch.testing.assert_close(nxt[key].squeeze(-1), torch.tensor(columns[key], dtype=torch.float64), **TOLERANCE)
    equity = torch.tensor([[twin.equity] for twin in twins], dtype=torch.float64)
    torch.testing.assert_close(nxt["equity"], equity, **TOLERANCE)
    for key in ("terminated", "truncated"):
        assert nxt[key].squeeze(-1).tolist() == list(columns[key])


@pytest.mark.parametrize("reward", ["log_wealth", "realised_pnl"])
@pytest.mark.parametrize("semantics", ["target", "rules"])
def test_given_prices(semantics, reward):
    steps, envs, window = 60, 3, 24
    prices = (0.008 * torch.randn(2, WARM_BARS + window + steps, dtype=torch.float64)).cumsum(-1).exp() * 40
    form = {"semantics": semantics, "reward": reward, "max_weight": 1.5, "bars_per_week": 5}
    env = OptionMarket(envs, prices=prices, starts="first", dtype=torch.float64, max_episode_steps=None, **form)
    first = WARM_BARS + window - 1
    assert env.max_episode_steps == steps
    lists = [prices[row % 2].tolist() for row in range(envs)]
    twins = [Twin(closes[: first + 1], first, limit=steps, **form) for closes in lists]
    td = env.reset()
    expected = torch.tensor([twin.observation() for twin in twins], dtype=torch.float64)
    torch.testing.assert_close(td["observation"], expected, **TOLERANCE)
    actions = 2.4 * torch.rand(steps, envs, dtype=torch.float64) - 1.2
    actions[torch.rand(steps, envs) < 0.2] = 0.0
    actions[:, 2] = actions[:, 2].abs()  # meets the limit of purchases
    trades = 0
    for t in range(steps):
        stepped, td = env.step_and_maybe_reset(td.set("action", actions[t].unsqueeze(-1)))
        results = [twin.step(float(actions[t, row]), lists[row][first + 1 + t]) for row, twin in enumerate(twins)]
        check(twins, stepped, results)
        torch.testing.assert_close(stepped["next", "price"][0, 0], prices[0, first + 1 + t])
        assert not any(result[3] for result in results)
        trades += sum(result[1] != 0 for result in results)
    assert trades > 60


def test_synthetic_prices_over_several_episodes():
    envs, limit = 2, 25
    form = {"semantics": "rules", "regime": LOUD, "window": 10}
    options = {"dtype": torch.float64, "max_episode_steps": limit, "slippage": 0.01}
    env = OptionMarket(envs, **options, **form)
    market = env.market
    env.set_seed(5)
    td = env.reset()
    # the same numbers once more
    torch.manual_seed(5)
    bars, draws = WARM_BARS + 10, {"dtype": torch.float64}
    uniform, normal = torch.rand(envs, bars + 1, **draws), torch.randn(envs, bars + 1, **draws)
    clocks = (torch.rand(envs, **draws) * 168).long()
    regime = (uniform[:, :1] >= market.shares).sum(-1)
    closes = [torch.ones(envs, **draws)]
    for bar in range(bars):
        returns = market.mean[regime] + market.sigma[regime] * normal[:, bar]
        closes.append(closes[-1] * returns.exp())
        regime = next_regime(regime, market.cumulative, uniform[:, bar + 1])
    noise = normal[:, bars]

    def scores():
        return (0.6 * market.score[regime] + 0.8 * noise).tolist()

    form["slippage"], form["limit"] = 0.01, limit
    lists = torch.stack(closes, -1).tolist()
    twins = [Twin(lists[row], int(clocks[row]) + 9, scores()[row], **form) for row in range(envs)]
    expected = torch.tensor([twin.observation() for twin in twins], dtype=torch.float64)
    torch.testing.assert_close(td["observation"], expected, **TOLERANCE)
    actions = 2.0 * torch.rand(60, envs, 1, generator=torch.Generator().manual_seed(1), **draws) - 1.0
    ends = 0
    for t in range(60):
        state = torch.get_rng_state()
        stepped, td = env.step_and_maybe_reset(td.set("action", actions[t]))
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        shocks, jump = torch.randn(2, envs, **draws), torch.rand(envs, **draws)
        assert torch.equal(torch.get_rng_state(), after)  # a step draws nothing else, ends or not
        returns = market.mean[regime] + market.sigma[regime] * shocks[0]
        regime = next_regime(regime, market.cumulative, jump)
        noise = 0.9 * noise + 0.19**0.5 * shocks[1]
        results = []
        for row, twin in enumerate(twins):
            close = twin.price * float(returns[row].exp())
            results.append(twin.step(float(actions[t, row, 0]), close, scores()[row]))
        check(twins, stepped, results)
        for twin, result in zip(twins, results, strict=True):
            if any(result[3:]):
                twin.begin()
                ends += 1
        root = torch.tensor([twin.observation() for twin in twins], dtype=torch.float64)
        torch.testing.assert_close(td["observation"], root, **TOLERANCE)  # the market has gone on
    assert ends >= 4
