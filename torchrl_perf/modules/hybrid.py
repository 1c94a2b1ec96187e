"""Distributions of hybrid actions: masked categorical and bounded normal parts, joined into one.

Importing this registers the divergences below with ``torch.distributions.kl_divergence``, where TorchRL looks for them.
Dimension key: ``D`` choices or components of one action; ``*`` any batch, nodes of an action included.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Categorical, Distribution, constraints, kl_divergence, register_kl

from torchrl_perf.functional import masked
from torchrl_perf.functional.losses import hybrid
from torchrl_perf.functional.wide import wide_dtype, widened
from torchrl_perf.modules.distributions import GumbelCategorical, log_of_probs, one_of
from torchrl_perf.modules.squashed_normal import (
    SquashedNormal,
    normal_parameters,
    rounded,
    squashed_loc,
)
from torchrl_perf.runtime.draws import normal


class DeviceMaskedCategorical(GumbelCategorical):
    """A categorical over the allowed choices, which is never NaN: a row that allows none takes choice 0.

    Such a row, and one that is not valid, has log-probability 0, entropy 0, divergence 0 and no gradient. Choices that
    are not allowed have probability 0 and log-probability ``-inf``. Entropy and divergence are exact. The counterpart
    of TorchRL's ``MaskedCategorical``.

    Args:
        logits: ``[*, D]`` unnormalised log-probabilities.
        mask: bool, broadcasts with ``[*, D]``, True for the allowed choices; all by default.
        valid: bool ``[*]`` or ``[*, 1]``, True for the rows that exist; all by default.
        probs: ``[*, D]`` unnormalised probabilities in the place of logits.
        indices: int64 ``[*, K]``, the allowed choices by index, in place of a mask.
        padding_value: the padding of ``indices`` in rows that allow fewer than K.
        validate_args: check arguments and values as torch does, which waits for the host; not by default.

    Raises:
        ValueError: for both of logits and probs or neither, both of mask and indices, and a mask that is not bool.
    """

    def __init__(
        self,
        logits: Tensor | None = None,
        mask: Tensor | None = None,
        valid: Tensor | None = None,
        *,
        probs: Tensor | None = None,
        indices: Tensor | None = None,
        padding_value: int | None = None,
        validate_args: bool | None = None,
    ) -> None:
        given = one_of(logits, probs)
        if indices is not None:
            if mask is not None:
                raise ValueError("expected either mask or indices, received both. Remedy: a mask alone.")
            mask = masked.mask_of_indices(indices, given.shape[-1], padding_value)
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(
                f"mask: expected bool, True for the allowed choices, received {mask.dtype} {list(mask.shape)}. Remedy: "
                "mask.bool(); indices= for indices; probs= for probabilities."
            )
        wide = given.to(wide_dtype(given.dtype)) if probs is None else log_of_probs(given)
        if probs is not None:
            possible = wide != -torch.inf
            mask = possible if mask is None else mask & possible
        if mask is not None and mask.shape != wide.shape:
            wide, mask = torch.broadcast_tensors(wide, mask)
        self.valid = valid = None if valid is None else masked.of_rows(valid, wide.shape[:-1])
        if valid is not None:
            exists = valid.unsqueeze(-1)
            mask = exists.expand(wide.shape) if mask is None else mask & exists
        self._set(masked.masked_log_softmax(wide, mask), given)
        # not the parents' constructors, which normalise once more
        Distribution.__init__(self, wide.shape[:-1], validate_args=bool(validate_args))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability ``[*]`` of choices ``[*]``; 0 where the row does not exist, whatever its choice."""
        return super().log_prob(value if self.valid is None else torch.where(self.valid, value.long(), 0))

    def entropy(self) -> Tensor:
        """``[*]`` nats, exact."""
        return masked.masked_entropy(self.log_probs).to(self.dtype)


