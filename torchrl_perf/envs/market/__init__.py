"""Trading one asset, with options that last, at costs."""

from torchrl_perf.envs.market.columns import PARTS, column_names, flatten, reading
from torchrl_perf.envs.market.market import OptionMarket
from torchrl_perf.envs.market.options import OPTION_NAMES, OptionRules, option_set
from torchrl_perf.envs.market.position_options import PositionRules, position_option_set
from torchrl_perf.envs.market.series import PriceSeries, sp500
from torchrl_perf.envs.market.settings import FIVE_REGIMES, MarketSettings, RegimeSettings

__all__ = [
    "FIVE_REGIMES",
    "OPTION_NAMES",
    "PARTS",
    "MarketSettings",
    "OptionMarket",
    "OptionRules",
    "PositionRules",
    "PriceSeries",
    "RegimeSettings",
    "column_names",
    "flatten",
    "option_set",
    "position_option_set",
    "reading",
    "sp500",
]
