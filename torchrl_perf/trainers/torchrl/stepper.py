"""The optimisation step of TorchRL's trainers, without a host read."""

from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import OptimizationStepper

from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.runtime import Captured, capture
from torchrl_perf.trainers.optim.optimization import GuardedAdam


class GuardedStepper(OptimizationStepper):
    """One optimiser step of a TorchRL ``Trainer``: losses, gradients, clipping and Adam, all on the device.

    The counterpart of ``torchrl.trainers.DefaultOptimizationStepper``, which reads the gradient norm at each step. Here
    the norm stays a tensor, the gradient is clipped to ``optimizer.max_grad_norm``, and a step whose loss or gradient
    is not finite leaves parameters and moments as they are and is counted in :attr:`skipped`.

    Install it on a constructed trainer, whose own ``optimizer`` is None::

        trainer.optimization_stepper = stepper
        stepper.register(trainer)

    Reads the keys that ``trainer.loss_module`` reads; the loss may write its priority into the batch.

    Args:
        optimizer: holds the parameters, the learning rate and the largest gradient norm (``math.inf`` for none).
        metrics: receives the losses' 0-d entries and the gradient norm as ``"train/<name>"``, means over an interval.
            Then :meth:`step` returns no metrics, and the trainer spends no kernels on averaging them.
        mode: ``"eager"``, in which a loss of this package may record itself, or ``"graph"``: losses, backward pass and
            optimiser are one CUDA graph, for minibatches of one size (CUDA only). The target networks and the replay
            buffer are updated outside of it.

    Attributes:
        skipped: number of steps that were not taken, int64 0-d.

    Raises:
        ValueError: for an unknown mode, and for ``"graph"`` without CUDA.
    """

    def __init__(
        self,
        optimizer: GuardedAdam,
        *,
        metrics: DeviceMetrics | None = None,
        mode: Literal["eager", "graph"] = "eager",
    ) -> None:
        self.optimizer = optimizer
        self.metrics = metrics
        self.device = optimizer.params[0].device
        if mode not in ("eager", "graph"):
            raise ValueError(f"mode: expected 'eager' or 'graph', received {mode!r}. Remedy: one of the two.")
        if mode == "graph" and self.device.type != "cuda":
            raise ValueError(
                f"mode='graph': expected parameters on CUDA, received them on {self.device}. Remedy: mode='eager'."
            )
        self.mode = mode
        self.skipped = torch.zeros((), dtype=torch.int64, device=self.device)
        self._captured: Captured | None = None

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        """One step on ``sub_batch [B]``.

        Args:
            trainer: its ``loss_module`` is called.
            sub_batch: rows as the loss reads them; the loss's priority is written into it.

        Returns:
            0-d detached tensors: the loss's entries (the mean of those that are no scalars) and ``"grad_norm"``; empty
            where ``metrics`` was given.

        Raises:
            ValueError: if the loss returns no entry whose name starts with "loss".
        """
        if self.mode == "eager":
            return TensorDict(self._update(trainer, sub_batch))
        # The trainer averages what it gets over many steps, and a replay overwrites the results of the last one.
        return TensorDict(self._replay(trainer, sub_batch)).clone()

    def _update(self, trainer: Trainer, sub_batch: TensorDictBase) -> dict[str, Tensor]:
        """Losses, gradients and optimiser step; returns the metrics, unless they have an accumulator."""
        self.optimizer.zero_grad()
        losses = cast("TensorDictBase", trainer.compute_loss(sub_batch))
        parts = [value for name, value in losses.items() if name.startswith("loss")]
        if not parts:
            raise ValueError(
                f"loss_module: expected entries whose names start with 'loss', received {sorted(losses.keys())}. "
                "Remedy: a torchrl LossModule, or a function that returns such a TensorDict."
            )
        total = torch.stack(parts).sum()
        total.backward()
        norm = self.optimizer.grad_norm()
        skip = ~(total.detach().isfinite() & norm.isfinite())
        self.optimizer.step((norm / self.optimizer.max_grad_norm).clamp_min(1.0), skip.to(torch.float32))
        self.skipped += skip
        values = {**dict(_scalars(losses)), "grad_norm": norm}
        if self.metrics is None:
            return values
        self.metrics.add_all({f"train/{name}": value for name, value in values.items()})
        self.metrics.add("train/steps_skipped", self.skipped, reduce="last")
        return {}

    def _replay(self, trainer: Trainer, sub_batch: TensorDictBase) -> dict[str, Tensor]:
        """:meth:`_update` as a graph; the priority that the loss writes into its copy of the batch is set in it."""
        key = _priority_key(trainer)
        if self._captured is None:

            def update(rows: TensorDictBase) -> dict[str, Tensor]:
                values = self._update(trainer, rows)
                priority = rows.get(key, None)
                return values if priority is None else {**values, "": priority}

            self._captured = capture(update, device=self.device, parameters=self.optimizer.params)
        # without a priority of its own, which the loss would overwrite in place
        values = dict(self._captured(sub_batch.exclude(key)))
        priority = values.pop("", None)
        if priority is not None:
            sub_batch.set(key, priority)
        return values

    def release(self) -> None:
        """Drop the graph; the next step records one again."""
        captured, self._captured = self._captured, None
        if captured is not None:
            captured.release()

    def state_dict(self) -> dict[str, Any]:
        """Copies of the optimiser's state, its learning rate, and the number of skipped steps."""
        return tree_map_only(Tensor, Tensor.clone, {"optimizer": self.optimizer.state_dict(), "skipped": self.skipped})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, in place: a captured graph stays valid."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.skipped.copy_(state_dict["skipped"])


def _scalars(losses: TensorDictBase) -> Iterator[tuple[str, Tensor]]:
    """Detached 0-d entries of a loss's result; entries with more elements as their mean, nested ones left out."""
    for name, value in losses.items():
        if isinstance(value, Tensor):
            values = value.detach()
            yield name, values.reshape(()) if values.numel() == 1 else values.to(torch.float32).mean()


def _priority_key(trainer: Trainer) -> NestedKey:
    keys = getattr(trainer.loss_module, "tensor_keys", None)
    return getattr(keys, "priority", "td_error")
