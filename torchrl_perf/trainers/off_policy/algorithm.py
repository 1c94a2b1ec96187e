"""What an off-policy algorithm is: the interface between the trainer that owns the loop and what is learnt in it.

The :class:`~torchrl_perf.trainers.off_policy.trainer.OffPolicyTrainer` fills the buffer, collects, stores, samples,
measures, guards and saves. An :class:`Algorithm` has the networks, and makes an :class:`Update` of each sample. In the
order of a run::

    algorithm = DQN(config)                        # settings alone: no env, no network
    env = algorithm.fitted(env)                    # where the trainer has made the env itself
    algorithm.watch(metrics, env)                  # accumulators of its own
    policy = algorithm.build(setup)                # networks and optimisers
    algorithm.connect(collector)                   # what batches are like
    # in each iteration
    metrics.add(algorithm.schedule())
    buffer.extend(algorithm.keep(batch))
    update = algorithm.update(sample, number)      # for each sample

``parts`` and ``experience`` are what a checkpoint holds of it, ``probe`` tells how much memory an update takes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.parallel import Ranks
from torchrl_perf.runtime.compile_switch import CompileSwitch
from torchrl_perf.runtime.oom import MicroBatches
from torchrl_perf.runtime.precision import Acceleration
from torchrl_perf.trainers.off_policy.slice_memory import SliceMemory
from torchrl_perf.trainers.run.state import Stateful

__all__ = ["Algorithm", "Count", "Setup", "Update", "with_steps"]


class Update(NamedTuple):
    """What came of one sample ``[B]``. All of it is on the device and without a gradient."""

    priority: Tensor | None
    """``[B]``, positive, of the rows; may be None where rows are drawn uniformly."""
    statistics: Mapping[str, Tensor]
    """0-d each, by the names of :attr:`Algorithm.statistics`."""
    losses: Tensor
    """``[L]``, in the order of :attr:`Algorithm.losses`."""
    grad_norms: Tensor
    """``[P]``, for each of :attr:`Algorithm.parameter_names` a number that is finite where its gradient is."""
    taken: Tensor
    """bool 0-d, whether the step was taken: losses and gradients were finite."""
    fault: Tensor
    """bool 0-d, whether they should have been: a loss scale that was too large is no fault."""


class Count(Protocol):
    """Keeps the statistics of an update and counts it; the last thing that an update computes."""

    def __call__(self, statistics: Mapping[str, Tensor], taken: Tensor, fault: Tensor) -> None:
        """Writes to the trainer's accumulators; see :class:`Update` for the arguments.

        Call it within the compiled function that they come from, so that it shares that function's kernels.
        """
        ...


@dataclass(frozen=True)
class Setup:
    """What the trainer lends an algorithm for its networks and updates."""

    owner: str
    """Name of the trainer, for messages."""
    device: torch.device
    """Of everything."""
    mode: str
    """``"eager"``, ``"compile"`` or ``"graph"``."""
    acceleration: Acceleration
    """Precision, kind of optimiser, compilation."""
    kernels: CompileSwitch
    """Decides whether functions are compiled; ``kernels.on`` may change between two iterations."""
    env: EnvBase | None
    """None where only a collector was given that has none."""
    specs: Any
    """What has ``observation_spec`` and ``action_spec``: the env or what its collector says of it; None for neither."""
    own_env: bool
    """Whether env or collector were given, and the env not made as the config says."""
    collecting: nn.Module | None
    """The policy of a collector that was given."""
    micro: MicroBatches
    """Runs what may run out of memory, and splits it."""
    updates: Tensor
    """Updates taken so far, int64 0-d; the same tensor throughout."""
    progress: Callable[[], Tensor]
    """Share of the annealed part of the run that is done, float32 0-d, at most 1."""
    count: Count
    """Has to be called once in each update."""
    repaired: Callable[[TensorDictBase], TensorDictBase]
    """Rows ``[R]`` with good ones in place of those that are not finite, where the run shall outlive these."""
    ranks: Ranks = field(default_factory=Ranks.alone)
    """The processes that learn together: each of them has rows of its own, and gradients are means over all."""

    def compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, compiled as one graph in the iterations that are, and never in mode ``"eager"``."""
        return self.kernels.function(fn)


