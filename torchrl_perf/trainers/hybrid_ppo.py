"""PPO for actions with discrete and continuous parts, with every step of the loop on the device."""

from torch import nn
from torchrl.data import MultiCategorical
from torchrl.envs import EnvBase

from torchrl_perf.modules.hybrid_actor import HybridActor, hybrid_features
from torchrl_perf.modules.mlp import FusedMLP
from torchrl_perf.trainers.config import PPOConfig
from torchrl_perf.trainers.hybrid_ppo_config import HybridPPOConfig
from torchrl_perf.trainers.ppo import PPOTrainer
from torchrl_perf.trainers.spaces import observation_inputs


class HybridPPOTrainer(PPOTrainer):
    """PPO on a :class:`HybridActor` (arXiv:1707.06347, arXiv:1903.01344): one ratio of all parts is clipped.

    Arguments, attributes and errors are those of :class:`PPOTrainer`; the default actor is :func:`make_hybrid_actor`.
    """

    config: HybridPPOConfig

    def make_actor(self, env: EnvBase) -> nn.Module:
        """:func:`make_hybrid_actor`."""
        return make_hybrid_actor(env, self.config)


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
    network = FusedMLP(
        inputs.size,
        hybrid_features(spec),
        hidden_size=config.hidden_size,
        activation=config.activation,
        precision=config.precision,
        output_gain=0.01,
        device=env.device,
    )
    return HybridActor(inputs.network(network), spec=spec, in_keys=inputs.keys)
