"""A probabilistic actor whose action has discrete and continuous parts."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.data import Bounded, Categorical, Composite, TensorSpec, Unbounded
from torchrl.modules import ProbabilisticActor

from torchrl_perf.modules.ensemble import EnsembleMLP
from torchrl_perf.modules.hybrid import BoundedNormal, DeviceMaskedCategorical, DiagonalNormal, HybridDistribution
from torchrl_perf.modules.squashed_normal import SquashedNormalHead, positive_scale, squashed_loc

PARAMS_KEY = "params"
"""Where the parameters of the distribution are written, each part's under its own key."""

LOC_LIMIT = 5.0
"""Greatest location of a bounded part before squashing: tanh(5) = 0.99991 of the way to the bound."""


def action_leaves(spec: TensorSpec) -> dict[NestedKey, TensorSpec]:
    """The parts of an action spec by key; a spec of one tensor is the part ``"action"``.

    Raises:
        ValueError: for a part that is neither index actions (Categorical) nor floating-point Bounded or Unbounded.
    """
    leaves = dict(spec.items(True, True)) if isinstance(spec, Composite) else {"action": spec}
    leaves = {unravel_key(key): leaf for key, leaf in leaves.items() if leaf is not None}
    for key, leaf in leaves.items():
        if type(leaf) is Categorical or (isinstance(leaf, Bounded | Unbounded) and leaf.dtype.is_floating_point):
            continue
        raise ValueError(
            f"spec: expected Categorical (index) or floating-point Bounded or Unbounded parts, received "
            f"{type(leaf).__name__} of {leaf.dtype} at {key!r}. Remedy: index actions for one-hot ones, one part for "
            "each entry of a MultiCategorical."
        )
    if not leaves:
        raise ValueError(
            "spec: expected at least one part, received none. Remedy: a Composite spec with at least one entry."
        )
    return leaves


def part_features(leaf: TensorSpec) -> int:
    """Number of outputs for one part: a logit for each choice, or location and scale of each component."""
    return int(cast("Any", leaf.space).n) if isinstance(leaf, Categorical) else 2 * leaf.shape[-1]


def hybrid_features(spec: TensorSpec) -> int:
    """Size of the last dim of the output of a :class:`HybridActor`'s network, for an action spec."""
    return sum(part_features(leaf) for leaf in action_leaves(spec).values())