class Algorithm(ABC):
    """What is learnt from samples of a replay buffer, and how: the part of a run that a paper describes.

    Nothing here waits for the host, and all shapes are static: on CUDA the whole iteration is one graph. Public
    attributes are those of the trainer as well: ``trainer.loss`` is ``trainer.algorithm.loss``.

    Attributes:
        statistics: names of what :class:`Update` tells; columns ``train/<name>``, each the mean over the updates taken.
        weights: by name, what a statistic is multiplied by, for those that only some updates have.
        losses: names of those statistics that are losses.
        parameter_names: of the parameters whose gradients it tells; :meth:`build` sets them.
        metric_names: columns that rows have besides, so that a misspelt one is found before a run.
        excluded_keys: outputs of the policy that are not stored.
        slices: reads slices of streams with a memory; None where single rows are learnt from.
        fills_at_random: whether actions are random until learning starts, or the policy's.
        policy: acts in the envs; :meth:`build` sets it.
    """

    statistics: tuple[str, ...] = ()
    weights: Mapping[str, float] = {}
    losses: tuple[str, ...] = ("loss",)
    parameter_names: Sequence[str] = ()
    metric_names: tuple[str, ...] = ()
    excluded_keys: tuple[NestedKey, ...] = ()
    slices: SliceMemory | None = None
    fills_at_random: bool = True
    policy: Any

    @abstractmethod
    def build(self, setup: Setup) -> nn.Module:
        """Makes networks and optimisers as attributes, on ``setup.device``, and returns the policy that collects.

        Raises:
            ValueError: for networks that were given and do not fit, and an env that the default ones do not fit.
        """

    @abstractmethod
    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds, and a rollback restores, by name: networks, target networks, optimisers."""

    @abstractmethod
    def update(self, sample: TensorDictBase, number: int) -> Update:
        """One update: losses, optimiser steps, targets.

        Args:
            sample: rows ``[B]`` of the replay buffer, or slices ``[S]`` of it with a memory.
            number: of the update within its iteration, from 0; the same in each iteration.
        """

    @abstractmethod
    def probe(self, rows: TensorDictBase) -> None:
        """The passes of an update on a sample ``rows [b]``, eagerly, to see how much memory they take."""

    # -- what most algorithms need not write --------------------------------------------------------------------------

    def fitted(self, env: EnvBase) -> EnvBase:
        """An env that the trainer has made, with the transforms that the algorithm needs."""
        return env

    def watch(self, metrics: DeviceMetrics, env: EnvBase | None) -> None:  # noqa: B027  most have nothing to add
        """Makes what the algorithm keeps beside the accumulators of the run, before its networks are there."""

    def connect(self, collector: Any) -> None:  # noqa: B027  most have nothing to note
        """Takes note of the collector, before the first batch: ``collector.batch`` is what batches are like."""

    def schedule(self) -> Mapping[str, Tensor]:
        """Sets what changes with the iteration (learning rate, exploration); returns it by the names of its columns."""
        return {}

    def keep(self, batch: TensorDictBase) -> TensorDictBase:
        """Takes what it needs of a batch ``[N, T]`` besides the buffer; returns what the buffer is to store."""
        return batch if self.slices is None else self.slices.stored(batch)

    def experience(self) -> dict[str, Stateful]:
        """What a checkpoint holds besides, by name, and a rollback leaves alone: memories of what the envs did."""
        return {}

    def summarise(self, row: dict[str, float]) -> dict[str, float]:
        """A row of metrics as it is logged; an algorithm may add what sums it up, or warn of it."""
        return row

    def after_load(self) -> None:  # noqa: B027  most have nothing to put right
        """Puts right what a checkpoint has overwritten and the settings decide."""


def with_steps(rows: TensorDictBase) -> TensorDictBase:
    """Rows of a batch with the key that a sample of n-step returns has besides."""
    return rows.set("steps_to_next_obs", torch.ones(len(rows), 1, dtype=torch.int64, device=rows.device))
