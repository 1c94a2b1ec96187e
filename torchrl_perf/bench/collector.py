"""Collection on CartPole: TorchRL's collector with its defaults and at its best, and this package's in each mode."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torchrl.collectors import BaseCollector, Collector

from torchrl_perf.bench.peers.baselines import PlainCartPole, plain_actor
from torchrl_perf.bench.report import format_table, write_results
from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.runtime import Stopwatch, synchronize, time_cuda
from torchrl_perf.trainers import PPOConfig, make_actor

COLUMNS = ("variant", "N x T", "frames_per_second", "us_per_step", "p10_us", "p90_us", "start_s")


VARIANTS = {
    "torchrl": "TorchRL's collector, actor and a plain env",
    "torchrl-no-traj-ids": "the same without trajectory ids",
    "torchrl-device-env": "TorchRL's collector and actor on a DeviceEnv",
    "eager-torchrl-actor": "DeviceCollector and DeviceEnv with TorchRL's actor",
    "eager": "DeviceCollector, DeviceEnv and DeviceActor",
    "compile": "the same, compiled",
    "graph": "the same, in a CUDA graph",
}


@dataclass(frozen=True)
class BenchCollector:
    """Options of ``torchrl-perf bench collector``."""

    num_envs: int = 256
    """Envs."""
    num_steps: int = 64
    """Steps of a batch."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Rows: TorchRL on a plain env, the same without trajectory ids, TorchRL on the package's env, ours by mode."""
    repeats: int = 10
    """Timed batches."""
    threads: int = 0
    """CPU threads of PyTorch; 0 leaves its default."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for the JSON; the package's bench/results by default."""


def _collector(variant: str, options: BenchCollector, device: str) -> BaseCollector:
    plain = variant in ("torchrl", "torchrl-no-traj-ids")
    env = (PlainCartPole if plain else CartPole)(options.num_envs, device=device)
    policy = plain_actor(env) if "torchrl" in variant else make_actor(env, PPOConfig())
    frames = options.num_envs * options.num_steps
    if variant.startswith("torchrl"):
        ids = variant != "torchrl-no-traj-ids"
        return Collector(
            env,
            policy,
            frames_per_batch=frames,
            total_frames=-1,
            device=device,
            track_traj_ids=ids,
            auto_register_policy_transforms=False,
        )
    return DeviceCollector(env, policy, frames_per_batch=frames, mode=variant.partition("-")[0])


def measure(variant: str, options: BenchCollector, device: str) -> dict[str, Any]:
    """One row: batches that own their data, from the collector's iterator."""
    start = Stopwatch("cpu").start()
    collector = _collector(variant, options, device)
    batches = iter(collector)
    for _ in range(4):
        next(batches)
    synchronize(device)
    start.stop()
    timing = time_cuda(lambda: next(batches), options.repeats, warmup=1, device=device)
    collector.shutdown()
    steps = options.num_steps
    return {
        "variant": variant,
        "N x T": f"{options.num_envs}x{steps}",
        "frames_per_second": options.num_envs * steps / timing.median * 1e6,
        "us_per_step": timing.median / steps,
        "p10_us": timing.p10 / steps,
        "p90_us": timing.p90 / steps,
        "start_s": start.seconds,
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints the table and writes ``collector.json`` (``collector_cpu.json`` on a CPU)."""
    import tyro

    options = tyro.cli(BenchCollector, args=argv, prog="torchrl-perf bench collector")
    device = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    variants = [v for v in options.variants if v != "graph" or device != "cpu"]
    rows = [measure(variant, options, device) for variant in variants]
    print(format_table(rows, COLUMNS))
    print(f"written to {write_results('collector_cpu' if device == 'cpu' else 'collector', rows, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
