"""Several ranks beside one: weak and strong scaling, ways to sum gradients, TorchRL with DistributedDataParallel.

Weak scaling gives each rank the rows of the shape; strong scaling divides them among the ranks.
"""

import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from torchrl_perf.bench.report import Sheet, format_table
from torchrl_perf.bench.scaling_rank import Case
from torchrl_perf.launch import launch_ranks

COLUMNS = (
    *("algorithm", "shape", "precision", "scaling", "sums", "ranks", "steps_per_second", "speedup", "ms"),
    *("p10_ms", "p90_ms", "collectives", "collectives_ms", "share", "start_s", "equal"),
)
POLL_SECONDS = 0.2
Sums = Literal["fused", "one-shot", "nccl", "ddp"]
"""How gradients are summed: in one kernel with their packing and norms, where that can be; over symmetric memory by
PyTorch; by NCCL (gloo on a CPU); or by DistributedDataParallel, eagerly."""


@dataclass(frozen=True)
class BenchScaling:
    """Options of ``torchrl-perf bench scaling``."""

    ranks: tuple[int, ...] = (1, 2, 4)
    """Numbers of ranks, in the order in which they are measured; more than there are GPUs are left out."""
    ppo: tuple[str, ...] = ("2048x128-tf32", "65536x16-bf16")
    """Envs x steps of an iteration of PPO, and its precision."""
    sac: tuple[str, ...] = ("64x8192-tf32",)
    """Envs x rows of a minibatch of SAC with layers of 512, 256 and 128."""
    dqn: tuple[str, ...] = ("4096x16-tf32",)
    """Envs x steps of an iteration of DQN, which makes one update of as many rows."""
    scaling: tuple[Literal["weak", "strong"], ...] = ("weak", "strong")
    """Whether the shape is that of each rank (weak) or of all (strong)."""
    sums: tuple[Sums, ...] = get_args(Sums)
    """Ways to sum gradients."""
    repeats: int = 60
    """Timed iterations."""
    device: str = "auto"
    """Device: cuda, or cpu with processes of one host."""
    out: str | None = None
    """Folder for scaling.json; the package's bench/results by default."""


def cases(options: BenchScaling, ranks: int, device: str) -> Iterator[Case]:
    """What is measured with a number of ranks, the ways to sum gradients one after the other.

    Args:
        options: of the benchmark.
        ranks: processes.
        device: ``"cuda"`` or ``"cpu"``.
    """
    for sums in options.sums:
        # one rank sums nothing, and a CPU has no symmetric memory
        if sums in ("fused", "one-shot") and (ranks == 1 or device == "cpu"):
            continue
        for algorithm, shapes in (("ppo", options.ppo), ("dqn", options.dqn), ("sac", options.sac)):
            for shape in shapes if algorithm == "ppo" or sums != "ddp" else ():
                sizes, _, precision = shape.partition("-")
                envs, rows = map(int, sizes.split("x"))
                # of one rank both kinds of scaling are the same work
                for scaling in options.scaling if ranks > 1 else options.scaling[:1]:
                    yield Case(algorithm, envs, rows, precision or "tf32", scaling, sums)


def with_speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their rate over that of one rank with the same work; without one where that was not measured.

    Args:
        rows: as :mod:`torchrl_perf.bench.scaling_rank` writes them.
    """
    names = ("algorithm", "shape", "precision")
    alone: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["ranks"] == 1:
            place = (*(row[name] for name in names), row["sums"] == "ddp")
            alone[place] = max(row["steps_per_second"], alone.get(place, 0.0))
    found = []
    for row in rows:
        one = alone.get((*(row[name] for name in names), row["sums"] == "ddp"))
        found.append(row | ({} if one is None else {"speedup": row["steps_per_second"] / one}))
    return found


def measured(options: BenchScaling, ranks: int, device: str, take: Callable[[dict[str, Any]], None]) -> None:
    """Measures with one number of ranks, which are started once for all cases.

    Args:
        options: of the benchmark.
        ranks: processes.
        device: ``"cuda"`` or ``"cpu"``.
        take: gets each row as soon as it is there.

    Raises:
        RuntimeError: where a rank failed; it has said why.
    """
    asked = [asdict(case) for case in cases(options, ranks, device)]
    if not asked:
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        out.touch()
        work = {"device": device, "repeats": options.repeats, "cases": asked}
        with followed(out, lambda line: take(json.loads(line))):
            code = launch_ranks(("-m", "torchrl_perf.bench.scaling_rank", json.dumps(work), str(out)), ranks)
        if code:
            raise RuntimeError(
                f"ranks: expected {ranks} that end with 0, received exit code {code}. Remedy: what they said above."
            )


@contextlib.contextmanager
def followed(path: Path, take: Callable[[str], None]) -> Iterator[None]:
    """Within it the lines that another process appends to a file are read as they come, in a thread; at its end all.

    Args:
        path: the file, which is there.
        take: gets each line.
    """
    end = threading.Event()

    def follow() -> None:
        with path.open() as file:
            over, text = False, ""
            while not over:
                over = end.wait(POLL_SECONDS)
                text += file.read()
                *lines, text = text.split("\n")
                for line in lines:
                    take(line)

    reader = threading.Thread(target=follow, name="rows")
    reader.start()
    try:
        yield
    finally:
        end.set()
        reader.join()


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints the table and writes ``scaling.json``."""
    import tyro

    options = tyro.cli(BenchScaling, args=argv, prog="torchrl-perf bench scaling")
    device = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    sheet = Sheet(COLUMNS, "scaling", options.out)
    for ranks in options.ranks:
        if device == "cuda" and ranks > torch.cuda.device_count():
            print(f"{ranks} ranks: left out, this machine has {torch.cuda.device_count()} GPUs", flush=True)
            continue

        def take(row: dict[str, Any]) -> None:
            row = row | {"sums": "gloo"} if device == "cpu" and row["sums"] == "nccl" else row
            sheet.rows[:] = with_speedups([*sheet.rows, row])
            sheet.show(sheet.rows[-1])

        measured(options, ranks, device, take)
    print(format_table(sheet.rows, COLUMNS))
    print(f"written to {sheet.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