class HybridParameters(TensorDictModuleBase):
    """A network whose output is split into the parameters of a :class:`HybridDistribution`.

    Keys read: ``in_keys``, masks and validity. Written: ``"params"``. Arguments are those of :class:`HybridActor`.
    """

    def __init__(
        self,
        network: nn.Module,
        leaves: Mapping[NestedKey, TensorSpec],
        *,
        in_keys: Sequence[NestedKey],
        mask_keys: Mapping[NestedKey, NestedKey],
        valid_key: NestedKey | None = None,
        joint: bool = True,
        log_scale_range: tuple[float, float] = (-5.0, 2.0),
    ) -> None:
        super().__init__()
        self.network = network
        self.network_keys = list(in_keys)
        self.part_keys = list(leaves)
        self.sizes = [part_features(leaf) for leaf in leaves.values()]
        self.mask_keys, self.valid_key, self.joint = dict(mask_keys), valid_key, joint
        self.heads = nn.ModuleList(_head(key, leaf, log_scale_range) for key, leaf in leaves.items())
        extra = [*self.mask_keys.values(), *([] if valid_key is None else [valid_key])]
        self.in_keys = list(dict.fromkeys([*in_keys, *extra]))  # pyright: ignore
        self.out_keys = [PARAMS_KEY]  # pyright: ignore

    def parameters_of(self, tensordict: TensorDictBase) -> tuple[dict[NestedKey, dict[str, Tensor]], torch.Size]:
        """The parameters of each part by its key, and the batch shape ``[*batch]`` of the action."""
        features = self.network(*[tensordict.get(key) for key in self.network_keys])
        if isinstance(features, Tensor):
            features = features.split(self.sizes, -1)
        valid = None if self.valid_key is None else tensordict.get(self.valid_key)
        rows = tensordict.batch_size
        params: dict[NestedKey, dict[str, Tensor]] = {}
        for key, head, part in zip(self.part_keys, self.heads, features, strict=True):
            params[key] = head(part)
            if key in self.mask_keys:
                params[key]["mask"] = tensordict.get(self.mask_keys[key])
            # a flag of the nodes does not apply to a part that is one action for the whole row
            if valid is not None and valid.shape in (part.shape[:-1], (*part.shape[:-1], 1)):
                params[key]["valid"] = valid.view(part.shape[:-1])
            if not self.joint:
                rows = part.shape[:-1]
        if valid is not None and not any("valid" in values for values in params.values()):
            raise ValueError(
                f"{self.valid_key!r}: expected the shape of the nodes of a part, one of "
                f"{[list(part.shape[:-1]) for part in features]}, received {list(valid.shape)}. Remedy: a mask "
                "without the features' last dimension."
            )
        return params, rows

    def write(self, tensordict: TensorDictBase, params: Mapping[NestedKey, Mapping[str, Tensor]]) -> TensorDictBase:
        """Write the parameters below ``"params"``."""
        # entry by entry: a compiler cannot trace a TensorDict that is made of nested ones on a device
        for key, values in params.items():
            path = (key,) if isinstance(key, str) else key
            for name, value in values.items():
                tensordict.set((PARAMS_KEY, *path, name), value)
        return tensordict

    def forward(self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None) -> TensorDictBase:
        """Write ``"params"``."""
        out = tensordict if tensordict_out is None else tensordict_out
        return self.write(out, self.parameters_of(tensordict)[0])


