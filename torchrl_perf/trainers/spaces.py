"""What default networks read and how they act, chosen from an env's specs: one place for all trainers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from tensordict.utils import NestedKey
from torch import distributions, nn
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from torchrl.envs import EnvBase
from torchrl.modules import IndependentNormal

from torchrl_perf.modules.distributions import GumbelCategorical
from torchrl_perf.modules.encoders.joined import JoinedInputs
from torchrl_perf.modules.multi_categorical import IndependentCategoricals

OBSERVATION = "observation"


class Inputs(NamedTuple):
    """The observations that a default network reads.

    Attributes:
        keys: in the order in which they are concatenated.
        size: O, the sum of their sizes.
    """

    keys: list[NestedKey]
    size: int

    def network(self, network: nn.Module) -> nn.Module:
        """A network of ``[*, O]`` as one of the inputs: itself for one key, else a :class:`JoinedInputs`."""
        return network if len(self.keys) == 1 else JoinedInputs(network)


class Choices(NamedTuple):
    """How a default policy acts.

    Attributes:
        features: numbers that the network gives for a state, one for each alternative; D for continuous actions.
        distribution: makes the distribution from its parameters.
        discrete: whether the features are logits.
    """

    features: int
    distribution: Callable[..., distributions.Distribution]
    discrete: bool


def observation_inputs(env: Any, *, several: bool = True) -> Inputs:
    """What default networks read: ``"observation"`` where there is a vector of that name.

    Otherwise all vectors of floating point are read, those below ``"observation"`` where it is a Composite; they are
    concatenated in alphabetical order of their keys, nested ones by their path. Masks and counts, which are bool or
    int, are left out.

    Args:
        env: an env, or anything with an ``observation_spec``.
        several: whether the network can read more than one.

    Raises:
        ValueError: where there is no vector, and for several where one is needed.
    """
    spec = cast("Composite", env.observation_spec)
    leaves = {key: leaf for key, leaf in spec.items(True, True) if isinstance(leaf, TensorSpec)}
    received = {str(key): f"{list(leaf.shape)} {leaf.dtype}" for key, leaf in leaves.items()}
    below = {key: leaf for key, leaf in leaves.items() if _path(key)[0] == OBSERVATION}
    vectors = {
        key: leaf
        for key, leaf in (below or leaves).items()
        if leaf.dtype.is_floating_point and leaf.ndim == spec.ndim + 1 and leaf.shape[-1] > 0
    }
    keys = sorted(vectors, key=_path)
    if not keys or (len(keys) > 1 and not several):
        what = "one vector of floating point" if not several else "a vector of floating point"
        raise ValueError(
            f"observation_spec: expected {what}, [*batch, O], for the default networks, received {received} in "
            f"{type(env).__name__}. Remedy: networks of your own that read them, or a transform of the env, such as "
            "CatTensors(in_keys=[...], out_key='observation'), RenameTransform or FlattenObservation."
        )
    return Inputs(cast("list[NestedKey]", keys), sum(vectors[key].shape[-1] for key in keys))


def vector_observation(specs: Any) -> TensorSpec:
    """The spec of ``"observation"``, for default networks that read that key alone.

    Raises:
        ValueError: where there is no vector of that name.
    """
    inputs = observation_inputs(specs, several=False)
    if inputs.keys != [OBSERVATION]:
        raise ValueError(
            f"observation_spec: expected the key {OBSERVATION!r} for the default networks, received {inputs.keys}. "
            f"Remedy: networks of your own, or RenameTransform(in_keys={inputs.keys}, out_keys=['{OBSERVATION}'])."
        )
    return specs.observation_spec[OBSERVATION]


def action_choices(env: EnvBase) -> Choices:
    """The distribution of a default policy: choices by index, several of them, or bounded continuous actions.

    Raises:
        ValueError: for another kind of action, several actions, and one that is not called "action".
    """
    spec = env.action_spec
    if env.action_keys != ["action"]:
        raise ValueError(
            f"action_spec: expected one action under the key 'action', received {env.action_keys} in "
            f"{type(env).__name__}. Remedy: pass actor=, such as a HybridActor for an action of several parts."
        )
    if isinstance(spec, MultiCategorical):
        sizes = alternatives(spec)
        return Choices(sum(sizes), functools.partial(IndependentCategoricals, nvec=sizes), True)
    if isinstance(spec, Categorical) and not isinstance(spec, Binary):
        return Choices(int(spec.space.n), GumbelCategorical, True)
    if isinstance(spec, Bounded) and spec.dtype.is_floating_point:
        return Choices(spec.shape[-1], IndependentNormal, False)
    raise ValueError(
        f"action_spec: expected Categorical (index), MultiCategorical or Bounded of floating point, received "
        f"{type(spec).__name__} of {spec.dtype} in {type(env).__name__}. Remedy: pass actor=."
    )


def continuous_action(specs: Any) -> TensorSpec:
    """The spec of ``"action"``, for default actors and critics of continuous actions; its kind is left to them.

    Raises:
        ValueError: for several actions, one of another name, and numbers that are not of float32 as the networks are.
    """
    keys = list(getattr(specs, "action_keys", ["action"]))
    if keys != ["action"]:
        raise ValueError(
            f"action_spec: expected one action under the key 'action', received {keys} in {type(specs).__name__}. "
            "Remedy: pass actor= and critic=, or PPO with a HybridActor for an action of several parts."
        )
    spec = specs.action_spec
    if spec.dtype is not None and spec.dtype.is_floating_point and spec.dtype != torch.float32:
        raise ValueError(
            f"action_spec: expected actions of torch.float32 for the default networks, received {spec.dtype} in "
            f"{type(specs).__name__}. Remedy: the transform DoubleToFloat(in_keys_inv=['action']), or networks of your "
            "own."
        )
    return spec


def alternatives(spec: MultiCategorical) -> tuple[int, ...]:
    """Numbers of alternatives of each choice; waits for the host, at construction.

    Raises:
        ValueError: if they differ between rows of the batch.
    """
    rows = spec.nvec.reshape(-1, spec.shape[-1])
    if not bool((rows == rows[0]).all()):
        raise ValueError(
            f"action_spec: expected the same numbers of alternatives in each row, received nvec {spec.nvec}. Remedy: "
            "pass actor=, or a mask of actions."
        )
    return tuple(int(number) for number in rows[0])


def single_choice(env: EnvBase) -> Categorical | OneHot:
    """The action spec of an env with one discrete choice, which a network of action values needs.

    Raises:
        ValueError: for another one.
    """
    spec = env.action_spec
    if not isinstance(spec, Categorical | OneHot) or isinstance(spec, Binary | MultiCategorical | MultiOneHot):
        raise ValueError(
            f"action_spec: expected discrete actions (Categorical or OneHot), one choice at a time, received "
            f"{type(spec).__name__} in {type(env).__name__}. Remedy: SAC or PPO for continuous actions, PPO for "
            "several choices at once (MultiCategorical)."
        )
    return spec


def _path(key: NestedKey) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else cast("tuple[str, ...]", key)
