"""Adam (arXiv:1412.6980) as a function of tensors: steps are skipped on the device and computed in wide precision."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_perf.functional.polyak import polyak_update_
from torchrl_perf.kernels import adam_kernels

__all__ = [
    "AdamSettings",
    "adam_step_",
    "adam_steps_",
    "bias_corrections",
    "exact_copy_",
    "fused_adam_steps_",
    "gradient_norms",
    "widest_dtype",
]


class AdamSettings(NamedTuple):
    """Settings of a step, except its step size."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the means of gradients and of their squares."""
    eps: float = 1e-8
    """Added to the root of the second mean."""
    weight_decay: float = 0.0
    """Added to the gradient, times the parameter."""
    decoupled: bool = False
    """Whether it shrinks the parameter itself instead (arXiv:1711.05101)."""


def widest_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a parameter's moments are kept and its step is computed: float64, or else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact_copy_(exact: Tensor, param: Tensor) -> Tensor:
    """Makes ``exact``, the wide value of a 16-bit parameter, agree with it, in place and without a host wait.

    If the parameter is the rounded wide value, the wide value is kept, so that steps below the parameter's resolution
    add up. If something else was written to the parameter, such as a checkpoint, the wide value becomes that.

    Args:
        exact: float32, shaped as ``param``.
        param: bfloat16 or float16.
    """
    return exact.copy_(torch.where(exact.to(param.dtype) == param, exact, param.to(exact.dtype)))


def bias_corrections(steps: Tensor, betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """``1 - beta1 ** steps`` and ``sqrt(1 - beta2 ** steps)``, shaped as ``steps``."""
    # 1 - beta ** steps would lose half of its digits in float32
    first, second = (-torch.expm1(steps * math.log(beta)) if beta else torch.ones_like(steps) for beta in betas)
    return first, second.sqrt()


@torch.no_grad()
def adam_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    corrections: tuple[Tensor, Tensor],
    *,
    lr: Tensor,
    settings: AdamSettings,
    grad_scale: Tensor,
    skip: Tensor,
) -> None:
    """One step of one parameter, in place; where ``skip`` is 1 no bit changes, whatever the gradient is.

    PyTorch's fused kernel in ordinary operations, for what that does not serve: it reads ``lr`` and ``grad_scale`` as
    float32, which is not enough for parameters of float64, and a compiler cannot merge it with what stands around it.

    Args:
        param: float32 or float64.
        grad: shaped as it; divided by ``grad_scale`` first.
        exp_avg: mean of the gradients, as ``param``.
        exp_avg_sq: mean of their squares, as ``param``.
        corrections: :func:`bias_corrections` of the number of steps, this one counted, 0-d each.
        lr: step size, 0-d.
        settings: the others.
        grad_scale: 0-d.
        skip: float 0-d, 1 to change nothing.
    """
    (beta1, beta2), eps, weight_decay, decoupled = settings
    applies, first, second = skip == 0, *corrections
    scaled, value, lr = grad.to(param.dtype) / grad_scale.to(param.dtype), param, lr.to(param.dtype)
    if weight_decay and decoupled:
        value = param * (1.0 - lr * weight_decay)
    elif weight_decay:
        scaled = scaled + weight_decay * param
    mean = exp_avg + (1 - beta1) * (scaled - exp_avg)
    square = beta2 * exp_avg_sq + (1 - beta2) * scaled * scaled
    value = value - lr * (mean / first) / (square.sqrt() / second + eps)
    exp_avg.copy_(torch.where(applies, mean, exp_avg))
    exp_avg_sq.copy_(torch.where(applies, square, exp_avg_sq))
    param.copy_(torch.where(applies, value, param))


