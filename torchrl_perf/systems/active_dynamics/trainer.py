"""Active learning of latent dynamics: a model is fitted while the most informative inputs are chosen."""

from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import TransformedEnv

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs.latent_field import LatentField
from torchrl_perf.functional.losses.elbo import beta_at
from torchrl_perf.metrics import EpisodeStatistics
from torchrl_perf.parallel import SharedGradients
from torchrl_perf.replay import RecentWindow
from torchrl_perf.runtime.oom import parts_of, refused
from torchrl_perf.runtime.seeds import seeded
from torchrl_perf.systems.active_dynamics.blueprint import make_filtered_policy, make_reward
from torchrl_perf.systems.active_dynamics.config import ActiveDynamicsConfig
from torchrl_perf.systems.active_dynamics.elbo import MultiStepELBOLoss
from torchrl_perf.systems.active_dynamics.evaluation import (
    Alignment,
    PredictionFigures,
    evaluate,
    fit_alignment,
    make_portrait,
    prediction_scores,
)
from torchrl_perf.systems.active_dynamics.information_reward import InformationReward
from torchrl_perf.systems.active_dynamics.networks import make_field_env, make_seq_vae
from torchrl_perf.systems.active_dynamics.picture import PhasePortrait
from torchrl_perf.systems.active_dynamics.predictive_elbo import PredictiveELBOLoss
from torchrl_perf.systems.active_dynamics.region import region_error, region_points
from torchrl_perf.systems.active_dynamics.seq_vae import SeqVAE
from torchrl_perf.trainers.device import accelerated, as_in_mode, fuse_when_compiled, kernels_of
from torchrl_perf.trainers.optim.optimization import adam_of
from torchrl_perf.trainers.run.joint_rows import window_of
from torchrl_perf.trainers.run.state import Stateful
from torchrl_perf.trainers.whole_loop import WholeLoop

LOSSES = ("loss_recon", "loss_kl", "loss_novelty")
WINDOW_KEYS = ("observation", "action", "is_init", "belief")
EVALUATION_SEED = 10_000
EVALUATION_ENVS = 256
EVALUATION_STEPS = 20


