"""Actor and critic of a PPO run, as TensorDict modules."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.data import Categorical, MultiCategorical
from torchrl.envs import EnvBase
from torchrl.modules import ValueOperator

from torchrl_perf.modules import DeviceActor, FusedMLP
from torchrl_perf.modules.hybrid_actor import HybridActor, action_leaves, hybrid_features, part_features
from torchrl_perf.modules.mixed import MixedSequential
from torchrl_perf.trainers.memory import head_inputs, make_trunk, remembers
from torchrl_perf.trainers.normalization import normalized
from torchrl_perf.trainers.spaces import action_choices


class _StateIndependentScale(nn.Module):
    """Learnt log-scales independent of the state, as usual for PPO (arXiv:2006.05990), behind the network's locations.

    Args:
        sizes: numbers of each part of an action: its choices, or the components of its location.
        continuous: which of the parts have a location.
        initial: scale of each component at the start.
        device: of the parameters.
    """

    def __init__(self, sizes: Sequence[int], continuous: Sequence[bool], initial: float, device: torch.device) -> None:
        super().__init__()
        self.sizes, self.continuous = list(sizes), list(continuous)
        learnt = sum(size for size, has_scale in zip(sizes, continuous, strict=True) if has_scale)
        self.log_scale = nn.Parameter(torch.full((learnt,), math.log(initial), device=device))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Parts ``[*, F]`` -> the same with the scales of each behind its location."""
        found, taken = [], 0
        for part, has_scale in zip(features.split(self.sizes, -1), self.continuous, strict=True):
            found.append(part)
            if has_scale:
                found.append(self.log_scale[taken : taken + part.shape[-1]].expand_as(part))
                taken += part.shape[-1]
        return torch.cat(found, -1)


class _OnTrunk(nn.Module):
    """A head above a network that the heads of other modules stand on as well.

    Args:
        trunk: maps the inputs to features ``[*, F]``.
        head: maps the features to anything.
        features: F.
    """

    def __init__(self, trunk: nn.Module, head: nn.Module, features: int) -> None:
        super().__init__()
        self.trunk, self.head, self.features = trunk, head, features

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(*inputs))


def trunk_of(actor: nn.Module) -> _OnTrunk:
    """The network of an actor that :func:`make_actor` made with ``shared_trunk``, whose trunk a critic may stand on."""
    return next(module for module in actor.modules() if isinstance(module, _OnTrunk))


def make_actor(env: EnvBase, config: Any) -> DeviceActor | HybridActor | TensorDictSequential:
    """A policy for the env's action spec: writes ``action`` and ``action_log_prob``.

    It reads what :func:`~torchrl_perf.trainers.spaces.observation_inputs` finds. Discrete (index) actions get a
    categorical over logits, several of them (``MultiCategorical``) one each; continuous ones a normal with a scale as
    ``policy_scale`` says, in the action's own units (our envs clip, and the trainers' collector does for Gymnasium's);
    an action of several parts :func:`make_hybrid_actor`.

    Raises:
        ValueError: for another kind of action spec, an env without an observation to read, and a ``policy_scale`` for
            an action that has none.
    """
    if env.action_keys != ["action"]:
        return make_hybrid_actor(env, config)
    choices, dependent = action_choices(env), config.policy_scale == "state_dependent"
    if choices.discrete:
        _refuse_scale(config)
    if choices.discrete or dependent:
        _refuse_initial_scale(config)
    size, device = choices.features, cast("torch.device", env.device)
    trunk = make_trunk(env, config)
    last: list[nn.Module] = []
    if not choices.discrete:
        last = [] if dependent else [_StateIndependentScale([size], [True], config.initial_scale, device)]
        last.append(NormalParamExtractor("exp"))
    actor = DeviceActor(
        _policy_network(env, config, 2 * size if dependent else size, last),
        distribution_class=cast("Any", choices.distribution),
        param_keys=["logits"] if choices.discrete else ["loc", "scale"],
        in_keys=head_inputs(env, config).keys,
        spec=env.full_action_spec,
    )
    return TensorDictSequential(*trunk, actor) if trunk else actor


