"""Adam (arXiv:1412.6980) as a function of tensors: steps are skipped on the device and computed in wide precision."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["AdamSettings", "adam_step_", "bias_corrections", "exact_copy_", "widest_dtype"]


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
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    settings: AdamSettings,
    grad_scale: Tensor,
    skip: Tensor,
) -> None:
    """One step of Adam, in place; where ``skip`` is 1 no bit changes, whatever the gradients are.

    Ordinary operations in place of PyTorch's fused kernel, which reads ``lr`` and ``grad_scale`` as float32: too little
    for parameters of float64.

    Args:
        params: of one dtype, float32 or float64.
        grads: one for each, of that dtype; divided by ``grad_scale`` first.
        exp_avgs: means of the gradients, as ``params``.
        exp_avg_sqs: means of their squares, as ``params``.
        steps: number of steps of each, float32 0-d.
        lr: step size, 0-d.
        settings: the others.
        grad_scale: 0-d.
        skip: float 0-d, 1 to change nothing.
    """
    if not params:
        return
    betas, eps, weight_decay, decoupled = settings
    dtype = params[0].dtype
    applies, lr = skip == 0, lr.to(dtype)
    torch._foreach_add_(list(steps), [applies.to(steps[0].dtype)] * len(steps))
    # if the first step is skipped the count is 0, and the results below are discarded
    first, second = bias_corrections(torch.stack(list(steps)).to(dtype).clamp_min(1.0), betas)
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
