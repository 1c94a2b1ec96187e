"""Recurrent layers and policies: sequences against cuDNN and TorchRL, whole PPO against JAX, time to learn.

Every number of the "sequence" rows is for one layer, forward alone and forward with backward, call by call and, where
that is possible, in a CUDA graph. The task of whole iterations is CartPole without velocities.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchrl_perf.bench.learning import learn, warm_up
from torchrl_perf.bench.peers import jax_recurrent
from torchrl_perf.bench.recurrent_sequences import CAPTURED, SEQUENCES, make_sequence
from torchrl_perf.bench.recurrent_tasks import TASKS
from torchrl_perf.bench.report import Sheet
from torchrl_perf.runtime import Acceleration, Stopwatch, capture, synchronize, time_cuda
from torchrl_perf.trainers import PPOConfig, PPOTrainer

COLUMNS = (
    *("part", "variant", "N x T", "hidden", "forward_ms", "both_ms", "graph_forward_ms", "graph_both_ms"),
    *("steps_per_second", "ms", "start_s", "seed", "learnt", "seconds", "steps", "mean_return", "error"),
)
RESETS = 0.02
"""Share of the steps that begin an episode."""
PARTS = ("sequence", "training", "learning")


@dataclass(frozen=True)
class BenchRecurrent:
    """Options of ``torchrl-perf bench recurrent``."""

    parts: tuple[str, ...] = PARTS
    """Parts: sequence (one layer), training (whole iterations of PPO), learning (time to learn a task)."""
    shapes: tuple[str, ...] = ("4x128", "2048x128")
    """Envs x steps."""
    hidden: int = 128
    """Hidden units."""
    sequences: tuple[str, ...] = SEQUENCES
    """Layers: gru, lstm, mingru, lru; cudnn-gru and cudnn-lstm, without resets; torchrl-pad, -scan, -triton."""
    memories: tuple[str, ...] = ("gru", "lstm", "mingru", "none", "jax")
    """Policies: a memory of --memory, none, or jax (if installed), a GRU."""
    mode: str = "auto"
    """How PPO runs: eager, compile, graph, or auto."""
    compile_after: int | None = 0
    """Iterations of PPO before its kernels are compiled; None leaves that to the trainer."""
    repeats: int = 20
    """Timed calls."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of the learning runs."""
    learning: tuple[str, ...] = (
        *("stateless-cartpole:gru", "stateless-cartpole:none", "tmaze-100:gru", "tmaze-100:none"),
        *("tmaze-1000:mingru", "tmaze-1000:none", "repeat-previous:gru", "repeat-previous:none"),
    )
    """Tasks of the learning runs, each with a memory; also tmaze-20."""
    limit: float = 60.0
    """Seconds of a learning run after compilation, after which it has not learnt."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for recurrent.json and recurrent_learning.json; the package's bench/results by default."""


def running(options: BenchRecurrent, device: str) -> dict[str, Any]:
    """The settings of PPO that say where it runs and how."""
    at = None if options.mode == "eager" else options.compile_after
    return {"mode": options.mode, "compile_after": at, "device": device, "logger": "none"}


