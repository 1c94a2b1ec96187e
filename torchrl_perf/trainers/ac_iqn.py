"""AC-IQN, a deterministic policy on a critic of implicit quantiles, with every step of the loop on the device."""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import nn
from torchrl.data import TensorSpec

from torchrl_perf.modules.mlp import hidden_layers
from torchrl_perf.modules.values.quantile import ImplicitQuantileCritic
from torchrl_perf.objectives.ac_iqn import ACIQNLoss
from torchrl_perf.trainers.config_checks import Checks, is_count
from torchrl_perf.trainers.networks import CONVOLUTION_SETTINGS
from torchrl_perf.trainers.normalization import make_normalization
from torchrl_perf.trainers.off_policy.actor_critic import ActorCritic
from torchrl_perf.trainers.off_policy.deterministic import (
    PENDULUM,
    DeterministicConfig,
    DeterministicPasses,
    NoisyActor,
    make_deterministic_actor,
)
from torchrl_perf.trainers.off_policy.slice_memory import SLICE_MEMORY_SETTINGS
from torchrl_perf.trainers.off_policy.trainer import OffPolicyTrainer
from torchrl_perf.trainers.spaces import inputs_of


@dataclass(frozen=True)
class ACIQNConfig(DeterministicConfig):
    """Every choice of an AC-IQN run: a deterministic policy on a critic of implicit quantiles (arXiv:1806.06923).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "ac-iqn"
    presets_in: ClassVar[str] = "trainers.ac_iqn:AC_IQN_PRESETS"
    blueprint_in: ClassVar[str] = "trainers.blueprints:AC_IQN"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (*DeterministicConfig.fixed_by_checkpoint, "num_cosines")

    not_taken: ClassVar[tuple[str, ...]] = (
        "layer_norm",
        *CONVOLUTION_SETTINGS,
        *SLICE_MEMORY_SETTINGS,
    )  # it reads a vector

    kappa: float = 1.0
    """Temporal difference up to which the quantile loss is quadratic; 0 is nowhere."""
    num_taus: int = 8
    """Quantiles of the action taken, drawn for each row (K)."""
    num_target_taus: int = 8
    """Quantiles of the target's action that each of them is compared with."""
    dropped_target_taus: int = 0
    """Quantiles that are drawn for a target beside those, the largest of which are left out of it: a single critic
    overestimates less (truncated quantiles, arXiv:2005.04269)."""
    num_actor_taus: int = 32
    """Quantiles whose mean the policy raises."""
    num_cosines: int = 64
    """Features of a quantile's level."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        counts = ("num_taus", "num_target_taus", "num_actor_taus", "num_cosines")
        checks.each(counts, is_count, "a positive integer")
        checks.each(("kappa",), lambda value: value >= 0, "a number of at least 0")
        checks.each(("dropped_target_taus",), lambda value: value >= 0, "0 or a positive integer")


AC_IQN_PRESETS: dict[str, ACIQNConfig] = {"Pendulum": ACIQNConfig(**PENDULUM)}
"""Settings for each task, by env name."""


class ACIQN(NoisyActor, ActorCritic):
    """Actor-critic with implicit quantiles: IQN (arXiv:1806.06923) for continuous actions, in the manner of DDPG.

    Levels are drawn on the device in each update, anew in each replay of a graph. An update that is split for want of
    memory draws them anew for each part.
    """

    config: ACIQNConfig
    loss: ACIQNLoss
    reads_vector = True

    def make_actor(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """:func:`make_deterministic_actor`, squashed by the arc tangent."""
        return make_deterministic_actor(observation, action, self.config, "atan")

    def make_critic(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """A network of quantiles of the value of observation and action.

        Where widths are given, the last is that of its own layers, and the others are those of a trunk of observations.

        Raises:
            ValueError: for no width.
        """
        config, device = self.config, cast("Any", action.device)
        given = config.hidden_sizes is not None or config.critic_hidden_sizes is not None
        widths = config.critic_widths if given else (config.hidden_size,)
        if not widths:
            raise ValueError(
                "critic_hidden_sizes: expected one width at least for ac-iqn, received none. Remedy: "
                f"critic_hidden_sizes=({config.hidden_size},)."
            )
        sizes = [observation.shape[-1], *widths[:-1]]
        layer = make_normalization(inputs_of(observation), config, device)
        layers = [*([] if layer is None else [layer]), *hidden_layers(sizes, config.activation, device=device)]
        trunk = nn.Sequential(*layers) if layers else None
        return ImplicitQuantileCritic(
            sizes[-1],
            action.shape[-1],
            num_cosines=config.num_cosines,
            hidden_size=widths[-1],
            trunk=trunk,
            activation=config.activation,
            precision=config.precision,
            device=device,
        )

    def make_loss(self, actor: nn.Module, critic: nn.Module) -> ACIQNLoss:
        """Quantile regression of the critic, the mean of its quantiles for the actor."""
        config = self.config
        return ACIQNLoss(
            actor,
            critic,
            gamma=config.gamma,
            kappa=config.kappa,
            num_taus=(config.num_taus, config.num_target_taus),
            num_actor_taus=config.num_actor_taus,
            dropped_target_taus=config.dropped_target_taus,
        )

    def make_passes(self) -> DeterministicPasses:
        """The deterministic policy gradient."""
        return DeterministicPasses(self.loss, self.critic_optimizer, self.actor_optimizer)


class ACIQNTrainer(OffPolicyTrainer):
    """The loop of :class:`OffPolicyTrainer` on :class:`ACIQN`.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs]; by default the package's task that the config names.
        collector: a collector that acts with a :class:`GaussianNoise` or :class:`OUNoise` on ``actor``; by default a
            :class:`DeviceCollector` of the env.
        actor: a deterministic TensorDict module for the env's action; by default that of the collector's policy, or
            :func:`make_deterministic_actor` where there is no collector.
        critic: an :class:`ImplicitQuantileCritic`.

    Raises:
        ValueError: at construction, for actions that are not continuous and bounded, or parts that do not fit.
    """

    algorithm_class = ACIQN
