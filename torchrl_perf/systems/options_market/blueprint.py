"""The policy and the market from the settings of a run."""

from typing import Any

import torch

from torchrl_perf.modules.option_actor import OptionPolicy
from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.systems.options_market.networks import make_market, make_market_options, make_options_market_env
from torchrl_perf.systems.options_market.trainer import MarketNetworks
from torchrl_perf.trainers.blueprints import OPTIONS, Blueprint, make_option_policy

__all__ = ["MARKET"]

NO_PRICES = 1.0  # rules read columns of an observation, whatever the prices were


def _policy(specs: Any, config: OptionsMarketConfig) -> OptionPolicy:
    # the options' rules know where in an observation a column is, which the market's settings decide
    bars = config.window + (config.max_episode_steps or 1) + 2
    prices = {"prices": torch.full((bars,), NO_PRICES)} if config.market == "recorded" else {}
    market = make_market(config.for_rows(1), specs.device, **prices)
    return make_option_policy(specs, config, MarketNetworks(config), make_market_options(config, market))


MARKET = Blueprint(_policy, OPTIONS, make_options_market_env)