def make_critic(
    env: EnvBase, config: Any, below: _OnTrunk | None = None, trunk: Sequence[TensorDictModuleBase] = ()
) -> ValueOperator | TensorDictSequential:
    """A value network: reads what :func:`make_actor` reads, writes ``state_value [*, 1]``.

    Args:
        env: that the values are of.
        config: of the run.
        below: what :func:`trunk_of` gives, for a critic on the actor's trunk; by default it has a network of its own.
        trunk: encoder and memory of the actor, where the config asks for a memory; without them the critic reads the
            features that the actor has written.
    """
    inputs = head_inputs(env, config)
    layers = config.critic_layers if below is None else {"hidden_sizes": ()}
    net: nn.Module = FusedMLP(
        inputs.size if below is None else below.features,
        1,
        activation=config.activation,
        precision=config.precision,
        device=env.device,
        **layers,
    )
    if below is not None:
        return ValueOperator(_OnTrunk(below.trunk, net, below.features), in_keys=inputs.keys)
    if remembers(config):
        value = ValueOperator(net, in_keys=inputs.keys)
        return TensorDictSequential(*trunk, value) if trunk else value
    net = normalized(net, inputs, config, env.device)
    network = inputs.network(net, precision=config.precision, device=env.device)
    return ValueOperator(network, in_keys=inputs.keys)


def make_hybrid_actor(env: EnvBase, config: Any) -> HybridActor | TensorDictSequential:
    """A policy for the env's action spec: writes each part of the action and log-probabilities.

    It reads what :func:`~torchrl_perf.trainers.spaces.observation_inputs` finds.

    Raises:
        ValueError: for a part that is neither Categorical (index) nor floating-point Bounded or Unbounded, an env
            without an observation to read, and a ``policy_scale`` for an action that has none.
    """
    spec = env.full_action_spec
    for key, leaf in spec.items(True, True):
        if isinstance(leaf, MultiCategorical):
            raise ValueError(
                f"action_spec: expected Categorical (index), Bounded or Unbounded parts, received MultiCategorical at "
                f"{key!r}. Remedy: a Categorical for each choice, PPOTrainer for an action of choices alone, or actor=."
            )
    _refuse_initial_scale(config)  # squashed, where a number before squashing would say little
    features, last = hybrid_features(spec), []
    leaves = list(action_leaves(spec).values())
    continuous = [not isinstance(leaf, Categorical) for leaf in leaves]
    if not any(continuous):
        _refuse_scale(config)
    if config.policy_scale == "state_independent":
        sizes = [
            part_features(leaf) // (2 if has_scale else 1) for leaf, has_scale in zip(leaves, continuous, strict=True)
        ]
        features = sum(sizes)
        last = [_StateIndependentScale(sizes, continuous, 1.0, cast("torch.device", env.device))]
    trunk = make_trunk(env, config)
    network = _policy_network(env, config, features, last)
    actor = HybridActor(network, spec=spec, in_keys=head_inputs(env, config).keys)
    return TensorDictSequential(*trunk, actor) if trunk else actor


def _policy_network(env: EnvBase, config: Any, features: int, last: Sequence[nn.Module]) -> nn.Module:
    """The network of a policy: a perceptron on what it reads, and ``last`` above it.

    With ``shared_trunk`` its parts are apart, so that a critic can stand on all but the last layers.
    """
    inputs = head_inputs(env, config)
    place = {"precision": config.precision, "device": env.device}
    layers = FusedMLP(inputs.size, features, activation=config.activation, output_gain=0.01, **place, **config.layers)
    if not config.shared_trunk:
        net = nn.Sequential(layers, *last) if last else layers
        if remembers(config):
            return net  # what reads the observation lies below
        return inputs.network(normalized(net, inputs, config, env.device), **place)
    *hidden, output = layers
    trunk = normalized(MixedSequential(*hidden, precision=config.precision), inputs, config, env.device)
    head = nn.Sequential(output, *last) if last else output
    return _OnTrunk(inputs.network(trunk, **place), head, config.widths[-1])


def _refuse_initial_scale(config: Any) -> None:
    if config.initial_scale != 1.0:
        raise ValueError(
            f"initial_scale: expected 1.0 unless the scale of a single continuous action is learnt numbers, received "
            f"{config.initial_scale}. Remedy: leave it out, or policy_scale='state_independent' for such an action."
        )


def _refuse_scale(config: Any) -> None:
    if config.policy_scale != "auto":
        raise ValueError(
            f"policy_scale: expected 'auto' for an action of choices, which has no scale, received "
            f"{config.policy_scale!r}. Remedy: leave it out."
        )
