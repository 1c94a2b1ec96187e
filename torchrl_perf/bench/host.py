"""Collection from gymnasium's vector envs on the CPU: the bare vector env, TorchRL's collector, and this package's.

All variants run in one process and take turns, batch by batch, so that whatever else the machine does hits them alike.
The policy is a 256-256 ReLU perceptron on the device; gymnasium[mujoco] is needed for the default env.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import BaseCollector, Collector
from torchrl.envs import DoubleToFloat, EnvBase, GymEnv, GymWrapper, ParallelEnv, SerialEnv, TransformedEnv

from torchrl_perf.bench.report import format_table, write_results
from torchrl_perf.collectors import HostCollector
from torchrl_perf.runtime import Stopwatch, synchronize

COLUMNS = ("variant", "N x T", "frames_per_second", "us_per_step", "p10_us", "p90_us", "share_of_bare", "start_s")

VARIANTS = {
    "bare": "SyncVectorEnv stepped with random actions, nothing stored: what a collector is measured by",
    "bare-policy": "SyncVectorEnv and the bare network, actions and observations moved, nothing stored: the ceiling",
    "host": "HostCollector over one SyncVectorEnv in mode SAME_STEP",
    "host-next-step": "the same in mode NEXT_STEP",
    "host-groups": "HostCollector over two SyncVectorEnvs, a thread each",
    "host-random": "HostCollector with random actions",
    "bare-async": "AsyncVectorEnv stepped with random actions",
    "host-async": "HostCollector over one AsyncVectorEnv",
    "host-async-groups": "HostCollector over two AsyncVectorEnvs",
    "torchrl-vector": "TorchRL's Collector over GymWrapper(SyncVectorEnv)",
    "torchrl-serial": "TorchRL's Collector over SerialEnv(GymEnv)",
    "torchrl-parallel": "TorchRL's Collector over ParallelEnv(GymEnv)",
}


@dataclass(frozen=True)
class BenchHost:
    """Options of ``torchrl-perf bench host``."""

    env: str = "HalfCheetah-v5"
    """Gymnasium id, with Box observations and actions."""
    num_envs: int = 16
    """Envs."""
    num_steps: int = 32
    """Steps of a batch."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Rows; ``torchrl-parallel`` takes up to minutes to start its processes."""
    rounds: int = 20
    """Timed batches of each variant."""
    threads: int = 1
    """CPU threads of PyTorch; 0 leaves its default."""
    device: str = "auto"
    """Where the policy acts and batches are stored."""
    out: str | None = None
    """Folder for the JSON; the package's bench/results by default."""


@dataclass
class _Runner:
    """A batch of one variant, what ends it, and its times."""

    batch: Callable[[], Any]
    close: Callable[[], Any]
    start_s: float
    times: list[float]


def make_policy(options: BenchHost, device: str) -> TensorDictModule:
    """The network, from the env's sizes."""
    env = gym.make(options.env)
    inputs, outputs = env.observation_space.shape[0], env.action_space.shape[0]  # pyright: ignore
    env.close()
    layers = [nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs), nn.Tanh()]
    return TensorDictModule(nn.Sequential(*layers).to(device), in_keys=["observation"], out_keys=["action"])


