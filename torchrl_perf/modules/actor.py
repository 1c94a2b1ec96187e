"""A probabilistic actor whose host time is little more than its network's."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.nn import InteractionType, TensorDictModule, skip_existing
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.data import TensorSpec
from torchrl.modules import ProbabilisticActor

from torchrl_perf.runtime.self_capture import self_capturing


class DeviceActor(ProbabilisticActor):
    """``torchrl.modules.ProbabilisticActor`` of one network and one distribution, with a fast path to a sample.

    While a collector samples actions, and where a loss asks for the distribution, network and distribution are called
    directly and their results written, which takes the host about two thirds of the time of the parent's chain of
    modules (on a CPU; compiled or captured there is no difference). Every other call (deterministic actions,
    ``tensordict_out``) is the parent's. Values, keys and random numbers are the parent's throughout.

    Keys read: ``in_keys``, and ``valid_key`` if given. Written: ``param_keys``, ``action`` and ``action_log_prob``
    (shaped as the batch).

    On CUDA a call of the batch alone becomes a CUDA graph once its shape repeats, see
    :func:`~torchrl_perf.runtime.self_capture.self_capturing`; ``capture = False`` turns that off.

    Args:
        network: maps the inputs to the distribution's parameters, one tensor for each of ``param_keys``.
        distribution_class: a ``torch.distributions`` class that takes the parameters by name.
        param_keys: the distribution's arguments and the keys they are written under, such as ``["logits"]``.
        in_keys: what the network reads.
        spec: the action's spec, for TorchRL's checks.
        valid_key: bool ``[*]`` or ``[*, 1]``, True for the agents that exist, all by default; the others act neutrally,
            with log-probability 0. It is passed to the distribution, which needs an argument ``valid``, such as
            :class:`BoundedNormal`.
        distribution_kwargs: further arguments of the distribution, such as its bounds.
    """

    capture = True

    def __init__(
        self,
        network: nn.Module,
        *,
        distribution_class: type[Distribution],
        param_keys: Sequence[str],
        in_keys: Sequence[NestedKey] = ("observation",),
        spec: TensorSpec | None = None,
        valid_key: NestedKey | None = None,
        distribution_kwargs: dict[str, Any] | None = None,
    ) -> None:
        arguments = dict(zip(param_keys, param_keys, strict=True))
        super().__init__(
            TensorDictModule(network, in_keys=list(in_keys), out_keys=list(param_keys)),
            in_keys=list(param_keys) if valid_key is None else arguments | {"valid": valid_key},
            spec=spec,
            distribution_class=distribution_class,
            distribution_kwargs=distribution_kwargs,
            return_log_prob=True,
        )
        self._distribution_class = distribution_class
        self._distribution_kwargs = dict(distribution_kwargs or {})
        self.valid_key = valid_key
        read = [*in_keys] if valid_key is None else [*in_keys, valid_key]
        self._entries_read = [unravel_key(key) for key in read]

    @property
    def made_of(self) -> tuple[type[Distribution], dict[str, Any]]:
        """The distribution's class, and its arguments beside the parameters."""
        return self._distribution_class, self._distribution_kwargs

    def forward(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None, **kwargs: Any
    ) -> TensorDictBase:
        """Write parameters, action and log-probability; sample or not as TorchRL's exploration type says."""
        if tensordict_out is not None or kwargs:
            return super().forward(tensordict, tensordict_out, **kwargs)
        return self._acted(tensordict)

    @self_capturing
    def _acted(self, tensordict: TensorDictBase) -> TensorDictBase:
        if interaction_type() is InteractionType.RANDOM and not skip_existing():
            return self._sampled(tensordict)
        return super().forward(tensordict)

    def recorded_entries(self, leaves: dict[NestedKey, Tensor]) -> dict[NestedKey, Tensor]:
        """What a recording holds of a batch: what the network and the distribution read."""
        read = {key: leaves[key] for key in self._entries_read if key in leaves}
        return leaves if skip_existing() or len(read) < len(self._entries_read) else read

    def get_dist(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None, **kwargs: Any
    ) -> Distribution:
        """The distribution of actions in ``tensordict``, whose parameters are written there."""
        # the parent's chain heeds what it is told of parameters that are there already, and of exploration by default
        others = self.return_composite or skip_existing() or interaction_type() is None
        if tensordict_out is not None or kwargs or others:
            return super().get_dist(tensordict, tensordict_out, **kwargs)
        return self._distribution(tensordict)

    def _distribution(self, tensordict: TensorDictBase) -> Distribution:
        head = cast("TensorDictModule", self.module[0])
        network = cast("nn.Module", head.module)
        params = network(*[tensordict.get(key) for key in head.in_keys])
        params = (params,) if isinstance(params, torch.Tensor) else params
        named = dict(zip(cast("list[str]", head.out_keys), params, strict=True))
        for key, value in named.items():
            tensordict.set(key, value)
        exists = {} if self.valid_key is None else {"valid": tensordict.get(self.valid_key)}
        return self._distribution_class(**named, **exists, **self._distribution_kwargs)

    def _sampled(self, tensordict: TensorDictBase) -> TensorDictBase:
        dist = self._distribution(tensordict)
        action = dist.rsample() if dist.has_rsample else dist.sample()
        tensordict.set(self.dist_sample_keys[0], action)
        tensordict.set(self.log_prob_keys[0], dist.log_prob(action))
        return tensordict
