"""Off-policy training: updates/s of SAC, env steps/s of DQN on CartPole, and the time to learn, beside TorchRL's."""

import gc
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import MLP, IndependentNormal, NormalParamExtractor, ProbabilisticActor, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from torchrl_perf.bench.learning import time_to_return
from torchrl_perf.bench.report import format_table, write_results
from torchrl_perf.envs import DeviceEnv
from torchrl_perf.runtime import Stopwatch, capture, synchronize, time_cuda
from torchrl_perf.trainers import (
    DQN_PRESETS,
    DDPGConfig,
    DDPGTrainer,
    DQNConfig,
    DQNTrainer,
    SACConfig,
    SACTrainer,
    TD3Config,
)

COLUMNS = ("task", "variant", "per_second", "us", "p10_us", "p90_us", "start_s", "tflops")
UPDATES_OF: dict[str, tuple[Any, Any]] = {
    "sac": (SACConfig, SACTrainer),
    "td3": (TD3Config, DDPGTrainer),
    "ddpg": (DDPGConfig, DDPGTrainer),
}
"""Config and trainer of the tasks that are updates of actor and critics."""
UPDATES = 16  # updates in one call
LEARN = replace(DQN_PRESETS["CartPole"], capacity=300_032, logger="none")  # rows: a multiple of the envs
"""Settings of the time to a return of 475: more envs collect faster, but it is updates that take the time."""


TASKS = ("sac", "dqn", "learn")
"""What is measured by default."""


@dataclass(frozen=True)
class BenchOffPolicy:
    """Options of ``torchrl-perf bench offpolicy``."""

    tasks: tuple[str, ...] = TASKS
    """What to measure: sac, td3, ddpg (updates/s), dqn (env steps/s), learn (time to a return of 475 on CartPole)."""
    variants: tuple[str, ...] = ("torchrl", "eager", "compile", "graph")
    """Rows; TorchRL's of SAC alone."""
    batch: int = 256
    """Rows of a sample of sac, td3 and ddpg."""
    hidden_sizes: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers of actor and critics of these."""
    precision: str = "tf32"
    """Precision of these, of ours alone."""
    dqn_envs: int = 4096
    """Envs of the DQN rows, of 16 steps an iteration, with one update of as many samples."""
    repeats: int = 50
    """Timed calls; a tenth of them for the slow variants."""
    seeds: int = 3
    """Seeds of the learning runs."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for offpolicy.json; the package's bench/results by default."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.tasks if name not in (*UPDATES_OF, "dqn", "learn")]
        if unknown or self.batch < 1 or not self.hidden_sizes or min(self.hidden_sizes) < 1:
            raise ValueError(
                f"tasks, batch, hidden_sizes: expected {[*UPDATES_OF, 'dqn', 'learn']}, positive numbers and at least "
                f"one width, received {list(self.tasks)}, {self.batch} and {list(self.hidden_sizes)}. Remedy: those."
            )

    @property
    def file(self) -> str:
        """Name of the results: what was measured, where it is not all, and sizes other than the default ones."""
        parts = ["offpolicy"] if self.tasks == TASKS else ["offpolicy", "-".join(self.tasks)]
        if (self.batch, self.hidden_sizes, self.precision) != (256, (256, 256), "tf32"):
            parts += [str(self.batch), "-".join(map(str, self.hidden_sizes)), self.precision]
        return "_".join(parts)


