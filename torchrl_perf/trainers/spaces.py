"""What default networks read and how they act, chosen from an env's specs: one place for all trainers."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from tensordict.utils import NestedKey
from torch import distributions, nn
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import EnvBase

from torchrl_perf.modules.distributions import DrawnNormal, GumbelCategorical
from torchrl_perf.modules.encoders.joined import JoinedInputs
from torchrl_perf.modules.encoders.observations import EncodedInputs, ObservationEncoder, ObservationPart
from torchrl_perf.modules.multi_categorical import IndependentCategoricals

OBSERVATION = "observation"
SMALLEST_IMAGE = 8  # pixels of a side
USUAL_CONVOLUTIONS: dict[str, Any] = {"conv_layers": "auto", "conv_features": None}


class Inputs(NamedTuple):
    """The observations that a default network reads.

    Attributes:
        keys: in the order in which they are concatenated.
        size: O, the numbers that they are or become.
        parts: what has to become numbers first, in the order of the keys; empty where all are vectors.
    """

    keys: list[NestedKey]
    size: int
    parts: tuple[ObservationPart, ...] = ()

    def network(self, network: nn.Module, *, precision: str = "tf32", device: Any = None) -> nn.Module:
        """A network of ``[*, O]`` as one of the inputs.

        It is itself for one vector, a :class:`JoinedInputs` for several, an :class:`EncodedInputs` for other kinds.

        Args:
            network: of one vector.
            precision: of an image's convolutions.
            device: of their parameters.
        """
        if self.parts:
            return EncodedInputs(ObservationEncoder(self.parts, precision=precision, device=device), network)
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


def observation_inputs(env: Any, config: Any = None) -> Inputs:
    """What default networks read: ``"observation"`` where there is a vector of that name.

    Otherwise everything is read that says something of the state: what is below ``"observation"`` where it is a
    Composite, else all entries, in alphabetical order of their keys, nested ones by their path. Vectors of floating
    point are concatenated as they are. Images, which are uint8 or of three dims, go through convolutions; indices
    become one-hot; other numbers are flattened. Flags, which are bool, counts, which are integers without bounds, and
    entries whose name has "mask" in it are left out.

    Args:
        env: an env, or anything with an ``observation_spec``.
        config: gives the convolutions of images, ``conv_layers`` and ``conv_features``; by default the usual ones.

    Raises:
        ValueError: where there is nothing to read, and for convolutions where there is no image.
    """
    return _convolved(_inputs_of(cast("Composite", env.observation_spec), _owner(env)), config, _owner(env))


def inputs_of(observation: TensorSpec, config: Any = None) -> Inputs:
    """:func:`observation_inputs` of the spec of ``"observation"``, ``[*, O]``, or of a Composite of all entries."""
    found = Inputs([OBSERVATION], observation.shape[-1]) if not isinstance(observation, Composite) else None
    return _convolved(found or _inputs_of(cast("Composite", observation), "the env"), config, "the env")


def _convolved(inputs: Inputs, config: Any, owner: str) -> Inputs:
    """Inputs whose images have the convolutions of a config.

    Raises:
        ValueError: for convolutions where there is no image.
    """
    given = {name: getattr(config, name, usual) for name, usual in USUAL_CONVOLUTIONS.items()}
    changed = {name: value for name, value in given.items() if value != USUAL_CONVOLUTIONS[name]}
    if not changed:
        return inputs
    if not any(part.kind == "image" for part in inputs.parts):
        name, value = next(iter(changed.items()))
        raise ValueError(
            f"{name}: expected {USUAL_CONVOLUTIONS[name]!r} without an image of at least {SMALLEST_IMAGE} x "
            f"{SMALLEST_IMAGE} pixels, received {value!r} for {[str(key) for key in inputs.keys]} of {owner}. Remedy: "
            "leave it out, or larger images."
        )
    parts = tuple(part._replace(**given) if part.kind == "image" else part for part in inputs.parts)
    return Inputs(inputs.keys, sum(part.features for part in parts), parts)


def readable_observation(specs: Any) -> TensorSpec:
    """The spec of ``"observation"`` where it is a vector and all that is read, else the whole observation's."""
    inputs = observation_inputs(specs)
    is_vector = inputs.keys == [OBSERVATION] and not inputs.parts
    return specs.observation_spec[OBSERVATION] if is_vector else specs.observation_spec


def vector_observation(specs: Any) -> TensorSpec:
    """The spec of ``"observation"``, for default networks that read one vector of that name alone.

    Raises:
        ValueError: where there is no vector of that name.
    """
    found = readable_observation(specs)
    if isinstance(found, Composite):
        raise ValueError(
            f"observation_spec: expected one vector of floating point under {OBSERVATION!r}, [*batch, O], for the "
            f"default networks, received {_listed(found)} in {_owner(specs)}. Remedy: networks of your own that "
            "read them, or a transform of the env, such as CatTensors(in_keys=[...], out_key='observation'), "
            "RenameTransform or FlattenObservation."
        )
    return found


def _inputs_of(spec: Composite, owner: str) -> Inputs:
    leaves = {key: leaf for key, leaf in spec.items(True, True) if isinstance(leaf, TensorSpec)}
    below = {key: leaf for key, leaf in leaves.items() if _path(key)[0] == OBSERVATION}
    parts = {key: part for key, leaf in (below or leaves).items() if (part := _part(key, leaf, spec.ndim)) is not None}
    keys = sorted(parts, key=_path)
    if not keys:
        raise ValueError(
            f"observation_spec: expected numbers, an image or indices for the default networks, received "
            f"{_listed(spec)} in {owner}. Remedy: networks of your own that read them, or a transform of the env."
        )
    chosen = tuple(parts[key] for key in keys)
    size = sum(part.features for part in chosen)
    plain = all(_is_vector(leaves[key], spec.ndim) for key in keys)
    return Inputs(cast("list[NestedKey]", keys), size, () if plain else chosen)


