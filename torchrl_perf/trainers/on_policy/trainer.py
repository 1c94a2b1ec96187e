"""The loop of every on-policy algorithm: collect, estimate, shuffled minibatches, guarded step, measure."""

from collections import ChainMap
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.collectors.native_autoreset import is_native
from torchrl_perf.functional.rows.permutation import random_permutation
from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics, PhaseTimer
from torchrl_perf.parallel import SharedGradients
from torchrl_perf.parallel.gradients import Reduced
from torchrl_perf.parallel.join import joined
from torchrl_perf.runtime.oom import MicroBatches, parts_of, refused
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
from torchrl_perf.trainers.on_policy.algorithm import OnPolicyAlgorithm, check_networks
from torchrl_perf.trainers.on_policy.minibatches import minibatch_indices
from torchrl_perf.trainers.on_policy.whole_step import WholeStep
from torchrl_perf.trainers.optim.optimization import adam_of
from torchrl_perf.trainers.run.joint_rows import window_of
from torchrl_perf.trainers.run.made_of import describe
from torchrl_perf.trainers.run.memory_estimate import announce_memory
from torchrl_perf.trainers.run.memory_floor import check_fits
from torchrl_perf.trainers.run.numerics import NumericalGuard
from torchrl_perf.trainers.run.state import Attributes, Checkpointed, Stateful, TrainState
from torchrl_perf.trainers.shards import config_of_rank
from torchrl_perf.trainers.sources import check_parts, device_of, find_source, host_collector
from torchrl_perf.trainers.tasks import make_env
from torchrl_perf.transforms.missing import fill_missing

if TYPE_CHECKING:
    from torchrl_perf.envs.from_callable import Made


