"""Proximal policy optimisation (arXiv:1707.06347) with every step of the loop on the device."""

from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchrl.envs import EnvBase
from torchrl.objectives import ClipPPOLoss

from torchrl_perf import envs
from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.functional.permutation import random_permutation
from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics, PhaseTimer
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.runtime import Captured, capture
from torchrl_perf.runtime.compile import compiled
from torchrl_perf.trainers.actor_critic import make_actor, make_critic
from torchrl_perf.trainers.checkpoint import (
    check_modules,
    load_checkpoint,
    load_random_state,
    random_state,
    save_checkpoint,
)
from torchrl_perf.trainers.config import PPOConfig
from torchrl_perf.trainers.device import resolve_device, resolve_mode
from torchrl_perf.trainers.minibatches import flat_rows, minibatch_indices
from torchrl_perf.trainers.optimization import GuardedAdam
from torchrl_perf.transforms import GAETransform

STATISTICS = ("loss_objective", "loss_critic", "loss_entropy", "entropy", "kl_approx", "clip_fraction")


class PPOTrainer:
    """PPO whose iteration (collect, advantage, update, measure) is one function of device state.

    On CUDA the whole iteration is captured into one CUDA graph, after two ordinary iterations that compile it; a replay
    costs the host one launch. On a CPU the same code runs eagerly, or compiled. The loop itself is :meth:`iteration`;
    :func:`~torchrl_perf.trainers.run.train` adds logging, checkpoints and a clean stop around it.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs]; by default the package's task that the config names.
        actor: a probabilistic TensorDict module for the env's action; by default :func:`make_actor`.
        critic: a TensorDict module that writes ``state_value``; by default :func:`make_critic`.

    Attributes:
        iterations_done: iterations run so far (host integer).
        episodes: returns and lengths of finished episodes, on the device.
        metrics: accumulators on the device; flush them for the values.

    Raises:
        ValueError: at construction, for CUDA where there is none, or parts that do not fit each other.
    """

    def __init__(
        self,
        config: PPOConfig,
        *,
        env: EnvBase | None = None,
        actor: torch.nn.Module | None = None,
        critic: torch.nn.Module | None = None,
    ) -> None:
        self.config = config
        self.device = resolve_device(config.device) if env is None else env.device
        self.mode = resolve_mode(config.mode, self.device)
        torch.manual_seed(config.seed)
        self.env = env or getattr(envs, config.env)(config.num_envs, device=self.device)
        self.actor = actor or make_actor(self.env, config)
        self.critic = critic or make_critic(self.env, config)
        self._check_parts()
        self.collector = DeviceCollector(
            self.env,
            self.actor,
            frames_per_batch=config.batch_size,
            mode="eager" if self.mode == "eager" else "compile",
            exclude_keys=("logits", "loc", "scale"),
        )
        if self.mode == "graph" and self.collector.waits_for_host:
            raise ValueError(
                f"env: expected one whose _reset honours its mask without a host read under mode 'graph', received "
                f"{type(self.env).__name__}. Remedy: a DeviceEnv, or mode='compile'."
            )
        self.gae = GAETransform(gamma=config.gamma, lmbda=config.lmbda, value_network=self.critic)
        self.loss = self._make_loss()
        self.optimizer = GuardedAdam(
            self.loss.parameters(), learning_rate=config.learning_rate, max_grad_norm=config.max_grad_norm
        )
        self.metrics = DeviceMetrics(self.device)
        self.episodes = EpisodeStatistics(self.env.batch_size[0], self.device)
        self.phases = PhaseTimer(self.device)
        self.iterations_done = 0
        self._make_state()
        compile_ = compiled if self.mode != "eager" else lambda fn: fn
        self._losses_fn = compile_(self._losses)
        self._guard_fn = compile_(self._guard)
        self._permutation_fn = compile_(random_permutation) if self.device.type == "cuda" else random_permutation
        # no eager audit: its different rounding would break bitwise resume; recording refuses host waits all the same
        self.step = capture(self.iteration, device=self.device, audit=False) if self.mode == "graph" else self.iteration

    def _check_parts(self) -> None:
        """Refuse an env or a critic that does not fit; the collector checks the actor."""
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

    def _make_loss(self) -> ClipPPOLoss:
        config = self.config
        loss = (DeviceClipPPOLoss if config.loss == "device" else ClipPPOLoss)(
            self.actor,
            self.critic,
            clip_epsilon=config.clip_epsilon,
            clip_value=config.clip_value,
            normalize_advantage=config.normalize_advantage,
            entropy_coeff=config.entropy_coeff,
            critic_coeff=config.critic_coeff,
            loss_critic_type="l2",
            functional=False,
        )
        if config.loss == "torchrl" and config.clip_value:
            # it asks at each call whether this is set: of a buffer, that is a host read
            del loss.clip_value
            loss.clip_value = config.clip_epsilon
        keys = loss.tensor_keys
        self._loss_keys = list(
            dict.fromkeys(
                [
                    *cast("list[NestedKey]", self.actor.in_keys),
                    *cast("list[NestedKey]", self.critic.in_keys),
                    *(keys.action, keys.sample_log_prob, keys.advantage, keys.value_target, keys.value),
                ]
            )
        )
        return loss

    def _make_state(self) -> None:
        """What changes from one iteration to the next on the device, beside parameters, moments and envs."""
        device = self.device
        self._entropy_coeff = cast("Tensor", self.loss.entropy_coeff)
        self._iteration = torch.zeros((), device=device)
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)
        self._sums = torch.zeros(len(STATISTICS) + 1, device=device)
        self._applied = torch.zeros((), device=device)
        self._first_bad = torch.full((), -1.0, device=device)

    @property
    def first_bad_iteration(self) -> Tensor:
        """First iteration with a loss or gradient that was not finite, counted from 1, or -1: 0-d, on the device."""
        return self._first_bad

    # -- the loop -----------------------------------------------------------------------------------------------------

    def iteration(self) -> None:
        """Collect a batch, compute advantages, update on shuffled minibatches, measure: no host read, static shapes."""
        self.schedule()
        with self.phases.phase("collect"):
            batch = self.collect()
        with self.phases.phase("advantage"):
            batch = self.advantage(batch)
        with self.phases.phase("update"):
            self.update(batch)
        with self.phases.phase("measure"):
            self.measure(batch)

    def schedule(self) -> None:
        """Learning rate and entropy weight of this iteration."""
        config = self.config
        done = self._iteration / config.iterations
        if config.anneal_learning_rate:
            self.optimizer.learning_rate.copy_(config.learning_rate * (1.0 - done))
        if config.entropy_coeff_final is not None:
            change = config.entropy_coeff_final - config.entropy_coeff
            self._entropy_coeff.copy_(config.entropy_coeff + done * change)
        self._iteration += 1

    def collect(self) -> TensorDictBase:
        """A batch ``[N, T]`` of fresh transitions; its tensors are overwritten by the next one."""
        return self.collector.collect().copy()

    def advantage(self, batch: TensorDictBase) -> TensorDictBase:
        """Adds ``advantage``, ``value_target`` and ``state_value`` to the batch."""
        return self.gae(batch)

    def update(self, batch: TensorDictBase) -> None:
        """``epochs`` passes over the batch in shuffled minibatches."""
        rows = flat_rows(batch, self._loss_keys)
        self._stopped.zero_()
        self._sums.zero_()
        self._applied.zero_()
        for index in minibatch_indices(
            rows.shape[0],
            epochs=self.config.epochs,
            parts=self.config.minibatches,
            device=self.device,
            permutation=self._permutation_fn,
        ):
            self.optimizer.zero_grad()
            total, statistics = self._losses_fn(rows, index)
            total.backward()
            grad_scale, skip = self._guard_fn(total.detach(), self.optimizer.grad_norm(), statistics)
            self.optimizer.step(grad_scale, skip)

    def measure(self, batch: TensorDictBase) -> None:
        """Episode statistics and metrics of the iteration, accumulated on the device."""
        self.episodes.update(batch.get(("next", "reward")), batch.get(("next", "done")))
        means = (self._sums / self._applied).unbind()
        names = (*(f"train/{name}" for name in STATISTICS), "train/grad_norm")
        self.metrics.add_all(dict(zip(names, means, strict=True)))
        self.metrics.add("train/updates_applied", self._applied)
        self.metrics.add("train/learning_rate", self.optimizer.learning_rate, reduce="last")
        finished = self.episodes.count > 0
        self.metrics.add("episode/mean_return", self.episodes.mean_return, reduce="last", mask=finished)
        self.metrics.add("episode/mean_length", self.episodes.mean_length, reduce="last", mask=finished)
        self.metrics.add("episode/count", self.episodes.count, reduce="last")
        self.metrics.add("train/first_bad_iteration", self._first_bad, reduce="last")

    # -- one minibatch ------------------------------------------------------------------------------------------------

    def _losses(self, rows: TensorDictBase, index: Tensor) -> tuple[Tensor, Tensor]:
        """Total loss of the rows at ``index``, and the statistics as one vector."""
        losses = self.loss(rows[index])
        total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        return total, torch.stack([losses[name].detach() for name in STATISTICS])

    def _guard(self, total: Tensor, grad_norm: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Decides on the device whether a step is taken, and with which gradient scale; keeps the metrics' sums."""
        finite = total.isfinite() & grad_norm.isfinite()
        if self.config.target_kl is not None:
            self._stopped.logical_or_(statistics[STATISTICS.index("kl_approx")] > self.config.target_kl)
        apply = finite & ~self._stopped
        row = torch.cat([statistics, grad_norm.view(1)])
        self._sums += torch.where(apply, row, 0.0)
        self._applied += apply
        first = (self._first_bad < 0) & ~finite
        self._first_bad.copy_(torch.where(first, self._iteration, self._first_bad))
        return (grad_norm / self.config.max_grad_norm).clamp_min(1.0), (~apply).to(torch.float32)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that changes between iterations, as tensors and plain scalars."""
        state = {
            "iterations_done": self.iterations_done,
            "actor": self.actor.state_dict(),
            "critic": self.critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "collector": dict(self.collector.state_dict()),
            "episodes": self.episodes.state_dict(),
            "metrics": self.metrics.state_dict(),
            "counters": {"iteration": self._iteration.clone(), "first_bad": self._first_bad.clone()},
            "entropy_coeff": self._entropy_coeff.clone(),
            "random": random_state(self.device),
        }
        return tree_map_only(Tensor, Tensor.clone, state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict` in place, so that a captured graph stays valid.

        Training goes on bit for bit on the same kind of device.

        Raises:
            ValueError: for other networks; nothing is changed then.
        """
        check_modules({"actor": self.actor, "critic": self.critic}, state)
        self.iterations_done = state["iterations_done"]
        self.actor.load_state_dict(state["actor"])
        self.critic.load_state_dict(state["critic"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.collector.load_state_dict(state["collector"])
        self.episodes.load_state_dict(state["episodes"])
        self.metrics.load_state_dict(state["metrics"])
        self._iteration.copy_(state["counters"]["iteration"])
        self._first_bad.copy_(state["counters"]["first_bad"])
        self._entropy_coeff.copy_(state["entropy_coeff"])
        load_random_state(state["random"], self.device)

    def save(self, path: str | Path) -> Path:
        """Writes a checkpoint."""
        return save_checkpoint(self.state_dict(), path)

    def load(self, path: str | Path) -> None:
        """Reads a checkpoint."""
        self.load_state_dict(load_checkpoint(path, self.device))

    def close(self) -> None:
        """Releases the graph and the env."""
        if isinstance(self.step, Captured):
            self.step.release()
        self.collector.shutdown()