class _NormalPart:
    """Shields a normal from rows that do not exist, whose parameters may be NaN."""

    valid: Tensor | None

    def _present(
        self, loc: Tensor, scale: Tensor | float, valid: Tensor | None, *bounds: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        loc, scale = normal_parameters(loc, scale, *bounds)
        self.valid = valid = None if valid is None else masked.of_rows(valid, loc.shape[:-1])
        if valid is None:
            return loc, scale
        missing = ~valid.unsqueeze(-1)
        return loc.masked_fill(missing, 0.0), scale.masked_fill(missing, 1.0)

    def _neutral(self, action: Tensor, neutral: Tensor) -> Tensor:
        return action if self.valid is None else torch.where(self.valid.unsqueeze(-1), action, neutral)


class BoundedNormal(_NormalPart, SquashedNormal):
    """:class:`SquashedNormal` with entropy, divergence and rows that may not exist.

    The entropy is that of the bounded action: the normal's, closed form, plus the mean of the log-Jacobian by
    quadrature (:func:`~torchrl_perf.functional.losses.hybrid.squash_log_jacobian_mean`, which states the error). The
    divergence of two with the same bounds is closed form. A row that is not valid acts in the middle of the bounds,
    with log-probability, entropy and divergence 0.

    Args:
        loc: ``[*, D]`` mean before squashing.
        scale: ``[*, D]`` standard deviation before squashing, positive.
        low: least action, a number or broadcastable to ``[*, D]``.
        high: greatest action, likewise.
        valid: bool ``[*]`` or ``[*, 1]``, True for the rows that exist; all by default.
        **options: ``validate_args``, ``tanh_loc`` and ``upscale``, as for :class:`SquashedNormal`.
    """

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor | float,
        low: Tensor | float = -1.0,
        high: Tensor | float = 1.0,
        valid: Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*self._present(loc, scale, valid, low, high), low, high, **options)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "BoundedNormal":
        """The same distribution for ``batch_shape`` rows."""
        valid = None if self.valid is None else self.valid.expand(torch.Size(batch_shape))
        return BoundedNormal(*self._expanded(batch_shape), valid, validate_args=self._validate_args)

    @property
    def mean(self) -> Tensor:
        """``[*, D]`` the squashed mean, which is the median."""
        return self.deterministic_sample

    def rsample(self, sample_shape: torch.Size | Sequence[int] = ()) -> Tensor:
        """``[*sample_shape, *, D]`` actions, differentiable in ``loc`` and ``scale``."""
        return self._neutral(super().rsample(sample_shape), self._squash(torch.zeros_like(self._wide_loc)))

    def rsample_and_log_prob(
        self, sample_shape: torch.Size | Sequence[int] = (), *, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Actions ``[*sample_shape, *, D]`` and their log-probabilities; see :class:`SquashedNormal`."""
        action, log_prob = super().rsample_and_log_prob(sample_shape, noise=noise)
        neutral = self._squash(torch.zeros_like(self._wide_loc))
        return self._neutral(action, neutral), hybrid.present(log_prob, self.valid)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability ``[*]`` of bounded actions ``[*, D]``; 0 where the row does not exist."""
        value = self._neutral(value, self._squash(torch.zeros_like(self._wide_loc)))
        return hybrid.present(super().log_prob(value), self.valid)

    def entropy(self) -> Tensor:
        """``[*]`` nats, of the bounded action."""
        entropy = hybrid.squashed_normal_entropy(self.loc, self.scale, self.low, self.high)
        return hybrid.present(entropy, self.valid)


class DiagonalNormal(_NormalPart, Distribution):
    """An unbounded normal whose D independent components are one event, with rows that may not exist.

    Entropy and divergence are closed form. A row that is not valid acts 0, with log-probability, entropy and divergence
    0. Nothing is validated and nothing waits for the host.

    Args:
        loc: ``[*, D]``.
        scale: ``[*, D]``, positive; or a number, or a function that makes it of ``loc``. Both broadcast.
        valid: bool ``[*]`` or ``[*, 1]``, True for the rows that exist; all by default.
        validate_args: check arguments and values as torch does, which waits for the host; not by default.
        tanh_loc: squash the mean first, ``upscale * tanh(loc / upscale)``, as TorchRL's ``IndependentNormal``.
        upscale: as above.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"loc": constraints.real_vector, "scale": constraints.positive}
    support = constraints.real_vector  # pyright: ignore[reportAssignmentType]  (torch declares a property)
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor | float,
        valid: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        tanh_loc: bool = False,
        upscale: Tensor | float = 5.0,
    ) -> None:
        loc = squashed_loc(loc, upscale) if tanh_loc else loc
        self.loc, self.scale = self._present(loc, scale, valid)
        super().__init__(self.loc.shape[:-1], self.loc.shape[-1:], validate_args=bool(validate_args))

    def expand(self, batch_shape: Any, _instance: Any = None) -> "DiagonalNormal":
        """The same distribution for ``batch_shape`` rows."""
        rows = torch.Size(batch_shape)
        valid = None if self.valid is None else self.valid.expand(rows)
        return DiagonalNormal(
            self.loc.expand(rows + self.event_shape),
            self.scale.expand(rows + self.event_shape),
            valid,
            self._validate_args,
        )

    @property
    def mean(self) -> Tensor:
        """``[*, D]``."""
        return self.loc

    @property
    def mode(self) -> Tensor:
        """``[*, D]``, the mean."""
        return self.loc

    @property
    def median(self) -> Tensor:
        """``[*, D]``, the mean."""
        return self.loc

    @property
    def deterministic_sample(self) -> Tensor:
        """``[*, D]`` the mean, which TorchRL uses under ``ExplorationType.DETERMINISTIC``."""
        return self.loc

    @property
    def stddev(self) -> Tensor:
        """``[*, D]``."""
        return self.scale

    @property
    def variance(self) -> Tensor:
        """``[*, D]``."""
        return self.scale.square()

    def rsample(self, sample_shape: torch.Size | Sequence[int] = ()) -> Tensor:
        """``[*sample_shape, *, D]`` actions, differentiable in ``loc`` and ``scale``."""
        shape = torch.Size(sample_shape) + self.loc.shape
        noise = normal(shape, dtype=wide_dtype(self.loc.dtype), device=self.loc.device)
        action = rounded(widened(self.loc) + widened(self.scale) * noise, self.loc, self.scale)
        return self._neutral(action, torch.zeros_like(self.loc))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability ``[*]`` of actions ``[*, D]``; 0 where the row does not exist."""
        if self._validate_args:
            self._validate_sample(value)
        value = self._neutral(value, torch.zeros_like(self.loc))
        return hybrid.present(hybrid.normal_log_prob(value, self.loc, self.scale), self.valid)

    def entropy(self) -> Tensor:
        """``[*]`` nats, closed form."""
        return hybrid.present(hybrid.normal_entropy(self.scale), self.valid)


class HybridDistribution(CompositeDistribution):
    """Independent discrete and continuous parts of one action, with a joint log-probability and no host wait.

    A TensorDict ``CompositeDistribution``, with the constructor, the keys of samples (any nesting) and of
    log-probabilities (``<part>_log_prob``) that TorchRL's losses know. It adds the joint log-probability, entropy and
    divergence, each the sum over the parts. A part with dims beyond the batch has one action for each node: its nodes
    are summed too, and nodes that are not valid count 0. With it ``kl_divergence`` and TorchRL's ``KLPENPPOLoss`` use
    the closed form where they would otherwise sample.

    Args:
        params: the parameters of each part under the part's name, batch ``[*batch]``.
        distribution_map: the class of each part by name, such as :class:`DeviceMaskedCategorical`,
            :class:`BoundedNormal`, :class:`DiagonalNormal` or any other with a closed-form or sampled entropy.
        **kwargs: as for ``CompositeDistribution``.
    """

    dists: dict[NestedKey, Distribution]

    def __init__(self, params: TensorDictBase, distribution_map: dict[NestedKey, type], **kwargs: Any) -> None:
        super().__init__(params, distribution_map, **kwargs)

    @classmethod
    def of_parts(cls, parts: dict[NestedKey, Distribution], batch_shape: torch.Size) -> "HybridDistribution":
        """A distribution of parts that exist already, each of batch ``[*batch, *nodes]``."""
        self = cls.__new__(cls)
        self._batch_shape = batch_shape
        self.dists = parts
        self.log_prob_key = self.entropy_key = None
        return self

    def rsample(self, shape: torch.Size | tuple[int, ...] = ()) -> TensorDict:
        """Samples ``[*shape, *batch]``, differentiable where a part can be reparametrised."""
        size = torch.Size(shape)
        parts = {key: d.rsample(size) if d.has_rsample else d.sample(size) for key, d in self.dists.items()}
        return TensorDict(cast("Any", parts), size + self.batch_shape)

    def joint_log_prob(self, sample: TensorDictBase) -> Tensor:
        """Log-probability ``[*batch]`` of all parts together; ``sample`` may hold other entries too."""
        return self.joined(self.part_log_probs(sample), max(sample.ndim, len(self.batch_shape)))

    def part_log_probs(self, sample: TensorDictBase) -> dict[NestedKey, Tensor]:
        """Log-probability of each part by its name, ``[*batch, *nodes]``."""
        return {key: dist.log_prob(sample.get(key)) for key, dist in self.dists.items()}

    def part_entropies(self, samples: int = 1) -> dict[NestedKey, Tensor]:
        """Entropy of each part by its name, ``[*batch, *nodes]``.

        Exact for categorical and normal parts, by quadrature for bounded ones; a part of another class that has none is
        estimated from ``samples`` draws.
        """
        return {key: _entropy(dist, samples) for key, dist in self.dists.items()}

    def joint_entropy(self, samples: int = 1) -> Tensor:
        """Entropy ``[*batch]`` of all parts together, the sum of :meth:`part_entropies`."""
        return self.joined(self.part_entropies(samples), len(self.batch_shape))

    def joint_kl(self, other: "HybridDistribution") -> Tensor:
        """``KL(self || other)`` ``[*batch]``, in closed form.

        Raises:
            ValueError: for another set of parts.
        """
        if list(self.dists) != list(other.dists):
            raise ValueError(
                f"other: expected the parts {list(self.dists)}, received {list(other.dists)}. Remedy: compare "
                "policies over the same action spec."
            )
        parts = {key: kl_divergence(dist, other.dists[key]) for key, dist in self.dists.items()}
        return self.joined(parts, len(self.batch_shape))

    @staticmethod
    def joined(parts: dict[NestedKey, Tensor], batch_dims: int) -> Tensor:
        """The sum ``[*batch]`` of values ``[*batch, *nodes]`` over parts and nodes."""
        values = [hybrid.sum_to(value, batch_dims) for value in parts.values()]
        return torch.stack(values).sum(0) if len(values) > 1 else values[0]


def _entropy(dist: Distribution, samples: int) -> Tensor:
    try:
        return dist.entropy()
    except NotImplementedError:
        size = torch.Size([samples])
        return -dist.log_prob(dist.rsample(size) if dist.has_rsample else dist.sample(size)).mean(0)


@register_kl(GumbelCategorical, GumbelCategorical)
@register_kl(GumbelCategorical, Categorical)
@register_kl(Categorical, GumbelCategorical)
def _kl_categorical(p: Categorical, q: Categorical) -> Tensor:
    # torch's own, of Categorical, indexes with a mask, which waits for the host
    log_p, log_q = (d.log_probs if isinstance(d, GumbelCategorical) else d.logits for d in (p, q))
    dtype = torch.promote_types(p.logits.dtype, q.logits.dtype)
    return hybrid.present(masked.masked_kl(log_p, log_q), getattr(p, "valid", None)).to(dtype)


@register_kl(DiagonalNormal, DiagonalNormal)
def _kl_normal(p: Any, q: Any) -> Tensor:
    return hybrid.present(hybrid.normal_kl(p.loc, p.scale, q.loc, q.scale), getattr(p, "valid", None))


@register_kl(SquashedNormal, SquashedNormal)
def _kl_squashed(p: Any, q: Any) -> Tensor:
    divergence = hybrid.normal_kl(p.loc, p.scale, q.loc, q.scale)
    same = [p_bound == q_bound for p_bound, q_bound in ((p.low, q.low), (p.high, q.high)) if p_bound is not q_bound]
    for bounds in same:
        # for differing bounds there is no closed form, and a check on the host would wait: the result is NaN
        if isinstance(bounds, Tensor):
            divergence = divergence.masked_fill(~bounds.expand_as(p.loc).all(-1), torch.nan)
        elif not bounds:
            raise ValueError(
                f"expected the same bounds, received [{p.low}, {p.high}] and [{q.low}, {q.high}]. Remedy: an estimate "
                "from samples, p.log_prob(x) - q.log_prob(x)."
            )
    return hybrid.present(divergence, getattr(p, "valid", None))


@register_kl(HybridDistribution, HybridDistribution)
def _kl_hybrid(p: HybridDistribution, q: HybridDistribution) -> Tensor:
    return p.joint_kl(q)
