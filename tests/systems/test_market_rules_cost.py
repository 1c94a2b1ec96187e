"""What the rules of the options alone cost a trader who sees the regimes, on the same prices as without them."""

import dataclasses
from functools import cache

import pytest
import torch

from torchrl_perf.modules import OptionController
from torchrl_perf.systems.options_market.config import OPTIONS_MARKET_PRESETS
from torchrl_perf.systems.options_market.evaluation import evaluate
from torchrl_perf.systems.options_market.networks import make_market_options, make_options_market_env, market_of
from torchrl_perf.systems.options_market.optimum import InformedTrader, best_trading

SEED, PATHS = 7, 96
MADE_FOR = torch.tensor([0, 1, 4, 5, 1])  # of each regime


@cache
def best_of(regime, cost):
    return best_trading(regime, cost=cost)


def traded(constrained, **changes):
    """Growth of an episode, and prices, of the informed trader, in the ranges of options whose choice is the best."""
    config = dataclasses.replace(OPTIONS_MARKET_PRESETS["OptionMarket"], num_envs=PATHS, max_episode_steps=200)
    env = make_options_market_env(config, "cpu", seed=SEED)
    market = market_of(env)
    settings = market.settings
    informed = InformedTrader(market, best_of(settings.regime, settings.cost))
    options = make_market_options(config, market)
    options = dataclasses.replace(options, continues=changes.pop("continues", options.continues))
    low, high = torch.tensor(options.action_ranges).T

    class Selector(torch.nn.Module):
        def forward(self, observation):
            """The less, the farther an option's range is from the best position."""
            if len(observation) != PATHS:
                return torch.zeros(len(observation), len(low))
            best = informed(env.full_action_spec.zero())["action"]
            bonus = torch.nn.functional.one_hot(MADE_FOR[market.get_buffer("state_regime")], len(low))
            return 0.01 * bonus - (low - best).relu() - (best - high).relu()

    controller = OptionController(Selector(), options, example=env.fake_tensordict(), **changes)

    def policy(tensordict):
        td, option = informed(tensordict), controller(tensordict)["active_option"]
        within = torch.minimum(torch.maximum(td["action"], low[option, None]), high[option, None])
        return td.set("action", within) if constrained else td

    figures, recording = evaluate(policy, env, seed=SEED)
    return figures.growth, recording.price


@pytest.fixture(scope="module")
def free():
    return traded(constrained=False)


def test_policies_meet_the_same_prices_whatever_they_draw(free):
    config = dataclasses.replace(OPTIONS_MARKET_PRESETS["OptionMarketPlain"], num_envs=PATHS, max_episode_steps=200)
    env = make_options_market_env(config, "cpu", seed=SEED)

    def draws(tensordict):
        return tensordict.set("action", torch.rand(PATHS, 1) * torch.rand(()))

    found = [evaluate(draws, env, seed=SEED)[1] for _ in range(2)]
    assert torch.equal(found[0].price, free[1])
    assert torch.equal(found[0].equity, found[1].equity)  # and what they draw is named by the seed, too
    assert found[0].size[:, 1:3].std() > 0.1


def test_options_that_continue_and_are_interrupted_cost_next_to_nothing(free):
    assert traded(constrained=True, interrupts=True)[0] > 0.985 * free[0]


def test_options_that_do_neither_cost_more(free):
    neither = traded(constrained=True, continues=False)[0]
    either = [traded(constrained=True)[0], traded(constrained=True, continues=False, interrupts=True)[0]]
    assert neither < 0.98 * free[0]
    assert min(either) > neither + 0.003 * free[0]
