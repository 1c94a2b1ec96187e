"""The loop of every off-policy run: fill a replay buffer, then collect, store, learn and measure on the device."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import BaseCollector

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.collectors.native_autoreset import is_native
from torchrl_perf.functional.priority_tree import LEAST_PRIORITY
from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics, PhaseTimer
from torchrl_perf.parallel.join import joined
from torchrl_perf.replay import DevicePrioritizedSampler, DeviceReplayBuffer, DeviceStorage, make_replay_buffer
from torchrl_perf.replay.stacked_frames import StackedFrames
from torchrl_perf.runtime.oom import MicroBatches, refused
from torchrl_perf.trainers.algorithm_attributes import of_algorithm
from torchrl_perf.trainers.captures import capture_iteration, collector_mode, collects_on_device
from torchrl_perf.trainers.device import (
    accelerated,
    acceleration_of,
    as_in_mode,
    fuse_when_compiled,
    kernels_of,
    resolve_mode,
)
from torchrl_perf.trainers.normalization import RunNormalization
from torchrl_perf.trainers.off_policy.algorithm import Algorithm, Setup, Update
from torchrl_perf.trainers.off_policy.config import OffPolicyConfig
from torchrl_perf.trainers.off_policy.shard_weights import corrections_of, shard_correction
from torchrl_perf.trainers.off_policy.task import Task
from torchrl_perf.trainers.run.joint_rows import window_of
from torchrl_perf.trainers.run.made_of import describe
from torchrl_perf.trainers.run.memory_estimate import announce_memory
from torchrl_perf.trainers.run.memory_floor import check_fits
from torchrl_perf.trainers.run.numerics import NumericalGuard
from torchrl_perf.trainers.run.state import Attributes, Checkpointed, Stateful, TrainState
from torchrl_perf.trainers.shards import config_of_rank
from torchrl_perf.trainers.sources import Source, check_parts, device_of, find_source, host_collector
from torchrl_perf.transforms.missing import end_where_missing

VALID = "valid"  # bool [N, 1], the rows of an env that count: see AgentStreams


class OffPolicyTrainer(Checkpointed):
    """An off-policy run whose iteration (collect, store, learn, measure) is one function of device state.

    What is learnt is the :class:`~torchrl_perf.trainers.off_policy.algorithm.Algorithm`'s, what it acts in the
    :class:`~torchrl_perf.trainers.off_policy.task.Task`'s; the loop is the same for all. ``DQNTrainer``, ``SACTrainer``
    and the others only name the algorithm.

    The first ``config.fill_iterations`` calls of :meth:`step` are :meth:`fill`: random actions, no update. Each later
    one is :meth:`iteration`. On CUDA that is captured into one CUDA graph, after two ordinary iterations; where the
    collector steps envs on the CPU, everything after the collection is (:meth:`digest`). In mode ``"auto"`` its kernels
    are eager ones at first, so that a run starts at once, and compiled after ``config.compiles_at`` iterations. On a
    CPU the same code runs eagerly, or compiled.

    Of an env that observes ``"valid"``, such as :class:`~torchrl_perf.envs.AgentStreams`, the rows where it is False
    are stored, but never drawn, and no statistic counts them.

    What is no attribute of the trainer is read from its algorithm, by :meth:`__getattr__`: ``policy``, ``loss``,
    ``actor_optimizer``, ``q_network``, ``options``, ...

    Args:
        config: every choice of the run; after ``parallel.join()`` of the whole run, of which each rank does its part.
        algorithm: what is learnt; by default an :attr:`algorithm_class` of the networks.
        env: a TorchRL env with batch_size [num_envs]; Gymnasium vector envs, one or a list of them (groups), of
            ``num_envs`` envs in all; or a class or function that makes an env of any kind, such as a ``gymnasium.Env``.
            By default the task's.
        collector: collects ``[N, T]`` batches with the algorithm's policy, such as a ``HostCollector``; by default a
            :class:`DeviceCollector` of the env.
        task: makes the env and measures what happens there; by default a :attr:`task_class`, of most trainers the
            package's task that the config names.
        **networks: arguments of :attr:`algorithm_class`: ``policy``, or ``actor`` and ``critic``.

    Attributes:
        made_by: functions that make networks in place of the algorithm's own, by its argument.
        config: of this rank's part; ``config.whole`` is what was given.
        ranks: the processes that learn together.
        guard: finds what is not finite, and judges the flushed rows.
        own_env: whether env or collector were given, and the env not made as the config says.
        valid_key: ``"valid"``, or None where all rows count.
        buffer: the replay buffer.
        stacks: makes stacks of the frames that are stored once, or None where observations are stored whole.
        update_number: number of the present update within its iteration (host integer), the same in each iteration.
        updates: updates applied so far, int64 0-d on the device.
        frames: frames collected so far, int64 0-d on the device.
        kernels: decides by ``iterations_done`` whether functions are compiled.
        iterations_done: iterations run so far (host integer).
        episodes: returns and lengths of finished episodes, on the device.
        metrics: accumulators on the device; flush them for the values.

    Raises:
        ValueError: at construction, for CUDA where there is none, or parts that do not fit each other.
    """

    algorithm_class: ClassVar[type[Algorithm]]
    task_class: ClassVar[type[Task]] = Task
    made_by: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {}

    def __init__(
        self,
        config: Any,
        algorithm: Algorithm | None = None,
        *,
        env: Any = None,
        collector: BaseCollector | None = None,
        task: Task | None = None,
        **networks: nn.Module | None,
    ) -> None:
        if algorithm is None:
            make: Any = getattr(self, "algorithm_class", None)
            if make is None:
                raise TypeError(
                    f"algorithm: expected what is learnt, received None, and {type(self).__name__} names none. Remedy: "
                    "SACTrainer or another one that does, or algorithm=SAC(config)."
                )
            algorithm = make(config, **networks, **self.made_by)
        elif networks:
            raise TypeError(
                f"{', '.join(networks)}: expected none beside an algorithm, received some. Remedy: give them to the "
                "algorithm."
            )
        self.device = device_of(config, env, collector)
        self.ranks = joined(self.device)
        self.config: OffPolicyConfig = config_of_rank(config, self.ranks)
        self.algorithm, self.task = algorithm, task or self.task_class()
        config = algorithm.config = self.config
        self.mode = resolve_mode(config.mode, self.device)
        self.kernels = kernels_of(config, self.mode, self.device)
        check_fits(config, self.device)
        self.acceleration = acceleration_of(config)
        torch.manual_seed(config.seed)
        self.source = self._find_source(env, collector)
        self.env, self.own_env = self.source.env, self.source.own
        with self.source.closed_on_error():
            self._make_parts()
        self.memory_estimate = announce_memory(
            self,
            self.networks(),
            minibatch_size=config.minibatch_size,
            capacity=config.capacity,
            stored=lambda batch: self.kept(batch.exclude(*self.task.not_stored)).clone(),
        )

    def _make_parts(self) -> None:
        """Networks, collector and buffer, and what surrounds them."""
        algorithm, given = self.algorithm, self.source.collector
        self._lacks_final_observations = self.env is not None and is_native(self.env)
        self._make_state()
        policy = algorithm.build(self._setup())
        fuse_when_compiled(self.kernels, [policy, *self.parts().values()], self.config.precision)
        self._make_guard()
        modules = [policy, *self.networks()]
        self.ranks.broadcast_(modules)
        place = self.device, self.valid_key, self.ranks
        self.normalization = RunNormalization(self.config, self.config.num_streams, modules, *place)
        self.collector = cast("Any", given if given is not None else self._make_collector(policy))
        check_parts(self.source, self.collector, policy, self.config)
        algorithm.connect(self.collector)
        self.buffer = self._make_buffer()
        self._corrections_fn = self.kernels.function(corrections_of)
        frames = self.source.frames
        self.stacks = StackedFrames(self.buffer, frames) if frames > 1 else None
        self.train_state = self._make_train_state()
        self.collects_on_device = collects_on_device(self.collector)
        self._captures = capture_iteration(self)

    # -- the algorithm ------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Public attributes of the algorithm, those that it documents."""
        return of_algorithm(self, name)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Columns that rows of metrics have beside those of every run."""
        return ("train/updates", "buffer/rows", *self.algorithm.metric_names, *self.task.metric_names)

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds of the algorithm, by name: networks, target networks, optimisers."""
        return self.algorithm.parts()

    def networks(self) -> list[torch.nn.Module]:
        """The modules among :meth:`parts`."""
        return [module for module in self.parts().values() if isinstance(module, torch.nn.Module)]

    def update(self, sample: TensorDictBase) -> Update:
        """One update from ``sample [B]``: the algorithm's, the priorities of its rows, what the guard notes."""
        update = self.algorithm.update(sample, self.update_number)
        with torch.no_grad():
            if self.config.sampler == "prioritized":
                generation = sample.get("index_generation", None)
                self.buffer.update_priority(sample.get("index"), cast("Tensor", update.priority), generation)
            self.guard.note(update.losses, update.grad_norms, update.fault)
        return update

    def count_update(self, statistics: Mapping[str, Tensor], taken: Tensor, fault: Tensor) -> None:
        """Keeps the statistics of an update, and the first iteration that had one which was not finite.

        Args:
            statistics: 0-d each, by the names of the algorithm's.
            taken: bool 0-d; an update that was not is left out of the statistics and not counted.
            fault: bool 0-d, whether losses and gradients were not finite and should have been.
        """
        names, weights = self.algorithm.statistics, self.algorithm.weights
        row = [statistics[name] * weights[name] if name in weights else statistics[name] for name in names]
        self._sums += torch.where(taken, torch.stack(row), 0.0)
        self._applied += taken
        self.updates += taken
        self.guard.mark_bad(fault)

    def probe(self, rows: TensorDictBase) -> None:
        """The passes of an update on a sample ``rows [b]``, eagerly, to see how much memory they take."""
        self.algorithm.probe(rows)

    def probe_batch(self, batch: TensorDictBase) -> None:
        """Nothing is computed of a batch ``[n, T]`` before it is stored."""

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One more iteration of the run, the filling ones first.

        In a loop of your own count it, ``trainer.iterations_done += 1``, as :func:`train` does: the number decides when
        kernels are compiled.
        """
        self.kernels.settle(self.iterations_done, self.train_state.notes, *self._captures)
        with as_in_mode(self.mode):
            if self._fill_left:
                self._fill_left -= 1
                self.fill()
            else:
                self.kernels.call(self.micro.call, self._captures.iterate)

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
        self.kernels.call(self.micro.call, self._captures.digest, batch)

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
            batch = self.collector.collect()
        keys = self.algorithm.excluded_keys
        return batch.exclude(*keys) if keys else batch

    def schedule(self) -> None:
        """Sets what changes with the iteration, and keeps it as metrics; before the updates and the next batch."""
        for name, value in self.algorithm.schedule().items():
            self.metrics.add(name, value, reduce="last")

    def store(self, batch: TensorDictBase) -> None:
        """Writes the transitions to the buffer, and counts them."""
        self.normalization.observe(batch)
        self.normalization.observe_rewards(batch)
        batch = self.algorithm.keep(self.task.stored(self.normalization.stored(batch)))
        self._iteration += 1
        self.guard.check(batch)
        self.frames += self.config.batch_size
        self.buffer.extend(self.kept(batch.exclude(*self.task.not_stored)))
        if self._anneals_beta:
            cast("DevicePrioritizedSampler", self.buffer.sampler).step()

    def kept(self, batch: TensorDictBase) -> TensorDictBase:
        """What is stored of a batch ``[N, T]``: of observations that are stacks of frames the newest frame."""
        return batch if self.stacks is None else self.stacks.newest(batch)

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
        names = (f"train/{name}" for name in self.algorithm.statistics)
        self.metrics.add_all(dict(zip(names, means, strict=True)))
        self.metrics.add("train/updates_applied", self._applied)
        self.metrics.add("train/micro_batches", self.micro.count, reduce="last")

    def samples(self) -> Iterator[TensorDictBase]:
        """A sample ``[B]`` for each update of the iteration; uniform ones are drawn together, in one gather.

        With a memory it is one of slices, ``[S]``.
        """
        config = self.config
        rows = config.minibatch_size
        if config.draws_together:
            drawn = self._draw(config.updates_per_iteration * rows)
            yield from drawn.split(len(drawn) // config.updates_per_iteration)
            return
        for _ in range(config.updates_per_iteration):
            yield self._draw(rows)

    def _draw(self, rows: int) -> TensorDictBase:
        """A sample ``[rows]``; if the run shall outlive bad rows, good ones in their place, and they come no more."""
        drawn = self.normalization.drawn(cast("TensorDictBase", self.buffer.sample(rows)))
        if self.ranks.several and self.config.sampler == "prioritized":
            sampler = cast("DevicePrioritizedSampler", self.buffer.sampler)
            factor = shard_correction(sampler, self.ranks, self._corrections_fn)
            drawn.set("priority_weight", drawn.get("priority_weight") * factor)
        drawn = drawn if self.stacks is None else self.stacks.whole(drawn)
        drawn = drawn if self.algorithm.slices is None else self.algorithm.slices.shaped(drawn)
        if not self.guard.repairs:
            return drawn
        good, order = self.guard.repair(drawn)
        generation = drawn.get("index_generation", None)
        if self.config.sampler == "prioritized" and generation is not None:
            # no slot has generation -2: the good rows keep their priority
            self.buffer.update_priority(
                drawn.get("index"), torch.full_like(order, LEAST_PRIORITY, dtype=torch.float32),
                torch.where(good.view(-1, *(1,) * (generation.ndim - 1)), -2, generation),
            )  # fmt: skip
        return drawn[order]

    def _repaired(self, rows: TensorDictBase) -> TensorDictBase:
        """Rows ``[R]``, with good ones in place of bad ones if the run shall outlive these."""
        return rows[self.guard.repair(rows)[1]] if self.guard.repairs else rows

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
        self.task.measure(self, batch)

    # -- counters ---------------------------------------------------------------------------------------------------

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

    def _find_source(self, env: Any, collector: BaseCollector | None) -> Source:
        """The env that was given, that of the collector, or the task's."""
        config = self.config
        source = find_source(config, self.device, env=env, collector=collector, make_env=self.task.make_env)
        if source.env is not None and not source.own:
            fitted = self.algorithm.fitted(source.env)
            source = replace(source, env=fitted, specs=fitted)
        self.task.check(source.env)
        return source

    def _setup(self) -> Setup:
        """What the algorithm is lent."""
        return Setup(
            owner=type(self).__name__,
            device=self.device,
            mode=self.mode,
            acceleration=self.acceleration,
            kernels=self.kernels,
            env=self.env,
            specs=self.source.specs,
            own_env=self.own_env,
            collecting=getattr(self.source.collector, "policy", None),
            micro=self.micro,
            updates=self.updates,
            progress=lambda: self.progress,
            count=self.count_update,
            repaired=self._repaired,
            ranks=self.ranks,
        )

    def _make_state(self) -> None:
        """What changes from one iteration to the next on the device, beside the algorithm's parts, buffer and envs."""
        device, config = self.device, self.config
        self.iterations_done = 0
        self._fill_left = config.fill_iterations
        self.metrics = DeviceMetrics(device)
        self.algorithm.watch(self.metrics, self.env)
        self.episodes = EpisodeStatistics(config.num_streams, device, window=window_of(self.ranks.size))
        self.valid_key = VALID if self.env is not None and VALID in self.env.observation_spec.keys() else None
        self.phases = PhaseTimer(device)
        self.micro = MicroBatches(device, enabled=config.split_on_oom)
        self.update_number = 0
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self.frames = torch.zeros((), dtype=torch.int64, device=device)
        self._iteration = torch.zeros((), device=device)
        self._sums = torch.zeros(len(self.algorithm.statistics), device=device)
        self._applied = torch.zeros((), device=device)

    def _make_guard(self) -> None:
        self.guard = NumericalGuard(
            self.metrics,
            self._iteration,
            on_nan=self.config.on_nan,
            losses=self.algorithm.losses,
            parameters=self.algorithm.parameter_names,
            compile=self.kernels.function,
            parts=self.parts,
            ranks=self.ranks,
        )
        self.guard.watch(self.env)
        self._first_bad = self.guard.first_bad

    def _make_collector(self, policy: torch.nn.Module) -> Any:
        config = self.config
        frames = config.rows_per_iteration
        at_random = config.fill_iterations * frames * self.algorithm.fills_at_random
        if self.env is None:
            options = {"frames_per_batch": frames, "init_random_frames": at_random, "seed": config.seed}
            options |= {"device": self.device, "mode": self.mode, "compile": self.kernels.function}
            return host_collector(self.source, policy, **options)
        made = DeviceCollector(
            self.env,
            policy,
            frames_per_batch=frames,
            init_random_frames=at_random,
            mode=collector_mode(self.mode, self.env),
            compile_mode=config.compile_mode,
            compile_later=self.kernels.changes,
            track_traj_ids=False,
            exclude_keys=self.algorithm.excluded_keys,
            auto_register_policy_transforms=self.algorithm.slices is not None,
        )
        self.kernels.follow(made.compile_steps)
        return made

    def _make_buffer(self) -> DeviceReplayBuffer:
        config = self.config
        self._anneals_beta = config.sampler == "prioritized" and config.beta_final is not None
        options: dict[str, Any] = {}
        if config.sampler == "prioritized":
            options |= {"alpha": config.alpha, "beta": config.beta}
        if self._anneals_beta:
            options |= {"beta_end": config.beta_final, "anneal_steps": config.schedule_iterations}
        if self.valid_key is not None:
            options["mask_key"] = self.valid_key
        slices = self.algorithm.slices
        if slices is not None:
            # flags as they are stored: the true next observation is there at the end of a slice too
            options |= {"slice_len": slices.length, "within_episode": False, "truncated_key": None}
        return make_replay_buffer(
            config.capacity,
            batch_size=config.minibatch_size,
            device=self.device,
            sampler=config.sampler if slices is None else "slice",
            n_step=config.n_step,
            gamma=config.gamma,
            compact=config.compact,
            **options,
        )

    # -- state --------------------------------------------------------------------------------------------------------

    def _make_train_state(self) -> TrainState:
        """Everything that changes between two iterations."""
        counters = ("iterations_done", "_fill_left", "_iteration", "frames", "updates", "_first_bad")
        return TrainState(
            made_by=self.config.algorithm,
            settings=self.config.whole.card(),
            made_of=describe(self.env or self.collector, self.parts(), own_env=self.own_env),
            device=self.device,
            counters=Attributes(self, counters),
            collector=self.collector,
            episodes=self.episodes,
            metrics=self.metrics,
            micro_batches=self.micro,
            replay=self.buffer,
            **self.parts(),
            **self.normalization.parts(),
            **self.algorithm.experience(),
        )

    def summarise(self, row: dict[str, float]) -> dict[str, float]:
        """A row of metrics as it is logged: with what the algorithm adds to it."""
        return self.algorithm.summarise(row)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state in place; what settings decide, such as a temperature that is not learnt, stays theirs.

        Raises:
            ValueError: for other networks, or a buffer of another layout or sampler; nothing is changed then.
        """
        super().load_state_dict(state)
        self.algorithm.after_load()

    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads a checkpoint and restores it as :meth:`load_state_dict` does."""
        super().load(path)
        self.algorithm.after_load()

    def close(self) -> None:
        """Releases the graph and the envs."""
        self._captures.release()
        self.collector.shutdown()
