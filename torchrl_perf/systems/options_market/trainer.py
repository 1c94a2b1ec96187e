"""SAC with options that trades one asset, with every step of the loop on the device.

Dimension key: ``N`` envs, ``T`` steps, ``O`` options.
"""

from typing import Any, cast

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import TensorSpec
from torchrl.envs import TransformedEnv

from torchrl_perf.envs.market import reading
from torchrl_perf.metrics import OptionUsage
from torchrl_perf.modules import MixedSequential
from torchrl_perf.modules.option_actor import OptionActor
from torchrl_perf.modules.option_set import OptionSet
from torchrl_perf.modules.options import OptionController
from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.systems.options_market.networks import (
    Compressed,
    make_market_options,
    make_options_market_env,
    market_of,
    with_compression,
)
from torchrl_perf.trainers.off_policy_actor_critic import actor_layers
from torchrl_perf.trainers.sac_options import SACOptionsTrainer

__all__ = ["OptionsMarketTrainer"]

MIN_SHARE = 0.05


class OptionsMarketTrainer(SACOptionsTrainer):
    """:class:`SACOptionsTrainer` on :class:`~torchrl_perf.envs.market.OptionMarket` (arXiv:1812.05905).

    Networks see observations through :class:`SymmetricLog`, rewards times ``reward_scale`` are stored, and the
    temperature of the choice of an option falls with the frames where the config says so.

    Metrics beside those of SAC with options, means over the steps of the interval: ``market/weight``, the position
    after the trade in units of the equity, ``market/exposure``, its absolute value, ``market/turnover``, notional
    traded in a step in units of the equity, ``market/cost``, the same of what it cost, ``market/trades``, the share of
    steps with a trade; ``option/usage_<name>``, ``option/max_usage``, ``option/num_used``, ``option/duration``, with an
    :class:`~torchrl_perf.metrics.OptionCollapseWarning` by the limits of the config; ``option/temperature``.

    Arguments, attributes and errors are those of :class:`SACOptionsTrainer`, and

    Raises:
        ValueError: for an env that is no :class:`OptionMarket` with a flat observation, and for prices that do not fit
            window and episode.
        ImportError: for the S&P 500 without the package ``skfolio``.
    """

    config: OptionsMarketConfig

    # -- construction -------------------------------------------------------------------------------------------------

    @property
    def options(self) -> OptionSet:
        """Names and rules of the options."""
        if self._options is None:
            self._options = make_market_options(self.config, market_of(self.env))
        return self._options

    def make_env(self) -> TransformedEnv:
        """:func:`make_options_market_env`."""
        return make_options_market_env(self.config, self.device, options=self._options)

    def make_actor(self, observation: TensorSpec, action: TensorSpec) -> OptionActor:
        """An actor that is told the option, of compressed observations."""
        size = observation.shape[-1] + self.options.num_options
        layers = with_compression(actor_layers(size, 2 * action.shape[-1], self.config))
        network = MixedSequential(*layers, precision=self.config.precision).to(action.device)
        return OptionActor(network, self.options, spec=action)

    def make_critic(self, observation: TensorSpec, action: TensorSpec) -> TensorDictModule:
        """Critics that are told the option, of compressed observations."""
        plain = super().make_critic(observation, action)
        return TensorDictModule(Compressed(cast("nn.Module", plain.module)), plain.in_keys, plain.out_keys)

    def make_option_network(self) -> nn.Module:
        """A number for each option, logits of the choice or values, from the compressed ``observation``."""
        size = cast("Any", self.env).observation_spec["observation"].shape[-1]
        layers = with_compression(actor_layers(size, self.options.num_options, self.config))
        return MixedSequential(*layers, precision=self.config.precision).to(self.device)

    def make_controller(self) -> OptionController:
        """A policy over the options that reads ``observation``."""
        config = self.config
        return OptionController(
            self.make_option_network(),
            self.options,
            example=cast("Any", self.env).fake_tensordict(),
            temperature=config.option_temperature,
            temperature_end=config.option_temperature_final,
            temperature_steps=config.option_temperature_frames if config.option_temperature_final else 0,
        )

    def _make_state(self) -> None:
        market_of(self.env)
        super()._make_state()
        names = self.options.names
        self.usage = OptionUsage(
            self.metrics,
            names,
            max_share=self.config.max_option_share,
            min_share=MIN_SHARE,
            min_used=min(self.config.min_options_used, len(names)),
        )

    # -- the loop -----------------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """The temperature of the choice of an option."""
        super().schedule()
        if self.config.option_temperature_final is not None:
            self.controller.step(self.config.batch_size)

    def store(self, batch: TensorDictBase) -> None:
        """Writes the transitions, and the options that ended, with scaled rewards; the batch is left as it is."""
        scaled = batch.copy()
        reward = batch.get(("next", "reward"))
        super().store(scaled.set(("next", "reward"), reward * self.config.reward_scale))

    def measure(self, batch: TensorDictBase) -> None:
        """Those of every trainer, and what was traded."""
        super().measure(batch)
        finite, following = self.guard.finite, cast("TensorDictBase", batch.get("next"))
        size, equity = reading(batch).size.unsqueeze(-1), batch.get("equity")
        traded, cost = following.get("traded"), following.get("cost")
        weight = (size * equity + traded) / (equity - cost)
        rows = {
            "market/weight": weight,
            "market/exposure": weight.abs(),
            "market/turnover": traded.abs() / equity,
            "market/cost": cost / equity,
            "market/trades": (traded != 0).to(weight.dtype),
        }
        for name, value in rows.items():
            self.metrics.add(name, finite(value))
        self.metrics.add("option/temperature", self.controller.temperature, reduce="last")
