"""Optimiser steps that clip, schedule and skip on the device."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class GuardedAdam:
    """Adam with gradient clipping, whose step can be skipped by a flag on the device.

    PyTorch's fused Adam already divides the gradient by a tensor and skips on a flag, for mixed precision: here the
    divisor clips the norm, and the flag is raised where the gradient is not finite. So a bad step leaves parameters and
    moments untouched without a host read.

    Args:
        params: parameters, all on one device.
        learning_rate: the initial step size; ``self.learning_rate`` is a 0-d tensor to be overwritten in place.
        max_grad_norm: norm above which the gradient is scaled down to it.
        eps: Adam's epsilon.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], *, learning_rate: float, max_grad_norm: float, eps: float = 1e-5
    ) -> None:
        self.params = list(params)
        device = self.params[0].device
        self.learning_rate = torch.tensor(learning_rate, device=device)
        self.max_grad_norm = max_grad_norm
        self.adam = torch.optim.Adam(
            self.params, lr=self.learning_rate, eps=eps, fused=True, capturable=device.type == "cuda"
        )

    def zero_grad(self) -> None:
        """Drops the gradients."""
        self.adam.zero_grad(set_to_none=True)

    def grad_norm(self) -> Tensor:
        """Norm of all gradients together, 0-d."""
        return torch.nn.utils.get_total_norm([p.grad for p in self.params if p.grad is not None])

    def step(self, grad_scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        """One step with the gradient clipped to ``max_grad_norm``, or none where it is not finite.

        Args:
            grad_scale: 0-d, what the gradients are divided by instead of what clips them.
            skip: 0-d float, 1 to take no step: given together with ``grad_scale``, by a caller who decides both.
        """
        if grad_scale is None or skip is None:
            norm = self.grad_norm()
            grad_scale, skip = (norm / self.max_grad_norm).clamp_min(1.0), (~norm.isfinite()).float()
        # the attributes through which torch.amp.GradScaler speaks to a fused optimiser
        self.adam.grad_scale = grad_scale  # pyright: ignore[reportAttributeAccessIssue]
        self.adam.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
        self.adam.step()

    def state_dict(self) -> dict:
        """The optimiser's state and the learning rate."""
        return self.adam.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """Restores :meth:`state_dict`, in place where a step has been taken: a captured graph stays valid."""
        if not self.adam.state:
            self.adam.load_state_dict(state_dict)
        for group, loaded in zip(self.adam.param_groups, state_dict["param_groups"], strict=True):
            self.learning_rate.copy_(loaded["lr"])
            group["lr"] = self.learning_rate
        saved = state_dict["state"]
        for number, param in enumerate(self.params):
            for name, value in self.adam.state[param].items():
                # no entry: the state was saved before the first step
                value.copy_(saved[number][name]) if number in saved else value.zero_()