@torch.no_grad()
def adam_steps_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    corrections: tuple[Tensor, Tensor],
    *,
    lr: Tensor,
    settings: AdamSettings,
    grad_scale: Tensor,
    skip: Tensor,
) -> None:
    """:func:`adam_step_` of several parameters of one dtype, in one launch on CUDA for each of its operations.

    Args:
        params: those that ``adam_step_`` takes one of, and so are the next three.
        grads: of the dtype of ``params``.
        exp_avgs: means.
        exp_avg_sqs: means of squares.
        corrections: ``[P]`` each.
        lr: as there, and so are the others.
        settings: as there.
        grad_scale: as there.
        skip: as there.
    """
    betas, eps, weight_decay, decoupled = settings
    dtype = params[0].dtype
    (first, second), applies, lr = corrections, skip == 0, lr.to(dtype)
    scaled = torch._foreach_div(list(grads), grad_scale.to(dtype))
    values = list(params)
    if weight_decay and decoupled:
        values = torch._foreach_mul(values, 1.0 - lr * weight_decay)
    elif weight_decay:
        scaled = torch._foreach_add(scaled, values, alpha=weight_decay)
    means = torch._foreach_lerp(list(exp_avgs), scaled, 1.0 - betas[0])
    squares = torch._foreach_mul(list(exp_avg_sqs), betas[1])
    torch._foreach_addcmul_(squares, scaled, scaled, value=1.0 - betas[1])
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, list(second.unbind()))
    torch._foreach_add_(roots, eps)
    changes = torch._foreach_div(means, roots)
    torch._foreach_mul_(changes, list((lr / first).unbind()))
    values = torch._foreach_sub(values, changes)
    kept, made = [*params, *exp_avgs, *exp_avg_sqs], [*values, *means, *squares]
    for old, new in zip(kept, made, strict=True):
        old.copy_(torch.where(applies, new, old))


@torch.no_grad()
def fused_adam_steps_(  # noqa: PLR0913  what a step reads and writes
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Tensor,
    *,
    lr: Tensor,
    settings: AdamSettings,
    grad_scale: Tensor,
    skip: Tensor,
    targets: Sequence[Tensor] = (),
    tau: Tensor | None = None,
) -> None:
    """:func:`adam_steps_` of float32 parameters, and the step of their targets, in one launch on CUDA.

    There it is one for each 48 parameters, where Triton is and all is contiguous; elsewhere PyTorch's fused kernel,
    which walks through memory and takes tensors for what lies there: gradients that lie otherwise than their parameters
    are copied, and parameters that lie otherwise than their means go through :func:`adam_steps_`.

    Args:
        params: float32, and so are all others; of any strides.
        grads: one for each, divided by ``grad_scale`` first.
        exp_avgs: means of the gradients.
        exp_avg_sqs: means of their squares.
        steps: number of steps of each, this one counted unless it is skipped, ``[P]``.
        lr: step size, 0-d.
        settings: the others.
        grad_scale: 0-d.
        skip: 0-d, 1 to change nothing but the targets.
        targets: one for each of ``params``, to be moved by ``tau`` towards the stepped ones, or none.
        tau: 0-d; needed with targets.
    """
    kernels = adam_kernels(params, grads, exp_avgs, exp_avg_sqs, targets)
    if kernels is not None:
        lists = (params, grads, exp_avgs, exp_avg_sqs)
        kernels.adam_(lists, steps, (lr, grad_scale, skip), settings, targets, tau)
        return
    grads = [
        g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for g, p in zip(grads, params, strict=True)
    ]
    columns = list(params), grads, list(exp_avgs), list(exp_avg_sqs)
    if all(len({each.stride() for each in row}) == 1 for row in zip(*columns, strict=True)):
        (beta1, beta2), eps, weight_decay, decoupled = settings
        (torch._fused_adamw_ if decoupled else torch._fused_adam_)(
            *columns,
            [],
            list(steps.unbind()),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=skip,
        )
    else:
        # of a first step that is skipped the count is 0, and nothing of what follows is kept
        corrections = bias_corrections(steps.clamp_min(1.0), settings.betas)
        adam_steps_(*columns, corrections, lr=lr, settings=settings, grad_scale=grad_scale, skip=skip)
    if targets:
        polyak_update_(targets, params, 0.0 if tau is None else tau)


def gradient_norms(grads: Sequence[Tensor], space: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Norm of each gradient, ``[P]``, in one launch on CUDA for each 48 of float32.

    Args:
        grads: of one dtype and device, at least one.
        space: what :func:`torchrl_perf.kernels.flat_adam.workspace` made for these or more, to be used again.
    """
    kernels = adam_kernels(grads)
    if kernels is not None:
        return kernels.norms(grads, *(kernels.workspace(grads) if space is None else space))
    return torch.stack(torch._foreach_norm(list(grads), 2))
