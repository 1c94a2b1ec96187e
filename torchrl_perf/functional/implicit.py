"""The mean over quantile levels of an implicit quantile network, as one function: a fused kernel on CUDA."""

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_perf.functional.mlp import WIDTHS
from torchrl_perf.kernels import processors
from torchrl_perf.runtime.upstream.tensors import carries_tangents

_ACTIVATION = {"tanh": torch.tanh, "relu": torch.relu}


def implicit_mean(psi: Tensor, phi: Tensor, params: list[Tensor], activation: str = "relu") -> Tensor:
    """``w2 mean_k f(w1 (psi * phi_k) + b1) + b2`` (IQN, arXiv:1806.06923): the reference that the kernel follows.

    The last layer is linear, so that it follows the mean: one product for all levels together.

    Args:
        psi: ``[B, F]`` features of the inputs.
        phi: ``[K, F]`` embeddings of levels that all rows share.
        params: ``[w1 [H, F], b1 [H], w2 [OUT, H], b2 [OUT]]``.
        activation: ``"relu"`` or ``"tanh"``.

    Returns:
        ``[B, OUT]``.
    """
    w1, b1, w2, b2 = params
    hidden = _ACTIVATION[activation](F.linear(psi.unsqueeze(-2) * phi, w1, b1))
    return F.linear(hidden.mean(-2), w2, b2)


def fusable(psi: Tensor, params: list[Tensor]) -> bool:
    """Whether :func:`fused_implicit_mean` has a kernel for these arguments.

    It has one for CUDA, float32, contiguous parameters, F = H in 32, 64 and 128, OUT <= 64, and no gradient, since
    there is no backward pass. Whether ``phi`` needs a gradient is not checked, only the parameters after it.
    """
    hidden, features = params[0].shape
    tensors = [psi, *params]
    return (
        psi.is_cuda
        and all(tensor.dtype == torch.float32 for tensor in tensors)
        and features == hidden
        and hidden in WIDTHS
        and params[2].shape[0] <= 64
        and not carries_tangents()
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and all(param.is_contiguous() for param in params)
    )


def fused_implicit_mean(
    psi: Tensor, phi: Tensor, params: list[Tensor], activation: str = "relu", precision: str = "tf32"
) -> Tensor:
    """:func:`implicit_mean` in one kernel on CUDA, which writes no ``[B, K, H]``.

    Args:
        psi: ``[B, F]`` float32 on CUDA, any strides.
        phi: ``[K, F]`` float32.
        params: as in :func:`implicit_mean`, contiguous.
        activation: ``"relu"`` or ``"tanh"``.
        precision: of the products with ``w1``: ``"tf32"``, ``"bf16"``, ``"fp16"`` or ``"ieee"``; that with ``w2`` is in
            TF32, or in float32 with ``"ieee"``.

    Returns:
        ``[B, OUT]`` float32, without a gradient. Equal to :func:`implicit_mean` within 2e-3 of its scale (``ieee``:
        1e-5, ``bf16``: 2e-2).
    """
    return torch.ops.torchrl_perf.implicit_mean(psi, phi.contiguous(), params, activation, precision)


@torch.library.custom_op("torchrl_perf::implicit_mean", mutates_args=())
def _implicit_mean(psi: Tensor, phi: Tensor, params: list[Tensor], activation: str, precision: str) -> Tensor:
    from torchrl_perf.kernels import implicit as kernel  # Triton is loaded where CUDA is used, not at import

    return kernel.forward(psi, phi, params, activation, precision, processors(psi.device))


@_implicit_mean.register_fake
def _(psi: Tensor, phi: Tensor, params: list[Tensor], activation: str, precision: str) -> Tensor:
    return psi.new_empty(psi.shape[0], params[2].shape[0])
