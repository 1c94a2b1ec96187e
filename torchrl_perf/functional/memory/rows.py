"""What the sequences of the cells have in common: rows by step, and when something is kept for a backward pass."""

import torch
from torch import Tensor

from torchrl_perf.runtime.upstream.tensors import is_transformed

__all__ = ["add_bias", "env_major", "grad_or_none", "keeps_gates", "takes_one_launch", "time_major"]


def time_major(rows: Tensor) -> Tensor:
    """``[T, N, *]``, contiguous, of ``[N, T, *]``: each step in one piece, as a loop over steps wants it."""
    return rows.transpose(0, 1).contiguous()


def env_major(steps: Tensor) -> Tensor:
    """``[N, T, *]``, contiguous, of ``[T, N, *]``."""
    return time_major(steps)


def keeps_gates(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow, for which the gates of each step are kept."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def takes_one_launch(*tensors: Tensor | None) -> bool:
    """Whether a step may be one kernel: float32 on CUDA, no backward pass may follow, and nothing is transformed."""
    given = [tensor for tensor in tensors if tensor is not None]
    return (
        not is_transformed()
        and not keeps_gates(*given)
        and all(each.is_cuda and each.dtype == torch.float32 for each in given)
    )


def add_bias(state: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    """``state @ columns + bias``, in one call."""
    return state @ columns if bias is None else torch.addmm(bias, state, columns)


def grad_or_none(gradient: Tensor, is_wanted: bool) -> Tensor | None:
    """The gradient, or None for an argument that was None."""
    return gradient if is_wanted else None
