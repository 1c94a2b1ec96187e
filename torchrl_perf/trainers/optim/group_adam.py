"""Adam that is fed with gradients and guards, clips and follows up with target networks in one function of tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_perf.functional.adam import bias_corrections, exact_copy_, widest_dtype
from torchrl_perf.functional.polyak import polyak_update_
from torchrl_perf.runtime.compile import compiled
from torchrl_perf.runtime.loss_scale import LossScale
from torchrl_perf.trainers.optim.optimization import is_fault
from torchrl_perf.trainers.optim.settings import check_params, check_setting, checked_betas, learning_rate_tensor

_NARROW = (torch.bfloat16, torch.float16)


class GroupAdam:
    """Adam (arXiv:1412.6980) over groups of parameters with a step size each.

    Gradients are given as a list, as ``torch.autograd.grad`` returns them. A step whose gradients are not finite leaves
    parameters and moments untouched, decided on the device. Eagerly the step is PyTorch's fused kernel; with
    ``compile``, and where the caller is compiled, norm, guard, moments, parameters and target networks are one function
    of few kernels.

    Parameters may be float32, float64, bfloat16 and float16, mixed as well: moments and arithmetic are float32, or
    float64 for float64, and a 16-bit parameter is the rounding of a float32 one, as in :class:`GuardedAdam`.

    Args:
        groups: pairs of parameters and their initial step size, all on one device.
        max_grad_norm: norm of all gradients together above which they are scaled down to it; None never.
        eps: Adam's epsilon.
        betas: decay of the means of gradients and of their squares.
        weight_decay: added to the gradients, times the parameters.
        targets: target parameters, one for each parameter, moved by ``tau`` after each step; none by default.
        compile: whether to compile the step.
        fused: eagerly, whether the step is PyTorch's fused kernel; if not, elementwise operations a parameter.
        loss_scale: factor that the gradients carry, for float16: differentiate with :meth:`cotangent`.

    Attributes:
        params: all parameters, in the order in which :meth:`step` takes their gradients.
        learning_rates: 0-d tensors, one for each group, to be overwritten in place.
        grad_checks: one number for each parameter, float32 ``[P]``; the first that is not finite is that of the first
            parameter whose gradient was not at the latest step.

    Raises:
        ValueError: for settings out of range, no parameters, or such on several devices or of another dtype.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[nn.Parameter], float]],
        *,
        max_grad_norm: float | None = None,
        eps: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        targets: Sequence[Tensor] = (),
        compile: bool = False,
        fused: bool = True,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.groups = [list(params) for params, _ in groups]
        self.params = [param for group in self.groups for param in group]
        if not self.params:
            raise ValueError("groups: expected at least one parameter, received none. Remedy: those of a network.")
        check_params(self.params)
        device = self.params[0].device
        self.learning_rates = [learning_rate_tensor(rate, params) for params, rate in groups]
        self.max_grad_norm = None if max_grad_norm is None else check_setting("max_grad_norm", max_grad_norm)
        self.eps, self.weight_decay = check_setting("eps", eps), check_setting("weight_decay", weight_decay)
        self.betas = checked_betas(betas)
        self.targets = list(targets)
        self.exp_avg, self.exp_avg_sq = (
            [torch.zeros_like(param, dtype=widest_dtype(param.dtype), requires_grad=False) for param in self.params]
            for _ in range(2)
        )
        # what the step is computed of: the parameters themselves, or the float32 ones that they are the rounding of
        self._exact: list[Tensor] = [
            param.detach().to(torch.float32) if param.dtype in _NARROW else param for param in self.params
        ]
        self._narrow = [number for number, param in enumerate(self.params) if param.dtype in _NARROW]
        # the widest of them, in which norms are taken; None where it is that of all gradients
        wide = max((exact.dtype for exact in self._exact), key=lambda dtype: dtype.itemsize)
        self._norm_dtype = None if all(param.dtype == wide for param in self.params) else wide
        self.steps = torch.zeros((), dtype=torch.float32, device=device)
        self.grad_checks = torch.zeros(len(self.params), device=device)
        self._numbers = torch.arange(len(self.params), device=device)
        self._ends = torch.tensor([param.numel() for param in self.params], device=device).cumsum(0)
        self.loss_scale = loss_scale
        # the kernel reads step sizes and divisors as float32
        eager = self._kernel if fused and wide == torch.float32 else self._formula
        self._step: Callable[..., tuple[Tensor, Tensor]] = compiled(self._formula) if compile else eager

    def cotangent(self, loss: Tensor) -> Tensor:
        """What to begin the backward pass of ``loss`` with: 1, or the loss scale; 0-d."""
        one = torch.ones_like(loss)
        return one if self.loss_scale is None else one * self.loss_scale.scale

    def step(self, grads: Sequence[Tensor], loss: Tensor, tau: float | Tensor = 0.0) -> tuple[Tensor, Tensor]:
        """One step, or none where a gradient or the loss is not finite; targets follow in any case.

        Args:
            grads: one for each of ``params``, of the loss times the loss scale where there is one.
            loss: 0-d, what they are the gradients of.
            tau: how far the targets go towards the parameters, a number or 0-d.

        Returns:
            Whether the step was taken, bool 0-d, and the norm of the gradients before clipping, 0-d.
        """
        step = self._formula if torch.compiler.is_compiling() else self._step
        with torch.no_grad():
            for number in self._narrow:
                exact_copy_(self._exact[number], self.params[number])
            return step(list(grads), loss.detach(), tau)

    def is_fault(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether loss or gradients of the latest step were bad themselves, not just too large for the loss scale."""
        return is_fault(loss, norm, self.loss_scale)

    def _guard(self, norm: Tensor, loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether to step, what the gradients are divided by, and their norm without the loss scale."""
        apply = norm.isfinite() & loss.isfinite()
        self.steps += apply
        scale = self.loss_scale
        if scale is not None:
            before = scale.scale.clone()
            norm = scale.check(norm)
            scale.update()
        divisor = torch.ones_like(norm) if self.max_grad_norm is None else (norm / self.max_grad_norm).clamp_min(1.0)
        return apply, divisor if scale is None else divisor * before, norm

    def _kernel(self, grads: list[Tensor], loss: Tensor, tau: float | Tensor) -> tuple[Tensor, Tensor]:
        """The step by PyTorch's fused kernel, which skips on a flag."""
        norms = torch.stack(torch._foreach_norm(grads, 2, self._norm_dtype))
        self.grad_checks.copy_(norms)
        norm = torch.linalg.vector_norm(norms)
        apply, divisor, norm = self._guard(norm, loss)
        start, skip = 0, (~apply).float()
        for number in self._narrow:
            grads[number] = grads[number].to(torch.float32)
        for group, rate in zip(self.groups, self.learning_rates, strict=True):
            part = slice(start, start := start + len(group))
            torch._fused_adam_(
                self._exact[part],
                grads[part],
                self.exp_avg[part],
                self.exp_avg_sq[part],
                [],
                [self.steps] * len(group),
                lr=rate,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self.weight_decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=skip,
            )
        for number in self._narrow:
            self.params[number].copy_(self._exact[number])
        if self.targets and not self._narrow:
            polyak_update_(self.targets, self.params, tau)
        elif self.targets:
            for target, exact in zip(self.targets, self._exact, strict=True):
                _follow(target, exact, tau)
        return apply, norm

    def _formula(self, grads: list[Tensor], loss: Tensor, tau: float | Tensor) -> tuple[Tensor, Tensor]:
        """The same in elementwise operations, which a compiler merges into few kernels."""
        # one sum over all: a sum for each gradient is two kernels where it is large
        flat = torch.cat([grad.reshape(-1).to(self._norm_dtype or grad.dtype) for grad in grads])
        norm = flat.square().sum().sqrt()
        # the place of the first bad entry comes from the same pass; those of its parameter's end lie behind it
        place = torch.where(flat.isfinite(), flat.shape[0], torch.arange(flat.shape[0], device=flat.device)).amin()
        number = (self._ends <= place).sum()
        self.grad_checks.copy_(torch.where(self._numbers == number, torch.inf, 0.0))
        apply, divisor, norm = self._guard(norm, loss)
        corrections = {
            dtype: bias_corrections(self.steps.to(dtype), self.betas)
            for dtype in dict.fromkeys(exact.dtype for exact in self._exact)
        }
        beta1, beta2 = self.betas
        rates = [rate for group, rate in zip(self.groups, self.learning_rates, strict=True) for _ in group]
        for number, (exact, grad, rate) in enumerate(zip(self._exact, grads, rates, strict=True)):
            mean, square = self.exp_avg[number], self.exp_avg_sq[number]
            correction1, correction2 = corrections[exact.dtype]
            scaled = grad.to(exact.dtype) / divisor
            if self.weight_decay:
                scaled = scaled + self.weight_decay * exact
            new_mean = mean + (1 - beta1) * (scaled - mean)
            new_square = beta2 * square + (1 - beta2) * scaled * scaled
            change = rate * (new_mean / correction1) / (new_square.sqrt() / correction2 + self.eps)
            new_param = torch.where(apply, exact - change, exact)
            mean.copy_(torch.where(apply, new_mean, mean))
            square.copy_(torch.where(apply, new_square, square))
            if self.targets:
                _follow(self.targets[number], new_param, tau)
            exact.copy_(new_param)
            if number in self._narrow:
                self.params[number].copy_(new_param)
        return apply, norm

    def state_dict(self) -> dict[str, Any]:
        """Moments, number of steps, step sizes and loss scale; parameters and targets are their modules'."""
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state_dict()}
        return {
            "steps": self.steps,
            "exp_avg": list(self.exp_avg),
            "exp_avg_sq": list(self.exp_avg_sq),
            "learning_rates": list(self.learning_rates),
            **({"exact": [self._exact[number] for number in self._narrow]} if self._narrow else {}),
            **scale,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict` in place: a captured graph stays valid.

        Raises:
            ValueError: for the state of other parameters; nothing is changed then.
        """
        own = self.state_dict()
        for name in ("exp_avg", "exp_avg_sq", "learning_rates"):
            expected, received = ([list(value.shape) for value in state[name]] for state in (own, state_dict))
            if expected != received:
                raise ValueError(
                    f"state_dict: expected {name} of shapes {expected}, received {received}. Remedy: the networks that "
                    "it was saved with."
                )
        if self.loss_scale is not None and "loss_scale" in state_dict:  # the state may be of another precision
            self.loss_scale.load_state_dict(state_dict["loss_scale"])
        self.steps.copy_(state_dict["steps"])
        for name in ("exp_avg", "exp_avg_sq", "learning_rates"):
            for value, saved in zip(own[name], state_dict[name], strict=True):
                value.copy_(saved)
        for value, saved in zip(own.get("exact", ()), state_dict.get("exact", ()), strict=False):
            value.copy_(saved)


def _follow(target: Tensor, source: Tensor, tau: float | Tensor) -> None:
    """Moves a target by ``tau`` towards a parameter, in place, in the parameter's dtype."""
    if target.dtype == source.dtype:
        target.lerp_(source, tau)  # pyright: ignore[reportCallIssue, reportArgumentType]
    else:
        target.copy_(torch.lerp(target.to(source.dtype), source, tau))  # pyright: ignore
