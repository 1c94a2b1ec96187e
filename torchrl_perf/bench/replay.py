"""Replay buffers: TorchRL's, Flashbax's where installed, a plain gather and this package's, beside the bytes moved."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler, SamplerWithoutReplacement, SliceSampler

from torchrl_perf.bench.gae import copy_bandwidth
from torchrl_perf.bench.peers import flashbax as flashbax_peer
from torchrl_perf.bench.report import format_table, write_results
from torchrl_perf.replay import DeviceRandomSampler, DeviceStorage, DeviceWriter, make_replay_buffer
from torchrl_perf.runtime import capture, time_cuda

COLUMNS = ("operation", "batch", "variant", "us", "p10_us", "p90_us", "floor_us", "times_floor")
OBSERVATION, ACTION = 376, 17  # Humanoid's: 2 x 376 + 18 floats a row with the reward
SLICE_LENGTH = 16
GRAPH_PARTS = 10  # calls in one graph, so that its launch is not what is timed
CALLS = 10  # one after another, as in a loop, between two readings of the clock, which take as long as a call


@dataclass(frozen=True)
class BenchReplay:
    """Options of ``torchrl-perf bench replay``."""

    capacity: int = 0
    """Rows; 1,048,576 on CUDA and 65,536 on a CPU by default."""
    batches: tuple[int, ...] = (256, 4096, 65_536)
    """Rows of a sample; larger ones than a sixteenth of the capacity are left out."""
    extend: int = 4096
    """Rows of a write."""
    repeats: int = 100
    """Timed stretches of ten calls."""
    peers: tuple[str, ...] = ("torchrl", "gather", "flashbax")
    """What to compare with: torchrl, gather, flashbax (where installed)."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for replay.json; the package's bench/results by default."""


def transitions(num_rows: int, device: torch.device, *, num_envs: int = 0) -> TensorDict:
    """Rows of 2 x 376 + 18 floats and flags: flat ``[B]``, or ``[N, T]`` where ``num_envs`` is given."""
    shape = (num_envs, num_rows // num_envs) if num_envs else (num_rows,)

    def floats(size: int) -> torch.Tensor:
        return torch.randn(*shape, size, device=device)

    done = torch.rand(*shape, 1, device=device) < 0.01
    following = {"observation": floats(OBSERVATION), "reward": floats(1), "done": done, "terminated": done.clone()}
    data = {"observation": floats(OBSERVATION), "action": floats(ACTION), "next": following}
    return TensorDict(data, batch_size=shape, device=device)


def row_bytes(data: TensorDictBase) -> int:
    """Bytes of one row of ``data``, all fields together."""
    return sum(leaf.element_size() * leaf[0].numel() for leaf in data.reshape(-1).values(True, True))


def torchrl_buffer(sampler: Sampler, capacity: int, batch: int | None, device: torch.device) -> TensorDictReplayBuffer:
    """TorchRL's buffer on the device, as its examples make it."""
    storage = LazyTensorStorage(capacity, device=device)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch)


@dataclass
class Bench:
    """One session: sizes, and the rows measured so far."""

    options: BenchReplay
    device: torch.device
    capacity: int
    bandwidth: float
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, operation: str, batch: int, variant: str, fn: Callable[[], Any], *, parts: int = 1) -> None:
        """Times ``fn``, which does the operation ``parts`` times."""

        def calls() -> None:
            for _ in range(CALLS):
                fn()

        timing = time_cuda(calls, self.options.repeats, device=self.device)
        parts *= CALLS
        size = row_bytes(transitions(2, self.device))
        floor = batch * (2 * size + 8) / self.bandwidth * 1e6
        times = {"us": timing.median / parts, "p10_us": timing.p10 / parts, "p90_us": timing.p90 / parts}
        row = {"operation": operation, "batch": batch, "variant": variant, **times, "floor_us": floor}
        self.rows.append({**row, "times_floor": times["us"] / floor})
        write_results(self.name, self.rows, self.options.out)

    def add_graph(self, operation: str, batch: int, variant: str, fn: Callable[[], Any]) -> None:
        """Times ``fn`` as a CUDA graph called from Python, and inside one that holds several calls of it."""
        if self.device.type != "cuda":
            return
        call = capture(fn, audit=False)
        self.add(operation, batch, f"{variant}, captured", call)
        call.release()
        call = capture(lambda: [fn() for _ in range(GRAPH_PARTS)][-1], audit=False)
        self.add(operation, batch, f"{variant}, in a graph", call, parts=GRAPH_PARTS)
        call.release()

    @property
    def name(self) -> str:
        """Name of the file of results."""
        return "replay" if self.device.type == "cuda" else "replay_cpu"

    @property
    def batches(self) -> Iterator[int]:
        """Batch sizes that the capacity is large enough for."""
        return (batch for batch in self.options.batches if batch * 16 <= self.capacity)