class ActiveDynamicsTrainer(WholeLoop):
    """Learns a latent dynamical system from noisy channels, with planned or random inputs.

    An iteration collects T steps of N envs (filter, plan, act), appends them to a ring of recent steps, fits the model
    to windows of it, and measures how well the model predicts the batch: one function of device state. On CUDA it is
    captured into one CUDA graph; on a CPU the same code runs eagerly, or with a compiled step of the envs. The loss is
    not compiled: unrolled over a window, that takes minutes, and in a graph there are no launches to save. The loop is
    :meth:`iteration`; :func:`~torchrl_perf.trainers.run.run.train` adds logging, checkpoints and a clean stop.

    The true state is read only for metrics: ``prediction/r2`` (and ``persistence``, of the belief as if nothing moved),
    ``prediction_horizon`` steps ahead, after the best linear map; :meth:`evaluate` does so on separate data.

    Args:
        config: every choice of the run; after ``parallel.join()`` of the whole run, of which each rank does its part.
        env: a :class:`LatentField` with num_envs rows; by default :func:`make_field_env`.
        model: by default :func:`make_seq_vae`.

    Attributes:
        ranks: the processes that learn together; what the planner remembers of past inputs is each rank's own.
        model: the autoencoder.
        reward: the planner's objective; None with random inputs.
        policy: filter and inputs.
        window: the ring of recent steps.
        iterations_done: iterations run so far (host integer).
        updates: updates applied so far, float32 0-d on the device.

    Raises:
        ValueError: at construction, for CUDA where there is none, or parts that do not fit each other.
    """

    metric_names = (
        *("prediction/r2", "prediction/persistence", "prediction/filter_r2", "input/mean_square", "train/beta"),
        *(f"train/{name}" for name in (*LOSSES, "grad_norm")),
    )

    def __init__(
        self, config: ActiveDynamicsConfig, *, env: LatentField | None = None, model: SeqVAE | None = None
    ) -> None:
        config = self._begin(config, env)
        self.kernels = kernels_of(config, self.mode, self.device)
        self.field_env = make_field_env(config, self.device) if env is None else env
        if self.field_env.num_envs != config.num_envs:
            raise ValueError(
                f"env: expected {config.num_envs} rows, the config's num_envs, received {self.field_env.num_envs}. "
                "Remedy: make both the same."
            )
        self.model = make_seq_vae(config, self.field_env) if model is None else model
        self.reward = make_reward(config, self.model)
        self.policy = make_filtered_policy(config, self.model, self.reward, self.field_env.action_spec)
        state = self.policy.make_state()
        self.env = TransformedEnv(self.field_env, state) if state.shapes else self.field_env
        fuse_when_compiled(self.kernels, [self.model, self.reward, self.policy], self.config.precision)
        self.collector = self._make_collector(list(state.shapes))
        bound = PredictiveELBOLoss if config.bound == "predictive" else MultiStepELBOLoss
        self.loss = bound(
            self.model,
            horizon=config.kl_horizon,
            decay=config.kl_decay,
            samples=config.samples,
            mask_rate=config.mask_rate,
        )
        self._named = {name: value for name, value in self.loss.named_parameters() if value.requires_grad}
        if self.reward is not None and self.reward.kind == "rnd":
            self._named |= {f"predictor.{name}": p for name, p in self.reward.predictor.named_parameters()}
        self.shared = SharedGradients(self._named.values(), ranks=self.ranks)
        self.optimizer = adam_of(config, self._named.values(), self.acceleration)
        self._keys = (*WINDOW_KEYS, *self.policy.filter.state_shapes)
        example = cast("TensorDictBase", self.collector.batch[:, 0]).select(*self._keys)
        self.window = RecentWindow(config.history, example, device=self.device)
        self._make_state()
        self._finish(self.field_env)

    # -- construction -------------------------------------------------------------------------------------------------

    def _make_collector(self, carried: list[str]) -> DeviceCollector:
        """A collector that stores no plans, and of the filter's state only what a window starts from."""
        plans = [key for key in carried if key.startswith("plan")]
        collector = DeviceCollector(
            self.env,
            self.policy,
            frames_per_batch=self.config.batch_size,
            mode="eager" if self.mode == "eager" else "compile",
            compile_mode=self.config.compile_mode,
            draw_ahead=True,
            track_traj_ids=False,
            compile_later=self.kernels.changes,
            exclude_keys=(*plans, *(("next", key) for key in carried)),
        )
        self.kernels.follow(collector.compile_steps)
        return collector

    def _make_state(self) -> None:
        """State on the device that changes between iterations, beside parameters, moments and envs."""
        device = self.device
        self._make_loop(LOSSES, self._named, compile=self.kernels.function)
        self.episodes = EpisodeStatistics(self.config.num_envs, device, window=window_of(self.ranks.size))
        self._names = (*LOSSES, "kl_start", *(f"kl_{k + 1}" for k in range(self.config.kl_horizon)), "grad_norm")
        self._sums = torch.zeros(len(self._names), device=device)
        self._applied = torch.zeros((), device=device)
        self._offsets = torch.arange(self.config.window, device=device)
        self.guard.watch(self.env)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One more iteration of the run.

        In a loop of your own count it, ``trainer.iterations_done += 1``, as :func:`train` does: the number decides when
        kernels are compiled.
        """
        self.kernels.settle(self.iterations_done, self.train_state.notes, self._iterate)
        with as_in_mode(self.mode):
            self.kernels.call(self.micro.call, self._iterate)

    def iteration(self) -> None:
        """Collect with the present model, remember, fit it to windows, measure: no host read, static shapes."""
        self._iteration += 1
        # iterations that start within ``random_steps`` are entirely random
        early = (self._iteration - 1.0) * self.config.batch_size < self.config.random_steps
        self.policy.random_share.copy_(torch.where(early, 1.0, self.config.random_share))
        with self.phases.phase("collect"):
            batch = self.collect()
        with self.phases.phase("store"):
            self.store(batch)
        with self.phases.phase("learn"):
            self.learn()
        with self.phases.phase("measure"):
            self.measure(batch)

    @accelerated
    def collect(self) -> TensorDictBase:
        """A batch ``[N, T]`` of fresh steps; its tensors are overwritten by the next one."""
        with refused("collect", "fewer num_envs, candidates or plan_horizon"):
            return self.collector.collect()

    @accelerated
    def store(self, batch: TensorDictBase) -> None:
        """Append the steps to the ring, and add their information about the model."""
        self.guard.check(batch)
        steps = batch.select(*self._keys)
        for t in range(batch.shape[1]):
            # no reset: the ring continues over the ends of episodes, which windows find by "is_init"
            self.window.append(steps[:, t])

    @accelerated
    def learn(self) -> None:
        """``updates`` updates, each from newly drawn windows."""
        self._sums.zero_()
        self._applied.zero_()
        view = self.window.view()
        rows, begins = self._draw(view.get("mask"))
        for row, begin in zip(rows.unbind(), begins.unbind(), strict=True):
            self.update(self._gather(view, row, begin))
        if self.reward is not None and self.reward.remembers:
            self._assess(self.reward, self._gather(view, rows.flatten(), begins.flatten()), view.get("mask").sum())
        means = (self._sums / self._applied).unbind()
        self.metrics.add_all({f"train/{name}": mean for name, mean in zip(self._names, means, strict=True)})
        self.metrics.add("train/updates_applied", self._applied)
        self.metrics.add("train/micro_batches", self.micro.count, reduce="last")
        self.metrics.add("train/beta", self.loss.beta, reduce="last")

    def update(self, windows: TensorDictBase) -> None:
        """One update from windows ``[B]`` of T steps each."""
        config = self.config
        schedule = {"beta": config.beta, "warmup": config.beta_warmup, "anneal": config.beta_anneal}
        self.loss.beta.copy_(beta_at(self.updates, config.beta_schedule, **schedule))
        attempt = partial(self._gradients, windows)
        total, statistics = self.micro.run(attempt, len(windows), undo=self.optimizer.zero_grad)
        total, statistics = self.shared.mean_(total, statistics)
        norm = self.optimizer.grad_norm()
        fault = self.optimizer.is_fault(total, norm)
        finite = total.isfinite() & norm.isfinite()
        self.optimizer.step((norm / config.max_grad_norm).clamp_min(1.0), (~finite).float())
        self._sums += torch.where(finite, torch.cat([statistics, norm.view(1)]), 0.0)
        self._applied += finite
        self.updates += finite
        self.guard.mark_bad(fault)
        self.guard.note(statistics[: len(LOSSES)], self.optimizer.grad_norms, fault)

    @accelerated
    def measure(self, batch: TensorDictBase) -> None:
        """Episode statistics and R^2 of predictions on the batch, accumulated on the device."""
        self.guard.report()
        self.episodes.update(self.guard.finite(batch.get(("next", "reward"))), batch.get(("next", "done")))
        alignment = fit_alignment(batch.get("belief"), batch.get("latent"))
        scores = prediction_scores(self.model, batch, self.config.prediction_horizon, alignment)
        last = {
            "prediction/r2": scores.r2[-1],
            "prediction/persistence": scores.persistence[-1],
            "prediction/filter_r2": scores.r2[0],
            "input/mean_square": batch.get("action").square().mean(),
        }
        self.metrics.add_all(last)
        finished = self.episodes.count > 0
        self.metrics.add("episode/mean_return", self.episodes.mean_return, reduce="last", mask=finished)
        self.metrics.add("episode/mean_length", self.episodes.mean_length, reduce="last", mask=finished)
        self.metrics.add("episode/count", self.episodes.count, reduce="last")
        self.metrics.add("train/first_bad_iteration", self._first_bad, reduce="last")

    # -- one update ---------------------------------------------------------------------------------------------------

    def _draw(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Envs and first steps of all windows of an iteration, each int64 ``[updates, B]``."""
        config = self.config
        size = (config.updates, config.minibatch_size)
        filled = mask[0].sum()
        choice = torch.rand(size, device=self.device)
        # rounding may give the number of choices itself
        first = (choice * (filled - config.window + 1)).long().clamp_max(filled - config.window)
        return torch.randint(config.num_envs, size, device=self.device), config.history - filled + first

    def _gather(self, view: TensorDictBase, row: Tensor, begin: Tensor) -> TensorDictBase:
        """The windows of envs ``row [B]`` from the steps ``begin [B]`` on."""
        place = (row.unsqueeze(-1), begin.unsqueeze(-1) + self._offsets)
        windows = TensorDict({key: view.get(key)[place] for key in self._keys}, [len(row)], device=self.device)
        return windows[self.guard.repair(windows)[1]] if self.guard.repairs else windows

    def _gradients(self, windows: TensorDictBase, parts: int) -> tuple[Tensor, Tensor]:
        """Gradients of the windows ``[B]``, in micro-batches; the loss 0-d and the statistics, detached."""
        self.optimizer.zero_grad()
        sums: list[tuple[Tensor, Tensor]] = []
        for part in parts_of(windows, parts):
            total, statistics = self._losses(part.batch)
            self.optimizer.scaled(total * part.share).backward()
            sums.append((total.detach() * part.share, statistics * part.share))
        totals, statistics = zip(*sums, strict=True)
        return torch.stack(totals).sum(), torch.stack(statistics).sum(0)

    def _losses(self, windows: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Total loss, and the statistics as one vector."""
        losses = self.loss(windows)
        novelty = torch.zeros((), device=self.device)
        if self.reward is not None and self.reward.kind == "rnd":
            novelty = self.reward.novelty(windows.get("belief")).mean()
        found = [losses["loss_recon"], losses["loss_kl"], novelty]
        statistics = torch.cat([torch.stack([*found, losses["kl_start"]]).detach(), losses["kl"]])
        return torch.stack(found).sum(), statistics

    @torch.no_grad()
    def _assess(self, reward: InformationReward, windows: TensorDictBase, steps: Tensor) -> None:
        """Recompute the information of ``steps`` stored steps from windows ``[B]``, encoded by the present model."""
        observation, action, starts = (windows.get(key) for key in ("observation", "action", "is_init"))
        state = [windows.get(key)[:, 0] for key in self.policy.filter.state_shapes]
        belief = self.model.encode(observation, action, starts.squeeze(-1), *state)
        reward.assess(belief.loc, action, steps)

    # -- what was learnt ----------------------------------------------------------------------------------------------

    def evaluate(
        self, horizon: int | None = None, *, seed: int = EVALUATION_SEED, envs: int = EVALUATION_ENVS
    ) -> PredictionFigures:
        """Predict on fresh data of probing inputs all over the square, the same at each call; reads the device.

        Args:
            horizon: steps ahead; by default the config's.
            seed: names the data.
            envs: number of points; half of them are predicted.
        """
        horizon = self.config.prediction_horizon if horizon is None else horizon
        env = self._fresh_env(envs)
        return evaluate(self.model, env, horizon=horizon, steps=EVALUATION_STEPS + horizon, seed=seed)

    def region_error(self, alignment: Alignment | None = None, *, horizon: int | None = None) -> float:
        """The share of the movement from points all over the region that predictions miss; reads the device.

        See :func:`~torchrl_perf.systems.active_dynamics.region.region_error`.

        Args:
            alignment: from learned to true states, as :meth:`evaluate` finds it; None finds it.
            horizon: steps; by default the config's.
        """
        horizon = self.config.prediction_horizon if horizon is None else horizon
        alignment = self.evaluate().alignment if alignment is None else alignment
        points = region_points(self.config.region, device=self.device)
        return float(region_error(self.model, self.field_env, alignment, points, horizon=horizon))

    def portrait(self, title: str = "") -> PhasePortrait:
        """True and learned field, with the states of the newest batch."""
        alignment = self.evaluate().alignment
        return make_portrait(self.model, self._fresh_env(1), alignment, self.collector.batch.get("latent"), title=title)

    def _fresh_env(self, rows: int) -> LatentField:
        """A separate env with the same world; the random numbers of the run are not changed."""
        with seeded(None, self.device):
            return make_field_env(self.config, self.device, rows, 0, region=True)

    # -- state --------------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Stateful]:
        """The parts that a rollback restores, by name."""
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        return parts if self.reward is None else {**parts, "reward": self.reward}

    def experience(self) -> dict[str, Stateful]:
        """Further parts of a checkpoint, by name: recorded experience."""
        return {
            "collector": self.collector,
            "window": self.window,
            "episodes": self.episodes,
            "metrics": self.metrics,
            "micro_batches": self.micro,
        }

    def close(self) -> None:
        """Releases the graph and the env."""
        self._release()
        self.collector.shutdown()
