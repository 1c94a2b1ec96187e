"""Whole episodes of a policy that does not explore, in envs of its own with random numbers of their own.

Dimension key: ``E`` rows of the env, ``T`` steps.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from torchrl_perf.collectors import DeviceCollector, HostCollector
from torchrl_perf.metrics.aggregates import bootstrap_interval
from torchrl_perf.runtime.precision import Acceleration
from torchrl_perf.runtime.seeds import seeded
from torchrl_perf.trainers.blueprints import Blueprint, blueprint_of
from torchrl_perf.trainers.policies import GreedyPolicy

__all__ = [
    "Episodes",
    "Evaluation",
    "episode_limit",
    "evaluate_episodes",
    "evaluation_of",
    "gymnasium_arguments",
    "host_collector",
    "host_collector_of",
]

CHUNK = 32  # steps between two looks at whether all episodes have ended
LONGEST = 1_000  # steps of an episode in an env that has no limit
OTHER_SEEDS = 10_000  # added to the seed of a run, for envs that it does not learn from
MakeCollector = Callable[[nn.Module], Any]
"""Called with the policy that acts, gives a collector of it: of envs in tensors, or of others."""
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
        env = getattr(env, "base_env", None)
    return None


class Evaluation:
    """The same episodes of a policy again and again: the first of each row of a collector's envs.

    Each :meth:`run` begins from the state that the envs had at construction and from the same random numbers, and
    leaves those of the rest of the program alone. So two runs differ by the policy alone, and one that is resumed is
    evaluated as if it had not been interrupted. On CUDA the steps are a CUDA graph where nothing in them waits; the
    host waits once in 32 steps, to see whether all episodes have ended.

    Args:
        make_collector: gives a collector of the envs, such as what :func:`collector_of` returns.
        policy: a TensorDict module; shared, not copied.
        seed: of the random numbers.
        max_steps: greatest length of an episode; by default the env's limit, or 1,000 where it has none.
        acceleration: precision of products on CUDA; PyTorch's own flags by default.
        closes_envs: whether :meth:`close` closes the envs, too.
    """

    def __init__(
        self,
        make_collector: MakeCollector,
        policy: nn.Module,
        *,
        seed: int,
        max_steps: int | None = None,
        acceleration: Acceleration | None = None,
        closes_envs: bool = True,
    ) -> None:
        self._closes_envs = closes_envs
        self.seed, self._acceleration = seed, acceleration or Acceleration()
        greedy = policy if isinstance(policy, GreedyPolicy) else GreedyPolicy(policy)
        with seeded(seed):
            self.collector: Any = make_collector(greedy)
        self.device = torch.device(self.collector.device)
        self.collector.exploration_type = ExplorationType.DETERMINISTIC
        self.max_steps = max_steps or episode_limit(getattr(self.collector, "env", None)) or LONGEST
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


def collector_of(env: EnvBase, mode: str = "eager", *, steps: int = CHUNK) -> MakeCollector:
    """Makes a collector of an env in tensors, for an :class:`Evaluation`.

    Args:
        env: with batch_size ``[E]``.
        mode: of the collector.
        steps: T of its batches; at most the length of an episode.
    """
    steps = min(steps, episode_limit(env) or steps)

    def make(policy: nn.Module) -> DeviceCollector:
        frames = env.batch_size.numel() * steps
        return DeviceCollector(env, policy, frames_per_batch=frames, mode=mode, compact_obs=True)  # pyright: ignore

    return make


def host_collector_of(
    name: str, rows: int, *, seed: int, device: torch.device, steps: int = CHUNK, **arguments: Any
) -> MakeCollector:
    """The same for envs of Gymnasium, which step on the CPU.

    Args:
        name: their id.
        rows: E.
        seed: of the envs.
        device: of the policy.
        steps: T of the batches.
        **arguments: of ``gymnasium.make``.
    """

    def make(policy: nn.Module) -> HostCollector:
        envs = gymnasium.make_vec(name, num_envs=rows, vectorization_mode="sync", **arguments)
        return host_collector(envs, seed=seed, device=device, steps=steps)(policy)

    return make


def host_collector(
    envs: gymnasium.vector.VectorEnv, *, seed: int, device: torch.device, steps: int = CHUNK
) -> MakeCollector:
    """The same for a vector env.

    Args:
        envs: of E envs.
        seed: of the envs.
        device: of the policy.
        steps: T of the batches.
    """

    def make(policy: nn.Module) -> HostCollector:
        acting: Any = policy
        frames = envs.num_envs * steps
        return HostCollector(envs, acting, frames_per_batch=frames, device=device, mode="eager", seed=seed)

    return make


def gymnasium_arguments(spec: Any) -> dict[str, Any]:
    """What a vector env of Gymnasium was made with beside its size, from its ``spec``."""
    own = ("num_envs", "vectorization_mode", "vector_kwargs")
    return {name: value for name, value in dict(spec.kwargs).items() if name not in own}


def evaluate_episodes(
    policy: nn.Module, env: EnvBase, *, seed: int = 0, max_steps: int | None = None, mode: str = "auto"
) -> Episodes:
    """Let a policy play one episode in each row of an env, without exploration.

    The random numbers of the rest of the program are left alone. The env is used up: it is closed at the end.

    Args:
        policy: a TensorDict module, such as a trainer's or that of
            :func:`~torchrl_perf.trainers.policies.load_policy`; on the env's device.
        env: a TorchRL env with batch_size ``[E]``, not the one that a trainer collects in.
        seed: of the env.
        max_steps: greatest length of an episode; by default the env's limit, or 1,000 where it has none.
        mode: of the :class:`~torchrl_perf.collectors.DeviceCollector` that steps it.

    Returns:
        Returns and lengths of the E episodes.
    """
    evaluation = Evaluation(collector_of(env, mode), policy, seed=seed, max_steps=max_steps)
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
    make = _own_collector(trainer, seed) or _made_collector(trainer, blueprint, seed)
    own = trainer.evaluation_env is None  # a later run may want the one that was given
    return Evaluation(make, trainer.policy, seed=seed, acceleration=trainer.acceleration, closes_envs=own)


def _own_collector(trainer: Any, seed: int) -> MakeCollector | None:
    """Of the env that was given for evaluations, or of Gymnasium's like those that the trainer collects in."""
    env, spec = trainer.evaluation_env, _gymnasium_spec(trainer)
    if isinstance(env, gymnasium.vector.VectorEnv):
        return host_collector(env, seed=seed, device=trainer.device)
    if env is not None:
        return collector_of(env, "auto" if trainer.mode == "graph" else "eager")
    if spec is None:
        return None
    arguments = gymnasium_arguments(spec)
    return host_collector_of(spec.id, trainer.config.eval_episodes, seed=seed, device=trainer.device, **arguments)


def _made_collector(trainer: Any, blueprint: Blueprint, seed: int) -> MakeCollector:
    """Of an env that the settings make."""
    if trainer.own_env:
        raise ValueError(
            f"eval_interval: expected an env of the settings, or trainer.evaluation_env, received a "
            f"{type(trainer).__name__} whose env came from Python. Remedy: trainer.evaluation_env = another env of the "
            "same kind, with a row for each episode; or eval_interval=0."
        )
    with seeded(seed, trainer.device):
        env = blueprint.env(trainer.config.for_rows(trainer.config.eval_episodes), trainer.device)
    return collector_of(env, "auto" if trainer.mode == "graph" else "eager")


def _gymnasium_spec(trainer: Any) -> Any:
    """What Gymnasium made the envs of a trainer's collector from; None for other envs, and below wrappers."""
    if not isinstance(trainer.collector, HostCollector):
        return None
    envs = trainer.collector.groups[0].envs
    spec = None if isinstance(envs, gymnasium.vector.VectorWrapper) else envs.spec
    # a wrapper changes what is observed or rewarded, and only who has put it there can do so again
    return None if spec is None or spec.additional_wrappers or spec.id not in gymnasium.registry else spec
