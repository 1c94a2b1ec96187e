"""Whole episodes of a policy that does not explore, in envs of its own with random numbers of their own.

Dimension key: ``E`` rows of the env, ``T`` steps.
"""

import math
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import ExplorationType

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs.agent_streams import AgentStreams
from torchrl_perf.metrics.aggregates import bootstrap_interval
from torchrl_perf.modules.memory.module import memories_of
from torchrl_perf.runtime.precision import Acceleration
from torchrl_perf.runtime.seeds import seeded
from torchrl_perf.trainers.blueprints import Blueprint, blueprint_of
from torchrl_perf.trainers.captures import steps_on_host
from torchrl_perf.trainers.policies import GreedyPolicy
from torchrl_perf.trainers.sources import Source, given_source, host_collector, source_of
from torchrl_perf.trainers.tasks import fitting_rows

__all__ = ["Episodes", "Evaluation", "below", "episode_limit", "evaluate_episodes", "evaluation_of"]

CHUNK = 32  # steps between two looks at whether all episodes have ended
LONGEST = 1_000  # steps of an episode in an env that has no limit
OTHER_SEEDS = 10_000  # added to the seed of a run, for envs that it does not learn from
VALID = "valid"  # bool [E, T, 1], the rows that count: see AgentStreams


@dataclass(frozen=True)
class Episodes:
    """Returns and lengths of whole episodes, in the order of the env's rows."""

    returns: list[float]
    """Sum of the rewards of each."""
    lengths: list[int]
    """Steps of each."""
    unfinished: int = 0
    """How many were cut off at the greatest number of steps; they count with what they had by then."""

    @property
    def mean_return(self) -> float:
        """Mean of the returns."""
        return statistics.fmean(self.returns)

    @property
    def return_deviation(self) -> float:
        """Standard deviation of the returns; NaN for a single one."""
        return statistics.stdev(self.returns) if len(self.returns) > 1 else math.nan

    @property
    def mean_length(self) -> float:
        """Mean of the lengths."""
        return statistics.fmean(self.lengths)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Bootstrap interval of the mean return; NaN for a single episode.

        Args:
            level: share of the resamples whose mean lies within it.
        """
        return bootstrap_interval(self.returns, level=level)

    def row(self) -> dict[str, float]:
        """The metrics of an evaluation during a run."""
        return {
            "eval/mean_return": self.mean_return,
            "eval/return_deviation": self.return_deviation,
            "eval/mean_length": self.mean_length,
        }

    def __str__(self) -> str:
        low, high = self.interval()
        cut = f", {self.unfinished} cut off" if self.unfinished else ""
        return (
            f"{len(self.returns)} episodes: return {self.mean_return:.2f} ± {self.return_deviation:.2f} (95% interval "
            f"of the mean {low:.2f} to {high:.2f}), length {self.mean_length:.1f}{cut}"
        )


def episode_limit(env: Any) -> int | None:
    """Steps after which an env truncates an episode, as far as it says; None for no limit."""
    while env is not None:
        limit = getattr(env, "max_episode_steps", None)
        if isinstance(limit, int):
            return limit
        env = below(env)
    return None


def below(env: Any) -> EnvBase | None:
    """The env below a transform or below streams of agents; None for any other.

    Several envs of TorchRL in one have every attribute, ``base_env`` among them.
    """
    return env.base_env if isinstance(env, TransformedEnv | AgentStreams) else None


class Evaluation:
    """The same episodes of a policy again and again: the first of each row of some envs.

    Each :meth:`run` begins from the state that the envs had at construction and from the same random numbers, and
    leaves those of the rest of the program alone. So two runs differ by the policy alone, and one that is resumed is
    evaluated as if it had not been interrupted. On CUDA the steps are a CUDA graph where nothing in them waits; the
    host waits once in 32 steps, to see whether all episodes have ended.

    Args:
        source: the envs, such as what :func:`~torchrl_perf.trainers.sources.given_source` returns.
        policy: a TensorDict module; shared, not copied.
        seed: of the random numbers.
        max_steps: greatest length of an episode; by default the envs' limit, or 1,000 where they have none.
        acceleration: precision of products on CUDA; PyTorch's own flags by default.
        mode: of the :class:`~torchrl_perf.collectors.DeviceCollector` that steps envs in tensors.
        steps: T of the batches; at most the length of an episode.
        closes_envs: whether :meth:`close` closes the envs, too.
    """

    def __init__(
        self,
        source: Source,
        policy: nn.Module,
        *,
        seed: int,
        max_steps: int | None = None,
        acceleration: Acceleration | None = None,
        mode: str = "auto",
        steps: int = CHUNK,
        closes_envs: bool = True,
    ) -> None:
        self._closes_envs = closes_envs
        self.seed, self._acceleration = seed, acceleration or Acceleration()
        greedy = policy if isinstance(policy, GreedyPolicy) else GreedyPolicy(policy)
        with seeded(seed), source.closed_on_error():
            self.collector: Any = _collector_of(source, greedy, mode=mode, seed=seed, steps=steps)
        self.device = torch.device(self.collector.device)
        self.collector.exploration_type = ExplorationType.DETERMINISTIC
        self.max_steps = max_steps or episode_limit(source.env) or source.max_episode_steps or LONGEST
        self._start = self.collector.state_dict()

    def run(self) -> Episodes:
        """One episode of each row; those that end early wait for the last one.

        Raises:
            ValueError: where no row counts.
        """
        tally: _Tally | None = None
        with seeded(self.seed, self.device), self._acceleration.active(self.device):
            self.collector.load_state_dict(self._start)
            self.collector.reset()
            for _ in range(math.ceil(self.max_steps / self.collector.num_steps)):
                batch = self.collector.collect()
                tally = _Tally(batch, self.max_steps) if tally is None else tally
                tally.add(batch)
                if not bool(tally.running.any()):
                    break
        assert tally is not None
        return tally.episodes()

    def row(self) -> dict[str, float]:
        """:meth:`run`, as metrics."""
        return self.run().row()

    def close(self) -> None:
        """Releases the graph, and the envs where they are its own."""
        self.collector.shutdown(close_env=self._closes_envs)


class _Tally:
    """Returns and lengths of the first episode of each row, on the device."""

    def __init__(self, batch: TensorDictBase, max_steps: int) -> None:
        rows, device = batch.batch_size[:-1].numel(), batch.get(("next", "reward")).device
        valid = batch.get(VALID, None)
        self.running = torch.ones(rows, dtype=torch.bool, device=device)
        if isinstance(valid, Tensor) and valid.dtype == torch.bool and valid.shape == (*batch.shape, 1):
            self.running = valid.reshape(rows, -1)[:, 0].clone()
        self.counts = self.running.clone()
        self.returns = torch.zeros(rows, dtype=torch.float64, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.left = max_steps

    def add(self, batch: TensorDictBase) -> None:
        """Adds the steps ``[E, T]`` of a batch, up to the end of each row's first episode."""
        rows, steps = len(self.running), min(batch.shape[-1], self.left)
        reward, done = (batch.get(("next", key)).reshape(rows, -1)[:, :steps] for key in ("reward", "done"))
        ended = done.to(torch.int64).cumsum(-1)
        within = self.running.unsqueeze(-1) & (ended - done.to(torch.int64) == 0)
        self.returns += torch.where(within, reward.to(torch.float64), 0.0).sum(-1)
        self.lengths += within.sum(-1)
        self.running &= ended[:, -1] == 0
        self.left -= steps

    def episodes(self) -> Episodes:
        """What was counted, on the host."""
        chosen = self.counts.cpu()
        if not bool(chosen.any()):
            raise ValueError(
                "env: expected at least one row that counts at the start, received none. Remedy: an env whose agents "
                "are active after a reset."
            )
        returns, lengths = self.returns.cpu()[chosen], self.lengths.cpu()[chosen]
        return Episodes(returns.tolist(), lengths.tolist(), int(self.running.sum()))