class OnPolicyTrainer(Checkpointed):
    """An :class:`OnPolicyAlgorithm` whose iteration is one function of device state.

    On CUDA the whole iteration is captured into one CUDA graph, after two ordinary iterations; a replay costs the host
    one launch. In mode ``"auto"`` its kernels are eager ones at first, so that a run starts at once, and compiled after
    ``config.compiles_at`` iterations. Where envs step on the CPU, everything after the collection is captured
    (:meth:`digest`), and the policy acts in a graph of its own. On a CPU the same code runs eagerly, or compiled.

    The loop itself is :meth:`iteration`; :func:`~torchrl_perf.trainers.run.run.train` adds logging, checkpoints and a
    clean stop around it. A trainer of an algorithm only names the algorithm and its networks; it changes nothing of the
    loop. What is no attribute of the trainer is read from its algorithm, by :meth:`__getattr__`: ``actor``, ``critic``,
    ``gae``, ...

    Args:
        config: every choice of the run; after ``parallel.join()`` of the whole run, of which each rank does its part.
        env: a TorchRL env with batch_size [num_envs]; Gymnasium vector envs, one or a list of them (groups), of
            ``num_envs`` envs in all; or a class or function that makes an env of any kind, such as a ``gymnasium.Env``.
            By default the one that the config names.
        collector: collects ``[N, T]`` batches with the policy, such as a ``HostCollector``; by default one of the env.
        **networks: in place of the algorithm's default ones, by name.

    Attributes:
        config: of this rank's part; ``config.whole`` is what was given.
        ranks: the processes that learn together.
        algorithm: what is learnt, and how.
        policy: acts in the env.
        loss: the module whose parameters are learnt.
        own_env: whether env or collector were given, and the env not made as the config says.
        env: in tensors; None where the envs step on the CPU.
        source: where transitions come from; its ``specs`` say what they are.
        collects_on_device: whether the collection is a part of the captured iteration.
        kernels: decides by ``iterations_done`` whether functions are compiled.
        iterations_done: iterations run so far (host integer).
        episodes: returns and lengths of finished episodes, on the device.
        metrics: accumulators on the device; flush them for the values.
        guard: finds what is not finite, and judges the flushed rows.
        statistics: names of what the loss says of each minibatch; their means over the applied updates are metrics.
        valid_key: ``"valid"`` of an env that says which of its rows count, such as
            :class:`~torchrl_perf.envs.AgentStreams`, or None. The others reach no loss, statistic or episode.

    Raises:
        ValueError: at construction, for CUDA where there is none, or parts that do not fit each other.
    """

    algorithm_class: ClassVar[type[OnPolicyAlgorithm]]

    def __init__(
        self, config: Any, *, env: Any = None, collector: BaseCollector | None = None, **networks: nn.Module | None
    ) -> None:
        self.device = device_of(config, env, collector)
        self.ranks = joined(self.device)
        self.config = config = config_of_rank(config, self.ranks)
        self.mode = resolve_mode(config.mode, self.device)
        self.kernels = kernels_of(config, self.mode, self.device)
        check_fits(config, self.device)
        self.acceleration = acceleration_of(config)
        torch.manual_seed(config.seed)
        made = {"make_env": lambda config, device: self.make_env()}
        self.source = find_source(config, self.device, env=env, collector=collector, **made)
        self.env, self.own_env = self.source.env, self.source.own
        with self.source.closed_on_error():
            self._make_parts(networks)
        rows = config.batch_size // config.minibatches
        self.memory_estimate = announce_memory(self, [self.loss], minibatch_size=rows)

    def _make_parts(self, networks: dict[str, nn.Module | None]) -> None:
        """Algorithm, collector and optimiser, and what surrounds them."""
        config, specs, given = self.config, self.source.specs, self.source.collector
        if specs is None:
            raise ValueError(
                f"collector: expected one that tells its specs, received {type(given).__name__}. Remedy: env= beside "
                "it, or a HostCollector or DeviceCollector."
            )
        acting = self.algorithm_class.acting
        if given is not None and networks.get(acting) is None:
            networks[acting] = cast("Any", given).policy
        self.algorithm = self.algorithm_class(config, specs, self.acceleration, **networks)
        self.policy = self.algorithm.policy
        self.loss, self.statistics = self.algorithm.loss, self.algorithm.statistics
        self.valid_key = self.algorithm.valid_key
        learnt = [self.policy, *self.algorithm.networks.values(), self.loss]
        place = self.device, self.valid_key, self.ranks
        self.normalization = RunNormalization(config, config.num_envs, learnt, *place)
        check_networks(type(self).__name__, self.algorithm.networks, specs, config, self.algorithm.carried)
        fuse_when_compiled(self.kernels, learnt, self.config.precision)
        self._lacks_final_observations = is_native(specs)
        self.collector = cast("Any", given if given is not None else self._make_collector())
        check_parts(self.source, self.collector, self.policy, config)
        self.ranks.broadcast_(learnt)
        self.shared = SharedGradients(
            self.loss.parameters(), ranks=self.ranks, broadcast=False, compile=self.kernels.function
        )
        self.optimizer = adam_of(config, self.loss.parameters(), self.acceleration)
        self.metrics = DeviceMetrics(self.device)
        self.episodes = EpisodeStatistics(specs.batch_size[0], self.device, window=window_of(self.ranks.size))
        self.phases = PhaseTimer(self.device)
        self.iterations_done = 0
        self._make_state()
        self.train_state = self._make_train_state()
        self._make_functions()

    def _make_functions(self) -> None:
        """What is compiled or captured: the whole iteration, or all but the steps of envs that wait for the host."""
        compile_ = self.kernels.function
        self._losses_fn = compile_(self._losses)
        self._guard_fn = compile_(self._guard)
        self._adapt_fn = compile_(self._adapt)
        self._permutation_fn = compile_(random_permutation) if self.device.type == "cuda" else random_permutation
        self._part_losses_fn = compile_(self._part_losses)
        self._shared_losses_fn, self._shared_guard_fn = map(compile_, (self._shared_losses, self._shared_guard))
        self._summary_fn, self._merged_fn = map(compile_, (self.algorithm.summary, self.algorithm.merged))
        self._whole_step = self._make_whole_step()
        self.collects_on_device = collects_on_device(self.collector)
        self._captures = capture_iteration(self)

    def _make_whole_step(self) -> WholeStep | None:
        """What makes a minibatch's update in one function, or None."""
        # in a graph the parts have faster kernels; ranks agree on gradients before a step; and the compiler
        # differentiates no memory
        if self.device.type != "cpu" or self.ranks.several or self.algorithm.carried:
            return None
        return WholeStep(
            self.loss,
            self._losses,
            self._before_step,
            self._judge,
            written=(self._sums, self._applied, self._stopped, self._first_bad),
            optimizer=self.optimizer,
            kernels=self.kernels,
            micro=self.micro,
            counted=len(self.algorithm.losses),
        )

    def __getattr__(self, name: str) -> Any:
        """Public attributes of the algorithm, those that it documents."""
        return of_algorithm(self, name)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Columns that rows of metrics have beside those of every run and ``statistics``."""
        return ("train/learning_rate", "train/grad_norm", *self.algorithm.metric_names)

    def make_env(self) -> "EnvBase | Made":
        """The default env: the one that the config names."""
        return make_env(self.config, self.device)

    def _make_collector(self) -> Any:
        config = self.config
        if self.env is None:
            options = {"frames_per_batch": config.batch_size, "device": self.device, "seed": config.seed}
            options |= {"mode": self.mode, "compile": self.kernels.function}
            return host_collector(self.source, self.algorithm.policy, **options)
        made = DeviceCollector(
            self.env,
            cast("Any", self.algorithm.policy),
            frames_per_batch=config.batch_size,
            mode=collector_mode(self.mode, self.env),
            compile_mode=config.compile_mode,
            compile_later=self.kernels.changes,
            draw_ahead=True,
            track_traj_ids=False,
            exclude_keys=tuple(self.algorithm.unused_keys),
            auto_register_policy_transforms=bool(self.algorithm.carried),
        )
        self.kernels.follow(made.compile_steps)
        return made

    def _make_state(self) -> None:
        """What changes from one iteration to the next on the device, beside parameters, moments and envs."""
        device = self.device
        self._iteration = torch.zeros((), device=device)
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)
        self._sums = torch.zeros(len(self.statistics) + 1, device=device)
        self._applied = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)  # what backward passes begin with: torch would make one for each
        self.micro = MicroBatches(device, enabled=self.config.split_on_oom)
        self.guard = NumericalGuard(
            self.metrics,
            self._iteration,
            on_nan=self.config.on_nan,
            losses=self.algorithm.losses,
            parameters=[name for name, _ in self.loss.named_parameters()],
            compile=self.kernels.function,
            parts=lambda: {**self.algorithm.networks, "optimizer": self.optimizer},
            ranks=self.ranks,
        )
        self.guard.watch(self.env)
        self._first_bad = self.guard.first_bad

    @property
    def first_bad_iteration(self) -> Tensor:
        """First iteration with a number that was not finite, counted from 1, or -1: 0-d, on the device."""
        return self._first_bad

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One more iteration of the run.

        In a loop of your own count it, ``trainer.iterations_done += 1``, as :func:`train` does: the number decides when
        kernels are compiled.
        """
        self.kernels.settle(self.iterations_done, self.train_state.notes, *self._captures)
        with as_in_mode(self.mode):
            self.kernels.call(self.micro.call, self._captures.iterate)

    def iteration(self) -> None:
        """Collect a batch, compute advantages, update on shuffled minibatches, measure: no host read, static shapes."""
        self.schedule()
        with self.phases.phase("collect"):
            batch = self.collect()
        self.kernels.call(self.micro.call, self._captures.digest, batch)

    def digest(self, batch: TensorDictBase) -> None:
        """Everything of an iteration that follows the collection."""
        with self.phases.phase("advantage"):
            self.guard.check(self.watched(batch))
            batch = self.advantage(batch)
        with self.phases.phase("update"):
            self.update(batch)
        with self.phases.phase("measure"):
            self.measure(batch)

    def schedule(self) -> None:
        """The learning rate of this iteration, and what the algorithm changes over the run."""
        config = self.config
        done = self._iteration / config.schedule_iterations
        if config.schedule_steps is not None:
            done = done.clamp_max(1.0)  # where the run is longer than its schedules
        if config.anneal_learning_rate and not self.algorithm.adapts_learning_rate:
            self.optimizer.learning_rate.copy_(config.learning_rate * (1.0 - done))
        self.algorithm.schedule(self._iteration)
        self._iteration += 1

    @accelerated
    def collect(self) -> TensorDictBase:
        """A batch ``[N, T]`` of fresh transitions; its tensors are overwritten by the next one."""
        with refused("collect", "fewer num_envs or num_steps, or a smaller network"):
            batch = self.collector.collect().copy()
        unused = self.algorithm.unused_keys
        # a collector of envs in tensors leaves them out of its memory
        return batch if self.env is not None else batch.exclude(*unused)

    def watched(self, batch: TensorDictBase) -> TensorDictBase:
        """The part of a batch in which the guard looks for what is not finite: all that the algorithm names.

        An env that resets itself under TorchRL's mark has NaN for its final observations, which is no fault.
        """
        batch = self.algorithm.watched(batch)
        if not self._lacks_final_observations:
            return batch
        batch = batch.copy()
        ended = batch.get(("next", "done"))
        return batch.set("next", fill_missing(batch.get("next").copy(), batch, ended))

    @accelerated
    def advantage(self, batch: TensorDictBase) -> TensorDictBase:
        """Adds to the batch what the updates learn from: the algorithm's ``estimate``."""
        self.normalization.observe_rewards(batch)
        if not self.normalization.changes_rewards:
            return self.algorithm.estimate(batch)
        estimated = self.algorithm.estimate(self.normalization.learnt(batch))
        return estimated.set(("next", "reward"), batch.get(("next", "reward")))  # what episodes are measured by

    @accelerated
    def update(self, batch: TensorDictBase) -> None:
        """``epochs`` passes over the batch in shuffled minibatches."""
        rows = self.algorithm.rows(batch)
        order = self.guard.repair(rows)[1] if self.guard.repairs else None
        self._stopped.zero_()
        self._sums.zero_()
        self._applied.zero_()
        for index, summary in self._minibatches(rows, order):
            noted = None if self._whole_step is None else self._whole_step(rows, index)
            if noted is not None:
                self.guard.note(*noted)
                continue
            attempt = partial(self._gradients, rows, index, summary=summary)
            total, statistics = self.micro.run(attempt, len(index), undo=self.optimizer.zero_grad)
            found = None
            if self.ranks.several:
                found = self._agreed(total, statistics, self._weight(rows, index))
                total, statistics = found.values
            if self.algorithm.adapts_learning_rate:
                self._adapt_fn(statistics, self.optimizer.learning_rate)
            norms = self.optimizer.parameter_norms() if found is None else found.norms
            if found is None or norms is not None:
                grad_scale, skip, fault = self._guard_fn(total, norms, statistics)
            else:
                grad_scale, skip, fault, norms = self._shared_guard_fn(total, found.flat, statistics)
            self.optimizer.step(grad_scale, skip)
            self.guard.note(statistics[: len(self.algorithm.losses)], norms, fault)

    def measure(self, batch: TensorDictBase) -> None:
        """Episode statistics and metrics of the iteration, accumulated on the device."""
        self.guard.report()
        self.normalization.observe(batch)  # after the updates: the batch was collected with the statistics before
        valid = None if self.valid_key is None else batch.get(self.valid_key).view(*batch.shape, 1)
        self.episodes.update(self.guard.finite(batch.get(("next", "reward"))), batch.get(("next", "done")), valid)
        means = (self._sums / self._applied).unbind()
        names = (*(f"train/{name}" for name in self.statistics), "train/grad_norm")
        # in few calls, whose values are stacked
        self.metrics.add_all(dict(zip(names, means, strict=True)) | {"train/updates_applied": self._applied})
        state = {"micro_batches": self.micro.count, "learning_rate": self.optimizer.learning_rate}
        self.metrics.add_all({f"train/{name}": value for name, value in state.items()}, "last")
        episodes = {"mean_return": self.episodes.mean_return, "mean_length": self.episodes.mean_length}
        episodes = {f"episode/{name}": value for name, value in episodes.items()}
        self.metrics.add_all(episodes, "last", mask=self.episodes.count > 0)
        self.metrics.add("episode/count", self.episodes.count, reduce="last")
        self.metrics.add("train/first_bad_iteration", self._first_bad, reduce="last")
        self.algorithm.measure(batch, self.metrics, self.guard)

    # -- one minibatch ------------------------------------------------------------------------------------------------

    def _minibatches(self, rows: TensorDictBase, order: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Indices of each minibatch, and what the ranks' parts of it have in common, in one collective for all."""
        drawn = minibatch_indices(
            rows.shape[0],
            epochs=self.config.epochs,
            parts=self.config.minibatches,
            device=self.device,
            permutation=self._permutation_fn,
        )
        indices = (shuffled if order is None else order[shuffled] for shuffled in drawn)
        if not self.ranks.several:
            yield from ((index, None) for index in indices)
            return
        known = list(indices)
        parts = self._summary_fn(rows, torch.stack(known))
        if parts is None:
            yield from ((index, None) for index in known)
            return
        yield from zip(known, self._merged_fn(self.ranks.gathered(parts)).unbind(), strict=True)

    def _weight(self, rows: TensorDictBase, index: Tensor) -> Tensor | None:
        """How much this rank's part of a minibatch counts: its rows that do; None where all ranks' count the same."""
        if not self.ranks.several or self.valid_key is None:
            return None
        return rows.get(self.valid_key)[index].sum().to(torch.float32)

    @property
    def _share(self) -> float:
        """What gradients are multiplied by where they are computed, so that their sum over ranks is the mean."""
        return 1.0 / self.ranks.size if self.valid_key is None else 1.0

    def _agreed(self, total: Tensor, statistics: Tensor, weight: Tensor | None) -> Reduced:
        """Makes the gradients those of all ranks; with the loss, 0-d, and the statistics of all."""
        grads = [param.grad for param in self.shared.params]
        found = self.shared.reduced(grads, total, statistics, weight=weight, divided=weight is None)
        self.shared.put_back(found)
        return found

    def _gradients(
        self, rows: TensorDictBase, index: Tensor, parts: int, summary: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the rows at ``index [B]``, in micro-batches; the loss 0-d and the statistics, detached.

        Of several ranks all of them are a rank's share of the mean.
        """
        self.optimizer.zero_grad()
        if parts == 1:
            if self.ranks.several:
                with self.algorithm.in_parts():
                    total, statistics = self._shared_losses_fn(rows, index, summary)
            else:
                total, statistics = self._losses_fn(rows, index)
            self.optimizer.scaled(total).backward(self._one.to(total.dtype))
            return total.detach(), statistics
        whole = self.algorithm.whole(rows, index, summary)
        pieces = {key: parts_of(value, parts) for key, value in whole.entries.items()}
        sums: list[tuple[Tensor, Tensor]] = []
        with self.algorithm.in_parts():
            for number, part in enumerate(parts_of(index, parts, whole.counts)):
                entries = {key: piece[number].batch for key, piece in pieces.items()}
                total, statistics = self._part_losses_fn(rows, part.batch, entries)
                weight = part.weight * self._share
                self.optimizer.scaled(total * weight).backward()
                sums.append((total.detach() * weight, statistics * weight))
        totals, statistics = zip(*sums, strict=True)
        return torch.stack(totals).sum(), torch.stack(statistics).sum(0)

    def _shared_losses(self, rows: TensorDictBase, index: Tensor, summary: Tensor | None) -> tuple[Tensor, Tensor]:
        """A rank's share of :meth:`_losses`, with what its rows have to know of the other ranks' rows."""
        whole = self.algorithm.whole(rows, index, summary)
        total, statistics = self._part_losses(rows, index, whole.entries)
        return total * self._share, statistics * self._share

    def _part_losses(self, rows: TensorDictBase, index: Tensor, entries: dict[NestedKey, Tensor]) -> Any:
        """:meth:`_losses` with entries ``[b, *]`` that were found from the whole minibatch."""
        minibatch = cast("TensorDictBase", rows[index])
        for key, value in entries.items():
            minibatch.set(key, value)
        return self._sum_losses(minibatch)

    def _losses(self, rows: TensorDictBase, index: Tensor) -> tuple[Tensor, Tensor]:
        """Total loss of the rows at ``index``, and the statistics as one vector."""
        return self._sum_losses(rows[index])

    def _sum_losses(self, minibatch: TensorDictBase) -> tuple[Tensor, Tensor]:
        total, statistics = self.algorithm.minibatch_loss(minibatch)
        return total, torch.stack([statistics[name].detach() for name in self.statistics])

    def _adapt(self, statistics: Tensor, learning_rate: Tensor) -> None:
        """The learning rate of this step; an argument, since Dynamo cannot look into this optimiser."""
        named = dict(zip(self.statistics, statistics.unbind(), strict=True))
        self.algorithm.adapt(named, learning_rate, ~self._stopped)

    def _before_step(self, statistics: Tensor, learning_rate: Tensor) -> Tensor:
        """What changes between the gradients and their step; whether no more steps are wanted, bool 0-d."""
        if self.algorithm.adapts_learning_rate:
            self._adapt(statistics, learning_rate)
        self._note_stop(statistics)
        return self._stopped

    def _note_stop(self, statistics: Tensor) -> None:
        stop = self.algorithm.stop(dict(zip(self.statistics, statistics.unbind(), strict=True)))
        if stop is not None:
            self._stopped.logical_or_(stop)

    def _guard(self, total: Tensor, norms: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Decides on the device whether a step is taken, and with which gradient scale; keeps the metrics' sums.

        The third result is whether loss or gradient are bad themselves, and not just too large for the loss scale.
        """
        return self._decide(total, self.optimizer.joint_norm(norms), statistics)

    def _shared_guard(self, total: Tensor, flat: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same with the norm of gradients that lie one after the other; and their norms ``[P]``, a new tensor."""
        decided = self._decide(total, self.optimizer.flat_norm(flat, self.shared.ends), statistics)
        # the next update writes the optimiser's; a compiler writes both in one pass
        return *decided, self.optimizer.grad_norms.clone()

    def _decide(self, total: Tensor, grad_norm: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._note_stop(statistics)
        apply = total.isfinite() & grad_norm.isfinite() & ~self._stopped
        fault = self._judge(total, grad_norm, statistics, apply)
        return (grad_norm / self.config.max_grad_norm).clamp_min(1.0), (~apply).to(torch.float32), fault

    def _judge(self, total: Tensor, grad_norm: Tensor, statistics: Tensor, taken: Tensor) -> Tensor:
        """Keeps the metrics' sums of an update whose step was taken; whether its loss or gradient are bad, bool 0-d."""
        self._sums += torch.where(taken, torch.cat([statistics, grad_norm.view(1)]), 0.0)
        self._applied += taken
        fault = self.optimizer.is_fault(total, grad_norm)
        self.guard.mark_bad(fault)
        return fault

    # -- memory and state ---------------------------------------------------------------------------------------------

    def probe(self, rows: TensorDictBase) -> None:
        """The passes of an update on ``rows [b]``, eagerly, to see how much memory they take."""
        rows = self.algorithm.probe_rows(rows)
        self._losses(rows, torch.arange(len(rows), device=self.device))[0].backward()

    def probe_batch(self, batch: TensorDictBase) -> None:
        """What is estimated of a batch ``[n, T]``."""
        self.algorithm.estimate(batch)

    def _make_train_state(self) -> TrainState:
        """Everything that changes between two iterations."""
        counters = Attributes(self, ("iterations_done", "_iteration", "_first_bad"))
        return TrainState(
            made_by=self.config.algorithm,
            settings=self.config.whole.card(),
            made_of=describe(self.env if self.env is not None else self.collector, self.parts(), own_env=self.own_env),
            device=self.device,
            counters=ChainMap(counters, self.algorithm.schedules),
            **self.parts(),
        )

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds, by name, beside the counters."""
        return {
            **self.algorithm.networks,
            "optimizer": self.optimizer,
            "collector": self.collector,
            "episodes": self.episodes,
            "metrics": self.metrics,
            "micro_batches": self.micro,
            **self.normalization.parts(),
            **self.algorithm.parts(),
        }

    def close(self) -> None:
        """Releases the graph and the envs."""
        self._captures.release()
        self.collector.shutdown()
