"""Sums in two levels: within each host first, then between hosts, each rank of a host for a piece of the numbers."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["TwoLevels", "problem_of_hosts"]


def problem_of_hosts(hosts: Sequence[str]) -> str:
    """Why ranks on these hosts cannot sum in two levels; empty where they can.

    Args:
        hosts: that of each rank.
    """
    counts = [hosts.count(host) for host in dict.fromkeys(hosts)]
    if len(counts) > 1 and len(set(counts)) == 1 and counts[0] > 1:
        return ""
    listed = ", ".join(map(str, counts))
    return (
        f"by_host: expected as many ranks, at least 2, on each of at least 2 hosts, received {listed} on "
        f"{len(counts)}. Remedy: the same --nproc-per-node of at least 2 on all hosts, or sums in one level."
    )


class TwoLevels:
    """All-reduce by the groups of ``torch.distributed``: few bytes of each rank pass the network between hosts.

    The ranks of a host sum among themselves; each then sums one piece with its counterparts on the other hosts; the
    pieces are gathered within the host. A piece is summed once for all ranks of a host, so that the sums are equal on
    all ranks to the last bit.

    Args:
        rank: of this process.
        hosts: that of each rank, any text; :func:`problem_of_hosts` has nothing against them.
        device: of the tensors.
        seconds: longest wait for another rank.

    Attributes:
        inner: the group of this rank's host.
        outer: that of the ranks of other hosts which sum the same piece.
        size: of the inner one.
    """

    def __init__(self, rank: int, hosts: Sequence[str], device: torch.device, seconds: float) -> None:
        members: dict[str, list[int]] = {}
        for number, host in enumerate(hosts):
            members.setdefault(host, []).append(number)
        own = members[hosts[rank]]
        self.size, self.place = len(own), own.index(rank)
        usual: dict[str, Any] = {"timeout": timedelta(seconds=seconds)}
        # every rank makes all groups, in the same order
        inner = [dist.new_group(ranks, **usual) for ranks in members.values()]
        outer = [dist.new_group(list(ranks), **usual) for ranks in zip(*members.values(), strict=True)]
        self.inner, self.outer = inner[list(members).index(hosts[rank])], outer[self.place]
        for group in (self.inner, self.outer):
            dist.all_reduce(torch.zeros(1, device=device), group=group)  # used once before anything is captured

    def sum(self, values: Tensor, of_host: Tensor | None = None) -> Tensor:
        """The sum over all ranks, as a new tensor.

        Args:
            values: contiguous; overwritten where ``of_host`` is not given.
            of_host: their sum over the ranks of this host, where something faster has made it.
        """
        if of_host is None:
            dist.all_reduce(values, group=self.inner)
            of_host = values
        numbers = of_host.reshape(-1)
        length = -(-numbers.numel() // self.size)
        padded = numbers.new_zeros(self.size * length)
        padded[: numbers.numel()].copy_(numbers)
        piece = padded.view(self.size, length)[self.place].clone()
        dist.all_reduce(piece, group=self.outer)
        dist.all_gather_into_tensor(padded, piece, group=self.inner)
        return padded[: numbers.numel()].view(values.shape)
