"""Distributions of hybrid actions: masked categorical and bounded normal parts, joined into one.

Importing this registers the divergences below with ``torch.distributions.kl_divergence``, where TorchRL looks for them.
Dimension key: ``D`` choices or components of one action; ``*`` any batch, nodes of an action included.
"""

from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Distribution, constraints, kl_divergence, register_kl

from torchrl_perf.functional import hybrid, masked
from torchrl_perf.modules.distributions import GumbelCategorical
from torchrl_perf.modules.squashed_normal import SquashedNormal


class DeviceMaskedCategorical(GumbelCategorical):
    """A categorical over the allowed choices, which is never NaN: a row that allows none takes choice 0.

    Such a row, and one that is not valid, has log-probability 0, entropy 0, divergence 0 and no gradient. Choices that
    are not allowed have probability 0 and log-probability ``-inf``. Entropy and divergence are exact.

    Args:
        logits: ``[*, D]`` unnormalised log-probabilities.
        mask: bool ``[*, D]``, True for the allowed choices; all by default.
        valid: bool ``[*]`` or ``[*, 1]``, True for the rows that exist; all by default.
    """

    def __init__(self, logits: Tensor, mask: Tensor | None = None, valid: Tensor | None = None) -> None:
        self.valid = valid = None if valid is None else masked.of_rows(valid, logits.shape[:-1])
        if valid is not None:
            exists = valid.unsqueeze(-1)
            mask = exists.expand(logits.shape) if mask is None else mask & exists
        self._param = masked.masked_log_softmax(logits, mask)
        self.logits = self._param  # pyright: ignore[reportAttributeAccessIssue]  (torch declares a lazy property)
        self._num_events = logits.shape[-1]
        # not the parents' constructors, which normalise once more
        Distribution.__init__(self, logits.shape[:-1], validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "DeviceMaskedCategorical":
        """The same distribution for ``batch_shape`` rows."""
        shape = torch.Size(batch_shape)
        valid = None if self.valid is None else self.valid.expand(shape)
        logits = self.logits.expand(shape + self.logits.shape[-1:])
        return DeviceMaskedCategorical(logits, logits != -torch.inf, valid)

    @property
    def mode(self) -> Tensor:
        """``[*]`` int64, the most probable allowed choice."""
        return self.logits.argmax(-1)

    @property
    def mean(self) -> Tensor:
        """The mode, since choices have no mean."""
        return self.mode

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability ``[*]`` of choices ``[*]``; 0 where the row does not exist, whatever its choice."""
        choice = value.long() if self.valid is None else value.long().masked_fill(~self.valid, 0)
        logits = self.logits.expand(choice.shape + self.logits.shape[-1:])
        return logits.gather(-1, choice.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """``[*]`` nats, exact."""
        return masked.masked_entropy(self.logits)


class _NormalPart:
    """Rows of a normal that do not exist, and that must not reach the others as NaN."""

    valid: Tensor | None

    def _present(self, loc: Tensor, scale: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
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
    quadrature (:func:`~torchrl_perf.functional.hybrid.squash_log_jacobian_mean`, which states the error). The
    divergence of two with the same bounds is closed form. A row that is not valid acts in the middle of the bounds,
    with log-probability, entropy and divergence 0.

    Args:
        loc: ``[*, D]`` mean before squashing.
        scale: ``[*, D]`` standard deviation before squashing, positive.
        low: least action, a number or broadcastable to ``[*, D]``.
        high: greatest action, likewise.
        valid: bool ``[*]`` or ``[*, 1]``, True for the rows that exist; all by default.
    """

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        low: Tensor | float = -1.0,
        high: Tensor | float = 1.0,
        valid: Tensor | None = None,
    ) -> None:
        super().__init__(*self._present(loc, scale, valid), low, high)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "BoundedNormal":
        """The same distribution for ``batch_shape`` rows."""
        wide = super().expand(batch_shape)
        valid = None if self.valid is None else self.valid.expand(torch.Size(batch_shape))
        return BoundedNormal(wide.loc, wide.scale, wide.low, wide.high, valid)

    @property
    def mean(self) -> Tensor:
        """``[*, D]`` the squashed mean, which is the median."""
        return self.deterministic_sample

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """``[*sample_shape, *, D]`` actions, differentiable in ``loc`` and ``scale``."""
        return self._neutral(super().rsample(sample_shape), self._squash(torch.zeros_like(self.loc)))

    def rsample_and_log_prob(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Actions ``[*sample_shape, *, D]`` and their log-probabilities; see :class:`SquashedNormal`."""
        action, log_prob = super().rsample_and_log_prob(sample_shape, noise=noise)
        neutral = self._squash(torch.zeros_like(self.loc))
        return self._neutral(action, neutral), hybrid.present(log_prob, self.valid)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability ``[*]`` of bounded actions ``[*, D]``; 0 where the row does not exist."""
        value = self._neutral(value, self._squash(torch.zeros_like(self.loc)))
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
        scale: ``[*, D]``, positive.
        valid: bool ``[*]`` or ``[*, 1]``, True for the rows that exist; all by default.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"loc": constraints.real_vector, "scale": constraints.positive}
    support = constraints.real_vector  # pyright: ignore[reportAssignmentType]  (torch declares a property)
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, valid: Tensor | None = None) -> None:
        self.loc, self.scale = self._present(loc, scale, valid)
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "DiagonalNormal":
        """The same distribution for ``batch_shape`` rows."""
        rows = torch.Size(batch_shape)
        valid = None if self.valid is None else self.valid.expand(rows)
        return DiagonalNormal(
            self.loc.expand(rows + self.event_shape), self.scale.expand(rows + self.event_shape), valid
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
    def deterministic_sample(self) -> Tensor:
        """``[*, D]`` the mean: what TorchRL takes under ``ExplorationType.DETERMINISTIC``."""
        return self.loc

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """``[*sample_shape, *, D]`` actions, differentiable in ``loc`` and ``scale``."""
        shape = torch.Size(sample_shape) + self.loc.shape
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        return self._neutral(self.loc + self.scale * noise, torch.zeros_like(self.loc))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability ``[*]`` of actions ``[*, D]``; 0 where the row does not exist."""
        value = self._neutral(value, torch.zeros_like(self.loc))
        return hybrid.present(hybrid.normal_log_prob(value, self.loc, self.scale), self.valid)

    def entropy(self) -> Tensor:
        """``[*]`` nats, closed form."""
        return hybrid.present(hybrid.normal_entropy(self.scale), self.valid)


class HybridDistribution(CompositeDistribution):
    """Independent discrete and continuous parts of one action, scored together without a host wait.

    A TensorDict ``CompositeDistribution``, with the constructor, the keys of samples (any nesting) and of
    log-probabilities (``<part>_log_prob``) that TorchRL's losses know. It adds the joint log-probability, entropy and
    divergence, each the sum over the parts and over the nodes of a part; parts of dims beyond the batch, one action for
    each node, count each node, and nodes that are not valid count 0. With it ``kl_divergence`` and TorchRL's
    ``KLPENPPOLoss`` take the closed form where they would otherwise sample one.

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
            raise ValueError(f"other: expected the parts {list(self.dists)}, received {list(other.dists)}.")
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
def _kl_categorical(p: GumbelCategorical, q: GumbelCategorical) -> Tensor:
    # torch's own, of Categorical, indexes with a mask, which waits for the host
    return masked.masked_kl(p.logits, q.logits)


@register_kl(SquashedNormal, SquashedNormal)
@register_kl(DiagonalNormal, DiagonalNormal)
def _kl_normal(p: Any, q: Any) -> Tensor:
    return hybrid.present(hybrid.normal_kl(p.loc, p.scale, q.loc, q.scale), getattr(p, "valid", None))


@register_kl(HybridDistribution, HybridDistribution)
def _kl_hybrid(p: HybridDistribution, q: HybridDistribution) -> Tensor:
    return p.joint_kl(q)
