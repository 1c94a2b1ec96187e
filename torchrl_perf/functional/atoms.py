"""The means of categorical action values, as one function: a fused kernel on CUDA."""

import torch
from torch import Tensor

from torchrl_perf.functional.wide import computed_wide
from torchrl_perf.runtime.upstream.tensors import carries_tangents

MOST = 4096
"""Padded numbers of a row, actions times atoms, that one program of the kernel holds."""


@computed_wide
def duel(streams: Tensor, num_actions: int) -> Tensor:
    """``V + A - mean(A)`` over the actions (arXiv:1511.06581), for each of M numbers.

    Args:
        streams: ``[*, (1 + D) M]``, the value's numbers first.
        num_actions: D.

    Returns:
        ``[*, D, M]``.
    """
    streams = streams.unflatten(-1, (1 + num_actions, -1))
    value, advantage = streams[..., :1, :], streams[..., 1:, :]
    return value + advantage - advantage.mean(-2, keepdim=True)


@computed_wide
def atom_means(logits: Tensor, support: Tensor, num_actions: int, dueling: bool = False) -> Tensor:
    """``sum_m softmax(logits)_m z_m`` for each action (C51, arXiv:1707.06887): the reference that the kernel follows.

    Args:
        logits: ``[*, D M]``, or with ``dueling`` ``[*, (1 + D) M]``, see :func:`duel`.
        support: ``[M]`` the atoms.
        num_actions: D.
        dueling: whether a value's logits come first.

    Returns:
        ``[*, D]``.
    """
    rows = duel(logits, num_actions) if dueling else logits.unflatten(-1, (num_actions, -1))
    return (rows.softmax(-1) * support).sum(-1)


def fusable(logits: Tensor, num_actions: int, num_atoms: int) -> bool:
    """Whether :func:`fused_atom_means` has a kernel: on CUDA, float32, no gradient, at most 4,096 padded numbers."""
    padded = (1 << (num_actions - 1).bit_length()) * (1 << (num_atoms - 1).bit_length())
    wants_grad = carries_tangents() or (torch.is_grad_enabled() and logits.requires_grad)
    return logits.is_cuda and logits.dtype == torch.float32 and not wants_grad and padded <= MOST


def fused_atom_means(logits: Tensor, support: Tensor, num_actions: int, dueling: bool = False) -> Tensor:
    """:func:`atom_means` in one kernel on CUDA, which reads the logits once and writes nothing else.

    Args:
        logits: as for :func:`atom_means`, float32 on CUDA.
        support: ``[M]`` float32.
        num_actions: D.
        dueling: as for :func:`atom_means`.

    Returns:
        ``[*, D]``, equal to :func:`atom_means` within 1e-5 of the support's width.
    """
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    means = torch.ops.torchrl_perf.atom_means(rows, support, num_actions, dueling)
    return means.view(*logits.shape[:-1], num_actions)


@torch.library.custom_op("torchrl_perf::atom_means", mutates_args=())
def _atom_means(logits: Tensor, support: Tensor, num_actions: int, dueling: bool) -> Tensor:
    from torchrl_perf.kernels import atoms as kernel  # Triton is loaded where CUDA is used, not at import

    return kernel.forward(logits, support, num_actions, dueling)


@_atom_means.register_fake
def _(logits: Tensor, support: Tensor, num_actions: int, dueling: bool) -> Tensor:
    return logits.new_empty(logits.shape[0], num_actions)
