"""One step of Adam for a group of parameters of any floating dtype, decided on the device."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from torchrl_perf.functional.adam import (
    AdamSettings,
    adam_step_,
    adam_steps_,
    bias_corrections,
    exact_copy_,
    fused_adam_steps_,
    widest_dtype,
)
from torchrl_perf.functional.polyak import polyak_update_
from torchrl_perf.runtime.precision import OptimizerKind

__all__ = ["AdamStep", "follow_"]


class AdamStep:
    """What Adam keeps of a group of parameters, and its step; every tensor is made here and then written in place.

    A 16-bit parameter has a float32 value, and is the rounding of it.

    Args:
        params: of a group, on one device.
        lr: step size, 0-d.
        settings: the others.

    Attributes:
        exact: float32 or float64 values, which are the parameters themselves where those are as wide.
        exp_avgs: means of the gradients, as ``exact``.
        exp_avg_sqs: means of their squares, as ``exact``.
    """

    def __init__(self, params: Sequence[nn.Parameter], lr: Tensor, settings: AdamSettings) -> None:
        self.params, self.lr, self.settings = list(params), lr, settings
        pairs = [(param, widest_dtype(param.dtype)) for param in self.params]
        self.narrow = [number for number, (param, dtype) in enumerate(pairs) if param.dtype != dtype]
        self.exact = [param.detach().to(dtype) if param.dtype != dtype else param for param, dtype in pairs]
        self.exp_avgs, self.exp_avg_sqs = (
            [torch.zeros_like(param, dtype=dtype, requires_grad=False) for param, dtype in pairs] for _ in range(2)
        )

    def states(self) -> Iterator[dict[str, Tensor]]:
        """What is kept of each parameter, by PyTorch's names, and ``exact`` of a 16-bit one."""
        for number in range(len(self.params)):
            exact = {"exact": self.exact[number]} if number in self.narrow else {}
            yield {"exp_avg": self.exp_avgs[number], "exp_avg_sq": self.exp_avg_sqs[number], **exact}

    def __call__(
        self, grads: Sequence[Tensor | None], steps: Tensor, grad_scale: Tensor, skip: Tensor, kind: OptimizerKind
    ) -> None:
        """The step of the parameters that have a gradient.

        Args:
            grads: one for each parameter, or None.
            steps: number of steps of each, this one counted unless it is skipped, float32 ``[P]``.
            grad_scale: 0-d, what the gradients are divided by.
            skip: float 0-d, 1 to change nothing.
            kind: of what runs for float32 values; those of float64 go one by one, and all do while the caller is
                compiled.
        """
        given = [number for number, grad in enumerate(grads) if grad is not None]
        narrow = [number for number in self.narrow if number in given]
        for number in narrow:
            exact_copy_(self.exact[number], self.params[number])
        together = [] if kind == "for-loop" or torch.compiler.is_compiling() else given
        together = [number for number in together if self.exact[number].dtype == torch.float32]
        if together:
            run = self._fused if kind == "fused" else self._listed
            run(together, grads, steps, grad_scale, skip)
        self._one_by_one([n for n in given if n not in together], grads, steps, grad_scale, skip)
        if narrow:
            torch._foreach_copy_([self.params[n] for n in narrow], [self.exact[n] for n in narrow])

    def _fused(
        self, numbers: list[int], grads: Sequence[Tensor | None], steps: Tensor, grad_scale: Tensor, skip: Tensor
    ) -> None:
        """Kernels that read ``lr`` and ``grad_scale`` as float32."""
        fused_adam_steps_(
            *self._columns(numbers, grads),
            steps if len(numbers) == len(self.params) else torch.stack([steps[n] for n in numbers]),
            lr=self.lr.to(torch.float32),
            settings=self.settings,
            grad_scale=grad_scale.to(torch.float32),
            skip=skip,
        )

    def _listed(
        self, numbers: list[int], grads: Sequence[Tensor | None], steps: Tensor, grad_scale: Tensor, skip: Tensor
    ) -> None:
        """PyTorch's operations on lists of tensors."""
        counts = steps if len(numbers) == len(self.params) else torch.stack([steps[n] for n in numbers])
        adam_steps_(
            *self._columns(numbers, grads),
            # of a first step that is skipped the count is 0, and nothing of what follows is kept
            bias_corrections(counts.clamp_min(1.0), self.settings.betas),
            lr=self.lr,
            settings=self.settings,
            grad_scale=grad_scale,
            skip=skip,
        )

    def _one_by_one(
        self, numbers: list[int], grads: Sequence[Tensor | None], steps: Tensor, grad_scale: Tensor, skip: Tensor
    ) -> None:
        """Elementwise operations, which a compiler merges into one kernel a parameter."""
        corrections = {
            dtype: bias_corrections(steps.to(dtype), self.settings.betas)
            for dtype in dict.fromkeys(self.exact[n].dtype for n in numbers)
        }
        for number, *row in zip(numbers, *self._columns(numbers, grads), strict=True):
            first, second = corrections[row[0].dtype]
            adam_step_(
                *row,
                (first[number], second[number]),
                lr=self.lr,
                settings=self.settings,
                grad_scale=grad_scale,
                skip=skip,
            )

    def _columns(self, numbers: list[int], grads: Sequence[Tensor | None]) -> tuple[list[Tensor], ...]:
        """Values, gradients and both means of the parameters of these numbers."""
        exact = [self.exact[n] for n in numbers]
        given = [cast("Tensor", grads[n]).to(self.exact[n].dtype) for n in numbers]
        return exact, given, [self.exp_avgs[n] for n in numbers], [self.exp_avg_sqs[n] for n in numbers]


def follow_(targets: Sequence[Tensor], sources: Sequence[Tensor], tau: float | Tensor) -> None:
    """Moves targets by ``tau`` towards values, in place; each step is computed in the wider of the two dtypes."""
    if not torch.compiler.is_compiling():
        polyak_update_(targets, sources, tau)
        return
    # one by one: a compiler merges this with the step, but not the operation on lists
    for target, source in zip(targets, sources, strict=True):
        if target.dtype == source.dtype:
            target.lerp_(source, tau)  # pyright: ignore[reportCallIssue, reportArgumentType]
        else:
            target.copy_(torch.lerp(target.to(source.dtype), source, tau))  # pyright: ignore
