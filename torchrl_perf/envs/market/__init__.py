"""Trading one asset, with options that last, at costs."""

from torchrl_perf.envs.market.columns import PARTS, column_names, flatten, reading
from torchrl_perf.envs.market.market import OptionMarket
from torchrl_perf.envs.market.options import OPTION_NAMES, OptionRules, option_set
from torchrl_perf.envs.market.series import PriceSeries, sp500
from torchrl_perf.envs.market.settings import MarketSettings, RegimeSettings

__all__ = [
    "OPTION_NAMES",
    "PARTS",
    "MarketSettings",
    "OptionMarket",
    "OptionRules",
    "PriceSeries",
    "RegimeSettings",
    "column_names",
    "flatten",
    "option_set",
    "reading",
    "sp500",
]
