"""SAC with options that trades one asset, with every step of the loop on the device.

Dimension key: ``N`` envs, ``T`` steps, ``O`` options.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.data import TensorSpec, Unbounded
from torchrl.envs import EnvBase

from torchrl_perf.envs.market import reading
from torchrl_perf.modules import DeviceActor, MixedSequential
from torchrl_perf.modules.bounds import action_bounds
from torchrl_perf.modules.option_actor import OptionPolicy
from torchrl_perf.modules.option_set import OptionSet
from torchrl_perf.modules.options import OptionController
from torchrl_perf.modules.squashed_normal import SquashedNormal, SquashedNormalHead
from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.systems.options_market.networks import (
    Compressed,
    Encoded,
    make_market,
    make_market_options,
    market_layers,
    market_of,
    window_encoder,
)
from torchrl_perf.trainers.off_policy.algorithm import Algorithm
from torchrl_perf.trainers.off_policy.task import Task
from torchrl_perf.trainers.off_policy.trainer import OffPolicyTrainer
from torchrl_perf.trainers.sac import SAC, make_sac_critic
from torchrl_perf.trainers.sac_options import OptionNetworks, SACOptions

__all__ = ["MarketNetworks", "MarketTask", "OptionsMarketTrainer", "make_plain_actor"]

MIN_SHARE = 0.05


class MarketNetworks(OptionNetworks):
    """Networks of SAC with options, which see observations through :class:`SymmetricLog`."""

    def critic(self, observation: TensorSpec, action: TensorSpec, options: OptionSet) -> TensorDictModule:
        """Critics conditioned on the option."""
        make = super().critic
        return compressed_critic(lambda observation: make(observation, action, options), observation, self.config)

    def controller(self, selector: nn.Module, options: OptionSet, example: TensorDictBase) -> OptionController:
        """A policy over the options, whose temperature falls if the config says so."""
        config = self.config
        return OptionController(
            selector,
            options,
            example=example,
            temperature=config.option_temperature,
            temperature_end=config.option_temperature_final,
            temperature_steps=config.option_temperature_frames if config.option_temperature_final else 0,
            interrupts=config.option_interrupt,
        )

    def layers(self, in_features: int, out_features: int) -> list[nn.Module]:
        """The layers of an actor or a choice, of the compressed input."""
        return market_layers(in_features, out_features, self.config)


class MarketTask(Task):
    """The market that a config describes, its scaled rewards, and metrics of its trades.

    Args:
        config: gives the factor of the rewards.
    """

    metric_names = ("market/weight", "market/exposure", "market/turnover", "market/cost", "market/trades")

    def __init__(self, config: OptionsMarketConfig) -> None:
        self.config = config
        if config.options != "none":
            self.metric_names = (*self.metric_names, "option/temperature")

    def make_env(self, config: Any, device: torch.device) -> EnvBase:
        """The market, without the state of options."""
        return make_market(config, device)

    def check(self, env: EnvBase | None) -> None:
        """Refuses an env that is no :class:`OptionMarket` with a flat observation."""
        market_of(env)

    def stored(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch with scaled rewards."""
        reward = batch.get(("next", "reward"))
        return batch.copy().set(("next", "reward"), reward * self.config.reward_scale)

    def measure(self, trainer: Any, batch: TensorDictBase) -> None:
        """Adds the trades, and the temperature of the choice of an option."""
        finite, following = trainer.guard.finite, cast("TensorDictBase", batch.get("next"))
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
            trainer.metrics.add(name, finite(value))
        if self.config.options != "none":
            trainer.metrics.add("option/temperature", trainer.controller.temperature, reduce="last")


def make_plain_actor(observation: TensorSpec, action: TensorSpec, config: Any) -> nn.Module:
    """The actor of a trader without options, for specs ``[*, O]`` and ``[*, D]``."""
    layers = market_layers(observation.shape[-1], 2 * action.shape[-1], config)
    head = SquashedNormalHead(*action_bounds(action))
    return DeviceActor(
        MixedSequential(*layers, head, precision=config.precision).to(action.device),
        distribution_class=SquashedNormal,
        param_keys=SquashedNormalHead.param_keys,
        in_keys=["observation"],
        spec=action,
    )


def make_plain_critic(observation: TensorSpec, action: TensorSpec, config: Any) -> TensorDictModule:
    """The critics of a trader without options, for specs ``[*, O]`` and ``[*, D]``."""
    return compressed_critic(lambda observation: make_sac_critic(observation, action, config), observation, config)


