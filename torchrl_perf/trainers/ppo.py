"""Proximal policy optimisation (arXiv:1707.06347) with every step of the loop on the device."""

from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.objectives import ClipPPOLoss

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.collectors.native_autoreset import is_native
from torchrl_perf.functional.permutation import random_permutation
from torchrl_perf.functional.ppo import normalized_advantage
from torchrl_perf.functional.schedules import linear
from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics, PhaseTimer
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.runtime import Captured, capture
from torchrl_perf.runtime.oom import MicroBatches, parts_of, refused
from torchrl_perf.trainers.actor_critic import make_actor, make_critic
from torchrl_perf.trainers.config import PPOConfig
from torchrl_perf.trainers.device import accelerated, acceleration_of, resolve_device, resolve_mode
from torchrl_perf.trainers.minibatches import flat_rows, minibatch_indices
from torchrl_perf.trainers.optimization import GuardedAdam
from torchrl_perf.trainers.recurrent import refuse_recurrent
from torchrl_perf.trainers.run.made_of import describe
from torchrl_perf.trainers.run.memory_estimate import announce_memory
from torchrl_perf.trainers.run.memory_floor import check_fits
from torchrl_perf.trainers.run.numerics import NumericalGuard
from torchrl_perf.trainers.run.state import Attributes, Checkpointed, Stateful, TrainState
from torchrl_perf.trainers.tasks import make_env
from torchrl_perf.transforms import GAETransform
from torchrl_perf.transforms.missing import fill_missing

LOSSES = ("loss_objective", "loss_critic", "loss_entropy")
STATISTICS = (*LOSSES, "entropy", "kl_approx", "clip_fraction")
VALID = "valid"  # bool [N, 1], the rows of an env that count: see AgentStreams


