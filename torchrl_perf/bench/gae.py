"""Generalised advantage estimation: TorchRL's two forms and this package's, against the time of moving the bytes."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate as torchrl_gae,
)
from torchrl.objectives.value.functional import (
    vec_generalized_advantage_estimate as torchrl_vec_gae,
)

from torchrl_perf.bench.report import format_table, write_results
from torchrl_perf.functional import generalized_advantage_estimate
from torchrl_perf.runtime import capture, time_cuda

COLUMNS = ("N x T", "variant", "us", "p10_us", "p90_us", "floor_us", "of_copy_bandwidth", "max_error")
BYTES_PER_ELEMENT = 22  # reward, value, next value in; advantage, return out; done and terminated
CUDA_SHAPES = (
    "65536x128",
    "4096x128",
    "2048x128",
    "32768x128",
    "8192x1024",
    "1024x1024",
    "256x16",
    "16x2048",
    "4x128",
    "1x4096",
)
CPU_SHAPES = ("16x16", "16x128", "16x1024", "1024x16", "1024x128", "1024x1024", "4096x32", "1x1024")


@dataclass(frozen=True)
class BenchGAE:
    """Options of ``torchrl-perf bench gae``."""

    shapes: tuple[str, ...] = ()
    """Envs x steps; a grid for the device by default."""
    repeats: int = 50
    """Timed calls; fewer for TorchRL's Python loop."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for gae.json; the package's bench/results by default."""


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large copy on ``device``."""
    size = 2**30 if device.type == "cuda" else 2**27
    source, target = (
        torch.ones(size, dtype=torch.uint8, device=device),
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    return 2 * size / (time_cuda(lambda: target.copy_(source), 20, device=device).median * 1e-6)


def _batch(num_envs: int, num_steps: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Value, next value, reward, done, terminated: ``[N, T, 1]`` views of time-major memory, a done step in 50."""
    value, next_value, reward = torch.randn(3, num_steps, num_envs, 1, device=device).transpose(1, 2).unbind(0)
    done = (torch.rand(num_steps, num_envs, 1, device=device) < 0.02).transpose(0, 1)
    terminated = done & (torch.rand(num_steps, num_envs, 1, device=device) < 0.5).transpose(0, 1)
    return value, next_value, reward, done, terminated


def _rotating(fn: Callable[..., Any], batches: list[tuple[torch.Tensor, ...]]) -> Callable[[], Any]:
    """Calls ``fn`` on one batch after the other, so that a small batch is not timed in the cache."""
    state = {"next": 0}

    def call() -> Any:
        batch = batches[state["next"] % len(batches)]
        state["next"] += 1
        return fn(0.99, 0.95, *batch)

    return call


def _graph_us(fn: Callable[..., Any], batches: list[tuple[torch.Tensor, ...]], repeats: int) -> Any:
    """Time of one call inside a CUDA graph that holds one call for each batch.

    The start of the graph is shared by these calls: of 8 calls of 1024 x 1024 it is .8 us each on an H200.
    """
    call = capture(lambda: [fn(0.99, 0.95, *batch) for batch in batches][-1], audit=False)
    return time_cuda(call, repeats, warmup=5)


def measure(shape: str, device: torch.device, bandwidth: float, repeats: int) -> list[dict[str, Any]]:
    """Rows of one shape."""
    num_envs, num_steps = map(int, shape.split("x"))
    size = num_envs * num_steps * BYTES_PER_ELEMENT
    # enough different batches that they do not all fit in the cache, within reason
    batches = [_batch(num_envs, num_steps, device) for _ in range(max(2, min(16, 200_000_000 // size)))]
    exact = torchrl_gae(0.99, 0.95, *(t.double() if t.is_floating_point() else t for t in batches[0]))[0]
    variants: dict[str, Callable[..., Any]] = {
        "torchrl loop": torchrl_gae,
        "torchrl vectorised": torchrl_vec_gae,
        "torchrl_perf": generalized_advantage_estimate,
    }
    rows = []
    for name, fn in variants.items():
        count = repeats if name == "torchrl_perf" else max(3, repeats // 10)
        timing = time_cuda(_rotating(fn, batches), count, warmup=2, device=device)
        rows.append((name, timing, 1, fn))
    if device.type == "cuda":
        fn = generalized_advantage_estimate
        rows.append(("torchrl_perf, in a graph", _graph_us(fn, batches, repeats), len(batches), fn))
    floor = size / bandwidth * 1e6
    return [
        {
            "N x T": shape,
            "variant": name,
            "us": timing.median / parts,
            "p10_us": timing.p10 / parts,
            "p90_us": timing.p90 / parts,
            "floor_us": floor,
            "of_copy_bandwidth": floor / (timing.median / parts),
            "max_error": float((fn(0.99, 0.95, *batches[0])[0].double() - exact).abs().max()),
        }
        for name, timing, parts, fn in rows
    ]


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints the table and writes ``gae.json``."""
    import tyro

    options = tyro.cli(BenchGAE, args=argv, prog="torchrl-perf bench gae")
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    bandwidth = copy_bandwidth(device)
    print(f"device copy: {bandwidth / 1e12:.2f} TB/s")
    shapes = options.shapes or (CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES)
    rows = [row for shape in shapes for row in measure(shape, device, bandwidth, options.repeats)]
    print(format_table(rows, COLUMNS))
    print(f"written to {write_results('gae' if device.type == 'cuda' else 'gae_cpu', rows, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
