"""Distributions that sample without a host wait, in few kernels."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Normal
from torch.distributions.utils import lazy_property
from torchrl.modules import IndependentNormal

from torchrl_perf.functional.masked import chosen, gumbel_argmax, masked_entropy
from torchrl_perf.functional.wide import wide_dtype
from torchrl_perf.runtime.draws import normal, uniform


class GumbelCategorical(Categorical):
    """``torch.distributions.Categorical`` that samples by the Gumbel-max trick.

    ``argmax(logits + G)`` with ``G = -log(-log(U))`` draws from ``softmax(logits)`` exactly, in one elementwise
    pass that a compiler fuses with the operations around it; ``torch.multinomial`` takes about eight kernels. Actions
    whose logit is ``-inf``, or whose probability is 0, are never drawn.

    Logits of 16 bits are normalised, and actions drawn, in float32: log-probabilities belong to the distribution that
    is sampled, and are rounded to 16 bits when they are returned.

    Args:
        logits: ``[*, D]`` unnormalised log-probabilities.
        probs: ``[*, D]`` unnormalised probabilities instead. (By position torch's class has these first, TorchRL's and
            this one the logits.)
        validate_args: check arguments and values as torch does, which waits for the host; not by default.

    Attributes:
        log_probs: ``[*, D]`` normalised, float64 if the arguments are, else float32.

    Raises:
        ValueError: for both of logits and probs, or neither.
    """

    valid: Tensor | None = None

    def __init__(
        self, logits: Tensor | None = None, probs: Tensor | None = None, validate_args: bool | None = None
    ) -> None:
        given = one_of(logits, probs)
        if probs is None:
            wide = given.to(wide_dtype(given.dtype))
            self._set(wide - wide.logsumexp(-1, keepdim=True), given)
        else:
            wide = log_of_probs(given)
            self._set(wide - wide.logsumexp(-1, keepdim=True), given)
            self.probs = (given.to(wide.dtype) / given.to(wide.dtype).sum(-1, keepdim=True)).to(self.dtype)
            self._param = self.probs
        Distribution.__init__(self, self.log_probs.shape[:-1], validate_args=bool(validate_args))

    def _set(self, log_probs: Tensor, given: Tensor) -> None:
        """Set the attributes of torch's class, whose constructor would normalise in the given dtype."""
        self.dtype = given.dtype if given.is_floating_point() else log_probs.dtype
        self.log_probs = log_probs
        self.logits = self._param = log_probs.to(self.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        self._num_events = log_probs.shape[-1]

    @lazy_property
    def probs(self) -> Tensor:
        """``[*, D]`` probabilities, in the dtype of the arguments."""
        return self.log_probs.softmax(-1).to(self.dtype)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "GumbelCategorical":
        """The same distribution for ``batch_shape`` rows."""
        new = cast("Any", type(self).__new__(type(self)) if _instance is None else _instance)
        super().expand(batch_shape, new)
        rows = torch.Size(batch_shape)
        new.dtype, new.log_probs = self.dtype, self.log_probs.expand(rows + self.log_probs.shape[-1:])
        new.valid = None if self.valid is None else self.valid.expand(rows)
        return new

    @property
    def mode(self) -> Tensor:
        """``[*]`` int64, the most probable action."""
        return self.log_probs.argmax(-1)

    @property
    def mean(self) -> Tensor:
        """The mode, since actions have no mean; TorchRL uses it under ``ExplorationType.MEAN``."""
        return self.mode

    @property
    def deterministic_sample(self) -> Tensor:
        """The mode, which TorchRL uses under ``ExplorationType.DETERMINISTIC``."""
        return self.mode

    def sample(self, sample_shape: torch.Size | Sequence[int] = ()) -> Tensor:
        """``[*sample_shape, *]`` int64 indices."""
        log_probs = self.log_probs.expand(*sample_shape, *self.log_probs.shape)
        return gumbel_argmax(log_probs, uniform(log_probs.shape, dtype=log_probs.dtype, device=log_probs.device))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of actions; value and rows broadcast."""
        if self._validate_args:
            self._validate_sample(value)
        choice, log_probs = value.long().unsqueeze(-1), self.log_probs
        if value.shape != log_probs.shape[:-1]:
            choice, log_probs = torch.broadcast_tensors(choice, log_probs)
        return chosen(log_probs, choice[..., :1]).to(self.dtype)

    def entropy(self) -> Tensor:
        """``[*]`` nats, exact; actions of probability 0 count 0."""
        if torch.compiler.is_compiling():
            return masked_entropy(self.log_probs).to(self.dtype)  # no second softmax: fewer kernels
        finite = self.log_probs.clamp(min=torch.finfo(self.log_probs.dtype).min)
        return -(finite * self.log_probs.softmax(-1)).sum(-1).to(self.dtype)


class DrawnNormal(IndependentNormal):
    """``torchrl.modules.IndependentNormal`` whose draws a collector may make ahead, many steps at once.

    Values and random numbers are those of TorchRL's class, and so are the arguments.
    """

    def rsample(self, sample_shape: torch.Size | Sequence[int] = ()) -> Tensor:
        """``[*sample_shape, *, D]`` actions, differentiable in ``loc`` and ``scale``."""
        base = cast("Normal", self.base_dist)
        shape = torch.Size(sample_shape) + base.batch_shape
        return base.loc + normal(shape, dtype=base.loc.dtype, device=base.loc.device) * base.scale


def one_of(logits: Tensor | None, probs: Tensor | None) -> Tensor:
    """The one of the two arguments that is not None.

    Raises:
        ValueError: for both or neither, or one without dims.
    """
    if (logits is None) == (probs is None):
        received = "neither" if logits is None else "both"
        raise ValueError(f"expected either logits or probs, received {received}. Remedy: name the one that you have.")
    given = cast("Tensor", probs if logits is None else logits)
    if given.ndim < 1:
        raise ValueError(
            f"logits, probs: expected [*, D], received {list(given.shape)}. Remedy: at least one dimension, of the "
            "categories."
        )
    return given


def log_of_probs(probs: Tensor) -> Tensor:
    """Logarithms in float32 or float64, ``-inf`` for 0, whose gradient is 0 and not NaN."""
    wide = probs.to(wide_dtype(probs.dtype))
    none = wide <= 0
    return wide.masked_fill(none, 1.0).log().masked_fill(none, -torch.inf)
