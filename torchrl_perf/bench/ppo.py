"""PPO on CartPole, or a task of a robot's sizes: TorchRL, a JAX peer, and this package eager, compiled and captured.

Reports the throughput of whole iterations, the split by phase and the time to learn.
"""

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from torchrl_perf.bench.learning import time_to_return
from torchrl_perf.bench.peers import jax as jax_peer
from torchrl_perf.bench.peers.baselines import PlainCartPole, TorchRLPPO
from torchrl_perf.bench.report import format_table, write_results
from torchrl_perf.bench.robot import Robot
from torchrl_perf.modules.mlp import FusedMLP
from torchrl_perf.runtime import Stopwatch, capture, synchronize, time_cuda
from torchrl_perf.trainers import PPOConfig, PPOTrainer

COLUMNS = (
    "variant",
    "N x T",
    "steps_per_second",
    "ms",
    "p10_ms",
    "p90_ms",
    "collect_ms",
    "advantage_ms",
    "update_ms",
    "measure_ms",
    "start_s",
)


@dataclass(frozen=True)
class BenchPPO:
    """Options of ``torchrl-perf bench ppo``."""

    task: Literal["CartPole", "robot"] = "CartPole"
    """CartPole; robot: 48 observations, 12 continuous actions, 512-256-128 with elu, 5 epochs, shape 4096x24."""
    shapes: tuple[str, ...] = ()
    """Envs x steps of an iteration; 4x128 2048x128 4096x128 65536x16 by default, for the robot 4096x24."""
    hidden_sizes: tuple[int, ...] = ()
    """Widths of the hidden layers of actor and critic, in ours and the peer's; 64 64 by default."""
    activation: str = ""
    """Activation of both; tanh by default, for the robot elu."""
    variants: tuple[str, ...] = ("torchrl", "eager", "compile", "graph", "graph-bf16", "jax")
    """Rows: torchrl, torchrl-cudagraph (CartPole with 64 64 alone), eager, compile, graph, graph-bf16, graph-plain
    (layer by layer, without fused kernels), graph-torchrl-loss, jax (if installed)."""
    repeats: int = 20
    """Timed iterations; a tenth of them for the slow variants."""
    learn: bool = True
    """Also measure the time to a mean return of 475 on CartPole, on CUDA in every precision."""
    seeds: int = 3
    """Seeds of the learning runs."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for ppo.json; the package's bench/results by default."""

    @property
    def changes(self) -> dict[str, Any]:
        """Settings that differ from those of the CartPole preset."""
        robot = {"hidden_sizes": (512, 256, 128), "activation": "elu", "epochs": 5} if self.task == "robot" else {}
        given = {"hidden_sizes": self.hidden_sizes, "activation": self.activation}
        return robot | {name: value for name, value in given.items() if value}

    @property
    def name(self) -> str:
        """Of the file of results."""
        parts = ["ppo", *(["robot"] if self.task == "robot" else [])]
        parts += ["-".join(map(str, self.hidden_sizes))] if self.hidden_sizes else []
        return "_".join([*parts, *([self.activation] if self.activation else [])])


PRECISIONS = ("tf32", "bf16", "fp16", "ieee")
ROBOT_SHAPES = ("4096x24",)
CARTPOLE_SHAPES = ("4x128", "2048x128", "4096x128", "65536x16")


def _config(shape: str, device: str, **changes: Any) -> PPOConfig:
    num_envs, num_steps = map(int, shape.split("x"))
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "total_steps": 10**9, "epochs": 4, "minibatches": 4}
    return PPOConfig(**{**sizes, "device": device, "logger": "none", **changes})


def _trainer(variant: str, shape: str, device: str, options: BenchPPO) -> PPOTrainer | TorchRLPPO:
    if variant.startswith("torchrl"):
        config = _config(shape, device)
        env = PlainCartPole(config.num_envs, device=device)
        return TorchRLPPO(env, config, cudagraph_policy=variant.endswith("cudagraph"))
    mode, _, option = variant.partition("-")
    known = {"bf16": {"precision": "bf16"}, "torchrl-loss": {"loss": "torchrl"}}
    config = _config(shape, device, mode=mode, **options.changes, **known.get(option, {}))
    trainer = PPOTrainer(config, env=Robot(config.num_envs, device=device) if options.task == "robot" else None)
    if option == "plain":
        for network in (part for part in trainer.loss.modules() if isinstance(part, FusedMLP)):
            network.fuses = False
    return trainer


