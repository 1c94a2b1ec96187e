"""Networks, options and market of a trader.

Dimension key: ``O`` options, ``D`` action.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_perf.envs.market import (
    OptionMarket,
    OptionRules,
    PriceSeries,
    RegimeSettings,
    option_set,
    position_option_set,
    sp500,
)
from torchrl_perf.envs.market.indicators import FEATURES
from torchrl_perf.modules.encoders.window_encoder import WindowEncoder
from torchrl_perf.modules.option_set import OptionSet, TimeHazard
from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.trainers.off_policy.actor_critic import actor_layers
from torchrl_perf.transforms import OptionState

__all__ = [
    "EXPOSURES",
    "SIDES",
    "Compressed",
    "Encoded",
    "SymmetricLog",
    "make_market",
    "make_market_options",
    "make_options_market_env",
    "market_layers",
    "market_of",
    "recorded_prices",
    "window_encoder",
]

EXPOSURES: dict[str, tuple[float, float]] = {
    "flat": (-0.05, 0.05),
    "cautious": (-0.5, 0.5),
    "long": (0.0, 1.0),
    "short": (-1.0, 0.0),
    "bold": (-1.0, 1.0),
}
"""Options that are ranges of the position, as shares of max_weight; each may be chosen at any time."""
SIDES: dict[str, tuple[float, float]] = {name: EXPOSURES[name] for name in ("flat", "long", "short")}
"""The three of them that differ by the side, and not by how much they hold at most."""
SHORTEST_EXPOSURE, LONGEST_EXPOSURE = 3, 20


class SymmetricLog(nn.Module):
    """``sign(x) log(1 + |x|)`` (arXiv:2301.04104), which leaves small numbers nearly unchanged and shrinks large ones.

    Columns of a market are in per cent, and a crash is a hundred times an ordinary bar.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[*]`` -> ``[*]``."""
        return input.sign() * input.abs().log1p()


class Compressed(nn.Module):
    """A network whose first input is passed through :class:`SymmetricLog`; the others are left alone.

    Args:
        network: of one or several inputs.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.compress = network, SymmetricLog()

    def forward(self, observation: Tensor, *others: Tensor) -> Any:
        """The network's output for the compressed ``[*, O]`` and the other inputs."""
        return self.network(self.compress(observation), *others)


def recorded_prices(config: OptionsMarketConfig) -> PriceSeries:
    """The closes that a config names, between its dates.

    Raises:
        ImportError: for the S&P 500 without the package ``skfolio``.
        FileNotFoundError: for a file that is not there.
        ValueError: for a file of another form, and where no bar lies between the dates.
    """
    series = sp500(config.prices_file or None)
    return series.between(config.first_date or series.dates[0], config.last_date or series.dates[-1])


def make_market(config: OptionsMarketConfig, device: torch.device | str, **options: Any) -> OptionMarket:
    """The market of a run.

    Args:
        config: prices, costs, what an action means, what is rewarded.
        device: of everything.
        **options: replace arguments of :class:`~torchrl_perf.envs.market.OptionMarket`, or ``num_envs``.

    Raises:
        ValueError: for prices that do not fit window and episode.
    """
    arguments: dict[str, Any] = {
        name: getattr(config, name)
        for name in (
            *("num_envs", "semantics", "reward", "commission", "slippage", "max_weight", "dead_band"),
            *("window", "bars_per_week", "max_episode_steps", "ruin"),
        )
    }
    if config.market == "regimes":
        arguments["regime"] = RegimeSettings(sentiment_correlation=config.sentiment_correlation)
    elif config.market == "five_regimes":
        arguments["regime"] = RegimeSettings.five(sentiment_correlation=config.sentiment_correlation)
    elif config.market == "brownian":
        mean, sigma = config.drift - config.volatility**2 / 2, config.volatility
        arguments["regime"] = RegimeSettings(transition=((1.0,),), mean=(mean,), sigma=(sigma,))
    elif "prices" not in options:
        arguments["prices"] = recorded_prices(config).prices
    return OptionMarket(**{**arguments, "device": device, **options})


def make_market_options(config: OptionsMarketConfig, market: OptionMarket) -> OptionSet:
    """The six options of a trader, :data:`EXPOSURES` or :data:`SIDES`, on the market's device."""
    if config.options == "trading":
        rules = OptionRules.of_price() if config.trend_unit == "price" else OptionRules()
        return option_set(market, rules=rules, directed=config.directed)
    if config.options == "positions":
        return position_option_set(market)
    ranges = EXPOSURES if config.options == "exposure" else SIDES
    hazard = TimeHazard(len(ranges), hazard_max=LONGEST_EXPOSURE, steepness=0.4)
    return OptionSet(
        tuple(ranges),
        termination=hazard.to(market.device),
        min_duration=SHORTEST_EXPOSURE,
        fallback="flat",
        action_range=tuple(ranges.values()),
    )


def make_options_market_env(
    config: OptionsMarketConfig, device: torch.device | str, *, options: OptionSet | None = None, **arguments: Any
) -> TransformedEnv | OptionMarket:
    """The market of a run, with the state of the options, where there are options.

    Args:
        config: as for :func:`make_market`.
        device: of everything.
        options: give O; by default those that the config names.
        **arguments: replace those of the market, as for :func:`make_market`.
    """
    market = make_market(config, device, **arguments)
    if config.options == "none":
        return market
    chosen = make_market_options(config, market) if options is None else options
    return TransformedEnv(market, OptionState(chosen.num_options))


def market_of(env: EnvBase | None) -> OptionMarket:
    """The market below an env's transforms.

    Raises:
        ValueError: for an env without one, or one that has no flat observation.
    """
    base = env.base_env if isinstance(env, TransformedEnv) else env
    if not isinstance(base, OptionMarket) or base.settings.observation == "dict":
        form = " with observation='dict'" if isinstance(base, OptionMarket) else ""
        raise ValueError(
            f"env: expected an OptionMarket with a flat observation, received {type(base).__name__}{form}. Remedy: "
            "make_options_market_env(config, device)."
        )
    return base


def window_encoder(config: OptionsMarketConfig, in_features: int, device: Any = None) -> WindowEncoder | None:
    """Attention over the bars of inputs ``[*, 23 W + R]``, where ``network`` asks for a transformer."""
    if config.network != "transformer":
        return None
    sizes = {"width": config.transformer_size, "num_layers": config.transformer_layers}
    heads = {"num_heads": config.transformer_heads, "precision": config.precision}
    bars = len(FEATURES) * config.window
    return WindowEncoder(config.window, len(FEATURES), in_features - bars, **sizes, **heads, device=device)


def market_layers(in_features: int, out_features: int, config: OptionsMarketConfig) -> list[nn.Module]:
    """The layers of an actor or of a choice, which see inputs ``[*, 23 W + R]`` through :class:`SymmetricLog`."""
    encoder = window_encoder(config, in_features)
    if encoder is None:
        return [SymmetricLog(), *actor_layers(in_features, out_features, config)]
    return [SymmetricLog(), encoder, *actor_layers(encoder.out_features, out_features, config)]


class Encoded(nn.Module):
    """A network whose first input is passed through an encoder; the others are left alone.

    Args:
        encoder: of the first input.
        network: of what it gives, and of the other inputs.
    """

    def __init__(self, encoder: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.encoder, self.network = encoder, network

    def forward(self, observation: Tensor, *others: Tensor) -> Any:
        """The network's output for ``[*, O]`` and the other inputs."""
        return self.network(self.encoder(observation), *others)
