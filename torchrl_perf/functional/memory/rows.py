"""What the sequences of the cells have in common: rows by step, and when something is kept for a backward pass."""

from typing import Any

import torch
from torch import Tensor

from torchrl_perf.runtime.upstream.tensors import is_transformed

__all__ = [
    "add_bias",
    "dense",
    "env_major",
    "grad_or_none",
    "keeps_gates",
    "refuse_second_gradients",
    "takes_one_launch",
    "time_major",
]


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


def dense(bias: Tensor | None) -> Tensor | None:
    """A bias as kernels read it; one may be a part of a larger tensor."""
    return None if bias is None else bias.contiguous()


def grad_or_none(gradient: Tensor, is_wanted: bool) -> Tensor | None:
    """The gradient, or None for an argument that was None."""
    return gradient if is_wanted else None


def refuse_second_gradients(backward: Any, name: str) -> None:
    """Have the operator of a backward pass say what does instead where its results are differentiated.

    Args:
        backward: the operator.
        name: of what it is the backward pass of.
    """

    def refuse(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            f"{name}: expected gradients that are not differentiated themselves, received a second derivative of a "
            "sequence, whose gates are not a part of the graph. Remedy: torch.func.grad for the first one, in whose "
            "transforms a sequence is a loop over steps, or a memory that is linear in its state, minGRU or the LRU."
        )

    backward.register_autograd(refuse)