def _phases(trainer: PPOTrainer | TorchRLPPO, graph: bool, repeats: int) -> dict[str, float]:
    """Median ms of each phase alone; in graphs of their own where the iteration is one graph."""
    state: dict[str, Any] = {}

    def collect() -> None:
        state["batch"] = trainer.collect()

    def advantage() -> None:
        state["advantage"] = trainer.advantage(state["batch"].copy())

    def update() -> None:
        trainer.update(state["advantage"])

    names: list[tuple[str, Callable[[], None]]] = [("collect", collect), ("advantage", advantage), ("update", update)]
    if isinstance(trainer, PPOTrainer):
        measure = trainer.measure
        names.append(("measure", lambda: measure(state["advantage"])))
    out = {}
    for name, fn in names:
        call = capture(fn, audit=False) if graph else fn
        out[f"{name}_ms"] = time_cuda(call, repeats, warmup=3).median / 1e3
    return out


def measure(variant: str, shape: str, device: str, options: BenchPPO) -> dict[str, Any]:
    """One row: median time of an iteration, its phases, and the time until the first fast iteration."""
    gc.collect()
    start = Stopwatch("cpu").start()
    trainer, repeats = _trainer(variant, shape, device, options), options.repeats
    for _ in range(3):
        trainer.step()
    synchronize(device)
    start.stop()
    slow = variant in ("torchrl", "torchrl-cudagraph", "eager")
    count = max(2, repeats // 10) if slow else repeats
    timing = time_cuda(trainer.step, count, warmup=1 if slow else 3, device=device)
    num_envs, num_steps = map(int, shape.split("x"))
    row = {
        "variant": variant,
        "N x T": shape,
        "steps_per_second": num_envs * num_steps / timing.median * 1e6,
        "ms": timing.median / 1e3,
        "p10_ms": timing.p10 / 1e3,
        "p90_ms": timing.p90 / 1e3,
        "repeats": count,
        "start_s": start.seconds,
    }
    if torch.device(device).type == "cuda":
        row |= _phases(trainer, variant.startswith("graph"), count)
    trainer.close()
    return row


def time_to_solve(seed: int, device: str, target: float = 475.0, **changes: Any) -> dict[str, Any]:
    """Wall time after compile and capture until the last 100 finished episodes have a mean return of ``target``."""
    config = replace(PPOConfig(), seed=seed, device=device, logger="none", compile_after=0, **changes)
    trainer = PPOTrainer(config)
    return {
        "variant": f"time to {target:.0f}, {config.precision}",
        "learns": trainer.mode if config.precision == "tf32" else f"{trainer.mode}-{config.precision}",
        "seed": seed,
        **time_to_return(trainer, target, warmup=4, every=2),
    }


def _available(variant: str, device: str, options: BenchPPO) -> bool:
    """Graphs need CUDA, the peer needs JAX on the same device, and TorchRL's loop is that of the preset."""
    if variant == "jax":
        return importlib.util.find_spec("jax") is not None
    if variant.startswith("torchrl"):
        return not options.changes
    return device != "cpu" or not variant.startswith("graph")


def _jobs(options: BenchPPO, device: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """The measurements that ``options`` asks for, each of which returns one row."""
    for shape in options.shapes or (ROBOT_SHAPES if options.task == "robot" else CARTPOLE_SHAPES):
        for variant in [name for name in options.variants if _available(name, device, options)]:
            if variant == "jax":
                config = _config(shape, device, **options.changes)
                yield partial(jax_peer.measure, config, options.repeats, options.task)
            else:
                yield partial(measure, variant, shape, device, options)
    if not options.learn or options.task != "CartPole":
        return
    for precision in PRECISIONS if device != "cpu" else PRECISIONS[:1]:
        for seed in range(options.seeds):
            yield partial(time_to_solve, seed, device, precision=precision, **options.changes)
    if _available("jax", device, options):
        for seed in range(options.seeds):
            yield partial(jax_peer.time_to_solve, replace(PPOConfig(), seed=seed, **options.changes))


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints the table and writes ``ppo.json``."""
    import tyro

    options = tyro.cli(BenchPPO, args=argv, prog="torchrl-perf bench ppo")
    device = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    for job in _jobs(options, device):
        rows.append(job())
        path = write_results(
            options.name, rows, options.out
        )  # after each row: a long run that is stopped keeps what it has
        if "ms" in rows[-1]:
            print(format_table(rows[-1:], COLUMNS).splitlines()[-1], flush=True)
    print(format_table([row for row in rows if "ms" in row], COLUMNS))
    print(
        format_table(
            [row for row in rows if "seed" in row], ("variant", "seed", "seconds", "steps", "mean_return", "start_s")
        )
    )
    if rows:
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