class HybridActor(ProbabilisticActor):
    """A policy for actions with discrete and continuous parts: one network, a :class:`HybridDistribution`.

    Each Categorical leaf of ``spec`` is a masked categorical, each Bounded one a normal squashed into its bounds (held
    in buffers; its location is kept smoothly within +-5, so that the normal's sample can be recovered from the action),
    each Unbounded one a plain normal. Parts are independent given the state. A leaf may have dims between the batch and
    its own, one action for each node (agent, particle) of a row: their log-probabilities are added up, and nodes that
    do not exist act neutrally (choice 0, the middle of the bounds, 0) and count 0. This is the policy of hybrid PPO
    (arXiv:1903.01344) and hybrid SAC (arXiv:1912.11077).

    Actions follow TorchRL's exploration type: sampled under RANDOM, else the mode and the squashed mean.

    Keys read: ``in_keys``, masks and ``valid_key``. Written: each part of the action at its key in ``spec``, its
    log-probability ``[*batch, *nodes]`` at the same key with ``_log_prob`` appended (TorchRL's names), their sum
    ``[*batch]`` at ``log_prob_key``, and the parameters under ``"params"``, which only TorchRL's ``KLPENPPOLoss`` and a
    closed-form divergence need in the batch.

    PPO losses, TorchRL's too, take the keys of the parts' actions and log-probabilities from the actor. To read only
    the sum, call ``loss.set_keys(sample_log_prob="action_log_prob")``.

    Args:
        network: maps the inputs to ``[*batch, *nodes, F]`` with ``F = hybrid_features(spec)``, the parts in the order
            of ``spec``; or to a tuple of one tensor for each part, where they have different nodes.
        spec: the action's spec, ``env.full_action_spec`` or a single leaf.
        in_keys: what the network reads.
        mask_key: bool ``[*, D]``, True for the allowed choices: one key for the only discrete part, or a mapping from
            parts to keys. A row that allows none takes choice 0.
        valid_key: bool ``[*batch, *nodes]`` (or with a trailing 1), True for the nodes that exist; applied to the parts
            of that shape.
        joint: False to keep the nodes apart as independent agents, with log-probabilities ``[*batch, *nodes]``.
        log_prob_key: where the joint log-probability is written.
        log_scale_range: range of the logarithm of the scales, before squashing.

    Raises:
        ValueError: for an unsupported kind of spec, bounds that differ between nodes, and masks for parts that are not
            discrete; when it acts, for a ``valid_key`` whose shape is that of no part.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        spec: TensorSpec,
        in_keys: Sequence[NestedKey] = ("observation",),
        mask_key: NestedKey | Mapping[NestedKey, NestedKey] | None = None,
        valid_key: NestedKey | None = None,
        joint: bool = True,
        log_prob_key: NestedKey = "action_log_prob",
        log_scale_range: tuple[float, float] = (-5.0, 2.0),
    ) -> None:
        leaves = action_leaves(spec)
        classes = {key: _part_class(leaf) for key, leaf in leaves.items()}
        head = HybridParameters(
            network,
            leaves,
            in_keys=in_keys,
            mask_keys=_mask_keys(mask_key, leaves),
            valid_key=valid_key,
            joint=joint,
            log_scale_range=log_scale_range,
        )
        super().__init__(
            cast("Any", head),
            in_keys=[PARAMS_KEY],
            out_keys=list(leaves),
            spec=spec if isinstance(spec, Composite) else Composite(action=spec, shape=spec.shape[:0]),
            distribution_class=HybridDistribution,
            distribution_kwargs={"distribution_map": classes},
            return_log_prob=True,
        )
        self._classes: Any = classes
        self.action_spec = spec
        self.joint_log_prob_key = log_prob_key
        self.out_keys = list(dict.fromkeys([*self.out_keys, log_prob_key]))  # pyright: ignore

    @property
    def head(self) -> HybridParameters:
        """The network with its heads."""
        return cast("HybridParameters", self.module[0])

    @property
    def param_keys(self) -> list[NestedKey]:
        """The keys below ``"params"``: ``exclude_keys`` of a collector whose batches need not keep the parameters."""
        keys: list[NestedKey] = []
        for key, kind in self._classes.items():
            names = ["logits"] if kind is DeviceMaskedCategorical else SquashedNormalHead.param_keys
            names = names[:2] if kind is DiagonalNormal else names
            path = (key,) if isinstance(key, str) else key
            keys += [(PARAMS_KEY, *path, name) for name in (*names, "mask", "valid")]
        return keys

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> HybridDistribution:
        """The distribution in the states of ``tensordict``, which is not written to."""
        return self._dist(*self.head.parameters_of(tensordict))

    def _dist(self, params: Mapping[NestedKey, Mapping[str, Tensor]], rows: torch.Size) -> HybridDistribution:
        parts = {key: self._classes[key](**values) for key, values in params.items()}
        return HybridDistribution.of_parts(parts, rows)

    def forward(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None, **kwargs: Any
    ) -> TensorDictBase:
        """Write parameters, action and log-probabilities; sample or not as TorchRL's exploration type says."""
        out = tensordict if tensordict_out is None else tensordict_out
        params, rows = self.head.parameters_of(tensordict)
        dist = self._dist(params, rows)
        self.head.write(out, params)
        explores = interaction_type() is InteractionType.RANDOM
        log_probs: dict[NestedKey, Tensor] = {}
        for key, part in dist.dists.items():
            action = _draw(part) if explores else cast("Any", part).deterministic_sample
            log_probs[key] = part.log_prob(action)
            out.set(key, action)
            out.set(_log_prob_name(key), log_probs[key])
        return out.set(self.joint_log_prob_key, dist.joined(log_probs, len(rows)))


