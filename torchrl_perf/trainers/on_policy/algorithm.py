"""What an on-policy algorithm is: the part of a run that is in its paper, and nothing of the loop around it."""

import abc
import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.runtime.precision import Acceleration
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.on_policy.minibatches import flat_rows
from torchrl_perf.trainers.recurrent import refuse_recurrent
from torchrl_perf.trainers.run.numerics import NumericalGuard
from torchrl_perf.trainers.run.state import Stateful

__all__ = ["OnPolicyAlgorithm", "OnPolicySettings", "Whole", "valid_key_of"]

VALID = "valid"  # bool [N] or [N, 1], the rows of an env that count: see AgentStreams


class OnPolicySettings(Protocol):
    """Settings that the loop itself reads, beside those of :class:`~torchrl_perf.trainers.config.RunConfig`."""

    @property
    def epochs(self) -> int:
        """Passes over each batch."""
        ...

    @property
    def minibatches(self) -> int:
        """Parts of a pass."""
        ...

    @property
    def learning_rate(self) -> float:
        """Adam's step size at the start."""
        ...

    @property
    def anneal_learning_rate(self) -> bool:
        """Whether it falls linearly to 0."""
        ...

    @property
    def max_grad_norm(self) -> float:
        """Largest norm of the gradient."""
        ...


class Whole(NamedTuple):
    """What the micro-batches of a minibatch ``[B]`` that memory does not hold at once have to know of all of it."""

    entries: dict[NestedKey, Tensor]
    """Entries ``[B, *]`` that take the place of those of its rows, such as normalised advantages."""
    counts: Tensor | None = None
    """How much each row counts, ``[B]``; None where all count the same."""