class Locomotion(DeviceEnv):
    """A linear task of HalfCheetah's sizes: 17 observations, 6 actions; cheap, so that updates are what is timed."""

    num_state = 17
    num_reset_noise = 17
    default_episode_steps = 1000
    observation_low: ClassVar[tuple[float, ...]] = (-math.inf,) * 17
    observation_high: ClassVar[tuple[float, ...]] = (math.inf,) * 17
    action_low: ClassVar[tuple[float, ...]] = (-1.0,) * 6
    action_high: ClassVar[tuple[float, ...]] = (1.0,) * 6

    def initial_state(self, uniform: Tensor) -> Tensor:
        """``[N, 17]`` in [-0.1, 0.1)."""
        return uniform * 0.2 - 0.1

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A damped integrator of the action, rewarded for its first coordinate."""
        push = nn.functional.pad(action, (0, 11))
        following = 0.95 * state + 0.05 * push
        return following, following[:, 0] - 0.1 * action.square().sum(-1), state[:, 0] > 10.0

    def observe(self, state: Tensor) -> Tensor:
        """The state."""
        return state


class TorchRLSAC:
    """TorchRL's parts as its examples put them together: buffer, ``SACLoss``, ``SoftUpdate``, Adam."""

    def __init__(self, env: DeviceEnv, batch: int, hidden_sizes: tuple[int, ...], device: torch.device) -> None:
        options = {"num_cells": list(hidden_sizes), "activation_class": nn.ReLU, "device": device}
        net = nn.Sequential(MLP(in_features=17, out_features=12, **options), NormalParamExtractor())
        module = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
        # IndependentNormal: with TanhNormal each call would wait for the host
        self.actor = ProbabilisticActor(
            module, in_keys=["loc", "scale"], spec=env.action_spec, distribution_class=IndependentNormal
        )
        critic = ValueOperator(MLP(in_features=23, out_features=1, **options), in_keys=["observation", "action"])
        self.loss = SACLoss(self.actor, critic, num_qvalue_nets=2, action_spec=env.action_spec, target_entropy=-6.0)
        self.loss.make_value_estimator(gamma=0.99)
        self.targets = SoftUpdate(self.loss, tau=0.005)
        groups = [list(self.loss.qvalue_network_params.flatten_keys().values())]
        groups += [list(self.loss.actor_network_params.flatten_keys().values()), [self.loss.log_alpha]]
        self.optimizers = [torch.optim.Adam(group, lr=3e-4) for group in groups]
        self.buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000, device=device), batch_size=batch)
        with torch.no_grad():
            self.buffer.extend(env.rollout(64, self.actor, break_when_any_done=False).reshape(-1))

    def learn(self) -> None:
        """Updates of critics, actor, temperature and targets."""
        for _ in range(UPDATES):
            losses = self.loss(self.buffer.sample())
            names = ("loss_qvalue", "loss_actor", "loss_alpha")
            for optimizer, name in zip(self.optimizers, names, strict=True):
                optimizer.zero_grad()
                losses[name].backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.targets.step()


def updates(task: str, variant: str, device: torch.device, options: BenchOffPolicy) -> dict[str, Any]:
    """Full updates/s of actor and critics, without collection."""
    start, (batch, sizes) = Stopwatch("cpu").start(), (options.batch, options.hidden_sizes)
    count = UPDATES if batch < 8192 else 4
    if variant == "torchrl":
        peer = TorchRLSAC(Locomotion(256, device=device), batch, sizes, device)
        call, close, count = peer.learn, lambda: None, UPDATES
    else:
        kind, trainer_of = UPDATES_OF[task]
        config = kind.without_task(
            num_envs=256, num_steps=4, learning_starts=max(8_192, batch), updates_per_iteration=count,
            capacity=1_000_000, mode="eager" if variant == "eager" else "compile", device=str(device), logger="none",
            total_steps=10**9, minibatch_size=batch, hidden_sizes=sizes, precision=options.precision,
        )  # fmt: skip
        trainer = trainer_of(config, env=Locomotion(256, device=device))
        for _ in range(config.fill_iterations):
            trainer.step()
        learn: Callable[[], None] = trainer.learn
        call = capture(learn, device=device, audit=False, warmup=3) if variant == "graph" else learn
        close = trainer.close
    row = _row(f"{task.upper()} updates", variant, call, count, start, device, options.repeats, close)
    made_of = {"batch": batch, "hidden_sizes": list(sizes), "precision": options.precision}
    return {**row, **made_of, "tflops": row["per_second"] * batch * products(task, sizes) * 2 / 1e12}


