"""PPO for actions with discrete and continuous parts, with every step of the loop on the device."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torchrl.envs import EnvBase

from torchrl_perf.trainers.actor_critic import make_hybrid_actor
from torchrl_perf.trainers.on_policy.trainer import OnPolicyTrainer
from torchrl_perf.trainers.ppo import PPO, PPOConfig


@dataclass(frozen=True)
class HybridPPOConfig(PPOConfig):
    """Every choice of a PPO run whose actions have discrete and continuous parts (arXiv:1707.06347, arXiv:1903.01344).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "hybrid-ppo"
    presets_in: ClassVar[str] = "trainers.hybrid_ppo:HYBRID_PPO_PRESETS"
    blueprint_in: ClassVar[str] = "trainers.blueprints:HYBRID_PPO"
    not_taken: ClassVar[tuple[str, ...]] = ("initial_scale",)

    env: str = "HybridTarget"
    """Env to learn in; an action of one part serves too. torchrl-perf envs lists those with a name."""


HYBRID_PPO_PRESETS: dict[str, HybridPPOConfig] = {
    "HybridTarget": HybridPPOConfig(
        num_envs=64,
        num_steps=16,
        total_steps=122_880,
        gamma=0.8,
        lmbda=0.9,
        epochs=5,
        minibatches=4,
        learning_rate=3e-3,
        entropy_coeff=0.03,
        entropy_coeff_final=0.0,
    ),
}
"""Settings for each task, by env name."""


class HybridPPO(PPO):
    """PPO on a :class:`HybridActor` (arXiv:1707.06347, arXiv:1903.01344): one ratio of all parts is clipped."""

    def make_actor(self, env: EnvBase) -> nn.Module:
        """:func:`~torchrl_perf.trainers.actor_critic.make_hybrid_actor`."""
        return make_hybrid_actor(env, self.config)


class HybridPPOTrainer(OnPolicyTrainer):
    """PPO for actions with discrete and continuous parts.

    The actor is :func:`~torchrl_perf.trainers.actor_critic.make_hybrid_actor`.


    It takes ``env=``, ``collector=``, ``actor=`` and ``critic=`` as :class:`~torchrl_perf.trainers.ppo.PPOTrainer`.
    """

    algorithm_class: ClassVar[type[PPO]] = HybridPPO  # pyright: ignore[reportIncompatibleVariableOverride]
