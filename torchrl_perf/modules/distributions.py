"""Distributions that sample without a host wait, in few kernels."""

import torch
from torch import Tensor
from torch.distributions import Categorical


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
        with torch.no_grad():
            logits = self.logits.expand(*sample_shape, *self.logits.shape)
            noise = torch.rand(logits.shape, dtype=logits.dtype, device=logits.device)
            # a draw of exactly 0 (one in 2**24) would give -inf, level with the actions that must not be drawn
            limits = torch.finfo(logits.dtype)
            noise = noise.clamp(limits.tiny, 1 - limits.eps / 2)
            return (logits - (-noise.log()).log()).argmax(-1)
