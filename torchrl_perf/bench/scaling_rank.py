"""What each rank of ``torchrl-perf bench scaling`` measures: ``python -m ... WORK OUT``, started once for each rank."""

import gc
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrl_perf.bench.peers.baselines import PlainCartPole, TorchRLPPO
from torchrl_perf.bench.report import json_text
from torchrl_perf.parallel import Ranks, join, leave
from torchrl_perf.runtime import Stopwatch, capture, synchronize, time_cuda
from torchrl_perf.trainers import DQNConfig, DQNTrainer, PPOConfig, PPOTrainer, SACConfig, SACTrainer

__all__ = ["Case", "measure"]

SYMMETRIC = ("fused", "one-shot")
"""Ways to sum over symmetric memory."""
SAC_LAYERS = (512, 256, 128)


@dataclass(frozen=True)
class Case:
    """One measurement."""

    algorithm: str
    """``"ppo"``, ``"dqn"`` or ``"sac"``."""
    envs: int
    """Of the shape: of each rank, or of all."""
    rows: int
    """Steps of an iteration of PPO or DQN, or rows of SAC's minibatch."""
    precision: str
    scaling: Literal["weak", "strong"]
    sums: str
    """``"fused"``, ``"one-shot"``, ``"nccl"`` or ``"ddp"``."""

    @property
    def shape(self) -> str:
        """Envs and rows."""
        return f"{self.envs}x{self.rows}"


class DistributedPPO:
    """TorchRL's PPO in a loop with ``DistributedDataParallel``, as its users write it.

    Args:
        config: of this rank.
        device: of this rank.
    """

    def __init__(self, config: PPOConfig, device: torch.device) -> None:
        env = PlainCartPole(config.num_envs, device=device)
        self.parts, self.config = TorchRLPPO(env, config), config
        alone = not torch.distributed.is_initialized()
        self.loss = self.parts.loss if alone else DistributedDataParallel(self.parts.loss)

    def step(self) -> None:
        """One iteration."""
        self.update(self.parts.advantage(self.parts.collect()))

    def update(self, batch: TensorDictBase) -> None:
        """Epochs of shuffled minibatches; the backward pass sums gradients over ranks."""
        self.parts.buffer.extend(batch.reshape(-1))
        for _ in range(self.config.epochs):
            for minibatch in self.parts.buffer:
                losses = self.loss(minibatch)
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(self.parts.loss.parameters(), self.config.max_grad_norm)
                self.parts.optimizer.step()
                self.parts.optimizer.zero_grad()

    def close(self) -> None:
        """Ends the collector."""
        self.parts.close()