class OnPolicyAlgorithm(abc.ABC):
    """The networks, targets, loss and schedules of an algorithm that learns from fresh batches only.

    :class:`~torchrl_perf.trainers.on_policy.trainer.OnPolicyTrainer` runs the loop around it. The constructor makes the
    networks in the order in which they draw random numbers, and nothing else draws any. No method may wait for the
    device: ``schedule``, ``estimate``, ``minibatch_loss``, ``stop`` and ``measure`` are part of the captured iteration.

    Args:
        config: settings of the run.
        env: the env ``[N]`` that the run is on, or what has its specs where the envs step on the CPU.
        acceleration: wraps a network for the run's precision: ``acceleration.policy(network)``.
        **networks: networks of the user's in place of the default ones, by the names in ``networks``; None for those.

    Attributes:
        policy: acts in the env; also explores, where the algorithm does.
        networks: what is learnt, by name; their order is that in the checkpoint.
        loss: module whose parameters the optimiser steps.
        acting: name of the network in the policy of a collector.
        losses: names of the statistics that the total loss is the sum of; these are what ``on_nan`` reports.
        statistics: names of all that :meth:`minibatch_loss` says, ``losses`` first; their means over the applied
            updates are the metrics ``train/...``.
        row_keys: entries of a batch that :meth:`minibatch_loss` reads.
        unused_keys: entries that the policy writes and no one reads, left out of the batch.
        schedules: 0-d tensors that :meth:`schedule` writes and that are no part of a network, by name.
        valid_key: the env's flag of the rows that count, or None; see :func:`valid_key_of`.
        carried: root entries of the policy's state that the algorithm learns from in their order.
        metric_names: columns that :meth:`measure` adds, so that a misspelt one is found before a run.
    """

    acting: ClassVar[str] = "actor"
    losses: ClassVar[tuple[str, ...]]

    policy: nn.Module
    networks: dict[str, nn.Module]
    loss: nn.Module
    statistics: tuple[str, ...]
    row_keys: list[NestedKey]
    unused_keys: Iterable[NestedKey] = ()
    schedules: dict[str, Tensor]
    valid_key: str | None = None
    carried: Collection[NestedKey] = ()
    metric_names: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def __init__(self, config: Any, env: EnvBase, acceleration: Acceleration, **networks: nn.Module | None) -> None: ...

    @abc.abstractmethod
    def estimate(self, batch: TensorDictBase) -> TensorDictBase:
        """Adds what the updates learn from, advantages or targets, to a batch ``[N, T]`` that may be changed."""

    def rows(self, batch: TensorDictBase) -> TensorDictBase:
        """What minibatches are drawn from, ``[R]``: the transitions of an estimated batch ``[N, T]``."""
        return flat_rows(batch, self.row_keys)

    @abc.abstractmethod
    def minibatch_loss(self, rows: TensorDictBase) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The total loss of rows ``[B]``, 0-d, and ``statistics`` by name, 0-d each; compiled with the run."""

    @abc.abstractmethod
    def probe_rows(self, rows: TensorDictBase) -> TensorDictBase:
        """Rows ``[b]`` of a batch with zeros for what :meth:`estimate` adds, to find out the memory of an update."""

    def schedule(self, iteration: Tensor) -> None:  # noqa: B027  # most change nothing
        """Sets what changes over the run, before an iteration's batch is collected.

        Args:
            iteration: iterations done so far, float 0-d.
        """

    def stop(self, statistics: Mapping[str, Tensor]) -> Tensor | None:
        """Whether this update and the rest of the iteration's are skipped, bool 0-d; None for never."""
        return None

    @property
    def adapts_learning_rate(self) -> bool:
        """Whether :meth:`adapt` sets the learning rate, which is not annealed then."""
        return False

    def adapt(self, statistics: Mapping[str, Tensor], learning_rate: Tensor, due: Tensor) -> None:  # noqa: B027
        """Changes the learning rate in place, before the step that it is used for.

        Args:
            statistics: of the step's minibatch, 0-d each.
            learning_rate: 0-d.
            due: bool 0-d; False where the iteration's updates were stopped before this one.
        """

    def summary(self, rows: TensorDictBase, index: Tensor) -> Tensor | None:
        """What a rank's parts of minibatches tell the others, ``[U, K]``, such as their advantages' means; or None.

        Args:
            rows: of this rank.
            index: ``[U, B]``, those of each minibatch.
        """
        return None

    def merged(self, summaries: Tensor) -> Tensor:
        """The summaries ``[U, K]`` of an iteration's minibatches, of those of each rank's parts, ``[R, U, K]``."""
        raise NotImplementedError

    def whole(self, rows: TensorDictBase, index: Tensor, summary: Tensor | None = None) -> Whole:
        """What parts of the minibatch of the rows at ``index [B]`` have to know of all of it.

        Args:
            rows: of this rank.
            index: ``[B]``.
            summary: of the minibatch of all ranks, where there are several.
        """
        return Whole({})

    def in_parts(self) -> contextlib.AbstractContextManager[object]:
        """Within it, :meth:`minibatch_loss` is given parts of a minibatch, with the entries of :meth:`whole`."""
        return contextlib.nullcontext()

    def watched(self, batch: TensorDictBase) -> TensorDictBase:
        """The part of a batch in which the guard looks for what is not finite."""
        return batch

    def measure(self, batch: TensorDictBase, metrics: DeviceMetrics, guard: NumericalGuard) -> None:  # noqa: B027
        """Adds metrics of the algorithm's own, behind those of every trainer."""

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds beside the networks, by name."""
        return {}


def check_networks(
    owner: str,
    networks: Mapping[str, nn.Module],
    env: EnvBase,
    config: RunConfig,
    carried: Collection[NestedKey] = (),
) -> None:
    """Refuse an env or networks that do not fit each other; the collector checks the policy.

    Args:
        owner: name of the trainer, for the message.
        networks: by name; those that act have been made for the env.
        env: of the run.
        config: of the run.
        carried: states that the algorithm learns from in their order, which its collector adds to the env.

    Raises:
        ValueError: for networks with memory, another number of envs, and in_keys that the env does not give.
    """
    refuse_recurrent(owner, dict(networks), env=env, own_state=carried)
    if env.batch_size != (config.num_envs,):
        raise ValueError(
            f"env: expected batch_size [{config.num_envs}], the config's num_envs, received {list(env.batch_size)}. "
            "Remedy: make both the same."
        )
    root = env.fake_tensordict().exclude("next")
    known = {*root.keys(True), *carried, *(["is_init"] if carried else [])}
    for name, network in networks.items():
        if name != "actor" and (absent := [key for key in getattr(network, "in_keys", []) if key not in known]):
            raise ValueError(
                f"{name}: expected in_keys among {sorted(map(str, root.keys(True, True)))}, which the env gives, "
                f"received {absent}. Remedy: set its in_keys."
            )


def valid_key_of(env: EnvBase) -> str | None:
    """``"valid"`` of an env that says which of its rows count, such as ``AgentStreams``, or None."""
    spec, batch = env.observation_spec.get(VALID, None), env.batch_size
    if spec is None or spec.dtype != torch.bool or spec.shape not in (batch, (*batch, 1)):
        return None
    return VALID
