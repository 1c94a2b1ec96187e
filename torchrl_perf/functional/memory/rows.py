"""What the sequences of the cells have in common: time-major rows, and when something is kept for a backward pass."""

import torch
from torch import Tensor

__all__ = ["add_bias", "as_time_major", "grad_or_none", "keeps_gates"]


def as_time_major(inputs: Tensor, initial: Tensor, begins: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """``inputs`` ``[T, N, *]``, contiguous and of ``dtype``, ``initial`` likewise, and ``begins`` ``[T, N, 1]``."""
    return (
        inputs.transpose(0, 1).to(dtype).contiguous(),
        initial.to(dtype).contiguous(),
        begins.transpose(0, 1).unsqueeze(-1).contiguous(),
    )


def keeps_gates(*tensors: Tensor) -> bool:
    """Whether a backward pass may follow, for which the gates of each step are kept."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def add_bias(state: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    """``state @ columns + bias``, in one call."""
    return state @ columns if bias is None else torch.addmm(bias, state, columns)


def grad_or_none(gradient: Tensor, is_wanted: bool) -> Tensor | None:
    """The gradient, or None for an argument that was None."""
    return gradient if is_wanted else None