class PPOTrainer(Checkpointed):
    """PPO whose iteration (collect, advantage, update, measure) is one function of device state.

    On CUDA the whole iteration is captured into one CUDA graph, after two ordinary iterations that compile it; a replay
    costs the host one launch. On a CPU the same code runs eagerly, or compiled. The loop itself is :meth:`iteration`;
    :func:`~torchrl_perf.trainers.run.run.train` adds logging, checkpoints and a clean stop around it.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs]; by default the package's task that the config names.
        actor: a probabilistic TensorDict module for the env's action; by default :func:`make_actor`.
        critic: a TensorDict module that writes ``state_value``; by default :func:`make_critic`.

    Attributes:
        own_env: whether the env was given, and not made as the config says.
        iterations_done: iterations run so far (host integer).
        episodes: returns and lengths of finished episodes, on the device.
        metrics: accumulators on the device; flush them for the values.
        guard: finds what is not finite, and judges the flushed rows.
        statistics: names of what the loss says of each minibatch; their means over the applied updates are metrics.
        value_size: numbers that the critic gives for a state, 1 unless a subclass has components.
        valid_key: ``"valid"`` of an env that says which of its rows count, such as
            :class:`~torchrl_perf.envs.AgentStreams`, or None. The others reach no loss, statistic or episode.

    Raises:
        ValueError: at construction, for CUDA where there is none, or parts that do not fit each other.
    """

    value_size: int = 1

    def __init__(
        self,
        config: PPOConfig,
        *,
        env: EnvBase | None = None,
        actor: torch.nn.Module | None = None,
        critic: torch.nn.Module | None = None,
    ) -> None:
        self.config, self.own_env = config, env is not None
        self.device = resolve_device(config.device) if env is None else env.device
        self.mode = resolve_mode(config.mode, self.device)
        check_fits(config, self.device)
        self.acceleration = acceleration_of(config)
        torch.manual_seed(config.seed)
        self.env = env or self.make_env()
        self.actor = self.acceleration.policy(actor or self.make_actor(self.env))
        self.critic = self.acceleration.policy(critic or self.make_critic(self.env))
        self._check_parts()
        self.valid_key = self._find_valid_key()
        self._lacks_final_observations = is_native(self.env)
        # the old policy's parameters, from which the divergence is computed
        closed_form = config.kl_estimate == "closed_form"
        self.statistics = (*STATISTICS, "kl") if closed_form else STATISTICS
        self.collector = DeviceCollector(
            self.env,
            self.actor,
            frames_per_batch=config.batch_size,
            mode="eager" if self.mode == "eager" else "compile",
            compile_mode=config.compile_mode,
            exclude_keys=() if closed_form else getattr(self.actor, "param_keys", ("logits", "loc", "scale")),
        )
        if self.mode == "graph" and self.collector.waits_for_host:
            raise ValueError(
                f"env: expected one whose _reset honours its mask without a host read under mode 'graph', received "
                f"{type(self.env).__name__}. Remedy: a DeviceEnv, or mode='compile'."
            )
        self.gae = self.make_gae()
        self.loss = self._make_loss()
        self.optimizer = GuardedAdam(
            self.loss.parameters(),
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            acceleration=self.acceleration,
        )
        self.metrics = DeviceMetrics(self.device)
        self.episodes = EpisodeStatistics(self.env.batch_size[0], self.device)
        self.phases = PhaseTimer(self.device)
        self.iterations_done = 0
        self._make_state()
        self.train_state = self._make_train_state()
        compile_ = partial(self.acceleration.compile, device=self.device) if self.mode != "eager" else lambda fn: fn
        self._losses_fn = compile_(self._losses)
        self._guard_fn = compile_(self._guard)
        self._permutation_fn = compile_(random_permutation) if self.device.type == "cuda" else random_permutation
        self._part_losses_fn = compile_(self._part_losses)
        # no eager audit: its different rounding would break bitwise resume; recording refuses host waits all the same
        graph = self.mode == "graph"
        self._iterate = capture(self.iteration, device=self.device, audit=False) if graph else self.iteration
        rows = config.batch_size // config.minibatches
        self.memory_estimate = announce_memory(self, [self.loss], minibatch_size=rows)

    def make_env(self) -> EnvBase:
        """The default env: the package's task that the config names."""
        return make_env(self.config, self.device)

    def make_actor(self, env: EnvBase) -> torch.nn.Module:
        """The default actor, :func:`make_actor`."""
        return make_actor(env, self.config)

    def make_critic(self, env: EnvBase) -> torch.nn.Module:
        """The default critic, :func:`make_critic`."""
        return make_critic(env, self.config)

    def make_gae(self) -> GAETransform:
        """What computes advantages; writes ``advantage``, ``value_target`` and ``state_value`` into a batch."""
        return GAETransform(gamma=self.config.gamma, lmbda=self.config.lmbda, value_network=self.critic)

    def _check_parts(self) -> None:
        """Refuse an env or a critic that does not fit; the collector checks the actor."""
        refuse_recurrent(type(self).__name__, {"actor": self.actor, "critic": self.critic}, env=self.env)
        if self.env.batch_size != (self.config.num_envs,):
            raise ValueError(
                f"env: expected batch_size [{self.config.num_envs}], the config's num_envs, received "
                f"{list(self.env.batch_size)}. Remedy: make both the same."
            )
        root = self.env.fake_tensordict().exclude("next")
        needed = [*getattr(self.critic, "in_keys", [])]
        if absent := [key for key in needed if key not in root.keys(True)]:
            raise ValueError(
                f"critic: expected in_keys among {sorted(map(str, root.keys(True, True)))}, which the env gives, "
                f"received {absent}. Remedy: set its in_keys."
            )

    def _find_valid_key(self) -> str | None:
        """The env's flag of the rows that count, where it has one."""
        spec = self.env.observation_spec.get(VALID, None)
        batch = self.env.batch_size
        if spec is None or spec.dtype != torch.bool or spec.shape not in (batch, (*batch, 1)):
            return None
        if self.config.loss == "torchrl":
            raise ValueError(
                f"loss: expected 'device' for {type(self.env).__name__}, whose rows do not all count ({VALID!r}), "
                "received 'torchrl'. Remedy: loss='device'."
            )
        return VALID

    def _make_loss(self) -> ClipPPOLoss:
        config = self.config
        value_range = config.clip_epsilon if config.value_clip_epsilon is None else config.value_clip_epsilon
        own: dict[str, Any] = {
            "closed_form_kl": "kl" in self.statistics,
            "entropy_floor": config.entropy_floor,
            "entropy_floor_coeff": config.entropy_floor_coeff,
            "valid_key": self.valid_key,
        }
        kind, own = (DeviceClipPPOLoss, own) if config.loss == "device" else (ClipPPOLoss, {})
        loss = kind(
            self.actor,
            self.critic,
            **own,
            clip_epsilon=config.clip_epsilon,
            clip_value=value_range if config.clip_value else False,
            normalize_advantage=config.normalize_advantage,
            entropy_coeff=config.entropy_coeff,
            critic_coeff=config.critic_coeff,
            loss_critic_type="l2",
            functional=False,
        )
        if config.loss == "torchrl" and config.clip_value:
            # it asks at each call whether this is set: of a buffer, that is a host read
            del loss.clip_value
            loss.clip_value = value_range
        keys = loss.tensor_keys
        read = [
            *cast("list[NestedKey]", self.actor.in_keys),
            *cast("list[NestedKey]", self.critic.in_keys),
            *(keys.advantage, keys.value_target, keys.value),
        ]
        for key in (keys.action, keys.sample_log_prob):  # a list of them where the action has several parts
            read += [key] if isinstance(key, str | tuple) else cast("list[NestedKey]", key)
        read += cast("Any", self.actor)[-1].in_keys if "kl" in self.statistics else []
        read += [] if self.valid_key is None else [self.valid_key]
        self._loss_keys = list(dict.fromkeys(read))
        return loss

    def _make_state(self) -> None:
        """What changes from one iteration to the next on the device, beside parameters, moments and envs."""
        device = self.device
        self._entropy_coeff = cast("Tensor", self.loss.entropy_coeff)
        self._iteration = torch.zeros((), device=device)
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)
        self._sums = torch.zeros(len(self.statistics) + 1, device=device)
        self._applied = torch.zeros((), device=device)
        self.micro = MicroBatches(device, enabled=self.config.split_on_oom)
        self.guard = NumericalGuard(
            self.metrics,
            self._iteration,
            on_nan=self.config.on_nan,
            losses=LOSSES,
            parameters=[name for name, _ in self.loss.named_parameters()],
            compile=None if self.mode == "eager" else partial(self.acceleration.compile, device=self.device),
            parts=lambda: {"actor": self.actor, "critic": self.critic, "optimizer": self.optimizer},
        )
        self.guard.watch(self.env)
        self._first_bad = self.guard.first_bad

    @property
    def first_bad_iteration(self) -> Tensor:
        """First iteration with a number that was not finite, counted from 1, or -1: 0-d, on the device."""
        return self._first_bad

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One more iteration of the run."""
        self.micro.call(self._iterate)

    def iteration(self) -> None:
        """Collect a batch, compute advantages, update on shuffled minibatches, measure: no host read, static shapes."""
        self.schedule()
        with self.phases.phase("collect"):
            batch = self.collect()
            self.guard.check(self.watched(batch))
        with self.phases.phase("advantage"):
            batch = self.advantage(batch)
        with self.phases.phase("update"):
            self.update(batch)
        with self.phases.phase("measure"):
            self.measure(batch)

    def schedule(self) -> None:
        """Learning rate and entropy weight of this iteration."""
        config = self.config
        done = self._iteration / config.schedule_iterations
        if config.schedule_steps is not None:
            done = done.clamp_max(1.0)  # where the run is longer than its schedules
        if config.anneal_learning_rate:
            self.optimizer.learning_rate.copy_(config.learning_rate * (1.0 - done))
        if config.entropy_coeff_final is not None:
            frames = config.entropy_frames
            length = config.schedule_iterations if frames is None else frames / config.batch_size
            ends = config.entropy_coeff, config.entropy_coeff_final
            self._entropy_coeff.copy_(linear(self._iteration, *ends, length))
        self._iteration += 1

    @accelerated
    def collect(self) -> TensorDictBase:
        """A batch ``[N, T]`` of fresh transitions; its tensors are overwritten by the next one."""
        with refused("collect", "fewer num_envs or num_steps, or a smaller network"):
            return self.collector.collect().copy()

    def watched(self, batch: TensorDictBase) -> TensorDictBase:
        """The part of a batch in which the guard looks for what is not finite: all of it.

        An env that resets itself under TorchRL's mark has NaN for its final observations, which is no fault.
        """
        if not self._lacks_final_observations:
            return batch
        batch = batch.copy()
        ended = batch.get(("next", "done"))
        return batch.set("next", fill_missing(batch.get("next").copy(), batch, ended))

    @accelerated
    def advantage(self, batch: TensorDictBase) -> TensorDictBase:
        """Adds ``advantage``, ``value_target`` and ``state_value`` to the batch."""
        return self.gae(batch)

    @accelerated
    def update(self, batch: TensorDictBase) -> None:
        """``epochs`` passes over the batch in shuffled minibatches."""
        rows = flat_rows(batch, self._loss_keys)
        order = self.guard.repair(rows)[1] if self.guard.repairs else None
        self._stopped.zero_()
        self._sums.zero_()
        self._applied.zero_()
        for shuffled in minibatch_indices(
            rows.shape[0],
            epochs=self.config.epochs,
            parts=self.config.minibatches,
            device=self.device,
            permutation=self._permutation_fn,
        ):
            index = shuffled if order is None else order[shuffled]
            attempt = partial(self._gradients, rows, index)
            total, statistics = self.micro.run(attempt, len(index), undo=self.optimizer.zero_grad)
            grad_scale, skip, fault = self._guard_fn(total, self.optimizer.grad_norm(), statistics)
            self.optimizer.step(grad_scale, skip)
            self.guard.note(statistics[: len(LOSSES)], self.optimizer.grad_norms, fault)

    def measure(self, batch: TensorDictBase) -> None:
        """Episode statistics and metrics of the iteration, accumulated on the device."""
        self.guard.report()
        valid = None if self.valid_key is None else batch.get(self.valid_key).view(*batch.shape, 1)
        self.episodes.update(self.guard.finite(batch.get(("next", "reward"))), batch.get(("next", "done")), valid)
        means = (self._sums / self._applied).unbind()
        names = (*(f"train/{name}" for name in self.statistics), "train/grad_norm")
        self.metrics.add_all(dict(zip(names, means, strict=True)))
        self.metrics.add("train/updates_applied", self._applied)
        self.metrics.add("train/micro_batches", self.micro.count, reduce="last")
        self.metrics.add("train/learning_rate", self.optimizer.learning_rate, reduce="last")
        finished = self.episodes.count > 0
        self.metrics.add("episode/mean_return", self.episodes.mean_return, reduce="last", mask=finished)
        self.metrics.add("episode/mean_length", self.episodes.mean_length, reduce="last", mask=finished)
        self.metrics.add("episode/count", self.episodes.count, reduce="last")
        self.metrics.add("train/first_bad_iteration", self._first_bad, reduce="last")

    # -- one minibatch ------------------------------------------------------------------------------------------------

    def _gradients(self, rows: TensorDictBase, index: Tensor, parts: int) -> tuple[Tensor, Tensor]:
        """Gradients of the rows at ``index [B]``, in micro-batches; the loss 0-d and the statistics, detached."""
        self.optimizer.zero_grad()
        if parts == 1:
            total, statistics = self._losses_fn(rows, index)
            self.optimizer.scaled(total).backward()
            return total.detach(), statistics
        # normalised over the whole minibatch, and not in each part
        advantage = rows.get(self.loss.tensor_keys.advantage)[index]
        valid = self._valid_rows(rows, index, advantage)
        if self.config.normalize_advantage:
            advantage = normalized_advantage(advantage, valid)
        # a part counts as much as it has rows that count
        counts = None if valid is None else valid.flatten(1).sum(-1) if valid.ndim > 1 else valid
        counts = None if counts is None else counts.to(torch.float32)
        sums: list[tuple[Tensor, Tensor]] = []
        self.loss.normalize_advantage = False
        try:
            for part, chosen in zip(parts_of(index, parts, counts), parts_of(advantage, parts), strict=True):
                total, statistics = self._part_losses_fn(rows, part.batch, chosen.batch)
                self.optimizer.scaled(total * part.weight).backward()
                sums.append((total.detach() * part.weight, statistics * part.weight))
        finally:
            self.loss.normalize_advantage = self.config.normalize_advantage
        totals, statistics = zip(*sums, strict=True)
        return torch.stack(totals).sum(), torch.stack(statistics).sum(0)

    def _valid_rows(self, rows: TensorDictBase, index: Tensor, advantage: Tensor) -> Tensor | None:
        """The flags of the rows at ``index`` that the loss counts, or None for all of them."""
        if not isinstance(self.loss, DeviceClipPPOLoss):
            return None
        flags = rows.select(*self.loss.valid_keys, strict=False)
        return self.loss.valid_rows(cast("TensorDictBase", flags[index]), advantage.shape[:-1])

    def probe(self, rows: TensorDictBase) -> None:
        """The passes of an update on ``rows [b]``, eagerly, to see how much memory they take."""
        keys = self.loss.tensor_keys
        rows.set(keys.advantage, torch.zeros(len(rows), 1, device=self.device))
        for key in (keys.value_target, keys.value):
            rows.set(key, torch.zeros(len(rows), self.value_size, device=self.device))
        self._losses(rows, torch.arange(len(rows), device=self.device))[0].backward()

    def probe_batch(self, batch: TensorDictBase) -> None:
        """The advantages of a batch ``[n, T]``."""
        self.gae(batch)

    def _part_losses(self, rows: TensorDictBase, index: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`_losses` with advantages ``[b, 1]`` that are normalised already."""
        minibatch = cast("TensorDictBase", rows[index])
        return self._sum_losses(minibatch.set(self.loss.tensor_keys.advantage, advantage))

    def _losses(self, rows: TensorDictBase, index: Tensor) -> tuple[Tensor, Tensor]:
        """Total loss of the rows at ``index``, and the statistics as one vector."""
        return self._sum_losses(rows[index])

    def _sum_losses(self, minibatch: TensorDictBase) -> tuple[Tensor, Tensor]:
        losses = self.loss(minibatch)
        total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        return total, torch.stack([losses[name].detach() for name in self.statistics])

    def _guard(self, total: Tensor, grad_norm: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Decides on the device whether a step is taken, and with which gradient scale; keeps the metrics' sums.

        The third result is whether loss or gradient are bad themselves, and not just too large for the loss scale.
        """
        finite = total.isfinite() & grad_norm.isfinite()
        if self.config.target_kl is not None:
            kl = statistics[self.statistics.index("kl" if "kl" in self.statistics else "kl_approx")]
            self._stopped.logical_or_(kl > self.config.target_kl)
        apply = finite & ~self._stopped
        row = torch.cat([statistics, grad_norm.view(1)])
        self._sums += torch.where(apply, row, 0.0)
        self._applied += apply
        fault = self.optimizer.is_fault(total, grad_norm)
        self.guard.mark_bad(fault)
        return (grad_norm / self.config.max_grad_norm).clamp_min(1.0), (~apply).to(torch.float32), fault

    # -- state --------------------------------------------------------------------------------------------------------

    def _make_train_state(self) -> TrainState:
        """Everything that changes between two iterations."""
        counters = Attributes(self, ("iterations_done", "_iteration", "_first_bad", "_entropy_coeff"))
        return TrainState(
            made_by=self.config.algorithm,
            made_of=describe(self.env, self.parts(), own_env=self.own_env),
            device=self.device,
            counters=counters,
            **self.parts(),
        )

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds, by name, beside the counters."""
        return {
            "actor": self.actor,
            "critic": self.critic,
            "optimizer": self.optimizer,
            "collector": self.collector,
            "episodes": self.episodes,
            "metrics": self.metrics,
            "micro_batches": self.micro,
        }

    def close(self) -> None:
        """Releases the graph and the env."""
        if isinstance(self._iterate, Captured):
            self._iterate.release()
        self.collector.shutdown()