class EnsembleHybridQ(nn.Module):
    """K critics ``Q_k(s, c)[d]``: the values of all D choices for the continuous parts ``c`` of an action.

    Args:
        num_members: K.
        in_features: size of observations and continuous parts together.
        num_choices: D.
        **options: as for :class:`~torchrl_perf.modules.EnsembleMLP`.
    """

    def __init__(self, num_members: int, in_features: int, num_choices: int, **options: Any) -> None:
        super().__init__()
        self.net = EnsembleMLP(num_members, in_features, num_choices, **options)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Observations ``[*, O]`` and continuous parts ``[*, C]`` -> ``[*, K, D]``."""
        return self.net(torch.cat(inputs, -1)).movedim(0, -2)


class _BoundedHead(nn.Module):
    def __init__(self, low: Tensor, high: Tensor, log_scale_range: tuple[float, float]) -> None:
        super().__init__()
        self.net = SquashedNormalHead(low, high, log_scale_min=log_scale_range[0], log_scale_max=log_scale_range[1])

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        loc, *others = self.net(features)
        # beyond this an action lies so close to its bound that rounding hides the normal's sample: PPO's ratios, which
        # are computed from the action alone, would overflow for a policy with a small scale
        loc = squashed_loc(loc, LOC_LIMIT)
        return dict(zip(SquashedNormalHead.param_keys, (loc, *others), strict=True))


class _UnboundedHead(nn.Module):
    def __init__(self, log_scale_range: tuple[float, float]) -> None:
        super().__init__()
        self.log_scale_range = log_scale_range

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        loc, raw = features.chunk(2, -1)
        return {"loc": loc, "scale": positive_scale(raw, *self.log_scale_range)}


class _ChoiceHead(nn.Module):
    def forward(self, features: Tensor) -> dict[str, Tensor]:
        return {"logits": features}


def _part_class(leaf: TensorSpec) -> type[Distribution]:
    if isinstance(leaf, Categorical):
        return DeviceMaskedCategorical
    return BoundedNormal if _bounds(leaf) is not None else DiagonalNormal


def _bounds(leaf: TensorSpec) -> tuple[Tensor, Tensor] | None:
    """Bounds ``[rows, D]`` each; None where all are infinite."""
    if isinstance(leaf, Unbounded):
        return None
    space = cast("Any", leaf.space)
    low, high = (bound.reshape(-1, leaf.shape[-1]) for bound in (space.low, space.high))
    infinite = not bool((low.isfinite() | high.isfinite()).any())
    return None if infinite else (low, high)


def _head(key: NestedKey, leaf: TensorSpec, log_scale_range: tuple[float, float]) -> nn.Module:
    if isinstance(leaf, Categorical):
        return _ChoiceHead()
    bounds = _bounds(leaf)
    if bounds is None:
        return _UnboundedHead(log_scale_range)
    if not all(bool((bound == bound[0]).all()) for bound in bounds):
        raise ValueError(
            f"spec: expected the same bounds for all rows and nodes of {key!r}, received {bounds}. Remedy: scale the "
            "actions in a transform of the env."
        )
    return _BoundedHead(bounds[0][0], bounds[1][0], log_scale_range)


def _mask_keys(
    mask_key: NestedKey | Mapping[NestedKey, NestedKey] | None, leaves: Mapping[NestedKey, TensorSpec]
) -> dict[NestedKey, NestedKey]:
    discrete = [key for key, leaf in leaves.items() if isinstance(leaf, Categorical)]
    if mask_key is None:
        return {}
    if isinstance(mask_key, Mapping):
        keys = {unravel_key(key): value for key, value in mask_key.items()}
    else:
        if len(discrete) != 1:
            raise ValueError(
                "mask_key: expected a mapping from parts to keys where there is not one discrete part, received "
                f"{mask_key!r} for {discrete}. Remedy: mask_key={{part: key}}."
            )
        keys = {discrete[0]: mask_key}
    if wrong := [key for key in keys if key not in discrete]:
        raise ValueError(
            f"mask_key: expected masks of discrete parts {discrete}, received some of {wrong}. Remedy: name discrete "
            "parts only."
        )
    return cast("dict[NestedKey, NestedKey]", keys)


def _draw(part: Distribution) -> Tensor:
    return part.rsample() if part.has_rsample else part.sample()


def _log_prob_name(key: NestedKey) -> NestedKey:
    return f"{key}_log_prob" if isinstance(key, str) else (*key[:-1], f"{key[-1]}_log_prob")
