"""Trading options on a simulated market, or on real prices, by SAC under a policy over options."""

from torchrl_perf.systems.options_market.config import OPTIONS_MARKET_PRESETS, OptionsMarketConfig
from torchrl_perf.systems.options_market.networks import make_options_market_env
from torchrl_perf.systems.options_market.picture import EquityRecording, draw_equity, record_equity, recorded_equity
from torchrl_perf.systems.options_market.trainer import OptionsMarketTrainer

__all__ = [
    "OPTIONS_MARKET_PRESETS",
    "EquityRecording",
    "OptionsMarketConfig",
    "OptionsMarketTrainer",
    "draw_equity",
    "make_options_market_env",
    "record_equity",
    "recorded_equity",
]
