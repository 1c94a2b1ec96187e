"""Updates of actors and critics whose networks are perceptrons, in few launches: the parts that algorithms share.

Between the launches of the networks stand small compiled functions of the rest: draws, losses, and their gradients in
what the networks gave. Each pass backward is called by hand, with the gradient of its outputs. The equations are those
of the algorithm's losses, which take values in place of networks here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_perf.functional.members import Gradients, Members
from torchrl_perf.modules.actor import DeviceActor
from torchrl_perf.modules.deterministic import DeterministicActor
from torchrl_perf.modules.encoders.joined import JoinedInputs
from torchrl_perf.modules.ensemble import EnsembleQ
from torchrl_perf.modules.member_networks import members_of_ensemble, members_of_layers
from torchrl_perf.modules.normalization import EmpiricalNormalization, NormalizedCritic
from torchrl_perf.runtime.upstream.modules import hook_dicts, is_changed
from torchrl_perf.trainers.off_policy.actor_critic import ActorCritic
from torchrl_perf.trainers.off_policy.passes import Outcome, Pass
from torchrl_perf.trainers.optim.one_launch import OneLaunchStep, takes_one_launch
from torchrl_perf.trainers.optim.optimization import GuardedAdam

__all__ = ["ActorChain", "ChainedUpdate", "CriticChain", "actor_chain", "critic_chain"]

MOST_ROWS = 2048
"""Rows of a sample up to which a compiler's products of float32 are slower; those of 16 bits are at any number."""


class CriticChain(NamedTuple):
    """Critics as one ensemble of perceptrons of observations and action."""

    net: Members
    normalization: nn.Module | None
    """Of the observations."""
    keys: list[NestedKey]
    """Entries of the observations."""

    def observations(self, td: TensorDictBase, *, following: bool = False) -> Tensor:
        """What stands before the action in the input, ``[B, O]`` float32."""
        return _input(self.keys, self.normalization, td, following)


class ActorChain(NamedTuple):
    """An actor as a perceptron and what makes of its outputs an action or the parameters of a distribution."""

    net: Members
    head: list[nn.Module]
    """Layers behind it."""
    normalization: nn.Module | None
    keys: list[NestedKey]

    def observations(self, td: TensorDictBase, *, following: bool = False) -> Tensor:
        """The input, ``[B, O]`` float32."""
        return _input(self.keys, self.normalization, td, following)

    def headed(self, y: Tensor) -> Any:
        """What the layers behind the perceptron make of its outputs."""
        value: Any = y
        for layer in self.head:
            value = layer(value)
        return value


def _input(keys: Sequence[NestedKey], normalization: nn.Module | None, td: TensorDictBase, following: bool) -> Tensor:
    entries = [td.get(("next", key) if following else key) for key in keys]
    joined = entries[0] if len(entries) == 1 else torch.cat(entries, -1)
    return (joined if normalization is None else normalization(joined)).float()


def critic_chain(critic: nn.Module, action_key: NestedKey) -> CriticChain | None:
    """A critic for the kernels; None for networks of another form."""
    net, normalization, keys = critic, None, list(cast("Any", critic).in_keys)
    if type(critic) is TensorDictModule and not is_changed(critic):
        net = cast("nn.Module", critic.module)
        if type(net) is NormalizedCritic and not is_changed(net):
            net, normalization = net.network, net.normalization
    if type(net) is not EnsembleQ or is_changed(net) or keys[-1] != action_key or action_key in keys[:-1]:
        return None
    members = members_of_ensemble(net.net)
    return None if members is None else CriticChain(members, normalization, keys[:-1])


def actor_chain(actor: nn.Module) -> ActorChain | None:
    """An actor for the kernels; None for networks of another form."""
    if type(actor) not in (DeviceActor, DeterministicActor) or is_changed(actor):
        return None
    if cast("Any", actor).valid_key is not None:
        return None
    wrapper = cast("Any", actor).module
    network = wrapper[0].module if isinstance(actor, DeviceActor) else wrapper
    keys = list(wrapper[0].in_keys) if isinstance(actor, DeviceActor) else list(actor.network_keys)
    if type(network) is JoinedInputs and not is_changed(network):
        network = network.network
    elif len(keys) > 1:
        return None
    normalization = None
    is_normalized = type(network) is nn.Sequential and len(network) == 2 and not is_changed(network)
    if is_normalized and type(network[0]) is EmpiricalNormalization:
        normalization, network = network[0], network[1]
    found = members_of_layers(network)
    return None if found is None else ActorChain(found[0], found[1], normalization, keys)


