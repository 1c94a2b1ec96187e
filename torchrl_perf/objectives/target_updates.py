"""Target networks that follow: TorchRL's updaters, with all parameters in one call."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torchrl.objectives import HardUpdate, LossModule, SoftUpdate
from torchrl.objectives.utils import TargetNetUpdater

from torchrl_perf.functional.polyak import polyak_update_
from torchrl_perf.runtime import is_capturing
from torchrl_perf.runtime.self_capture import InPlaceReplays
from torchrl_perf.runtime.upstream.target_updaters import sources_and_targets

__all__ = ["DeviceHardUpdate", "DeviceSoftUpdate"]


class DeviceSoftUpdate(SoftUpdate):
    """``target <- target + (1 - eps) (source - target)`` for all targets of a loss, in one call (arXiv:1509.02971).

    The counterpart of TorchRL's ``SoftUpdate``, to the last bit: it takes any ``LossModule``, copies all sources at
    construction and in :meth:`init_`, and moves what is a parameter that learns; buffers and frozen parameters stay as
    they were copied. On CUDA the call becomes one launch of a graph after two calls. Two things differ: the targets of
    losses inside the loss follow as well, and a step between a loss and its ``backward()`` raises where that needs the
    targets as they were.

    A target of 16 bits does not move where a step is less than half of its last bit, which with a ``tau`` of .005 is
    nearly always so: keep targets in float32.

    Args:
        loss_module: the loss, with ``target_X_params`` beside ``X_params``.
        eps: what is kept of the target at a step, in [0, 1]; may be changed later.
        tau: ``1 - eps``, in its place.
        capture: on CUDA, :meth:`step` becomes a CUDA graph; False leaves it as it is.

    Raises:
        ValueError: for no ``LossModule``, both of ``eps`` and ``tau``, or a number outside of [0, 1].
        RuntimeError: for neither, for a loss without targets, and for targets that are the sources.
    """

    def __init__(
        self, loss_module: LossModule, *, eps: float | None = None, tau: float | None = None, capture: bool = True
    ) -> None:
        super().__init__(loss_module, eps=eps, tau=tau)
        self.capture, self._replays = capture, InPlaceReplays(type(self).__name__)
        self._inside = [SoftUpdate(inner, eps=self.eps) for inner in _losses_inside(loss_module)]

    def init_(self) -> None:
        """Copies all sources to the targets."""
        self._pairs = None
        super().init_()
        for updater in getattr(self, "_inside", ()):
            updater.init_()

    @torch.no_grad()
    def step(self) -> None:
        """Moves all targets, in place."""
        sources, targets = self._pairs = self._pairs or _pairs_of([self, *self._inside])
        _refuse_gradients(targets)
        weight = 1 - self.eps
        if not (self.capture and self._replays.serves(targets[0].device)):
            polyak_update_(targets, sources, weight)
            return
        memory = (weight, tuple([tensor.data_ptr() for tensor in (*targets, *sources)]))
        device = targets[0].device
        self._replays(lambda _: polyak_update_(targets, sources, weight), (), memory, device=device, writes=targets)


class DeviceHardUpdate(HardUpdate):
    """Copies all sources of a loss to their targets, in one call, after ``value_network_update_interval`` steps.

    The counterpart of TorchRL's ``HardUpdate`` (arXiv:1509.06461), which counts so: that many steps do nothing, and the
    next one copies. The targets of losses inside the loss are copied as well.

    Args:
        loss_module: the loss, with ``target_X_params`` beside ``X_params``.
        value_network_update_interval: steps between two that copy.

    Raises:
        ValueError: for no ``LossModule``.
        RuntimeError: for a loss without targets, for targets that are the sources, and for a step inside of a captured
            function, which would repeat what the host once decided.
    """

    def __init__(self, loss_module: LossModule, *, value_network_update_interval: float = 1000) -> None:
        super().__init__(loss_module, value_network_update_interval=value_network_update_interval)
        self._inside = [HardUpdate(inner) for inner in _losses_inside(loss_module)]

    def init_(self) -> None:
        """Copies all sources to the targets."""
        self._pairs = None
        super().init_()
        for updater in getattr(self, "_inside", ()):
            updater.init_()

    @torch.no_grad()
    def step(self) -> None:
        """Counts, and copies where it is time."""
        if is_capturing():
            raise RuntimeError(
                "DeviceHardUpdate: expected a step outside of captured functions, since it is counted on the host, "
                "received one inside. Remedy: call it after the captured function, or DeviceSoftUpdate inside."
            )
        if self.counter != self.value_network_update_interval:
            self.counter += 1
            return
        sources, targets = self._pairs = self._pairs or _pairs_of([self, *self._inside])
        _refuse_gradients(targets)
        torch._foreach_copy_(targets, sources)
        self.counter = 0


def _losses_inside(loss: LossModule) -> Iterator[LossModule]:
    """Losses within a loss that have targets of their own, outermost first."""
    for inner in loss.modules():
        if inner is not loss and isinstance(inner, LossModule) and _has_targets(inner):
            yield inner


def _has_targets(loss: nn.Module) -> bool:
    return any(name.startswith("target_") and name.endswith("_params") for name, _ in loss.named_children())


def _pairs_of(updaters: Sequence[TargetNetUpdater]) -> tuple[list[Tensor], list[Tensor]]:
    """What moves, of all updaters together: sources, and the targets that follow them."""
    pairs = [pair for updater in updaters for pair in sources_and_targets(updater)]
    return [source for source, _ in pairs], [target for _, target in pairs]


def _refuse_gradients(targets: list[Tensor]) -> None:
    if any(target.requires_grad for target in targets):
        raise RuntimeError(
            "step: expected targets without a gradient, received one that requires it. Remedy: "
            "target.requires_grad_(False)."
        )