def measure_sequence(name: str, shape: str, hidden: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Milliseconds of one layer on ``[N, T]`` sequences; ``error`` where a layer does not run here."""
    num_envs, steps = map(int, shape.split("x"))
    row: dict[str, Any] = {"part": "sequence", "variant": name, "N x T": shape, "hidden": hidden}
    x = torch.randn(num_envs, steps, hidden, device=device, requires_grad=True)
    begins = torch.rand(num_envs, steps, device=device) < RESETS
    weight = torch.randn(num_envs, steps, hidden, device=device)
    with Acceleration(precision="tf32").active(device):
        try:
            layer, call = make_sequence(name, hidden, device)
            leaves = [x, *layer.parameters()]

            def forward() -> None:
                with torch.no_grad():
                    call(x, begins)

            def both() -> None:
                torch.autograd.grad(call(x, begins), leaves, weight, allow_unused=True)

            for key, fn in (("forward_ms", forward), ("both_ms", both)):
                row[key] = time_cuda(fn, repeats, warmup=3, device=device).median / 1e3
                if device.type == "cuda" and name in CAPTURED:
                    graph = capture(fn, compile=False, device=device, audit=False)
                    row[f"graph_{key}"] = time_cuda(graph, repeats, warmup=5, device=device).median / 1e3
        except (ImportError, RuntimeError, NotImplementedError) as error:  # of a package that is not here
            row["error"] = str(error).splitlines()[0][:120]
    return row


def config_of(memory: str, shape: str, options: BenchRecurrent, device: str, **changes: Any) -> PPOConfig:
    """PPO as PureJaxRL's recurrent one has it: four epochs of four minibatches of whole streams."""
    num_envs, num_steps = map(int, shape.split("x"))
    settings = {"epochs": 4, "minibatches": 4, "total_steps": 10**9, "normalize_observations": False, **changes}
    settings |= {} if memory == "none" else {"memory_size": options.hidden}
    settings |= {"memory": memory, "num_envs": num_envs, "num_steps": num_steps, **running(options, device)}
    return PPOConfig(env="StatelessCartPole", **settings)


def measure_training(memory: str, shape: str, options: BenchRecurrent, device: str) -> dict[str, Any]:
    """Env steps a second of whole iterations, after compilation and recording."""
    config = config_of(memory, shape, options, device)
    start = Stopwatch("cpu").start()
    trainer = PPOTrainer(config)
    for _ in range(4):
        trainer.step()
    synchronize(trainer.device)
    start.stop()
    timing = time_cuda(trainer.step, options.repeats, warmup=3, device=device)
    variant = f"{memory}, {trainer.mode}" + ("" if options.compile_after == 0 else ", not compiled")
    trainer.close()
    row = {"part": "training", "variant": variant, "N x T": shape, "hidden": options.hidden}
    row |= {"steps_per_second": config.batch_size / timing.median * 1e6, "ms": timing.median / 1e3}
    return row | {"start_s": start.seconds}


def measure_learning(name: str, options: BenchRecurrent, device: str) -> Iterator[dict[str, Any]]:
    """A row of each seed: wall time until the last 100 finished episodes have the mean return of a task that is learnt.

    One trainer compiles and records once, and runs from the state that a trainer of each seed begins with.

    Args:
        name: of the task and the memory, ``"stateless-cartpole:gru"``.
        options: give the mode, the seeds and the longest time.
        device: of the runs.
    """
    task, _, memory = name.partition(":")
    place = running(options, device)
    trainer = PPOTrainer(TASKS[task].config(memory, **place))
    start_s = warm_up(trainer, 4)
    for seed in options.seeds:
        trainer.load_state_dict(first_state(task, memory, seed, {**place, "mode": "eager", "compile_after": None}))
        row = {"part": "learning", "variant": name, "seed": seed, "hidden": trainer.config.memory_size}
        found = learn(trainer, TASKS[task].target, every=2, limit=options.limit)
        yield row | found | {"learnt": found["seconds"] is not None, "start_s": start_s}
    trainer.close()


def first_state(task: str, memory: str, seed: int, place: dict[str, Any]) -> dict[str, Any]:
    """The state of a run that has taken no step."""
    fresh = PPOTrainer(TASKS[task].config(memory, seed=seed, **place))
    state = fresh.state_dict()
    fresh.close()
    return state


def _jobs(options: BenchRecurrent, device: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """The measurements of speed that ``options`` asks for, each of which returns one row."""
    if "sequence" in options.parts:
        for shape in options.shapes:
            for name in options.sequences:
                yield partial(measure_sequence, name, shape, options.hidden, torch.device(device), options.repeats)
    if "training" in options.parts:
        for shape in options.shapes:
            for memory in options.memories:
                if memory != "jax":
                    yield partial(measure_training, memory, shape, options, device)
                elif importlib.util.find_spec("jax") is not None:
                    config = config_of("gru", shape, options, device)
                    yield partial(jax_recurrent.measure, config, options.repeats)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints each row and writes ``recurrent.json`` and ``recurrent_learning.json``."""
    import tyro

    options = tyro.cli(BenchRecurrent, args=argv, prog="torchrl-perf bench recurrent")
    device = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    speed, learning = Sheet(COLUMNS, "recurrent", options.out), Sheet(COLUMNS, "recurrent_learning", options.out)
    for job in _jobs(options, device):
        speed.add(job())
    for name in options.learning if "learning" in options.parts else ():
        for row in measure_learning(name, options, device):
            learning.add(row)
    for path in filter(None, (speed.path, learning.path)):
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
