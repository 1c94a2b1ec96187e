"""Sums in one kernel beside NCCL's, on ranks that come at other times: ``python gpu_sums.py OUT``, for each rank."""

import json
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from torchrl_perf.parallel import SharedGradients, join, leave
from torchrl_perf.runtime import capture

SHAPES = ((64, 4), (64,), (64, 64), (64,), (2, 64), (2,), (1500,))
SUMS = 17
REPLAYS = 300
SLEEP_CYCLES = 40_000
"""Of a GPU at most, before a sum: 20 us or so."""


def main(out: str) -> None:
    """Writes how many sums were made, eagerly and within a graph, and how many of them differ from NCCL's."""
    ranks = join("cuda")
    torch.manual_seed(ranks.rank)
    chance = random.Random(ranks.rank)
    params = [nn.Parameter(torch.zeros(shape, device=ranks.device)) for shape in SHAPES]
    shared = SharedGradients(params)
    wrong = torch.zeros((), dtype=torch.int64, device=ranks.device)
    norms_off = torch.zeros((), device=ranks.device)
    grads = [torch.empty_like(param) for param in params]
    loss = torch.empty((), device=ranks.device)

    def compare() -> None:
        """A sum by each way, of numbers that are drawn anew."""
        for grad in (*grads, loss):
            grad.normal_()
        torch.cuda._sleep(chance.randrange(SLEEP_CYCLES))
        found = shared.reduced(grads, loss, divided=True)
        assert found.norms is not None, "expected one kernel"
        expected = torch.cat([grad.flatten() for grad in (*grads, loss)])
        dist.all_reduce(expected)
        got = torch.cat([grad.flatten() for grad in (*found.gradients, *found.values)])
        wrong.add_((got != expected).sum())
        real = torch.stack([grad.norm() for grad in found.gradients])
        norms_off.copy_(torch.maximum(norms_off, ((found.norms - real).abs() / real).max()))

    for _ in range(REPLAYS):
        compare()

    def many() -> None:
        for _ in range(SUMS):
            compare()

    recorded = capture(many, audit=False)
    for _ in range(REPLAYS):
        recorded()
    torch.cuda.synchronize()
    row = {"rank": ranks.rank, "sums": shared.ranks.begun, "wrong": wrong.item(), "norms_off": norms_off.item()}
    if ranks.first:
        Path(out).write_text(json.dumps(row))
    recorded.release()
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
