"""Loss, gradients and optimiser step of a minibatch as one compiled function, for a CPU."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_perf.functional.pullback import Differentiable
from torchrl_perf.runtime.compile_switch import CompileSwitch
from torchrl_perf.runtime.oom import MicroBatches, WholeUpdates, first_line
from torchrl_perf.runtime.upstream.optimizers import has_step_hooks
from torchrl_perf.runtime.upstream.tensors import has_gradient_hooks
from torchrl_perf.trainers.optim.optimization import GuardedAdam

__all__ = ["WholeStep"]

logger = logging.getLogger("torchrl_perf")

Losses = Callable[[TensorDictBase, Tensor], tuple[Tensor, Tensor]]
"""Total loss 0-d of the rows at an index, and its statistics ``[S]``."""
Judge = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Counts an update, of loss, norm, statistics and whether the step was taken; whether loss or gradient are bad."""
Noted = tuple[Tensor, Tensor, Tensor]


class WholeStep:
    """An update of rows of a batch in one call of the compiler's, where the parts of it would be many.

    On a CPU an update of a small network is mostly what surrounds its arithmetic: autograd's bookkeeping, guards of
    each compiled function, calls of the optimiser. In one function there are one check and few kernels. On CUDA all of
    this is in a graph, and the parts have faster kernels.

    What the compiler refuses, such as a network with operators that ``torch.func`` cannot differentiate, is made in
    parts, and the log says so once. So is an update of parameters of which some are frozen or have hooks on their
    gradients: ``torch.func`` would differentiate the frozen ones, and calls no hook. So is one of an optimiser with
    hooks around its step, and one with a weight decay and parameters that the loss does not depend on: their gradients
    would be zeros, to which the decay is added.

    Args:
        module: whose parameters are learnt.
        losses: the loss.
        before: of the statistics ``[S]`` and the learning rate: what changes before the step; whether none is wanted,
            bool 0-d.
        judge: see :data:`Judge`.
        written: tensors that ``before`` and ``judge`` write.
        optimizer: of the module's parameters.
        kernels: when functions are compiled.
        micro: an update that did not fit into memory is made in parts as well.
        counted: first entries of the statistics, which the guard notes.
    """

    def __init__(
        self,
        module: nn.Module,
        losses: Losses,
        before: Callable[[Tensor, Tensor], Tensor],
        judge: Judge,
        *,
        written: Sequence[Tensor],
        optimizer: GuardedAdam,
        kernels: CompileSwitch,
        micro: MicroBatches,
        counted: int,
    ) -> None:
        self._losses, self._before, self._judge, self._counted = losses, before, judge, counted
        self._written = list(written)
        self.optimizer, self._kernels, self._micro = optimizer, kernels, micro
        self._loss = Differentiable(module, self._of_rows, optimizer.params)
        self._tries = WholeUpdates(micro, trials=1)
        self._step_fn = kernels.function(self._step)
        self._refused = False
        self._unused: bool | None = None

    def __call__(self, rows: TensorDictBase, index: Tensor) -> Noted | None:
        """What the guard is to note of the update; None where nothing was done, and parts are to be made.

        Args:
            rows: of the batch, ``[R]``.
            index: those of the minibatch, ``[B]``.
        """
        if self._refused or not self._kernels.on or self._micro.parts > 1:
            return None
        if not all(param.requires_grad and not has_gradient_hooks(param) for param in self.optimizer.params):
            return None
        if has_step_hooks(self.optimizer) or self._decays_unused(rows, index):
            return None
        try:
            noted = self._tries(
                lambda: self._step_fn(rows, index, self.optimizer.learning_rate), len(index), self._state
            )
        except torch._dynamo.exc.TorchDynamoException as error:  # before anything has been computed
            logger.warning("updates are made in parts, since the compiler refuses them whole: %s", first_line(error))
            noted = None
        self._refused = noted is None and self._micro.parts == 1
        return noted

    def _decays_unused(self, rows: TensorDictBase, index: Tensor) -> bool:
        """Whether a parameter that the loss does not depend on would decay; found out once, by an eager pass."""
        if self._unused is None and any(group["weight_decay"] for group in self.optimizer.param_groups):
            with torch.random.fork_rng([]), torch.compiler.set_stance("force_eager"):
                (total,), _, pull = self._loss.pullback((rows, index))
                pull([torch.ones_like(total)])
            self._unused = len(self._loss.depended_on) < len(self.optimizer.params)
        return bool(self._unused)

    def _state(self) -> list[Tensor]:
        """What an update writes."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        scale = self.optimizer.loss_scale
        scales = [] if scale is None else [scale.scale, scale.steps, scale.overflow, scale.finite]
        written = [*self._written, self.optimizer.grad_norms, self.optimizer.learning_rate]
        return [*self.optimizer.params, *moments, *scales, *written]

    def _of_rows(self, context: tuple[TensorDictBase, Tensor]) -> tuple[tuple[Tensor, ...], Any]:
        total, statistics = self._losses(*context)
        return (total,), statistics

    def _step(self, rows: TensorDictBase, index: Tensor, learning_rate: Tensor) -> Noted | None:
        if not torch.compiler.is_compiling():
            return None  # what the switch falls back to where the compiler refuses it
        (total,), statistics, pull = self._loss.pullback((rows, index))
        total, statistics = total.detach(), statistics.detach()
        grads, _ = pull([self.optimizer.cotangent(total)])
        unless = self._before(statistics, learning_rate)
        taken, norm = self.optimizer.apply_gradients(grads, total, unless=unless)
        fault = self._judge(total, norm, statistics, taken)
        return statistics[: self._counted].clone(), self.optimizer.grad_norms.clone(), fault
