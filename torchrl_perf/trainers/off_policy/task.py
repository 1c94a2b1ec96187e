"""What an off-policy run acts in: where its env comes from, what of it is stored, what is measured."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs import EnvBase

from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.tasks import make_env

if TYPE_CHECKING:
    from torchrl_perf.envs.from_callable import Made

__all__ = ["NOT_STORED", "Task", "both"]

# no loss reads them: a root state is never done, and the start of an episode follows from the end of the last
NOT_STORED = ("collector", "done", "terminated", "truncated", "is_init", ("next", "is_init"), ("next", "valid"))


class Task:
    """The env that the config names. Systems have tasks of their own.

    Attributes:
        not_stored: entries of a batch that are not stored.
        metric_names: columns that :meth:`measure` adds.
    """

    not_stored: ClassVar[tuple[NestedKey, ...]] = NOT_STORED
    metric_names: ClassVar[tuple[str, ...]] = ()

    def make_env(self, config: RunConfig, device: torch.device) -> "EnvBase | Made":
        """The env of a run, in tensors or what makes Gymnasium envs.

        Raises:
            ValueError: for a name that is no env's.
        """
        return make_env(config, device)

    def check(self, env: EnvBase | None) -> None:
        """Refuses an env, given or made, that is of another kind.

        Raises:
            ValueError: naming it.
        """

    def stored(self, batch: TensorDictBase) -> TensorDictBase:
        """A batch ``[N, T]`` as it is learnt from; the batch itself is left as it is."""
        return batch

    def measure(self, trainer: Any, batch: TensorDictBase) -> None:
        """Adds to ``trainer.metrics`` what a batch ``[N, T]`` tells beside returns and lengths of episodes."""


def both(keys: Iterable[str]) -> tuple[NestedKey, ...]:
    """Entries at the root and below "next"."""
    names = tuple(keys)
    return (*names, *(("next", name) for name in names))
