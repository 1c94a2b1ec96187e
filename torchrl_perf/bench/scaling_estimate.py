"""A paper estimate of PPO on many GPUs, from times that were measured on few: the table of ``docs/machines.md``.

An iteration takes what it takes on one GPU, and for each update the sum of the gradient: within a host, then between
hosts in a tree. Nothing overlaps. ``python -m torchrl_perf.bench.scaling_estimate`` prints the table.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Assumptions", "collective_us", "estimate", "iteration_ms", "table"]

RANKS = (1, 2, 4, 8, 16, 64, 256, 1_024)


@dataclass(frozen=True)
class Assumptions:
    """Numbers of the estimate: the first ones are measured on H200 GPUs, the others are assumed."""

    floor_ms: float = 1.10
    """Measured: an iteration of 4 envs x 128 steps, where launches are all that counts."""
    row_ns: float = 5.37
    """Measured: what each further row costs, between 4 x 128 (1.10 ms) and 2,048 x 128 rows (2.504 ms)."""
    one_shot_us: tuple[float, float] = (6.6, 8.2)
    """Measured: sum of 38 kB over symmetric memory by 2 and by 4 GPUs of a host."""
    updates: int = 16
    """Of an iteration: 4 passes over 4 minibatches."""
    numbers: int = 9_200
    """float32 in a gradient: actor and critic with two layers of 64, losses and statistics."""
    gpus_of_host: int = 8
    """Assumed."""
    hop_us: float = 8.0
    """Assumed: one step between two hosts, kernel and network together."""
    network_gb_s: float = 40.0
    """Assumed: of a GPU's network card, 400 Gb/s less a fifth."""
    spread: float = 0.005
    """Assumed: deviation of an iteration's time from GPU to GPU, as a share of it; all wait for the slowest."""


def collective_us(ranks: int, assumed: Assumptions) -> float:
    """Time of one sum of the gradient.

    Args:
        ranks: GPUs, of which each host has ``gpus_of_host``.
        assumed: the numbers.
    """
    if ranks == 1:
        return 0.0
    near, hosts = min(ranks, assumed.gpus_of_host), math.ceil(ranks / assumed.gpus_of_host)
    two, four = assumed.one_shot_us
    within = two + (four - two) * (math.log2(near) - 1.0)
    # up the tree and down again, with the whole gradient each time
    between = 2.0 * math.ceil(math.log2(hosts)) * (assumed.hop_us + _send_us(assumed)) if hosts > 1 else 0.0
    return within + between


def _send_us(assumed: Assumptions) -> float:
    return 4.0 * assumed.numbers / (assumed.network_gb_s * 1e3)


def iteration_ms(rows: int, ranks: int, assumed: Assumptions, *, local_updates: int = 1) -> float:
    """Time of an iteration.

    Args:
        rows: env steps of one GPU.
        ranks: GPUs.
        assumed: the numbers.
        local_updates: updates of each rank by itself before parameters are averaged; 1 sums each gradient.
    """
    alone = assumed.floor_ms + rows * assumed.row_ns * 1e-6
    sums = assumed.updates / local_updates + (ranks > 1)  # and one for the advantages
    # the greatest of so many normal numbers
    slowest = 1.0 + assumed.spread * math.sqrt(2.0 * math.log(ranks))
    return alone * slowest + sums * collective_us(ranks, assumed) * 1e-3


def estimate(rows: int, ranks: int, assumed: Assumptions, *, local_updates: int = 1) -> float:
    """Env steps per second of all ranks; arguments as of :func:`iteration_ms`."""
    return ranks * rows / iteration_ms(rows, ranks, assumed, local_updates=local_updates) * 1e3


def table(assumed: Assumptions, *, weak: int = 2_048 * 128, strong: int = 65_536 * 128) -> str:
    """The estimates as a Markdown table.

    Args:
        assumed: the numbers.
        weak: env steps of an iteration of each rank.
        strong: those of all ranks.
    """
    head = ("GPUs", "a sum, us", "weak, M steps/s", "of ideal", "8 local updates", "strong, M steps/s", "of ideal")
    lines = [head, tuple("-" * len(text) for text in head)]
    one_weak, one_strong = (estimate(rows, 1, assumed) for rows in (weak, strong))
    for ranks in RANKS:
        rates = (
            estimate(weak, ranks, assumed),
            estimate(weak, ranks, assumed, local_updates=8),
            estimate(strong // ranks, ranks, assumed),
        )
        lines.append(
            (
                f"{ranks:,}",
                f"{collective_us(ranks, assumed):.0f}",
                *(f"{rates[0] / 1e6:,.0f}", f"{rates[0] / one_weak / ranks:.2f}", f"{rates[1] / 1e6:,.0f}"),
                *(f"{rates[2] / 1e6:,.0f}", f"{rates[2] / one_strong / ranks:.2f}"),
            )
        )
    return "\n".join(_line(cells, [max(len(row[i]) for row in lines) for i in range(len(head))]) for cells in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


if __name__ == "__main__":
    print(table(Assumptions()))
