"""PPO for actions with discrete and continuous parts, with every step of the loop on the device."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn
from torchrl.data import MultiCategorical
from torchrl.envs import EnvBase

from torchrl_perf.modules.hybrid_actor import HybridActor, hybrid_features
from torchrl_perf.modules.mlp import FusedMLP
from torchrl_perf.trainers.normalization import normalized
from torchrl_perf.trainers.on_policy.trainer import OnPolicyTrainer
from torchrl_perf.trainers.ppo import PPO, PPOConfig
from torchrl_perf.trainers.spaces import observation_inputs


@dataclass(frozen=True)
class HybridPPOConfig(PPOConfig):
    """Every choice of a PPO run whose actions have discrete and continuous parts (arXiv:1707.06347, arXiv:1903.01344).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "hybrid-ppo"
    presets_in: ClassVar[str] = "trainers.hybrid_ppo:HYBRID_PPO_PRESETS"

    env: Literal[  # pyright: ignore[reportIncompatibleVariableOverride]
        "HybridTarget", "CartPole", "Pendulum", "Acrobot", "MountainCar", "MountainCarContinuous"
    ] = "HybridTarget"
    """Which of the package's tasks to learn; an action of one part serves too."""


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
        """:func:`make_hybrid_actor`."""
        return make_hybrid_actor(env, self.config)


class HybridPPOTrainer(OnPolicyTrainer):
    """PPO for actions with discrete and continuous parts; the actor is :func:`make_hybrid_actor`.

    Arguments, attributes and errors are those of :class:`~torchrl_perf.trainers.ppo.PPOTrainer`.
    """

    algorithm_class: ClassVar[type[PPO]] = HybridPPO  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        config: HybridPPOConfig,
        *,
        env: EnvBase | None = None,
        actor: nn.Module | None = None,
        critic: nn.Module | None = None,
    ) -> None:
        super().__init__(config, env=env, actor=actor, critic=critic)


def make_hybrid_actor(env: EnvBase, config: PPOConfig) -> HybridActor:
    """A policy for the env's action spec: writes each part of the action and log-probabilities.

    It reads ``observation``, or the vectors of :func:`~torchrl_perf.trainers.spaces.observation_inputs`.

    Raises:
        ValueError: for a part that is neither Categorical (index) nor floating-point Bounded or Unbounded, and an env
            without a vector to read.
    """
    spec = env.full_action_spec
    for key, leaf in spec.items(True, True):
        if isinstance(leaf, MultiCategorical):
            raise ValueError(
                f"action_spec: expected Categorical (index), Bounded or Unbounded parts, received MultiCategorical at "
                f"{key!r}. Remedy: a Categorical for each choice, PPOTrainer for an action of choices alone, or actor=."
            )
    inputs = observation_inputs(env)
    network: nn.Module = FusedMLP(
        inputs.size,
        hybrid_features(spec),
        hidden_size=config.hidden_size,
        activation=config.activation,
        precision=config.precision,
        output_gain=0.01,
        device=env.device,
    )
    network = normalized(network, inputs.keys, inputs.size, config, env.device)
    return HybridActor(inputs.network(network), spec=spec, in_keys=inputs.keys)
