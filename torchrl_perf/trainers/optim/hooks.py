"""The hooks around a step whose gradients are given, and not at the parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchrl_perf.runtime.upstream.optimizers import has_step_hooks, step_hooks
from torchrl_perf.runtime.upstream.tensors import call_gradient_hooks, has_gradient_hooks

__all__ = ["is_hooked", "within_hooks"]


def is_hooked(optimizer: Any) -> bool:
    """Whether something is called around a step, or with the gradients of one of the parameters."""
    return has_step_hooks(optimizer) or any(map(has_gradient_hooks, optimizer.params))


@contextmanager
def within_hooks(optimizer: Any, grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Calls the hooks before a step, gives the gradients that they leave, and calls those behind it at the end.

    While they are called the gradients are at the parameters, where hooks look for them; afterwards none is. Hooks that
    wait until a gradient is there (``register_post_accumulate_grad_hook``) are called first.

    Args:
        optimizer: with ``params``.
        grads: one for each of them.

    Raises:
        RuntimeError: for a hook that returns other arguments, of which this step has none.
    """
    before, behind = step_hooks(optimizer)
    try:
        for param, grad in zip(optimizer.params, grads, strict=True):
            param.grad = grad
        for param in optimizer.params:
            call_gradient_hooks(param)
        for hook in before:
            if hook(optimizer, (), {}) is not None:
                raise RuntimeError(
                    "step hook: expected None, since this step has no arguments, received others for it. Remedy: "
                    "change param.grad in place."
                )
        left = [torch.zeros_like(param) if param.grad is None else param.grad for param in optimizer.params]
        yield left
        for hook in behind:
            hook(optimizer, (), {})
    finally:
        for param in optimizer.params:
            param.grad = None