def products(task: str, sizes: tuple[int, ...]) -> float:
    """Multiply-adds of matrix products of one row in one update.

    Forward a weight takes part in one, backward in one for the gradient of its input and one for its own. Critics learn
    (3) and are asked for the action's gradient (2), their targets act (1); SAC's actor acts at two states and learns
    from one (4), DDPG's learns (3) and its target acts (1). TD3's actor is due at each second update.
    """
    critics = 1 if task == "ddpg" else 2
    critic = critics * _weights((23, *sizes, 1))
    actor = _weights((17, *sizes, 12 if task == "sac" else 6))
    if task == "sac":
        return 6 * critic + 4 * actor
    share = TD3Config.policy_delay if task == "td3" else 1
    return 4 * critic + actor + (2 * critic + 3 * actor) / share


def _weights(sizes: tuple[int, ...]) -> int:
    return sum(inputs * outputs for inputs, outputs in itertools.pairwise(sizes))


def dqn(variant: str, device: torch.device, repeats: int, num_envs: int) -> dict[str, Any]:
    """Env steps/s of whole iterations on CartPole: 16 steps of each env, one update of as many samples."""
    start = Stopwatch("cpu").start()
    rows = num_envs * 16
    config = DQNConfig.without_task(
        num_envs=num_envs, num_steps=16, minibatch_size=rows, updates_per_iteration=1, capacity=16 * rows,
        learning_starts=2 * rows, mode=variant, device=str(device), logger="none", total_steps=10**9,
    )  # fmt: skip
    trainer = DQNTrainer(config)
    for _ in range(config.fill_iterations):
        trainer.step()
    return _row("DQN env steps", variant, trainer.step, rows, start, device, repeats, trainer.close)


def _row(
    task: str, variant: str, call: Callable[[], Any], count: int, start: Stopwatch, device: torch.device,
    repeats: int, close: Callable[[], Any],
) -> dict[str, Any]:  # fmt: skip
    for _ in range(4):
        call()
    synchronize(device)
    start.stop()
    slow = variant in ("torchrl", "eager")
    timing = time_cuda(call, max(3, repeats // 10) if slow else repeats, warmup=2, device=device)
    close()
    times = {"us": timing.median, "p10_us": timing.p10, "p90_us": timing.p90}
    per_second = count / timing.median * 1e6
    return {"task": task, "variant": variant, "per_second": per_second, **times, "start_s": start.seconds}


def time_to_solve(seed: int, device: torch.device, config: DQNConfig = LEARN, target: float = 475.0) -> dict[str, Any]:
    """Wall time after compile and capture until the last 100 finished episodes have a mean return of ``target``."""
    trainer = DQNTrainer(replace(config, seed=seed, device=str(device)))
    learnt = time_to_return(trainer, target, warmup=config.fill_iterations + 4, every=20)
    return {"task": f"DQN, time to {target:.0f}", "seed": seed, **learnt}


def _jobs(options: BenchOffPolicy, device: torch.device) -> Iterator[Callable[[], dict[str, Any]]]:
    variants = [name for name in options.variants if name != "graph" or device.type == "cuda"]
    for task in [name for name in UPDATES_OF if name in options.tasks]:
        for variant in variants:
            if variant != "torchrl" or task == "sac":
                yield partial(updates, task, variant, device, options)
    for variant in variants if "dqn" in options.tasks else ():
        if variant != "torchrl":
            yield partial(dqn, variant, device, options.repeats, options.dqn_envs)
    for seed in range(options.seeds if "learn" in options.tasks else 0):
        yield partial(time_to_solve, seed, device)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints the table and writes ``offpolicy.json``."""
    import tyro

    options = tyro.cli(BenchOffPolicy, args=argv, prog="torchrl-perf bench offpolicy")
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    rows: list[dict[str, Any]] = []
    for job in _jobs(options, device):
        gc.collect()
        rows.append(job())
        path = write_results(options.file if device.type == "cuda" else f"{options.file}_cpu", rows, options.out)
        print(rows[-1], flush=True)
    print(format_table([row for row in rows if "us" in row], COLUMNS))
    learnt = [row for row in rows if "seed" in row]
    print(format_table(learnt, ("task", "seed", "seconds", "steps", "mean_return", "start_s")))
    if rows:
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
