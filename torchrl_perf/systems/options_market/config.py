"""Settings of a run that learns to trade one asset with options."""

import dataclasses
import datetime
from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive
from torchrl_perf.trainers.sac_options import SACOptionsConfig

__all__ = ["OPTIONS_MARKET_PRESETS", "OptionsMarketConfig"]

PRESET_NAMES = Literal[
    "OptionMarket",
    "OptionMarketPlain",
    "OptionMarketOriginal",
    "OptionMarketKelly",
    "OptionMarketZeroEdge",
    "OptionMarketSP500",
]


OF_OPTIONS = (
    *(
        "option_learning",
        "option_interrupt",
        "option_relabel",
        "option_learning_rate",
        "option_temperature",
        "option_entropy_coeff",
    ),
    *("option_clip", "option_capacity", "option_temperature_final", "option_temperature_frames"),
    *("directed", "trend_unit", "max_option_share", "min_options_used"),
)
"""Settings that mean nothing without options."""
OF_TRANSFORMER = ("transformer_size", "transformer_layers", "transformer_heads")
"""Settings that mean nothing for perceptrons."""


@dataclass(frozen=True)
class OptionsMarketConfig(SACOptionsConfig):
    """Every choice of a run on :class:`~torchrl_perf.envs.market.OptionMarket` with SAC below a policy over options.

    SAC: arXiv:1812.05905; options: Sutton, Precup and Singh, 1999. Returns are reported in log growth of the equity, or
    in what ``reward`` gives, whatever ``reward_scale``.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "options-market"
    presets_in: ClassVar[str] = "systems.options_market.config:OPTIONS_MARKET_PRESETS"
    blueprint_in: ClassVar[str] = "systems.options_market.blueprint:MARKET"
    env_class: ClassVar[str] = "OptionMarket"
    work_of_step: ClassVar[int] = 13
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *SACOptionsConfig.fixed_by_checkpoint,
        *("market", "semantics", "reward", "options", "directed", "window", "prices_file", "first_date", "last_date"),
        *("network", *OF_TRANSFORMER),
    )

    env: PRESET_NAMES = "OptionMarket"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which settings to start from: hourly bars of five regimes; the same without options; of two regimes that differ
    in volatility alone, with the original's rules for purchases and sales; a market without costs whose best position
    is known; one where only not trading is right; or the S&P 500. The task is that of the settings."""
    num_steps: int = 8
    """Steps of each env in one iteration (T)."""
    gamma: float = 0.992
    """Discount factor, of one bar to the next."""
    market: Literal["regimes", "five_regimes", "brownian", "recorded"] = "regimes"
    """Where prices come from: two hidden regimes, a calm and a wild one; five, in each of which another way to trade
    pays (RegimeSettings.five); geometric Brownian motion; or prices_file."""
    sentiment_correlation: float = 0.0
    """Two or five regimes: correlation of the observed sentiment with the hidden regime's mean; 0 is no edge."""
    drift: float = 0.0
    """market="brownian": drift of a bar; the log return has the mean drift - volatility^2 / 2."""
    volatility: float = 0.002
    """market="brownian": standard deviation of the log return of a bar."""
    prices_file: str = ""
    """market="recorded": gzipped CSV of dates and closes; "" is the S&P 500 of the package skfolio."""
    first_date: str = ""
    """market="recorded": first date that is traded on, as 2000-12-31; "" is the file's first."""
    last_date: str = ""
    """market="recorded": last date, included; "" is the file's last."""
    bars_per_week: int = 168
    """Period of the time of week: 168 for hours around the clock, 5 for trading days."""
    semantics: Literal["target", "rules"] = "rules"
    """What an action is: a position in parts of max_weight, or a purchase or sale within rules."""
    reward: Literal["log_wealth", "realised_pnl"] = "log_wealth"
    """What a step is rewarded with: log growth of the equity, or what trades realised."""
    reward_scale: float = 100.0
    """What rewards are multiplied by before they are learnt from: 100 makes log growth per cent."""
    options: Literal["trading", "positions", "exposure", "sides", "none"] = "trading"
    """The six options of a trader with rules of their own, for purchases and sales or for positions; or ranges of the
    position that last for a while: of various sizes, or the sides of the market, whose size is up to the actor. Or
    none: plain soft actor-critic."""
    trend_unit: Literal["volatility", "price"] = "volatility"
    """options="trading": what the distance of two averages that makes a trend is measured in; 1.5 or 3 times the
    present volatility, or 1.5 or 3 % of the price."""
    directed: bool = False
    """options="trading": options buy, sell or close alone, rather than act to both sides."""
    commission: float = 0.001
    """Cost of a trade, part of the traded notional."""
    slippage: float = 0.00055
    """The same, on top."""
    max_weight: float = 1.0
    """Greatest part of the equity that is invested; more than 1 is leverage."""
    dead_band: float = 0.0
    """semantics="target": a target that is not farther than this from the present weight is not traded to."""
    window: int = 24
    """Bars of the technical observation."""
    network: Literal["perceptron", "transformer"] = "perceptron"
    """What reads the bars of the window: the hidden layers, all at once; or attention over the bars (arXiv:1706.03762),
    whose summary they read beside what is not of the window. Actor, choice and critics have an encoder each."""
    transformer_size: int = 64
    """network="transformer": size of a bar's token."""
    transformer_layers: int = 2
    """network="transformer": layers."""
    transformer_heads: int = 4
    """network="transformer": heads of the attention, a divisor of transformer_size."""
    max_episode_steps: int = 672
    """Steps after which an episode is truncated."""
    ruin: float = 0.5
    """Equity, in units of the capital, at which an episode terminates."""
    option_temperature_final: float | None = None
    """Temperature of the choice from option_temperature_frames on; None keeps it."""
    option_temperature_frames: int = 50_000
    """Frames over which it falls by the same factor in each."""
    max_option_share: float = 0.5
    """Share of the steps above which an option's use is warned of as a collapse; with 1 it never is."""
    min_options_used: int = 3
    """Options with more than 5% of the steps below which the same is warned of."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        counts = ("window", "max_episode_steps", "bars_per_week", "option_temperature_frames", "min_options_used")
        checks.each(counts, is_count, "a positive integer")
        positive = ("volatility", "reward_scale", "max_weight", "option_temperature_final")
        checks.each(positive, is_positive, "a positive number")
        checks.each(("commission", "slippage", "dead_band"), lambda value: 0 <= value < 1, "a number in [0, 1)")
        checks.each(("ruin",), lambda value: 0 < value < 1, "a number in (0, 1)")
        checks.each(("max_option_share",), lambda value: 0 < value <= 1, "a number in (0, 1]")
        checks.each(("sentiment_correlation",), lambda value: -1 <= value <= 1, "a number in [-1, 1]")
        checks.each(("first_date", "last_date"), _is_date, "'' or an ISO 8601 date such as '2000-12-31'")
        if checks.sound("first_date", "last_date") and self.last_date and self.first_date > self.last_date:
            problem = f"expected a date from first_date = {self.first_date!r} on, received {self.last_date!r}."
            checks.add("last_date", f"last_date: {problem} Remedy: a later one.")
        self._check_network(checks)
        if checks.sound("options") and self.options == "none":
            usual = type(self).without_task()
            for name in OF_OPTIONS:
                if checks.sound(name) and getattr(self, name) != getattr(usual, name):
                    problem = (
                        f"expected {getattr(usual, name)!r} with options='none', received {getattr(self, name)!r}."
                    )
                    checks.add(name, f"{name}: {problem} Remedy: leave it out, or --env OptionMarketPlain.")
        if (
            checks.sound("options", "semantics")
            and self.options not in ("trading", "none")
            and self.semantics != "target"
        ):
            problem = (
                f"expected 'target' with options={self.options!r}, ranges of a position, received {self.semantics!r}."
            )
            checks.add("semantics", f"semantics: {problem} Remedy: semantics='target', or options='trading'.")
        checks.idle(("directed",), "options", lambda options: options != "trading")  # the others have directions
        if checks.sound("commission", "slippage", "max_weight") and self.cost * self.max_weight >= 1:
            problem = f"expected commission + slippage below 1 / max_weight, received {self.cost:.6g}."
            checks.add("commission", f"commission: {problem} Remedy: less of either.")

    def _check_network(self, checks: Checks) -> None:
        checks.each(OF_TRANSFORMER, is_count, "a positive integer")
        checks.idle(OF_TRANSFORMER, "network", lambda network: network == "perceptron")
        if not checks.sound("network", "window", *OF_TRANSFORMER) or self.network == "perceptron":
            return
        if self.window < 2:
            problem = f"expected at least 2 bars with network='transformer', received {self.window}."
            checks.add("window", f"window: {problem} Remedy: window=24.")
        if self.transformer_size % self.transformer_heads:
            problem = f"expected a divisor of transformer_size = {self.transformer_size}, received "
            remedy = "Remedy: transformer_heads=1, or a size that it divides."
            checks.add("transformer_heads", f"transformer_heads: {problem}{self.transformer_heads}. {remedy}")

    @property
    def keeps_choices(self) -> bool:
        """Whether choices of options are kept to learn from."""
        return super().keeps_choices and self.options != "none"

    @property
    def cost(self) -> float:
        """Cost of a unit of traded notional."""
        return self.commission + self.slippage


def _is_date(value: str) -> bool:
    try:
        return not value or datetime.date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


_HOURLY = OptionsMarketConfig(
    env="OptionMarketOriginal",
    num_envs=16,
    num_steps=8,
    total_steps=100_000,
    capacity=100_000,
    updates_per_iteration=8,
    minibatch_size=256,
    learning_starts=5_000,
    actor_learning_rate=3e-4,
    critic_learning_rate=3e-4,
    option_learning_rate=3e-4,
    initial_temperature=1e-3,
    learn_temperature=False,
    hidden_size=128,
    option_temperature_final=0.1,
    option_capacity=10_000,
    sentiment_correlation=0.5,
)

OPTIONS_MARKET_PRESETS: dict[str, OptionsMarketConfig] = {
    # Holding no position costs nothing, and trading at random does: learnt from returns, options that trade die out
    # before anything is known of them. What matters of the past is in the columns of the last bar. Returns are noise
    # for the most part, so that batches are large, and targets may follow fast.
    "OptionMarket": dataclasses.replace(
        _HOURLY,
        env="OptionMarket",
        num_envs=512,
        num_steps=4,
        total_steps=3_000_000,
        capacity=1_000_000,
        updates_per_iteration=10,
        minibatch_size=2_048,
        learning_starts=8_192,
        gamma=0.97,
        tau=0.02,
        market="five_regimes",
        sentiment_correlation=0.98,
        semantics="target",
        options="positions",
        dead_band=0.2,
        window=1,
        max_episode_steps=336,
        actor_learning_rate=2e-3,
        critic_learning_rate=2e-3,
        option_learning_rate=2e-3,
        option_learning="critic",
        option_relabel=1.0,
        option_interrupt=True,
        option_entropy_coeff=0.03,
        option_capacity=2_000,
        option_temperature_final=None,
        initial_temperature=2e-3,
        hidden_size=64,
    ),
    # what trends are was a part of the price, which hourly bars never reach
    "OptionMarketOriginal": dataclasses.replace(_HOURLY, trend_unit="price"),
    # Returns carry little information on the best weight (a Sharpe ratio of .3 a bar): learning needs many of them, at
    # weights of all sizes, which the temperature ensures. Growth is flat around its maximum: options that differ by how
    # much they hold at most differ little in it. Their entropies tell them apart, and the choice keeps to several. What
    # is learnt last of such returns is noise, which step sizes that fall to 0 leave out.
    "OptionMarketKelly": dataclasses.replace(
        _HOURLY,
        env="OptionMarketKelly",
        num_envs=256,
        total_steps=327_680,
        capacity=327_680,
        minibatch_size=2_048,
        learning_starts=8_192,
        gamma=0.5,
        tau=0.02,
        market="brownian",
        sentiment_correlation=0.0,
        drift=0.08,
        volatility=0.25,
        semantics="target",
        options="exposure",
        commission=0.0,
        slippage=0.0,
        max_weight=2.0,
        window=1,
        max_episode_steps=32,
        ruin=0.1,
        reward_scale=10.0,
        actor_learning_rate=1e-3,
        critic_learning_rate=3e-3,
        anneal_learning_rate=True,
        option_learning_rate=1e-3,
        option_learning="critic",
        option_entropy_coeff=0.6,
        option_capacity=2_000,
        option_temperature_final=None,
        initial_temperature=0.25,
        hidden_size=64,
    ),
    "OptionMarketZeroEdge": dataclasses.replace(
        _HOURLY,
        env="OptionMarketZeroEdge",
        num_envs=64,
        total_steps=64_000,
        gamma=0.9,
        market="brownian",
        sentiment_correlation=0.0,
        drift=0.0,
        volatility=0.002,
        window=1,
        max_episode_steps=168,
        learning_starts=4_096,
        actor_learning_rate=1e-3,
        critic_learning_rate=1e-3,
        hidden_size=32,
        max_option_share=1.0,
        min_options_used=1,
    ),
    "OptionMarketSP500": dataclasses.replace(
        _HOURLY,
        env="OptionMarketSP500",
        total_steps=64_000,
        gamma=0.95,
        market="recorded",
        sentiment_correlation=0.0,
        bars_per_week=5,
        semantics="target",
        options="exposure",
        dead_band=0.1,
        max_episode_steps=252,
        initial_temperature=0.01,
        hidden_size=64,
    ),
}
"""Settings by env name: for two CPU cores, but for OptionMarket, which takes a GPU some minutes."""
# the same without options, which they are to be compared with
OPTIONS_MARKET_PRESETS["OptionMarketPlain"] = dataclasses.replace(
    OPTIONS_MARKET_PRESETS["OptionMarket"],
    env="OptionMarketPlain",
    options="none",
    **{field.name: field.default for field in dataclasses.fields(OptionsMarketConfig) if field.name in OF_OPTIONS},
)
