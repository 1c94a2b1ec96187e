"""Several independent choices as one action, without a host wait."""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl
from torch.nn import functional as F

from torchrl_perf.functional.masked import gumbel_argmax, masked_entropy, masked_kl


class IndependentCategoricals(Distribution):
    """D independent choices, of ``nvec[d]`` alternatives each, as one event: actions of a ``MultiCategorical`` spec.

    Log-probability, entropy and divergence are the sums over the choices, in closed form.

    Args:
        logits: ``[*, sum(nvec)]`` unnormalised log-probabilities, those of the first choice first.
        nvec: numbers of alternatives, each at least 1.

    Attributes:
        logits: ``[*, D, max(nvec)]`` log-probabilities, ``-inf`` beyond a choice's own alternatives.

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
        self.logits = torch.stack(parts, -2).log_softmax(-1)
        super().__init__(logits.shape[:-1], torch.Size([len(self.nvec)]), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "IndependentCategoricals":
        """The same distribution for ``batch_shape`` rows."""
        other = cast("IndependentCategoricals", self.__new__(type(self)))
        other.nvec = self.nvec
        other.logits = self.logits.expand(*torch.Size(batch_shape), *self.logits.shape[-2:])
        Distribution.__init__(other, torch.Size(batch_shape), self.event_shape, validate_args=False)
        return other

    @property
    def mode(self) -> Tensor:
        """``[*, D]`` int64, the most probable alternatives."""
        return self.logits.argmax(-1)

    @property
    def deterministic_sample(self) -> Tensor:
        """The mode: what TorchRL takes under ``ExplorationType.DETERMINISTIC``."""
        return self.mode

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """``[*sample_shape, *, D]`` int64 indices."""
        return gumbel_argmax(self.logits.expand(*sample_shape, *self.logits.shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability ``[*]`` of choices ``[*, D]``."""
        shape = torch.broadcast_shapes(value.shape, self.logits.shape[:-1])
        choice = value.long().expand(shape).unsqueeze(-1)
        return self.logits.expand(*shape, -1).gather(-1, choice).squeeze(-1).sum(-1)

    def entropy(self) -> Tensor:
        """``[*]`` nats, exact."""
        return masked_entropy(self.logits).sum(-1)


@register_kl(IndependentCategoricals, IndependentCategoricals)
def _kl(p: IndependentCategoricals, q: IndependentCategoricals) -> Tensor:
    return masked_kl(p.logits, q.logits).sum(-1)