def _is_vector(leaf: TensorSpec, batch_dims: int) -> bool:
    return leaf.dtype is not None and leaf.dtype.is_floating_point and leaf.ndim == batch_dims + 1


def _part(key: NestedKey, leaf: TensorSpec, batch_dims: int) -> ObservationPart | None:
    """What an entry is to a default network; None for one that it does not read."""
    shape, space = tuple(leaf.shape[batch_dims:]), cast("Any", leaf.space)
    is_count = isinstance(leaf, Unbounded) and leaf.dtype is not None and not leaf.dtype.is_floating_point
    if (
        leaf.dtype is None
        or leaf.dtype == torch.bool
        or is_count
        or 0 in shape
        or "mask" in str(_path(key)[-1]).lower()
    ):
        return None
    if isinstance(leaf, MultiCategorical):
        return ObservationPart("choices", shape, alternatives(leaf))
    if isinstance(leaf, Categorical) and not isinstance(leaf, Binary):
        return ObservationPart("choices", shape, (int(space.n),) * math.prod(shape))
    side = min(shape) if len(shape) == 2 else min(sorted(shape)[1:]) if len(shape) == 3 else 0
    is_image = side >= SMALLEST_IMAGE and (leaf.dtype == torch.uint8 or len(shape) == 3)
    return ObservationPart("image" if is_image else "numbers", shape)


def _listed(spec: Composite) -> dict[str, str]:
    """Shape and dtype of each entry."""
    return {
        str(key): f"{list(leaf.shape)} {leaf.dtype}"
        for key, leaf in spec.items(True, True)
        if isinstance(leaf, TensorSpec)
    }


def action_choices(env: EnvBase) -> Choices:
    """The distribution of a default policy: choices by index, several of them, or continuous actions.

    Raises:
        ValueError: for another kind of action, several actions, and one that is not called "action".
    """
    spec = env.action_spec
    if env.action_keys != ["action"]:
        raise ValueError(
            f"action_spec: expected one action under the key 'action', received {env.action_keys} in "
            f"{_owner(env)}. Remedy: pass actor=, such as a HybridActor for an action of several parts."
        )
    if isinstance(spec, MultiCategorical):
        sizes = alternatives(spec)
        return Choices(sum(sizes), functools.partial(IndependentCategoricals, nvec=sizes), True)
    if isinstance(spec, Categorical) and not isinstance(spec, Binary):
        return Choices(int(spec.space.n), GumbelCategorical, True)
    if isinstance(spec, Bounded | Unbounded) and spec.dtype.is_floating_point:
        _check_shape(spec, env)
        return Choices(spec.shape[-1], DrawnNormal, False)
    raise ValueError(
        f"action_spec: expected Categorical (index), MultiCategorical or Bounded of floating point, received "
        f"{type(spec).__name__} of {spec.dtype} in {_owner(env)}. Remedy: pass actor=, or "
        "index actions, such as those of TorchRL's GymEnv with categorical_action_encoding=True."
    )


def _check_shape(spec: TensorSpec, specs: Any) -> None:
    """That an action is ``[*batch, D]``, as default networks give it, or ``[*batch, A, D]`` of agents that observe.

    Raises:
        ValueError: for a single number, for none, and for a matrix that is not one of agents.
    """
    own, agents = tuple(spec.shape[len(specs.batch_size) :]), spec.shape[:-1]
    observed = [leaf.shape[:-1] for leaf in specs.observation_spec.values(True, True)]
    if not own or 0 in own or (len(own) > 1 and agents not in observed):
        raise ValueError(
            f"action_spec: expected a vector [D] for the default networks, received the shape {own} in "
            f"{_owner(specs)}. Remedy: an env that takes a vector, such as one behind gymnasium's TransformAction, or "
            "networks of your own."
        )


def continuous_action(specs: Any) -> TensorSpec:
    """The spec of ``"action"``, for default actors and critics of continuous actions; its kind is left to them.

    Raises:
        ValueError: for several actions, one of another name or no vector, and numbers that are not float32.
    """
    keys = list(getattr(specs, "action_keys", ["action"]))
    if keys != ["action"]:
        raise ValueError(
            f"action_spec: expected one action under the key 'action', received {keys} in {_owner(specs)}. "
            "Remedy: pass actor= and critic=, or PPO with a HybridActor for an action of several parts."
        )
    spec = specs.action_spec
    if spec.dtype is None or not spec.dtype.is_floating_point:
        return spec
    if spec.dtype != torch.float32:
        raise ValueError(
            f"action_spec: expected actions of torch.float32 for the default networks, received {spec.dtype} in "
            f"{_owner(specs)}. Remedy: the transform DoubleToFloat(in_keys_inv=['action']), or networks of your "
            "own."
        )
    _check_shape(spec, specs)
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
            f"{type(spec).__name__} in {_owner(env)}. Remedy: SAC or PPO for continuous actions, PPO for "
            "several choices at once (MultiCategorical)."
        )
    return spec


def _owner(specs: Any) -> str:
    """The class of an env, for a sentence; what has specs alone are envs that step on the CPU."""
    return type(specs).__name__ if isinstance(specs, EnvBase) else "the envs on the CPU"


def _path(key: NestedKey) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else cast("tuple[str, ...]", key)