def _vector(options: BenchHost, kind: str, mode: AutoresetMode, share: int = 1) -> VectorEnv:
    fns = [partial(gym.make, options.env)] * (options.num_envs // share)
    if kind == "async":
        # importing TorchRL makes "spawn" the default, which takes seconds a process
        return AsyncVectorEnv(fns, autoreset_mode=mode, context="fork")
    return SyncVectorEnv(fns, autoreset_mode=mode)


def _bare(variant: str, options: BenchHost, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    envs = _vector(options, "async" if "async" in variant else "sync", AutoresetMode.SAME_STEP)
    observation, _ = envs.reset(seed=0)
    network = make_policy(options, device).module

    def random_steps() -> None:
        for _ in range(options.num_steps):
            envs.step(envs.action_space.sample())

    @torch.no_grad()
    def policy_steps() -> None:
        nonlocal observation
        for _ in range(options.num_steps):
            action = network(torch.as_tensor(observation, dtype=torch.float32).to(device)).cpu().numpy()
            observation = envs.step(action)[0]

    return (policy_steps if variant == "bare-policy" else random_steps), envs.close


def _host(variant: str, options: BenchHost, device: str) -> HostCollector:
    kind = "async" if "async" in variant else "sync"
    mode = AutoresetMode.NEXT_STEP if variant.endswith("next-step") else AutoresetMode.SAME_STEP
    share = 2 if variant.endswith("groups") else 1
    policy = None if variant == "host-random" else make_policy(options, device)
    envs = [_vector(options, kind, mode, share) for _ in range(share)]
    frames = options.num_envs * options.num_steps
    return HostCollector(envs, policy, frames_per_batch=frames, device=device, seed=0)


def _torchrl(variant: str, options: BenchHost, device: str) -> BaseCollector:
    make = partial(GymEnv, options.env)
    if variant == "torchrl-vector":
        env: EnvBase = GymWrapper(_vector(options, "sync", AutoresetMode.DISABLED))
    else:
        env = (ParallelEnv if variant.endswith("parallel") else SerialEnv)(options.num_envs, make)
    return Collector(
        TransformedEnv(env, DoubleToFloat()),
        make_policy(options, device),
        frames_per_batch=options.num_envs * options.num_steps,
        total_frames=-1,
        policy_device=device,
        env_device="cpu",
        storing_device=device,
        auto_register_policy_transforms=False,
    )


def start(variant: str, options: BenchHost, device: str) -> _Runner:
    """Builds a variant and runs three batches of it."""
    watch = Stopwatch("cpu").start()
    if variant.startswith("bare"):
        batch, close = _bare(variant, options, device)
    elif variant.startswith("host"):
        collector = _host(variant, options, device)
        batch, close = collector.collect, collector.shutdown
    else:
        collector = _torchrl(variant, options, device)
        batch, close = partial(next, iter(collector)), collector.shutdown
    for _ in range(3):
        batch()
    synchronize(device)
    watch.stop()
    return _Runner(batch, close, watch.seconds, [])


def measure(options: BenchHost, device: str) -> list[dict[str, Any]]:
    """One row for each variant."""
    runners = {variant: start(variant, options, device) for variant in options.variants}
    for _ in range(options.rounds):
        for runner in runners.values():
            with Stopwatch("cpu") as watch:
                runner.batch()
                synchronize(device)
            runner.times.append(watch.seconds / options.num_steps * 1e6)
    for runner in runners.values():
        runner.close()
    return [_row(variant, runners, options) for variant in runners]


def _row(variant: str, runners: dict[str, _Runner], options: BenchHost) -> dict[str, Any]:
    runner = runners[variant]
    bare = runners.get("bare-async" if "async" in variant else "bare")
    tenths = quantiles(runner.times, n=10) if len(runner.times) > 1 else [runner.times[0]] * 9
    return {
        "variant": variant,
        "N x T": f"{options.num_envs}x{options.num_steps}",
        "frames_per_second": options.num_envs / median(runner.times) * 1e6,
        "us_per_step": median(runner.times),
        "p10_us": tenths[0],
        "p90_us": tenths[-1],
        "share_of_bare": None if bare is None else median(bare.times) / median(runner.times),
        "start_s": runner.start_s,
        "env": options.env,
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints the table and writes ``host.json`` (``host_cpu.json`` on a CPU)."""
    import tyro

    options = tyro.cli(BenchHost, args=argv, prog="torchrl-perf bench host")
    device = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of the envs' and TorchRL's own
        rows = measure(options, device)
    print(format_table(rows, COLUMNS))
    print(f"written to {write_results('host_cpu' if device == 'cpu' else 'host', rows, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
