"""Several independent choices as one action, without a host wait."""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl
from torch.nn import functional as F

from torchrl_perf.functional.masked import gumbel_argmax, masked_entropy, masked_kl
from torchrl_perf.functional.wide import wide_dtype
from torchrl_perf.runtime.draws import uniform


class IndependentCategoricals(Distribution):
    """D independent choices, of ``nvec[d]`` alternatives each, as one event: actions of a ``MultiCategorical`` spec.

    Log-probability, entropy and divergence are the sums over the choices, in closed form.

    Args:
        logits: ``[*, sum(nvec)]`` unnormalised log-probabilities, those of the first choice first.
        nvec: numbers of alternatives, each at least 1.

    Attributes:
        log_probs: ``[*, D, max(nvec)]``, ``-inf`` beyond a choice's own alternatives; float64 if the logits are, else
            float32.
        logits: the same in the dtype of the logits given.

    Raises:
        ValueError: if the logits do not have as many columns.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.nonnegative_integer  # pyright: ignore[reportAssignmentType]  (torch declares a property)
    has_rsample = False

    def __init__(self, logits: Tensor, nvec: Sequence[int]) -> None:
        self.nvec = tuple(nvec)
        if logits.shape[-1] != sum(self.nvec):
            raise ValueError(
                f"logits: expected {sum(self.nvec)} columns for choices of {list(self.nvec)}, received "
                f"{list(logits.shape)}. Remedy: a network with that many outputs."
            )
        most = max(self.nvec)
        parts = [F.pad(part, (0, most - part.shape[-1]), value=-torch.inf) for part in logits.split(self.nvec, -1)]
        # log-probabilities of 16 bits would be off by up to 3 % each, and so would the draws
        self.log_probs = torch.stack(parts, -2).log_softmax(-1, dtype=wide_dtype(logits.dtype))
        self.dtype = logits.dtype
        super().__init__(logits.shape[:-1], torch.Size([len(self.nvec)]), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "IndependentCategoricals":
        """The same distribution for ``batch_shape`` rows."""
        other = cast("IndependentCategoricals", self.__new__(type(self)))
        other.nvec = self.nvec
        other.log_probs = self.log_probs.expand(*torch.Size(batch_shape), *self.log_probs.shape[-2:])
        other.dtype = self.dtype
        Distribution.__init__(other, torch.Size(batch_shape), self.event_shape, validate_args=False)
        return other

    @property
    def logits(self) -> Tensor:
        """``[*, D, max(nvec)]`` log-probabilities, in the dtype of the logits given."""
        return self.log_probs.to(self.dtype)

    @property
    def mode(self) -> Tensor:
        """``[*, D]`` int64, the most probable alternatives."""
        return self.log_probs.argmax(-1)

    @property
    def mean(self) -> Tensor:
        """The mode, since choices have no mean; TorchRL uses it under ``ExplorationType.MEAN``."""
        return self.mode

    @property
    def deterministic_sample(self) -> Tensor:
        """The mode, which TorchRL uses under ``ExplorationType.DETERMINISTIC``."""
        return self.mode

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """``[*sample_shape, *, D]`` int64 indices."""
        log_probs = self.log_probs.expand(*sample_shape, *self.log_probs.shape)
        return gumbel_argmax(log_probs, uniform(log_probs.shape, dtype=log_probs.dtype, device=log_probs.device))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability ``[*]`` of choices ``[*, D]``."""
        shape = torch.broadcast_shapes(value.shape, self.log_probs.shape[:-1])
        choice = value.long().expand(shape).unsqueeze(-1)
        return self.log_probs.expand(*shape, -1).gather(-1, choice).squeeze(-1).sum(-1).to(self.dtype)

    def entropy(self) -> Tensor:
        """``[*]`` nats, exact."""
        return masked_entropy(self.log_probs).sum(-1).to(self.dtype)


@register_kl(IndependentCategoricals, IndependentCategoricals)
def _kl(p: IndependentCategoricals, q: IndependentCategoricals) -> Tensor:
    return masked_kl(p.log_probs, q.log_probs).sum(-1).to(p.dtype)
