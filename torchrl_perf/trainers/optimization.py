"""Optimiser steps that clip, schedule and skip on the device."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_perf.runtime.loss_scale import LossScale
from torchrl_perf.runtime.precision import Acceleration


def is_fault(loss: Tensor, grad_norm: Tensor, loss_scale: LossScale | None = None) -> Tensor:
    """Whether a loss or its gradients are bad themselves, and not just too large for the loss scale.

    Args:
        loss: 0-d.
        grad_norm: norm of its gradients, 0-d, that ``loss_scale`` has checked.
        loss_scale: what the gradients were scaled with.

    Returns:
        bool 0-d.
    """
    bad = ~grad_norm.isfinite()
    return ~loss.isfinite() | (bad if loss_scale is None else bad & ~loss_scale.overflow)


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
        acceleration: gives the kind of the optimiser, and the loss scale for ``"fp16"``. The kinds that are not fused
            divide and skip in passes of their own, which copy parameters and moments.

    Attributes:
        loss_scale: factor on the loss, None where it needs none: differentiate ``scaled(loss)``.
        grad_norms: norm of each parameter's gradient at the latest :meth:`grad_norm`, float ``[P]``, with the scale.

    Raises:
        ValueError: for kind ``"foreach"`` on a CPU, where PyTorch has none with a learning rate in a tensor.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        learning_rate: float,
        max_grad_norm: float,
        eps: float = 1e-5,
        acceleration: Acceleration | None = None,
    ) -> None:
        acceleration = acceleration or Acceleration()
        self.params = list(params)
        device = self.params[0].device
        if acceleration.optimizer == "foreach" and device.type != "cuda":
            raise ValueError(
                f"optimizer='foreach': expected parameters on CUDA, received {device}. Remedy: 'fused' or 'for-loop'."
            )
        self.learning_rate = torch.tensor(learning_rate, device=device)
        self.max_grad_norm = max_grad_norm
        self.grad_norms = torch.zeros(len(self.params), device=device)
        self.adam: Any = acceleration.make_optimizer(self.params, torch.optim.Adam, lr=self.learning_rate, eps=eps)
        self.loss_scale: LossScale | None = acceleration.make_loss_scale(device)
        self._step = self._fused_step if acceleration.optimizer == "fused" else self._unfused_step

    def zero_grad(self) -> None:
        """Drops the gradients."""
        self.adam.zero_grad(set_to_none=True)

    def scaled(self, loss: Tensor) -> Tensor:
        """What to differentiate: the loss, times the loss scale where there is one."""
        return loss if self.loss_scale is None else self.loss_scale.scaled(loss)

    def grad_norm(self) -> Tensor:
        """Norm of all gradients together, 0-d, the loss scale divided out."""
        norms = torch._foreach_norm([p.grad for p in self.params if p.grad is not None])
        self.grad_norms = torch.stack(self._of_all_params(norms))
        norm = torch.linalg.vector_norm(self.grad_norms)
        return norm if self.loss_scale is None else self.loss_scale.check(norm)

    def _of_all_params(self, norms: Sequence[Tensor]) -> list[Tensor]:
        """One norm for each parameter, 0 for those without a gradient."""
        if len(norms) == len(self.params):
            return list(norms)
        given, zero = iter(norms), torch.zeros((), device=self.params[0].device)
        return [zero if param.grad is None else next(given) for param in self.params]

    def is_fault(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Whether loss or gradients (both 0-d) are bad themselves, and not just too large for the loss scale; 0-d."""
        return is_fault(loss, grad_norm, self.loss_scale)

    def step(self, grad_scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        """One step with the gradient clipped to ``max_grad_norm``, or none where it is not finite.

        Args:
            grad_scale: 0-d, what the gradients are divided by instead of what clips them, the loss scale apart.
            skip: 0-d float, 1 to take no step: given together with ``grad_scale``, by a caller who decides both and has
                called :meth:`grad_norm`.
        """
        if grad_scale is None or skip is None:
            norm = self.grad_norm()
            grad_scale, skip = (norm / self.max_grad_norm).clamp_min(1.0), (~norm.isfinite()).float()
        if self.loss_scale is not None:
            grad_scale = grad_scale * self.loss_scale.scale
            skip = torch.maximum(skip, (~self.loss_scale.finite).float())
        self._step(grad_scale, skip)
        if self.loss_scale is not None:
            self.loss_scale.update()

    def _fused_step(self, grad_scale: Tensor, skip: Tensor) -> None:
        # the attributes through which torch.amp.GradScaler speaks to a fused optimiser
        self.adam.grad_scale, self.adam.found_inf = grad_scale, skip
        self.adam.step()

    def _unfused_step(self, grad_scale: Tensor, skip: Tensor) -> None:
        """The same by kinds that neither divide nor skip themselves: what a skipped step changed is put back."""
        torch._foreach_div_([param.grad for param in self.params if param.grad is not None], grad_scale)
        before = [value.detach().clone() for value in self._values()]
        self.adam.step()
        after = self._values()
        # moments that the first step made were zero
        before += [torch.zeros_like(value) for value in after[len(before) :]]
        skipped = skip.bool()
        with torch.no_grad():
            for value, old in zip(after, before, strict=True):
                value.copy_(torch.where(skipped.to(value.device), old, value))

    def _values(self) -> list[Tensor]:
        return [*self.params, *(value for param in self.params for value in self.adam.state[param].values())]

    def state_dict(self) -> dict:
        """The optimiser's state, the learning rate and the loss scale."""
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state_dict()}
        return self.adam.state_dict() | scale

    def load_state_dict(self, state_dict: dict) -> None:
        """Restores :meth:`state_dict`, in place where a step has been taken: a captured graph stays valid."""
        # none: the state is of another precision
        if self.loss_scale is not None and (scale := state_dict.get("loss_scale")) is not None:
            self.loss_scale.load_state_dict(scale)
        if not self.adam.state:
            self.adam.load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        for group, loaded in zip(self.adam.param_groups, state_dict["param_groups"], strict=True):
            self.learning_rate.copy_(loaded["lr"])
            group["lr"] = self.learning_rate
        saved = state_dict["state"]
        for number, param in enumerate(self.params):
            for name, value in self.adam.state[param].items():
                # no entry: the state was saved before the first step
                value.copy_(saved[number][name]) if number in saved else value.zero_()
