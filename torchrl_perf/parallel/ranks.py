"""The processes of one run, and what they agree on: sums on the device, decisions on the host."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeVar
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrl_perf.functional.moments import Moments, merged_moments
from torchrl_perf.parallel.fused_sums import exchange_of, sums_of
from torchrl_perf.parallel.levels import TwoLevels, problem_of_hosts
from torchrl_perf.parallel.one_shot import OneShot
from torchrl_perf.parallel.place import own_place

__all__ = ["RankStoppedError", "Ranks", "let_go"]

T = TypeVar("T")

_OF_GROUPS: "WeakSet[Ranks]" = WeakSet()
"""Those that hold a process group, wherever they are kept."""

HANG_SECONDS = 600.0
"""Longest wait of a rank for the others within a collective: evaluations and compilations take place between two."""


class RankStoppedError(RuntimeError):
    """Another rank has said what is wrong; this one ends without a word.

    Attributes:
        exit_code: for the process.
    """

    def __init__(self, problem: str, exit_code: int = 1) -> None:
        super().__init__(problem)
        self.exit_code = exit_code


class Ranks:
    """The processes of a run, each with its own envs, replay and random numbers, and one policy in common.

    Methods on tensors are collectives of the device (NCCL, gloo on a CPU): each rank has to call them in the same order
    with the same shapes, none waits for the host, and a CUDA graph may hold them. What they give is equal on all ranks
    to the last bit. Methods on values are for the host, between iterations. Of one process alone every method is the
    identity.

    Args:
        device: of this rank's tensors.
        group: a process group of ``torch.distributed``; None is a process alone. Its backends have to serve the device,
            and the CPU for values.
        one_shot: whether small buffers on CUDA are summed over symmetric memory where peers can reach each other.
        by_host: whether sums are made in two levels, within each host and then between hosts; all ranks of the default
            group. NCCL has trees of its own over hosts, so that this pays where it does not find the shorter way.
        seconds: longest wait for a rank that is behind the others.

    Raises:
        ValueError: for ``by_host`` of one host, or of hosts with one rank or different numbers of them; on the first
            rank, a RankStoppedError on the others.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        begun: collectives that this process has come to; a recorded one counts once.
        own: this rank's part of what :class:`~torchrl_perf.parallel.SharedGradients` has averaged first, the loss say,
            for a guard that takes them out again; None, and nothing is kept, where no guard asked for it.
        one_shot: whether buffers are made in symmetric memory from now on, where they can be.
        fused: whether gradients are packed, summed and their norms found by one kernel from now on, where they can be.
        sums: how often a sum of so many numbers of a dtype was asked for so far, or in one kernel of tensors of such
            sizes; a recorded one counts once.
    """

    def __init__(
        self,
        device: torch.device,
        group: Any = None,
        *,
        one_shot: bool = True,
        by_host: bool = False,
        seconds: float = HANG_SECONDS,
    ) -> None:
        self.device, self._group = torch.device(device), group
        self.seconds, self.begun, self.one_shot, self.fused = seconds, 0, one_shot, one_shot
        self.own: list[Tensor] | None = None
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        if group is not None:
            _OF_GROUPS.add(self)
        self.sums: Counter[tuple[int | tuple[int, ...], torch.dtype]] = Counter()
        self._one_shot: OneShot | None = None
        self._levels: TwoLevels | None = None
        fast = one_shot and self.device.type == "cuda"
        if self.size == 1 or not (fast or by_host):
            return
        hosts = self._hosts()
        if by_host:
            if problem := problem_of_hosts(hosts):
                raise ValueError(problem) if self.first else RankStoppedError(problem)
            self._levels = TwoLevels(self.rank, hosts, self.device, seconds)
            self._one_shot = OneShot(self._levels.inner, self._levels.size) if fast else None
        elif len(set(hosts)) == 1:  # a host may have as many GPUs as there are ranks on several
            self._one_shot = OneShot(group, self.size)

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> Self:
        """A process without others."""
        return cls(torch.device(device))

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes logs and folders."""
        return self.rank == 0

    @property
    def group(self) -> Any:
        """The process group; None of a process alone.

        Raises:
            RuntimeError: after :func:`torchrl_perf.parallel.leave`.
        """
        if self._group is None and self.several:
            raise RuntimeError(
                f"ranks: expected the group of {self.size} processes, received a call after leave(), which has ended "
                "it. Remedy: leave() last, or the Ranks of another join()."
            )
        return self._group

    def let_go(self) -> list[ref[Any]]:
        """Gives up the groups, for :func:`let_go`; weak references to them."""
        levels = () if self._levels is None else (self._levels.inner, self._levels.outer)
        groups = [ref(group) for group in (self._group, *levels)]
        self._group = self._levels = None
        return groups

    def _hosts(self) -> list[str]:
        """The host of each rank; all ask together."""
        place = own_place()
        kernels: list[Any] = [None] * self.size
        dist.all_gather_object(kernels, place.kernel or place.host, group=self.group)
        return kernels

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # of a copied network: the processes are the same

    def __reduce__(self) -> Any:
        return Ranks.alone, (str(self.device),)  # a pickled network acts in a process of its own

    # -- on the device ------------------------------------------------------------------------------------------------

    def buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Zeros ``[size]`` that :meth:`sum_` adds up fastest; made by all ranks at once, before a capture."""
        if self.one_shot and self._one_shot is not None and self._one_shot.takes(size, dtype):
            return self._one_shot.empty(size, dtype, self.device).zero_()
        return torch.zeros(size, dtype=dtype, device=self.device)

    def sum_(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place.

        Args:
            values: contiguous, of the same shape on all ranks.
        """
        found = self.summed(values)
        return values if found is values else values.copy_(found)

    def summed(self, values: Tensor) -> Tensor:
        """The same, as a new tensor where that is one launch fewer, and otherwise in place.

        Args:
            values: contiguous, of the same shape on all ranks; not read again before they are written anew.
        """
        if not self.several:
            return values
        self.begun += 1
        self.sums[values.numel(), values.dtype] += 1
        of_host = None
        if self._one_shot is not None and self._one_shot.holds(values):
            of_host = self._one_shot.sum(values)
        if self._levels is not None:
            return self._levels.sum(values, of_host)
        if of_host is not None:
            return of_host
        dist.all_reduce(values, group=self.group)
        return values

    def exchange(self, like: Sequence[Tensor]) -> Any:
        """What :meth:`summed_parts` takes for tensors of these sizes; None where one kernel cannot sum them.

        All ranks make it at once, before a capture.

        Args:
            like: float32.
        """
        if not self.fused or self._one_shot is None or self._levels is not None:
            return None
        if not self._one_shot.takes(sum(one.numel() for one in like), torch.float32):
            return None
        return exchange_of(self.group, self.rank, self.size, like)

    def summed_parts(self, tensors: Sequence[Tensor], exchange: Any, normed: int) -> tuple[Tensor, Tensor]:
        """The sums over ranks of several tensors, and the norms of the first ``normed`` of them.

        Args:
            tensors: contiguous float32, of the sizes that the exchange was made for.
            exchange: of :meth:`exchange`.
            normed: of the norms.

        Returns:
            All sums one after the other, each from a multiple of 16 bytes on, and the norms ``[normed]``.
        """
        self.begun += 1
        self.sums[tuple([one.numel() for one in tensors]), torch.float32] += 1
        return sums_of(tensors, exchange, normed)

    def gathered(self, values: Tensor) -> Tensor:
        """``[*]`` of each rank as ``[size, *]``, in the order of ranks."""
        if not self.several:
            return values.unsqueeze(0)
        # each rank adds zeros to the others' rows, which changes no number
        found = values.new_zeros((self.size, *values.shape))
        found[self.rank].copy_(values)
        return self.sum_(found)

    def merged(self, moments: Moments) -> Moments:
        """The summary of the rows of all ranks, merged in the order of ranks.

        Args:
            moments: of this rank's rows.
        """
        if not self.several:
            return moments
        shape = moments.mean.shape
        flat = torch.cat([moments.count.reshape(1), moments.mean.reshape(-1), moments.squares.reshape(-1)])
        found = [
            Moments(row[0], *(part.view(shape) for part in row[1:].chunk(2))) for row in self.gathered(flat).unbind()
        ]
        total = found[0]
        for other in found[1:]:
            total = merged_moments(total, other)
        return total

    @torch.no_grad()
    def broadcast_(self, parts: Iterable[Any]) -> None:
        """Parameters and buffers of modules, and tensors, become those of the first rank.

        Args:
            parts: modules and tensors, the same on all ranks; anything else is left alone.

        Raises:
            ValueError: on the first rank, where shapes or dtypes of another are not its own.
            RankStoppedError: on the others then.
        """
        if not self.several:
            return
        found: dict[int, Tensor] = {}
        for part in parts:
            tensors = [*part.parameters(), *part.buffers()] if isinstance(part, nn.Module) else [part]
            found |= {id(one): one for one in tensors if isinstance(one, Tensor) and one.numel()}
        self._compare_shapes(list(found.values()))
        for tensor in found.values():
            self.begun += 1
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, 0, group=self.group)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)

    def _compare_shapes(self, tensors: list[Tensor]) -> None:
        """Refuse what a collective would wait for without end, or mix up: tensors that are others on another rank."""
        kinds = self.values([(tuple(one.shape), str(one.dtype)) for one in tensors])
        for rank, other in enumerate(kinds):
            if other == kinds[0]:
                continue
            number = next((n for n, pair in enumerate(zip(kinds[0], other, strict=False)) if pair[0] != pair[1]), -1)
            told = [f"{len(kind)} of them" if number < 0 else f"{kind[number]}" for kind in (kinds[0], other)]
            place = "" if number < 0 else f" for number {number}"
            problem = (
                f"ranks: expected parameters and buffers of the same shapes and dtypes on all, {told[0]}{place} as "
                f"rank 0 has them, received {told[1]} on rank {rank}. Remedy: the same envs and networks on all ranks."
            )
            raise ValueError(problem) if self.first else RankStoppedError(problem)

    # -- on the host --------------------------------------------------------------------------------------------------

    def values(self, value: T) -> list[T]:
        """A plain value of each rank, in the order of ranks; waits for all of them."""
        if not self.several:
            return [value]
        self.begun += 1
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def of_first(self, make: Callable[[], T]) -> T:
        """What a function gives on the first rank, for all; the others wait for it.

        Args:
            make: called on the first rank alone; gives what can be pickled.

        Raises:
            RankStoppedError: on the others, where it raised on the first.
        """
        if not self.several:
            return make()
        self.begun += 1
        told: list[Any] = [None, None]
        error: BaseException | None = None
        if self.first:
            try:
                told[0] = make()
            except BaseException as caught:
                error = caught
                code = caught.code if isinstance(caught, SystemExit) else 1
                told[1] = (repr(caught), code if isinstance(code, int) else int(bool(code)))
        dist.broadcast_object_list(told, 0, group=self.group)
        if error is not None:
            raise error
        if told[1] is not None:
            raise RankStoppedError(*told[1])
        return told[0]

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank; the same answer on all."""
        return any(self.values(flag)) if self.several else flag

    def all(self, flag: bool) -> bool:
        """Whether it is so on all ranks; the same answer on all."""
        return all(self.values(flag)) if self.several else flag


def share(total: int, ranks: int) -> int:
    """A rank's part of a number, rounded up."""
    return -(-total // ranks)


def let_go() -> list[ref[Any]]:
    """Takes the groups from all :class:`Ranks`, which trainers and optimisers may keep to the end of the process.

    Returns:
        The groups, as weak references: those that are alive have another owner.
    """
    groups = [group for ranks in list(_OF_GROUPS) for group in ranks.let_go()]
    _OF_GROUPS.clear()
    return groups