def _collector_of(source: Source, policy: Any, *, mode: str, seed: int, steps: int) -> Any:
    """Collects in envs of any kind."""
    rows = source.specs.batch_size.numel()
    if source.env is None:
        options: dict[str, Any] = {"frames_per_batch": rows * steps, "device": source.specs.device, "seed": seed}
        return host_collector(source, policy, mode="eager", **options)
    steps, mode = min(steps, episode_limit(source.env) or steps), "eager" if steps_on_host(source.env) else mode
    return DeviceCollector(
        source.env,
        policy,
        frames_per_batch=rows * steps,
        mode=mode,
        compact_obs=True,
        auto_register_policy_transforms=bool(memories_of(policy)),
    )


def evaluate_episodes(
    policy: nn.Module, env: Any, *, seed: int = 0, max_steps: int | None = None, mode: str = "auto"
) -> Episodes:
    """Let a policy play one episode in each row of an env, without exploration.

    The random numbers of the rest of the program are left alone. The env is used up: it is closed at the end.

    Args:
        policy: a TensorDict module, such as a trainer's or that of
            :func:`~torchrl_perf.trainers.policies.load_policy`; on the env's device.
        env: a TorchRL env with batch_size ``[E]`` or a ``gymnasium.vector.VectorEnv`` of E envs, not the one that a
            trainer collects in.
        seed: of the env.
        max_steps: greatest length of an episode; by default the env's limit, or 1,000 where it has none.
        mode: of the :class:`~torchrl_perf.collectors.DeviceCollector` that steps an env in tensors.

    Returns:
        Returns and lengths of the E episodes.
    """
    device = next((each.device for each in (*policy.parameters(), *policy.buffers())), torch.device("cpu"))
    source = given_source(env, device)
    evaluation = Evaluation(source, policy, seed=seed, max_steps=max_steps, mode=mode)
    try:
        return evaluation.run()
    finally:
        evaluation.close()