def compressed_critic(
    make: Callable[[TensorSpec], TensorDictModule], observation: TensorSpec, config: Any
) -> TensorDictModule:
    """Critics of the compressed observation, or of what the window's encoder gives of it.

    Args:
        make: makes them for a spec ``[*, O]``.
        observation: of the market.
        config: of the run.
    """
    encoder = window_encoder(config, observation.shape[-1], observation.device)
    if encoder is None:
        plain = make(observation)
        network = cast("nn.Module", plain.module)
    else:
        rows = observation.shape[:-1]
        plain = make(Unbounded((*rows, encoder.out_features), device=observation.device, dtype=observation.dtype))
        network = Encoded(encoder, cast("nn.Module", plain.module))
    return TensorDictModule(Compressed(network), plain.in_keys, plain.out_keys)


class OptionsMarketTrainer(OffPolicyTrainer):
    """:class:`SACOptions` on :class:`~torchrl_perf.envs.market.OptionMarket` (arXiv:1812.05905).

    Networks see observations through :class:`SymmetricLog`, rewards times ``reward_scale`` are stored, and the
    temperature of the choice of an option falls with the frames where the config says so.

    Metrics beside those of SAC with options, means over the steps of the interval: ``market/weight``, the position
    after the trade in units of the equity, ``market/exposure``, its absolute value, ``market/turnover``, notional
    traded in a step in units of the equity, ``market/cost``, the same of what it cost, ``market/trades``, the share of
    steps with a trade; ``option/usage_<name>``, ``option/max_usage``, ``option/num_used``, ``option/duration``, with an
    :class:`~torchrl_perf.metrics.OptionCollapseWarning` by the limits of the config; ``option/temperature``.

    With ``options="none"`` it is plain soft actor-critic of the same networks, which options are to be compared with:
    it has neither the metrics nor the parts of options.

    Args:
        config: every choice of the run.
        env: an :class:`OptionMarket` below an :class:`OptionState` transform; by default the config's.
        collector: a collector that acts with the trainer's policy; by default a :class:`DeviceCollector` of the env.
        options: names and rules; by default those that the config names.
        policy: an :class:`OptionPolicy` of your own.
        option_value: maps what the controller reads to values of the options ``[*, O]``, or of the state ``[*, 1]``.
        critic: a TensorDict module that reads observations, action and "active_option".
        networks: makes those that are not given; by default :class:`MarketNetworks`.

    Raises:
        ValueError: for an env that is no :class:`OptionMarket` with a flat observation, for prices that do not fit
            window and episode, and for parts that do not fit each other.
        ImportError: for the S&P 500 without the package ``skfolio``.
    """

    def __init__(
        self,
        config: OptionsMarketConfig,
        *,
        env: EnvBase | None = None,
        collector: BaseCollector | None = None,
        options: OptionSet | None = None,
        policy: OptionPolicy | None = None,
        option_value: nn.Module | None = None,
        critic: nn.Module | None = None,
        networks: OptionNetworks | None = None,
    ) -> None:
        if config.options == "none":
            given = {"options": options, "policy": policy, "option_value": option_value, "networks": networks}
            if wrong := [name for name, part in given.items() if part is not None]:
                raise ValueError(
                    f"{', '.join(wrong)}: expected None with options='none', received parts of options. Remedy: leave "
                    "them out, or another setting of options."
                )
            plain = SAC(config, critic=critic, make_actor=make_plain_actor, make_critic=make_plain_critic)
            super().__init__(config, plain, env=env, collector=collector, task=MarketTask(config))
            return
        algorithm: Algorithm = SACOptions(
            config,
            options=options,
            policy=policy if policy is not None else getattr(collector, "policy", None),
            option_value=option_value,
            critic=critic,
            networks=networks or MarketNetworks(config),
            find_options=lambda env: make_market_options(config, market_of(env)),
            usage=lambda options: _limits(config, options),
            anneals_choice=config.option_temperature_final is not None,
        )
        super().__init__(config, algorithm, env=env, collector=collector, task=MarketTask(config))


def _limits(config: OptionsMarketConfig, options: OptionSet) -> dict[str, Any]:
    """When the use of options counts as a collapse."""
    used = min(config.min_options_used, options.num_options)
    return {"max_share": config.max_option_share, "min_share": MIN_SHARE, "min_used": used}
