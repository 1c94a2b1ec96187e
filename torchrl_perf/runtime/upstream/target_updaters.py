"""TorchRL's updaters of targets: what they move, which they keep to themselves."""

from collections.abc import Iterator

from torch import Tensor
from torchrl.objectives.utils import TargetNetUpdater


def sources_and_targets(updater: TargetNetUpdater) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter that learns, beside the target that follows it; buffers and frozen parameters are left out."""
    for key, source in updater._sources.items(True, True):
        path = (key,) if isinstance(key, str) else key
        yield source, updater._targets.get((f"target_{path[0]}", *path[1:]))
