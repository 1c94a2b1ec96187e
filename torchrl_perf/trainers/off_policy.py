"""What off-policy trainers share: fill a replay buffer, then collect, store, learn and measure on the device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.collectors.native_autoreset import is_native
from torchrl_perf.functional.priority_tree import LEAST_PRIORITY
from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics, PhaseTimer
from torchrl_perf.replay import DevicePrioritizedSampler, DeviceReplayBuffer, DeviceStorage, make_replay_buffer
from torchrl_perf.runtime import Captured, capture
from torchrl_perf.runtime.oom import MicroBatches, refused
from torchrl_perf.trainers.device import accelerated, acceleration_of, resolve_device, resolve_mode
from torchrl_perf.trainers.off_policy_config import OffPolicyConfig
from torchrl_perf.trainers.run.made_of import describe
from torchrl_perf.trainers.run.memory_estimate import announce_memory
from torchrl_perf.trainers.run.memory_floor import check_fits
from torchrl_perf.trainers.run.numerics import NumericalGuard
from torchrl_perf.trainers.run.state import Attributes, Checkpointed, Stateful, TrainState
from torchrl_perf.trainers.tasks import make_env
from torchrl_perf.transforms.missing import end_where_missing

# no loss reads them: a root state is never done, and the start of an episode follows from the end of the last
NOT_STORED = ("collector", "done", "terminated", "truncated", "is_init", ("next", "is_init"), ("next", "valid"))
VALID = "valid"  # bool [N, 1], the rows of an env that count: see AgentStreams


class OffPolicyTrainer(Checkpointed, ABC):
    """An off-policy algorithm whose iteration (collect, store, learn, measure) is one function of device state.

    The first ``config.fill_iterations`` calls of :meth:`step` are :meth:`fill`: random actions, no update. Each later
    one is :meth:`iteration`. On CUDA that is captured into one CUDA graph, after two ordinary iterations that compile
    it; where the collector steps envs on the CPU, everything after the collection is (:meth:`digest`). On a CPU the
    same code runs eagerly, or compiled.

    An algorithm writes four methods: :meth:`build`, :meth:`parts`, :meth:`schedule`, :meth:`update`.

    Of an env that observes ``"valid"``, such as :class:`~torchrl_perf.envs.AgentStreams`, the rows where it is False
    are stored, but never drawn, and no statistic counts them.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs]; by default the package's task that the config names.
        collector: collects ``[N, T]`` batches with the trainer's policy, such as a ``HostCollector``; by default a
            :class:`DeviceCollector` of the env.

    Attributes:
        statistics: names of the entries of the vector that an algorithm hands to :meth:`count_update`.
        losses: names of the losses that it hands to ``guard.note``.
        parameter_names: names of the parameters whose gradients it hands there; :meth:`build` sets them.
        guard: finds what is not finite, and judges the flushed rows.
        excluded_keys: outputs of the policy that are not stored.
        not_stored: entries of a batch that are not stored.
        own_env: whether env or collector were given, and the env not made as the config says.
        valid_key: ``"valid"``, or None where all rows count.
        fills_at_random: whether actions are random until learning starts, or the policy's.
        policy: acts in the envs; what :meth:`build` returned.
        buffer: the replay buffer.
        update_number: number of the present update within its iteration (host integer), the same in each iteration.
        updates: updates applied so far, int64 0-d on the device.
        frames: frames collected so far, int64 0-d on the device.
        iterations_done: iterations run so far (host integer).
        episodes: returns and lengths of finished episodes, on the device.
        metrics: accumulators on the device; flush them for the values.

    Raises:
        ValueError: at construction, for CUDA where there is none, or parts that do not fit each other.
    """

    statistics: ClassVar[tuple[str, ...]] = ()
    losses: ClassVar[tuple[str, ...]] = ("loss",)
    parameter_names: Sequence[str] = ()
    excluded_keys: ClassVar[tuple[NestedKey, ...]] = ()
    not_stored: ClassVar[tuple[NestedKey, ...]] = NOT_STORED
    fills_at_random: ClassVar[bool] = True

    def __init__(
        self, config: OffPolicyConfig, *, env: EnvBase | None = None, collector: BaseCollector | None = None
    ) -> None:
        self.config, self.own_env = config, collector is not None or env is not None
        given = cast("Any", collector if collector is not None else env)
        self.device = resolve_device(config.device if given is None else str(given.device))
        self.mode = resolve_mode(config.mode, self.device)
        check_fits(config, self.device)
        self.acceleration = acceleration_of(config)
        torch.manual_seed(config.seed)
        self.env = env if given is not None else self.make_env()
        if self.env is None:
            self.env = getattr(collector, "env", None)
        self._lacks_final_observations = self.env is not None and is_native(self.env)
        self._make_state()
        self.policy = self.build()
        self._make_guard()
        self.collector = cast("Any", collector if collector is not None else self._make_collector())
        self._check_parts()
        self.buffer = self._make_buffer()
        self.train_state = self._make_train_state()
        # a graph holds the whole iteration where the envs are tensors, and all but the collection where they are not
        graph = self.mode == "graph"
        self.collects_on_device = isinstance(self.collector, DeviceCollector) and not self.collector.waits_for_host
        # no eager audit: its different rounding would break bitwise resume; recording refuses host waits all the same
        whole = graph and self.collects_on_device
        self._iterate = capture(self.iteration, device=self.device, audit=False) if whole else self.iteration
        part = graph and not self.collects_on_device
        self._digest = capture(self.digest, device=self.device, audit=False) if part else self.digest
        modules = [module for module in self.parts().values() if isinstance(module, torch.nn.Module)]
        sizes = {"minibatch_size": config.minibatch_size, "capacity": config.capacity, "not_stored": self.not_stored}
        self.memory_estimate = announce_memory(self, modules, **sizes)

    # -- what an algorithm writes -------------------------------------------------------------------------------------

    @abstractmethod
    def build(self) -> torch.nn.Module:
        """Makes networks and optimisers as attributes, on ``self.device``, and returns the policy that collects.

        ``self.env`` is the env that the specs are read from, or None where only a collector was given.
        """

    @abstractmethod
    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds of the algorithm, by name: networks, target networks, optimisers."""

    @abstractmethod
    def schedule(self) -> None:
        """Sets what changes with the iteration: learning rate, exploration; read ``self.progress``. No host read."""

    @abstractmethod
    def update(self, sample: TensorDictBase) -> None:
        """One update from ``sample [B]``: losses, optimiser steps, targets, priorities, :meth:`count_update`."""

    def make_env(self) -> EnvBase:
        """The package's task that the config names."""
        return make_env(self.config, self.device)

    def probe(self, rows: TensorDictBase) -> None:
        """The passes of an update on a sample ``rows [b]``, eagerly, to see how much memory they take."""
        raise NotImplementedError(f"{type(self).__name__} has no probe.")

    def experience(self) -> dict[str, Stateful]:
        """What a checkpoint holds besides, by name, and a rollback leaves alone: memories of what the envs did."""
        return {}

    def probe_batch(self, batch: TensorDictBase) -> None:
        """Nothing is computed of a batch ``[n, T]`` before it is stored."""

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One more iteration of the run, the filling ones first."""
        if self._fill_left:
            self._fill_left -= 1
            self.fill()
        else:
            self.micro.call(self._iterate)

    def fill(self) -> None:
        """An iteration without updates."""
        batch = self.collect()
        self.schedule()
        self.store(self._complete(batch))
        self.measure(batch)

    def iteration(self) -> None:
        """Collect a batch and learn from what is stored: no host read on the device path, static shapes."""
        with self.phases.phase("collect"):
            batch = self.collect()
        self.micro.call(self._digest, batch)

    def digest(self, batch: TensorDictBase) -> None:
        """Everything of an iteration that follows the collection."""
        self.schedule()
        with self.phases.phase("store"):
            self.store(self._complete(batch))
        with self.phases.phase("learn"):
            self.learn()
        with self.phases.phase("measure"):
            self.measure(batch)

    @accelerated
    def collect(self) -> TensorDictBase:
        """A batch ``[N, T]`` of fresh transitions; its tensors are overwritten by the next one."""
        with refused("collect", "fewer num_envs or num_steps, or a smaller network"):
            return self.collector.collect()

    def store(self, batch: TensorDictBase) -> None:
        """Writes the transitions to the buffer, and counts them."""
        self._iteration += 1
        self.guard.check(batch)
        self.frames += self.config.batch_size
        self.buffer.extend(batch.exclude(*self.not_stored))
        if self._anneals_beta:
            cast("DevicePrioritizedSampler", self.buffer.sampler).step()

    def _complete(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch without missing final observations, which only envs that reset themselves leave."""
        return end_where_missing(batch) if self._lacks_final_observations else batch

    @accelerated
    def learn(self) -> None:
        """``updates_per_iteration`` updates, each from rows of its own."""
        self._sums.zero_()
        self._applied.zero_()
        for number, sample in enumerate(self.samples()):
            self.update_number = number
            self.update(sample)
        means = (self._sums / self._applied).unbind()
        names = (f"train/{name}" for name in self.statistics)
        self.metrics.add_all(dict(zip(names, means, strict=True)))
        self.metrics.add("train/updates_applied", self._applied)
        self.metrics.add("train/micro_batches", self.micro.count, reduce="last")

    def samples(self) -> Iterator[TensorDictBase]:
        """A sample ``[B]`` for each update of the iteration; uniform ones are drawn together, in one gather."""
        config = self.config
        rows = config.minibatch_size
        if config.draws_together:
            drawn = self._draw(config.updates_per_iteration * rows)
            yield from drawn.split(rows)
            return
        for _ in range(config.updates_per_iteration):
            yield self._draw(rows)

    def _draw(self, rows: int) -> TensorDictBase:
        """A sample ``[rows]``; if the run shall outlive bad rows, good ones in their place, and they come no more."""
        drawn = cast("TensorDictBase", self.buffer.sample(rows))
        if not self.guard.repairs:
            return drawn
        good, order = self.guard.repair(drawn)
        generation = drawn.get("index_generation", None)
        if self.config.sampler == "prioritized" and generation is not None:
            # no slot has generation -2: the good rows keep their priority
            self.buffer.update_priority(
                drawn.get("index"), torch.full_like(order, LEAST_PRIORITY, dtype=torch.float32),
                torch.where(good, -2, generation),
            )  # fmt: skip
        return drawn[order]

    def measure(self, batch: TensorDictBase) -> None:
        """Episode statistics and metrics of the iteration, accumulated on the device."""
        self.guard.report()
        valid = None if self.valid_key is None else batch.get(self.valid_key)
        self.episodes.update(self.guard.finite(batch.get(("next", "reward"))), batch.get(("next", "done")), valid)
        finished = self.episodes.count > 0
        self.metrics.add("episode/mean_return", self.episodes.mean_return, reduce="last", mask=finished)
        self.metrics.add("episode/mean_length", self.episodes.mean_length, reduce="last", mask=finished)
        self.metrics.add("episode/count", self.episodes.count, reduce="last")
        self.metrics.add("train/updates", self.updates, reduce="last")
        self.metrics.add("train/first_bad_iteration", self._first_bad, reduce="last")
        self.metrics.add("buffer/rows", self.rows, reduce="last")

    # -- for the algorithms -------------------------------------------------------------------------------------------

    def compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` compiled as one graph, or as it is in mode ``"eager"``."""
        return fn if self.mode == "eager" else self.acceleration.compile(fn, device=self.device)

    def count_update(self, statistics: Tensor, finite: Tensor, fault: Tensor | None = None) -> None:
        """Keeps the metrics of an update, and the first iteration that had one which was not finite.

        Args:
            statistics: ``[len(self.statistics)]`` float32, in that order.
            finite: bool 0-d, whether losses and gradients were; an update that was not is skipped and not counted.
            fault: bool 0-d, whether they should have been: a loss scale that was too large is none; by default ~finite.
        """
        self._sums += torch.where(finite, statistics, 0.0)
        self._applied += finite
        self.updates += finite
        self.guard.mark_bad(~finite if fault is None else fault)

    @property
    def progress(self) -> Tensor:
        """Share of the iterations over which the run anneals that are done, float32 0-d on the device, at most 1."""
        done = self._iteration / self.config.schedule_iterations
        return done if self.config.schedule_steps is None else done.clamp_max(1.0)

    @property
    def rows(self) -> Tensor:
        """Rows in the buffer, int64 0-d on the device."""
        ring = cast("DeviceStorage", self.buffer.storage).ring
        return ring.length * ring.num_streams

    @property
    def first_bad_iteration(self) -> Tensor:
        """First iteration with a number that was not finite, counted from 1, or -1: 0-d, on the device."""
        return self._first_bad

    # -- construction -------------------------------------------------------------------------------------------------

    def _make_state(self) -> None:
        """What changes from one iteration to the next on the device, beside the algorithm's parts, buffer and envs."""
        device, config = self.device, self.config
        self.iterations_done = 0
        self._fill_left = config.fill_iterations
        self.metrics = DeviceMetrics(device)
        self.episodes = EpisodeStatistics(config.num_streams, device)
        self.valid_key = VALID if self.env is not None and VALID in self.env.observation_spec.keys() else None
        self.phases = PhaseTimer(device)
        self.micro = MicroBatches(device, enabled=config.split_on_oom)
        self.update_number = 0
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self.frames = torch.zeros((), dtype=torch.int64, device=device)
        self._iteration = torch.zeros((), device=device)
        self._sums = torch.zeros(len(self.statistics), device=device)
        self._applied = torch.zeros((), device=device)

    def _make_guard(self) -> None:
        self.guard = NumericalGuard(
            self.metrics,
            self._iteration,
            on_nan=self.config.on_nan,
            losses=self.losses,
            parameters=self.parameter_names,
            compile=None if self.mode == "eager" else partial(self.acceleration.compile, device=self.device),
            parts=self.parts,
        )
        self.guard.watch(self.env)
        self._first_bad = self.guard.first_bad

    def _make_collector(self) -> DeviceCollector:
        config = self.config
        return DeviceCollector(
            cast("EnvBase", self.env),
            self.policy,
            frames_per_batch=config.rows_per_iteration,
            init_random_frames=config.fill_iterations * config.rows_per_iteration * self.fills_at_random,
            mode="eager" if self.mode == "eager" else "compile",
            compile_mode=config.compile_mode,
            exclude_keys=self.excluded_keys,
        )

    def _make_buffer(self) -> DeviceReplayBuffer:
        config = self.config
        self._anneals_beta = config.beta_final is not None
        options: dict[str, Any] = {}
        if config.sampler == "prioritized":
            options |= {"alpha": config.alpha, "beta": config.beta}
        if self._anneals_beta:
            options |= {"beta_end": config.beta_final, "anneal_steps": config.schedule_iterations}
        if self.valid_key is not None:
            options["mask_key"] = self.valid_key
        return make_replay_buffer(
            config.capacity,
            batch_size=config.minibatch_size,
            device=self.device,
            sampler=config.sampler,
            n_step=config.n_step,
            gamma=config.gamma,
            compact=config.compact,
            **options,
        )

    def _check_parts(self) -> None:
        """Refuse an env or a collector that does not fit the config or the policy."""
        config, collector = self.config, self.collector
        streams, rows, words = config.num_streams, config.rows_per_iteration, config.rows_in_words
        if self.env is not None and self.env.batch_size != (streams,):
            raise ValueError(
                f"env: expected batch_size [{streams}], the config's {words.removesuffix(' * num_steps')}, received "
                f"{list(self.env.batch_size)}. Remedy: make both the same."
            )
        frames = collector.requested_frames_per_batch
        if frames != rows or getattr(collector, "num_envs", streams) != streams:
            raise ValueError(
                f"collector: expected {streams} envs and frames_per_batch={rows}, the config's {words}, received "
                f"{getattr(collector, 'num_envs', 'other')} envs and {frames}. Remedy: make both the same."
            )
        if collector.policy is not self.policy:
            raise ValueError(
                f"collector: expected it to act with the trainer's policy, received {type(collector.policy).__name__}. "
                "Remedy: pass the same object to the collector and to the trainer."
            )

    # -- state --------------------------------------------------------------------------------------------------------

    def _make_train_state(self) -> TrainState:
        """Everything that changes between two iterations."""
        counters = ("iterations_done", "_fill_left", "_iteration", "frames", "updates", "_first_bad")
        return TrainState(
            made_by=self.config.algorithm,
            made_of=describe(self.env or self.collector, self.parts(), own_env=self.own_env),
            device=self.device,
            counters=Attributes(self, counters),
            collector=self.collector,
            episodes=self.episodes,
            metrics=self.metrics,
            micro_batches=self.micro,
            replay=self.buffer,
            **self.parts(),
            **self.experience(),
        )

    def close(self) -> None:
        """Releases the graph and the envs."""
        for fn in (self._iterate, self._digest):
            if isinstance(fn, Captured):
                fn.release()
        self.collector.shutdown()


def with_steps(rows: TensorDictBase) -> TensorDictBase:
    """Rows of a batch with the key that a sample of n-step returns has besides."""
    return rows.set("steps_to_next_obs", torch.ones(len(rows), 1, dtype=torch.int64, device=rows.device))