class ChainedUpdate(ABC):
    """One update of an algorithm, see :meth:`ActorCritic.update`.

    Args:
        algorithm: with losses and optimisers.
        actor: of the loss.
        critic: of the loss.
        target_critic: of the loss.
    """

    def __init__(
        self, algorithm: ActorCritic, actor: ActorChain, critic: CriticChain, target_critic: CriticChain
    ) -> None:
        self.algorithm, self.loss = algorithm, algorithm.loss
        self.actor, self.critic, self.target_critic = actor, critic, target_critic
        # the loss itself has one of TorchRL's, which asks whether targets are updated
        self._hooks = hook_dicts(*[part for part in self.loss.modules() if part is not self.loss])
        self.critic_step = _step(algorithm.critic_optimizer, critic.net, target_critic.net)

    @staticmethod
    def serves(algorithm: ActorCritic) -> bool:
        """Whether the optimisers of an algorithm are those that one launch steps."""
        return takes_one_launch(algorithm.critic_optimizer) and takes_one_launch(algorithm.actor_optimizer)

    def takes(self, sample: TensorDictBase) -> bool:
        """Whether this is the faster way for a sample ``[B]``, of plain rows, and serves what may have changed since.

        Parameters may have been frozen, which the plain update refuses, and groups of an optimiser set apart. Hooks of
        networks are called by the plain update alone.
        """
        is_fast = len(sample) <= MOST_ROWS or self.critic.net.precision in ("bf16", "fp16")
        nets = self.critic.net, self.actor.net
        learns = all(param.requires_grad for net in nets for param in net.params)
        is_plain = sample.get(self.loss.action_key).ndim == 2
        return is_fast and is_plain and learns and not any(self._hooks) and self.serves(self.algorithm)

    @abstractmethod
    def __call__(self, sample: TensorDictBase, actor_due: bool = True) -> Outcome:
        """Losses, gradients and steps of a sample ``[B]``."""

    def values(self, x: Tensor, *, beside: bool = False, save: bool = True) -> tuple[Tensor, Any]:
        """Values ``[K, B, 1]`` of the critics, and with ``beside`` of their targets behind them, ``[2 K, B, 1]``."""
        return self.critic.net.forward(x, beside=self.target_critic.net if beside else None, save=save)

    def outcome(
        self,
        told: tuple[dict[str, Tensor], dict[str, Tensor], Tensor],
        critic_step: tuple[Tensor, Tensor],
        actor: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None,
        actor_step: tuple[Tensor, Tensor] | None = None,
    ) -> Outcome:
        """What the update did, of losses, other means and priorities."""
        losses, means, priority = told
        of_actor = None if actor is None else Pass(*actor, [])
        return self.algorithm.outcome_of(Pass(losses, means, [], priority), critic_step, of_actor, actor_step)


def _step(
    optimizer: GuardedAdam, net: Members, target: Members | None, others: Sequence[nn.Parameter] = ()
) -> OneLaunchStep:
    params = cast("list[nn.Parameter]", net.params)
    targets = None if target is None else dict(zip(params, target.params, strict=True))
    return OneLaunchStep(optimizer, params, others, targets)


def actor_step(
    algorithm: ActorCritic, actor: ActorChain, target: ActorChain | None, others: Sequence[nn.Parameter] = ()
) -> OneLaunchStep:
    """The steps of an actor, and of parameters of one number each that learn with it."""
    return _step(algorithm.actor_optimizer, actor.net, None if target is None else target.net, others)


def of_first(gradients: Gradients | None) -> Gradients:
    """Gradients that were asked for."""
    assert gradients is not None
    return gradients
