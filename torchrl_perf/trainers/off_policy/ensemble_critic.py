"""The critics that off-policy algorithms make themselves: one batched network of several action values."""

from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import TensorSpec

from torchrl_perf.modules.encoders.observations import EncodedCritic, ObservationEncoder
from torchrl_perf.modules.ensemble import EnsembleQ
from torchrl_perf.modules.normalization import NormalizedCritic
from torchrl_perf.objectives.sac import VALUE_KEY
from torchrl_perf.trainers.memory import remembers
from torchrl_perf.trainers.normalization import make_normalization
from torchrl_perf.trainers.off_policy.actor_critic import ActorCriticConfig
from torchrl_perf.trainers.off_policy.slice_memory import CRITIC_FEATURES
from torchrl_perf.trainers.spaces import Inputs, inputs_of

__all__ = ["make_ensemble_critic"]


def make_ensemble_critic(
    observation: TensorSpec, action: TensorSpec, config: ActorCriticConfig, num_critics: int
) -> TensorDictModule:
    """K action values in one batched network: reads observations and ``action``, writes ``[*, K]``.

    Args:
        observation: spec ``[*, O]`` of ``"observation"``, or a Composite of all observations.
        action: spec ``[*, D]``.
        config: gives widths, activation and precision.
        num_critics: K.
    """
    inputs = Inputs([CRITIC_FEATURES], config.memory_size) if remembers(config) else inputs_of(observation, config)
    net: nn.Module = EnsembleQ(
        num_critics,
        inputs.size + action.shape[-1],
        activation=config.activation,
        precision=config.precision,
        device=action.device,
        **config.critic_layers,
    )
    if inputs.parts:
        encoder = ObservationEncoder(inputs.parts, precision=config.precision, device=action.device)
        net = EncodedCritic(encoder, net)
    elif not remembers(config) and (layer := make_normalization(inputs, config, action.device)) is not None:
        net = NormalizedCritic(layer, net)
    return TensorDictModule(net, in_keys=[*inputs.keys, "action"], out_keys=[VALUE_KEY])
