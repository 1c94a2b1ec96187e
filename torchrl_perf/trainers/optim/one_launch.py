"""A step of :class:`GuardedAdam` in one kernel: clipping, guard and targets, where squares of gradients are known."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrl_perf.functional.members import Gradients
from torchrl_perf.trainers.optim.optimization import GuardedAdam
from torchrl_perf.trainers.optim.settings import AdamGroup

__all__ = ["OneLaunchStep", "takes_one_launch"]

MOST_PARAMETERS = 40
"""Parameters of an optimiser up to which a kernel is given the places of all."""


def takes_one_launch(optimizer: GuardedAdam) -> bool:
    """Whether the kernel serves an optimiser: float32 parameters, no loss scale, and groups that differ in little."""
    alike = {(*group["betas"], group["eps"], group["decoupled_weight_decay"]) for group in optimizer.param_groups}
    return (
        optimizer.loss_scale is None
        and len(optimizer.params) <= MOST_PARAMETERS
        and len(alike) == 1
        and all(param.dtype == torch.float32 and param.is_contiguous() for param in optimizer.params)
    )


class OneLaunchStep:
    """The steps of an optimiser, see :meth:`GuardedAdam.apply_gradients`.

    Args:
        optimizer: one that :func:`takes_one_launch`; what it keeps is written in place.
        params: those of :class:`~torchrl_perf.functional.members.Members`, in their order.
        others: the optimiser's further parameters, of one number each.
        targets: what follows, by the parameter that it follows.
    """

    def __init__(
        self,
        optimizer: GuardedAdam,
        params: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter] = (),
        targets: dict[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self.optimizer, self._params = optimizer, [*params, *others]
        self._targets = [] if targets is None else [targets[param] for param in self._params]
        ids = [id(param) for param in optimizer.params]
        self._numbers = [ids.index(id(param)) for param in self._params]
        of_group = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        self._groups = [of_group[number] for number in self._numbers]

    @torch.no_grad()
    def __call__(
        self, gradients: Gradients, others: Sequence[Tensor], loss: Tensor, tau: float | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One step, or none where a gradient or the loss is not finite; targets follow in any case.

        Args:
            gradients: of the parameters.
            others: of the further ones, 0-d each.
            loss: 0-d float32.
            tau: how far targets go; None for not at all.

        Returns:
            Whether the step was taken, bool 0-d, and the norm of the gradients before clipping, 0-d.
        """
        from torchrl_perf.kernels.guarded_adam import Columns, Layout, launch_step

        optimizer = self.optimizer
        optimizer.take_over_settings()
        states: list[Any] = [optimizer.state[param] for param in self._params]
        columns = Columns(
            tuple(self._params),
            tuple(state["exp_avg"] for state in states),
            tuple(state["exp_avg_sq"] for state in states),
            () if tau is None else tuple(self._targets),
            optimizer.step_counts,
            optimizer.grad_norms,
        )
        settings = [cast("AdamGroup", group).settings for group in optimizer.param_groups]
        layout = Layout(gradients.places, self._groups, self._numbers, settings, optimizer.max_grad_norm)
        grads, rates = (*gradients.values, *others), tuple(optimizer.learning_rates)
        norm, taken = launch_step(columns, grads, gradients.squares, loss, rates, 0.0 if tau is None else tau, layout)
        optimizer.step_counts.add_(taken)
        return taken, norm