def make(case: Case, ranks: Ranks) -> Any:
    """The trainer of a case, and env steps or learnt rows of one of its iterations over all ranks.

    Args:
        case: what is measured.
        ranks: the processes.
    """
    whole = ranks.size if case.scaling == "weak" else 1
    usual: dict[str, Any] = {"num_envs": case.envs * whole, "total_steps": 10**10, "logger": "none", "log_interval": 10}
    usual |= {"device": ranks.device.type, "precision": case.precision}
    usual["mode"] = "graph" if ranks.device.type == "cuda" else "eager"
    if case.algorithm == "sac":
        rows = case.rows * whole
        config = SACConfig(**usual, minibatch_size=rows, learning_starts=rows, hidden_sizes=SAC_LAYERS)
        return SACTrainer(config), rows * config.updates_per_iteration
    if case.algorithm == "dqn":
        rows = usual["num_envs"] * case.rows
        sizes = {"num_steps": case.rows, "minibatch_size": rows, "capacity": 16 * rows, "learning_starts": 2 * rows}
        return DQNTrainer(DQNConfig.without_task(**usual, **sizes, updates_per_iteration=1)), rows
    config = PPOConfig(**usual, num_steps=case.rows, epochs=4, minibatches=4)
    if case.sums != "ddp":
        return PPOTrainer(config), config.batch_size
    own = PPOConfig(**usual | {"num_envs": config.num_envs // ranks.size}, num_steps=case.rows, epochs=4, minibatches=4)
    return DistributedPPO(own, ranks.device), config.batch_size


def measure(case: Case, ranks: Ranks, repeats: int) -> dict[str, Any]:
    """One row: rate, collectives and their share, and whether the parameters of all ranks are equal.

    Args:
        case: what is measured.
        ranks: the processes, which measure together.
        repeats: timed iterations.
    """
    gc.collect()
    torch.manual_seed(ranks.rank)
    ranks.one_shot, ranks.fused = case.sums in SYMMETRIC, case.sums == "fused"
    start = Stopwatch("cpu").start()
    trainer, per_iteration = make(case, ranks)
    # filling, two iterations as they are, and the one that is recorded, whose sums are those of each later one
    for _ in range(getattr(trainer.config, "fill_iterations", 0) + 2):
        _advance(trainer)
    before = ranks.sums.copy()
    _advance(trainer)
    sums = ranks.sums - before
    synchronize(ranks.device)
    start.stop()
    count = 2 if case.sums == "ddp" and repeats > 2 else repeats
    timing = time_cuda(lambda: _advance(trainer), count, warmup=min(3, count), device=ranks.device)
    alone_ms = 0.0 if case.sums == "ddp" else _collectives_ms(sums, ranks, repeats)
    print_of = ranks.values(_fingerprint(trainer))
    trainer.close()
    slowest = max(ranks.values(timing.median))
    return {
        **{"algorithm": case.algorithm, "shape": case.shape, "precision": case.precision, "scaling": case.scaling},
        **{"sums": case.sums, "ranks": ranks.size, "steps_per_second": per_iteration / slowest * 1e6},
        **{"ms": slowest / 1e3, "p10_ms": timing.p10 / 1e3, "p90_ms": timing.p90 / 1e3, "repeats": count},
        "collectives": sum(sums.values()),
        "collective_numbers": sum(sum(_sizes(size)) * times for (size, _), times in sums.items()),
        "collectives_ms": alone_ms,
        "share": alone_ms / (slowest / 1e3),
        "start_s": max(ranks.values(start.seconds)),
        "equal": len(set(print_of)) == 1,
    }


def _advance(trainer: Any) -> None:
    trainer.step()
    if hasattr(trainer, "iterations_done"):
        trainer.iterations_done += 1


def _collectives_ms(sums: Counter[Any], ranks: Ranks, repeats: int) -> float:
    """Time of the sums of an iteration alone, one after the other; on CUDA in a graph."""
    if not ranks.several or not sums:
        return 0.0
    calls = [one for (size, dtype), times in sums.items() for one in _sums_alone(size, dtype, times, ranks)]

    def call() -> None:
        for one in calls:
            one()

    run = capture(call, audit=False) if ranks.device.type == "cuda" else call
    ranks.values(None)  # all begin at once
    return max(ranks.values(time_cuda(run, repeats, warmup=3, device=ranks.device).median)) / 1e3


def _sizes(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return size if isinstance(size, tuple) else (size,)


def _sums_alone(
    size: int | tuple[int, ...], dtype: torch.dtype, times: int, ranks: Ranks
) -> Iterator[Callable[[], object]]:
    """Functions that make sums of a kind, of zeros."""
    if isinstance(size, tuple):
        tensors = [torch.zeros(one, dtype=dtype, device=ranks.device) for one in size]
        exchange = ranks.exchange(tensors)
        yield from [partial(ranks.summed_parts, tensors, exchange, len(tensors))] * times
        return
    for _ in range(times):
        yield partial(ranks.summed, ranks.buffer(size, dtype))


def _fingerprint(trainer: Any) -> str:
    """A hash of all parameters."""
    parts = [trainer.loss] if isinstance(trainer, DistributedPPO) else list(trainer.parts().values())
    modules = [part for part in parts if isinstance(part, nn.Module)]
    values = [value.detach().cpu().contiguous() for module in modules for value in module.parameters()]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Measures the cases of WORK; the first rank appends each row to OUT, a line."""
    work, out = cast("list[str]", sys.argv[1:] if argv is None else argv)
    asked = json.loads(work)
    cases = [Case(**case) for case in asked["cases"]]
    ranks = join(asked["device"], one_shot=any(case.sums in SYMMETRIC for case in cases))
    for case in cases:
        row = measure(case, ranks, asked["repeats"])
        if ranks.first:
            with Path(out).open("a") as file:
                file.write(json_text(row) + "\n")
    leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
