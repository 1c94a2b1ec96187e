"""The policy and the market from the settings of a run."""

from typing import Any

import torch
from torch import nn

from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.systems.options_market.networks import make_market, make_market_options, make_options_market_env
from torchrl_perf.systems.options_market.trainer import MarketNetworks, make_plain_actor
from torchrl_perf.trainers.blueprints import OF_LOSS, OPTIONS, Blueprint, Weights, make_option_policy
from torchrl_perf.trainers.spaces import continuous_action, vector_observation

__all__ = ["MARKET"]

NO_PRICES = 1.0  # rules read columns of an observation, whatever the prices were


def _policy(specs: Any, config: OptionsMarketConfig) -> nn.Module:
    if config.options == "none":
        return make_plain_actor(vector_observation(specs), continuous_action(specs), config)
    # the options' rules know where in an observation a column is, which the market's settings decide
    bars = config.window + (config.max_episode_steps or 1) + 2
    prices = {"prices": torch.full((bars,), NO_PRICES)} if config.market == "recorded" else {}
    market = make_market(config.for_rows(1), specs.device, **prices)
    return make_option_policy(specs, config, MarketNetworks(config), make_market_options(config, market))


class MarketBlueprint(Blueprint):
    """A policy over options, or the actor alone where there are none."""

    def weights_of(self, config: Any) -> Weights:
        """Where a checkpoint of a run with this config holds the parameters of its policy."""
        return OF_LOSS if config.options == "none" else self.weights


MARKET = MarketBlueprint(_policy, OPTIONS, make_options_market_env)
