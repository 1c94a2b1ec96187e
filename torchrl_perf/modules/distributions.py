"""Distributions that sample without a host wait, in few kernels."""

import torch
from torch import Tensor
from torch.distributions import Categorical

from torchrl_perf.functional.masked import gumbel_argmax


class GumbelCategorical(Categorical):
    """``torch.distributions.Categorical`` that samples by the Gumbel-max trick.

    ``argmax(logits + G)`` with ``G = -log(-log(U))`` draws from ``softmax(logits)`` exactly, in one elementwise
    pass that a compiler fuses with what is around it; ``torch.multinomial`` is about eight kernels. Actions whose logit
    is ``-inf`` are never drawn. Log-probability, entropy, mode and KL are the parent's.

    Args:
        logits: ``[*, D]`` unnormalised log-probabilities.
    """

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits=logits, validate_args=False)

    @property
    def deterministic_sample(self) -> Tensor:
        """The mode: what TorchRL takes under ``ExplorationType.DETERMINISTIC``."""
        return self.mode

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """``[*sample_shape, *]`` int64 indices."""
        return gumbel_argmax(self.logits.expand(*sample_shape, *self.logits.shape))