def evaluation_of(trainer: Any) -> Any:
    """What evaluates a trainer's policy during its run, by the settings ``eval_interval`` and ``eval_episodes``.

    Returns:
        What has ``row()``, the metrics, and ``close()``; None for a run without evaluations.

    Raises:
        ValueError: for an env from Python of which the settings can make no second one.
    """
    config = trainer.config
    if not config.eval_interval:
        return None
    blueprint = blueprint_of(config)
    if blueprint.evaluation is not None:
        return blueprint.evaluation(trainer)
    seed = config.seed + OTHER_SEEDS
    with seeded(seed, trainer.device):
        source = _other_envs(trainer, blueprint)
    mode = "auto" if trainer.mode == "graph" else "eager"
    own = trainer.evaluation_env is None  # a later run may want the one that was given
    return Evaluation(source, trainer.policy, seed=seed, acceleration=trainer.acceleration, mode=mode, closes_envs=own)


def _other_envs(trainer: Any, blueprint: Blueprint) -> Source:
    """Envs like those that a trainer learns in, for its evaluations."""
    config, device = trainer.config, trainer.device
    if trainer.evaluation_env is not None:
        return given_source(trainer.evaluation_env, device)
    if not trainer.own_env:
        rows = fitting_rows(config, config.eval_episodes)
        return source_of(blueprint.env(config.for_rows(rows), device), rows, device)
    if (again := trainer.source.again) is not None:
        return again(config.eval_episodes)
    raise ValueError(
        f"eval_interval: expected an env of the settings, or trainer.evaluation_env, received a "
        f"{type(trainer).__name__} whose env came from Python. Remedy: trainer.evaluation_env = another env of the "
        "same kind, with a row for each episode; or eval_interval=0."
    )