def fill(buffer: ReplayBuffer, capacity: int, device: torch.device) -> None:
    """Fills a buffer, a part at a time."""
    part = min(capacity, 65_536)
    for _ in range(capacity // part):
        buffer.extend(transitions(part, device))


def uniform(bench: Bench) -> None:
    """Uniform samples and writes."""
    device, capacity, peers = bench.device, bench.capacity, bench.options.peers
    if "torchrl" in peers:
        theirs = torchrl_buffer(RandomSampler(), capacity, None, device)
        fill(theirs, capacity, device)
        _sample_and_extend(bench, theirs, "torchrl")
        del theirs
    for kind, variant in (
        (TensorDictReplayBuffer, "torchrl with our parts"),
        (ReplayBuffer, "ReplayBuffer, our parts"),
    ):
        parts = {"storage": DeviceStorage(capacity, device=device), "sampler": DeviceRandomSampler()}
        mixed = kind(**parts, writer=DeviceWriter())
        fill(mixed, capacity, device)
        _sample_and_extend(bench, mixed, variant)
        del mixed, parts
    ours = make_replay_buffer(capacity, batch_size=32, device=device)
    fill(ours, capacity, device)
    _sample_and_extend(bench, ours, "torchrl_perf", graph=True)
    if "gather" in peers:
        _plain_gather(bench, ours[:])


def _sample(buffer: ReplayBuffer, batch: int) -> TensorDictBase:
    return buffer.sample(batch)


def _sample_and_extend(bench: Bench, buffer: ReplayBuffer, variant: str, *, graph: bool = False) -> None:
    for batch in bench.batches:
        bench.add("sample", batch, variant, partial(_sample, buffer, batch))
        if graph:
            bench.add_graph("sample", batch, variant, partial(_sample, buffer, batch))
    data = transitions(bench.options.extend, bench.device)
    bench.add("extend", bench.options.extend, variant, lambda: buffer.extend(data))
    if graph:
        bench.add_graph("extend", bench.options.extend, variant, lambda: buffer.extend(data))


def _plain_gather(bench: Bench, data: TensorDictBase) -> None:
    """A sample without a buffer: one random index, one gather per field."""
    fields = [leaf.contiguous() for leaf in data.flatten_keys().values()]
    rows = fields[0].shape[0]

    def gather(batch: int) -> list[torch.Tensor]:
        index = torch.randint(0, rows, (batch,), device=bench.device)
        return [leaf[index] for leaf in fields]

    for batch in bench.batches:
        bench.add("sample", batch, "plain gather", partial(gather, batch))
        bench.add_graph("sample", batch, "plain gather", partial(gather, batch))


def without_replacement(bench: Bench) -> None:
    """Samples of shuffled epochs."""
    device, capacity = bench.device, bench.capacity
    for name in [name for name in ("torchrl", "torchrl_perf") if name in (*bench.options.peers, "torchrl_perf")]:
        buffer = (
            torchrl_buffer(SamplerWithoutReplacement(), capacity, None, device)
            if name == "torchrl"
            else make_replay_buffer(capacity, batch_size=32, device=device, sampler="epoch")
        )
        fill(buffer, capacity, device)
        for batch in bench.batches:
            bench.add("epoch sample", batch, name, partial(_sample, buffer, batch))
        del buffer


def slices(bench: Bench) -> None:
    """Samples of windows of consecutive steps of one episode."""
    device, capacity = bench.device, bench.capacity
    num_envs, steps = 64, capacity // 64
    data = transitions(num_envs * steps, device, num_envs=num_envs)
    for batch in [batch for batch in bench.batches if batch <= 4096]:
        if "torchrl" in bench.options.peers:
            sampler = SliceSampler(slice_len=SLICE_LENGTH, end_key=("next", "done"), strict_length=True)
            theirs = torchrl_buffer(sampler, capacity, batch, device)
            # one stream, so that its slices are those of [N, T] memory laid end to end
            theirs.extend(data.reshape(-1))
            bench.add("slice sample", batch, "torchrl", theirs.sample)
            del theirs
        ours = make_replay_buffer(capacity, batch_size=batch, device=device, sampler="slice", slice_len=SLICE_LENGTH)
        ours.extend(data)
        bench.add("slice sample", batch, "torchrl_perf", ours.sample)
        bench.add_graph("slice sample", batch, "torchrl_perf", ours.sample)
        del ours


def prioritized(bench: Bench) -> None:
    """Prioritised samples with their weights and the update of their priorities."""
    device, capacity = bench.device, bench.capacity
    ours = make_replay_buffer(capacity, batch_size=32, device=device, sampler="prioritized", alpha=0.6)
    fill(ours, capacity, device)
    index = torch.arange(capacity, device=device)
    ours.update_priority(index, torch.rand(capacity, device=device))

    def step(batch: int) -> TensorDictBase:
        sample = _sample(ours, batch)
        ours.update_priority(sample["index"], sample["next", "reward"].view(-1).abs())
        return sample

    for batch in bench.batches:
        bench.add("prioritised sample + update", batch, "torchrl_perf", partial(step, batch))
        bench.add_graph("prioritised sample + update", batch, "torchrl_perf", partial(step, batch))
    data = transitions(bench.options.extend, device)
    bench.add("prioritised extend", bench.options.extend, "torchrl_perf", lambda: ours.extend(data))
    bench.add_graph("prioritised extend", bench.options.extend, "torchrl_perf", lambda: ours.extend(data))


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints the table and writes ``replay.json``."""
    import tyro

    options = tyro.cli(BenchReplay, args=argv, prog="torchrl-perf bench replay")
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    capacity = options.capacity or (2**20 if device.type == "cuda" else 2**16)
    bench = Bench(options, device, capacity, copy_bandwidth(device))
    for part in (uniform, without_replacement, prioritized, slices):
        part(bench)
    if "flashbax" in options.peers and flashbax_peer.available():
        for row in flashbax_peer.measure(capacity, tuple(bench.batches), options.extend, options.repeats):
            bench.rows.append(row)
            write_results(bench.name, bench.rows, options.out)
    print(f"{capacity:,} rows of {row_bytes(transitions(2, device))} bytes; copy {bench.bandwidth / 1e12:.2f} TB/s")
    print(format_table(bench.rows, COLUMNS))
    print(f"written to {write_results(bench.name, bench.rows, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
