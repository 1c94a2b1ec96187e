"""What off-policy trainers share: fill a replay buffer, then collect, store, learn and measure on the device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast, get_args

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase

from torchrl_perf import envs
from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics, PhaseTimer
from torchrl_perf.replay import DevicePrioritizedSampler, DeviceReplayBuffer, DeviceStorage, make_replay_buffer
from torchrl_perf.runtime import Captured, capture
from torchrl_perf.runtime.compile import compiled
from torchrl_perf.trainers.checkpoint import (
    check_modules,
    load_checkpoint,
    load_random_state,
    random_state,
    save_checkpoint,
)
from torchrl_perf.trainers.config import EnvName
from torchrl_perf.trainers.device import resolve_device, resolve_mode
from torchrl_perf.trainers.off_policy_config import OffPolicyConfig

# no loss reads them: a root state is never done, and the start of an episode follows from the end of the last
NOT_STORED = ("collector", "done", "terminated", "truncated", "is_init", ("next", "is_init"))


class Stateful(Protocol):
    """Anything that is saved in a checkpoint: a module, an optimiser."""

    def state_dict(self) -> Mapping[str, Any]:
        """What changes during training."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restores it, in place."""
        ...


class OffPolicyTrainer(ABC):
    """An off-policy algorithm whose iteration (collect, store, learn, measure) is one function of device state.

    The first ``config.fill_iterations`` calls of :meth:`step` are :meth:`fill`: random actions, no update. Each later
    one is :meth:`iteration`. On CUDA that is captured into one CUDA graph, after two ordinary iterations that compile
    it; where the collector steps envs on the CPU, everything after the collection is (:meth:`digest`). On a CPU the
    same code runs eagerly, or compiled.

    An algorithm writes four methods: :meth:`build`, :meth:`parts`, :meth:`schedule`, :meth:`update`.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs]; by default the package's task that the config names.
        collector: collects ``[N, T]`` batches with the trainer's policy, such as a ``HostCollector``; by default a
            :class:`DeviceCollector` of the env.

    Attributes:
        statistics: names of the entries of the vector that an algorithm hands to :meth:`count_update`.
        excluded_keys: outputs of the policy that are not stored.
        policy: acts in the envs; what :meth:`build` returned.
        buffer: the replay buffer.
        updates: updates applied so far, int64 0-d on the device.
        frames: frames collected so far, int64 0-d on the device.
        iterations_done: iterations run so far (host integer).
        episodes: returns and lengths of finished episodes, on the device.
        metrics: accumulators on the device; flush them for the values.

    Raises:
        ValueError: at construction, for CUDA where there is none, or parts that do not fit each other.
    """

    statistics: ClassVar[tuple[str, ...]] = ()
    excluded_keys: ClassVar[tuple[NestedKey, ...]] = ()

    def __init__(
        self, config: OffPolicyConfig, *, env: EnvBase | None = None, collector: BaseCollector | None = None
    ) -> None:
        self.config = config
        given = cast("Any", collector if collector is not None else env)
        self.device = resolve_device(config.device if given is None else str(given.device))
        self.mode = resolve_mode(config.mode, self.device)
        torch.manual_seed(config.seed)
        self.env = env if given is not None else make_env(config, self.device)
        if self.env is None:
            self.env = getattr(collector, "env", None)
        self._make_state()
        self.policy = self.build()
        self.collector = cast("Any", collector if collector is not None else self._make_collector())
        self._check_parts()
        self.buffer = self._make_buffer()
        # a graph holds the whole iteration where the envs are tensors, and all but the collection where they are not
        graph = self.mode == "graph"
        self.collects_on_device = isinstance(self.collector, DeviceCollector) and not self.collector.waits_for_host
        # no eager audit: its different rounding would break bitwise resume; recording refuses host waits all the same
        whole = graph and self.collects_on_device
        self._iterate = capture(self.iteration, device=self.device, audit=False) if whole else self.iteration
        part = graph and not self.collects_on_device
        self._digest = capture(self.digest, device=self.device, audit=False) if part else self.digest

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

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One more iteration of the run, the filling ones first."""
        if self._fill_left:
            self._fill_left -= 1
            self.fill()
        else:
            self._iterate()

    def fill(self) -> None:
        """An iteration without updates; its actions are random."""
        batch = self.collect()
        self.schedule()
        self.store(batch)
        self.measure(batch)

    def iteration(self) -> None:
        """Collect a batch and learn from what is stored: no host read on the device path, static shapes."""
        with self.phases.phase("collect"):
            batch = self.collect()
        self._digest(batch)

    def digest(self, batch: TensorDictBase) -> None:
        """Everything of an iteration that follows the collection."""
        self.schedule()
        with self.phases.phase("store"):
            self.store(batch)
        with self.phases.phase("learn"):
            self.learn()
        with self.phases.phase("measure"):
            self.measure(batch)

    def collect(self) -> TensorDictBase:
        """A batch ``[N, T]`` of fresh transitions; its tensors are overwritten by the next one."""
        return self.collector.collect()

    def store(self, batch: TensorDictBase) -> None:
        """Writes the transitions to the buffer, and counts them."""
        self._iteration += 1
        self.frames += batch.numel()
        self.buffer.extend(batch.exclude(*NOT_STORED))
        if self._anneals_beta:
            cast("DevicePrioritizedSampler", self.buffer.sampler).step()

    def learn(self) -> None:
        """``updates_per_iteration`` updates, each from rows of its own."""
        self._sums.zero_()
        self._applied.zero_()
        for sample in self.samples():
            self.update(sample)
        means = (self._sums / self._applied).unbind()
        names = (f"train/{name}" for name in self.statistics)
        self.metrics.add_all(dict(zip(names, means, strict=True)))
        self.metrics.add("train/updates_applied", self._applied)

    def samples(self) -> Iterator[TensorDictBase]:
        """A sample ``[B]`` for each update of the iteration; uniform ones are drawn together, in one gather."""
        config = self.config
        rows = config.minibatch_size
        if config.draws_together:
            drawn = cast("TensorDictBase", self.buffer.sample(config.updates_per_iteration * rows))
            yield from drawn.split(rows)
            return
        for _ in range(config.updates_per_iteration):
            yield self.buffer.sample()

    def measure(self, batch: TensorDictBase) -> None:
        """Episode statistics and metrics of the iteration, accumulated on the device."""
        self.episodes.update(batch.get(("next", "reward")), batch.get(("next", "done")))
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
        return fn if self.mode == "eager" else compiled(fn)

    def count_update(self, statistics: Tensor, finite: Tensor) -> None:
        """Keeps the metrics of an update, and the first iteration that had one which was not finite.

        Args:
            statistics: ``[len(self.statistics)]`` float32, in that order.
            finite: bool 0-d, whether losses and gradients were; an update that was not is skipped and not counted.
        """
        self._sums += torch.where(finite, statistics, 0.0)
        self._applied += finite
        self.updates += finite
        first = (self._first_bad < 0) & ~finite
        self._first_bad.copy_(torch.where(first, self._iteration, self._first_bad))

    @property
    def progress(self) -> Tensor:
        """Share of the run's iterations that are done, float32 0-d on the device."""
        return self._iteration / self.config.iterations

    @property
    def rows(self) -> Tensor:
        """Rows in the buffer, int64 0-d on the device."""
        ring = cast("DeviceStorage", self.buffer.storage).ring
        return ring.length * ring.num_streams

    @property
    def first_bad_iteration(self) -> Tensor:
        """First iteration with a loss or gradient that was not finite, counted from 1, or -1: 0-d, on the device."""
        return self._first_bad

    # -- construction -------------------------------------------------------------------------------------------------

    def _make_state(self) -> None:
        """What changes from one iteration to the next on the device, beside the algorithm's parts, buffer and envs."""
        device, config = self.device, self.config
        self.iterations_done = 0
        self._fill_left = config.fill_iterations
        self.metrics = DeviceMetrics(device)
        self.episodes = EpisodeStatistics(config.num_envs, device)
        self.phases = PhaseTimer(device)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self.frames = torch.zeros((), dtype=torch.int64, device=device)
        self._iteration = torch.zeros((), device=device)
        self._sums = torch.zeros(len(self.statistics), device=device)
        self._applied = torch.zeros((), device=device)
        self._first_bad = torch.full((), -1.0, device=device)

    def _make_collector(self) -> DeviceCollector:
        config = self.config
        return DeviceCollector(
            cast("EnvBase", self.env),
            self.policy,
            frames_per_batch=config.batch_size,
            init_random_frames=config.fill_iterations * config.batch_size,
            mode="eager" if self.mode == "eager" else "compile",
            exclude_keys=self.excluded_keys,
        )

    def _make_buffer(self) -> DeviceReplayBuffer:
        config = self.config
        self._anneals_beta = config.beta_final is not None
        schedule = {"beta_end": config.beta_final, "anneal_steps": config.iterations} if self._anneals_beta else {}
        return make_replay_buffer(
            config.capacity,
            batch_size=config.minibatch_size,
            device=self.device,
            sampler=config.sampler,
            alpha=config.alpha,
            beta=config.beta,
            n_step=config.n_step,
            gamma=config.gamma,
            compact=config.compact,
            **schedule,
        )

    def _check_parts(self) -> None:
        """Refuse an env or a collector that does not fit the config or the policy."""
        config, collector = self.config, self.collector
        if self.env is not None and self.env.batch_size != (config.num_envs,):
            raise ValueError(
                f"env: expected batch_size [{config.num_envs}], the config's num_envs, received "
                f"{list(self.env.batch_size)}. Remedy: make both the same."
            )
        frames = collector.requested_frames_per_batch
        if frames != config.batch_size or getattr(collector, "num_envs", config.num_envs) != config.num_envs:
            raise ValueError(
                f"collector: expected {config.num_envs} envs and frames_per_batch={config.batch_size}, the config's "
                f"num_envs * num_steps, received {getattr(collector, 'num_envs', 'other')} envs and {frames}. Remedy: "
                "make both the same."
            )
        if collector.policy is not self.policy:
            raise ValueError(
                f"collector: expected it to act with the trainer's policy, received {type(collector.policy).__name__}. "
                "Remedy: pass the same object to the collector and to the trainer."
            )

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that changes between iterations, as tensors and plain scalars."""
        state = {
            "iterations_done": self.iterations_done,
            "fill_left": self._fill_left,
            "parts": {name: dict(part.state_dict()) for name, part in self.parts().items()},
            "collector": dict(self.collector.state_dict()),
            "episodes": self.episodes.state_dict(),
            "metrics": self.metrics.state_dict(),
            "counters": {name: tensor.clone() for name, tensor in self._counters().items()},
            "random": random_state(self.device),
        }
        state = tree_map_only(Tensor, Tensor.clone, state)
        state["buffer"] = self.buffer.state_dict()  # copies already, and the largest part
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict` in place, so that a captured graph stays valid.

        Training goes on bit for bit on the same kind of device, where the collector can restore its envs.

        Raises:
            ValueError: for other networks, or a buffer of another layout or sampler; nothing is changed then.
        """
        check_modules(self.parts(), state["parts"])
        self.buffer.load_state_dict(state["buffer"])  # before the rest: it refuses another layout
        self.iterations_done = state["iterations_done"]
        self._fill_left = state["fill_left"]
        for name, part in self.parts().items():
            part.load_state_dict(state["parts"][name])
        self.collector.load_state_dict(state["collector"])
        self.episodes.load_state_dict(state["episodes"])
        self.metrics.load_state_dict(state["metrics"])
        for name, tensor in self._counters().items():
            tensor.copy_(state["counters"][name])
        load_random_state(state["random"], self.device)

    def _counters(self) -> dict[str, Tensor]:
        return {
            "iteration": self._iteration,
            "frames": self.frames,
            "updates": self.updates,
            "first_bad": self._first_bad,
        }

    def save(self, path: str | Path) -> Path:
        """Writes a checkpoint."""
        return save_checkpoint(self.state_dict(), path)

    def load(self, path: str | Path) -> None:
        """Reads a checkpoint."""
        self.load_state_dict(load_checkpoint(path, self.device))

    def close(self) -> None:
        """Releases the graph and the envs."""
        for fn in (self._iterate, self._digest):
            if isinstance(fn, Captured):
                fn.release()
        self.collector.shutdown()


def make_env(config: OffPolicyConfig, device: torch.device) -> EnvBase:
    """The package's task that the config names, ``num_envs`` times.

    Raises:
        ValueError: for a name that is none of them.
    """
    if config.env not in get_args(EnvName):
        raise ValueError(
            f"env: expected one of {', '.join(get_args(EnvName))}, received {config.env!r}. Remedy: one of these, or "
            "a trainer made with env= or collector=."
        )
    return getattr(envs, config.env)(config.num_envs, device=device)
