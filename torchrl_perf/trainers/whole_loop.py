"""What trainers have in common whose iteration is a function of their own, captured whole."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchrl_perf.metrics import DeviceMetrics, PhaseTimer
from torchrl_perf.parallel import Ranks
from torchrl_perf.parallel.join import joined
from torchrl_perf.runtime import Captured
from torchrl_perf.runtime.oom import MicroBatches
from torchrl_perf.runtime.precision import Acceleration
from torchrl_perf.trainers.captures import capture_whole
from torchrl_perf.trainers.device import acceleration_of, resolve_device, resolve_mode
from torchrl_perf.trainers.run.made_of import describe
from torchrl_perf.trainers.run.memory_floor import check_fits
from torchrl_perf.trainers.run.numerics import NumericalGuard
from torchrl_perf.trainers.run.state import Attributes, Checkpointed, Stateful, TrainState
from torchrl_perf.trainers.shards import config_of_rank

__all__ = ["WholeLoop"]


class WholeLoop(Checkpointed, ABC):
    """A trainer with an ``iteration`` of its own, and ``parts`` and ``experience`` that a checkpoint holds.

    Its constructor calls :meth:`_begin` first, makes networks and optimiser, then calls :meth:`_make_loop` and, with
    all else made, :meth:`_finish`.

    Attributes:
        device: of the run.
        ranks: the processes that learn together.
        config: every choice of the run, of this rank's part.
        own_env: whether the env came from Python.
        mode: ``"eager"``, ``"compile"`` or ``"graph"``.
        acceleration: precision of the run.
        iterations_done: iterations run so far (host integer).
        updates: updates applied so far, float32 0-d on the device.
    """

    config: Any
    device: torch.device
    ranks: Ranks
    acceleration: Acceleration
    guard: NumericalGuard
    updates: Tensor

    @abstractmethod
    def parts(self) -> dict[str, Stateful]:
        """The parts that a rollback restores, by name."""

    @abstractmethod
    def experience(self) -> dict[str, Stateful]:
        """Further parts of a checkpoint, by name."""

    @abstractmethod
    def iteration(self) -> None:
        """One iteration: no host read, static shapes."""

    def _begin(self, config: Any, env: Any) -> Any:
        """Where the run takes place and with which precision; the seed is set. Returns the config of this rank."""
        self.device = resolve_device(config.device) if env is None else cast("torch.device", env.device)
        self.ranks = joined(self.device)
        self.config = config_of_rank(config, self.ranks)
        self.own_env = env is not None
        self.mode = resolve_mode(config.mode, self.device)
        check_fits(self.config, self.device)
        self.acceleration = acceleration_of(config)
        torch.manual_seed(self.config.seed)
        return self.config

    def _make_loop(
        self, losses: Sequence[str], parameters: Iterable[str], *, compile: Callable[..., Any] | None = None
    ) -> None:
        """State of the loop on the device, beside parameters, moments and envs, and the guard of its numbers.

        Args:
            losses: names of those that are minimised.
            parameters: names of those that are learnt.
            compile: makes a compiled function.
        """
        device = self.device
        self.metrics = DeviceMetrics(device)
        self.phases = PhaseTimer(device)
        self.micro = MicroBatches(device, enabled=self.config.split_on_oom)
        self.iterations_done = 0
        self.updates = torch.zeros((), device=device)
        self._iteration = torch.zeros((), device=device)
        self.guard = NumericalGuard(
            self.metrics,
            self._iteration,
            on_nan=self.config.on_nan,
            losses=losses,
            parameters=list(parameters),
            parts=self.parts,
            compile=compile,
            ranks=self.ranks,
        )
        self._first_bad = self.guard.first_bad

    def _finish(self, env: Any) -> None:
        """What a checkpoint holds, and the captured iteration.

        Args:
            env: of the run, which the checkpoint describes.
        """
        self.train_state = TrainState(
            made_by=self.config.algorithm,
            settings=self.config.whole.card(),
            made_of=describe(env, self.parts(), own_env=self.own_env),
            device=self.device,
            counters=Attributes(self, ("iterations_done", "_iteration", "_first_bad", "updates")),
            **self.parts(),
            **self.experience(),
        )
        self._iterate = capture_whole(self)

    def _release(self) -> None:
        """Gives the memory of the graph back."""
        if isinstance(self._iterate, Captured):
            self._iterate.release()
