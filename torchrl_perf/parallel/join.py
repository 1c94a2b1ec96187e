"""How a process that ``torchrun`` started finds the others, and how it leaves them."""

import atexit
import gc
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from torchrl_perf import __version__
from torchrl_perf.parallel.meeting import agent_store, meet, words_of_all
from torchrl_perf.parallel.ranks import HANG_SECONDS, Ranks, RankStoppedError, let_go
from torchrl_perf.runtime.capture import release_recorded
from torchrl_perf.runtime.deadline import Deadline

__all__ = [
    "RankError",
    "RankLostError",
    "RankStoppedError",
    "compare",
    "ending",
    "join",
    "joined",
    "leave",
    "world_size",
]

LEAVE_SECONDS = 30.0
"""Longest wait for the GPU and the other ranks when this one leaves."""
IDLE_SECONDS = 0.2
"""For which a rank that leaves stands still where its group lives on, so that threads drop what they worked on."""

WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Variables that keep NVLink's multicast off where they are not set: sums are too small to gain by it, and a process
that is killed while it holds such memory can leave a host's GPUs unusable."""

_JOINED: list[Ranks] = []
"""What :func:`join` gave, once it was called: a process has one default group."""
_LEFT: list[ref[Any]] = []
"""Groups that have ended, as weak references."""
_DEADLINES: list[Deadline] = []
"""The one for leaving, from the first group on."""


class RankError(ValueError):
    """Ranks that do not fit each other, or cannot find each other."""


class RankLostError(RuntimeError):
    """Another rank has died, hangs or has left."""


def world_size() -> int:
    """Processes of the run, as ``torchrun`` tells each; 1 for one that it did not start."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(
    device: torch.device | str = "auto",
    *,
    seconds: float = HANG_SECONDS,
    one_shot: bool = True,
    by_host: bool = False,
) -> Ranks:
    """The processes that ``torchrun`` started, this one among them; a process alone where it started none.

    With CUDA the GPU of number ``LOCAL_RANK`` becomes the current device. Called again it gives the same processes.

    Args:
        device: ``"auto"`` (CUDA where there is one), ``"cpu"`` or ``"cuda"``.
        seconds: longest wait for another rank within a collective.
        one_shot: see :class:`Ranks`.
        by_host: see :class:`Ranks`; nothing to a process alone.

    Raises:
        ValueError: for ``by_host`` where hosts do not have as many ranks each.
        RankError: for a GPU or a backend that is not there, and a port in use.
        RankStoppedError: where another rank of this host says that.
    """
    wants_cuda = torch.device("cpu" if device == "auto" else device).type == "cuda"
    on_cuda = wants_cuda or (device == "auto" and torch.cuda.is_available())
    if _JOINED:
        return _JOINED[0]
    if world_size() == 1 and not dist.is_initialized():
        place = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        return Ranks.alone(place)
    place = _own_device() if on_cuda else torch.device("cpu")
    if not _DEADLINES:
        _DEADLINES.append(Deadline())
        atexit.register(_leave_at_the_end)
    if not dist.is_initialized():
        _start(place, seconds)
    _JOINED.append(Ranks(place, dist.group.WORLD, one_shot=one_shot, by_host=by_host, seconds=seconds))
    return _JOINED[0]


def joined(device: torch.device) -> Ranks:
    """The processes that :func:`join` has found, or this one alone where it was not called.

    Args:
        device: of the tensors.

    Raises:
        RankError: for another device than that of this rank.
    """
    if not _JOINED:
        return Ranks.alone(device)
    ranks = _JOINED[0]
    if ranks.device != torch.device(device):
        raise RankError(
            f"device: expected {ranks.device}, that of {place_of(ranks.rank)}, received {device}. Remedy: "
            f"device='{ranks.device.type}', of which each rank takes its own."
        )
    return ranks


def leave(*, seconds: float = LEAVE_SECONDS) -> None:
    """Ends the communication of this process, as all ranks do; nothing happens where there is none.

    NCCL waits with the end of a communicator for every CUDA graph that holds one of its collectives. So all functions
    that :func:`torchrl_perf.runtime.capture` has recorded are released first. A graph of ``torch.cuda.graph`` has to be
    reset by whoever made it. A process that has joined also leaves when it ends without a call of this, by an exception
    or Ctrl-C as well.

    The threads of gloo end with the last reference to the group, so every :class:`Ranks` gives up its own. One that
    lived on could come to drop a tensor while the interpreter ends, which aborts the process (pytorch/pytorch#190489).

    Args:
        seconds: longest time; a process that still waits says so and is killed.
    """
    _JOINED.clear()
    there = dist.is_initialized()
    with ending(seconds):
        if there:
            with suppress(RuntimeError):  # on a device that has failed there is nothing left to release
                release_recorded()
        _LEFT.extend(let_go())
        if there:
            dist.destroy_process_group()
        if any(group() is not None for group in _LEFT):
            gc.collect()
        if any(group() is not None for group in _LEFT):  # an exception has it, or a module of the caller's
            time.sleep(IDLE_SECONDS)


def _leave_at_the_end() -> None:
    """Leaves where nobody has: torch, which takes the group down with the process, would wait for its graphs."""
    # the exception that ends the process keeps what its functions had, groups too
    for name in ("last_exc", "last_value", "last_traceback"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    leave()


def ending(seconds: float = LEAVE_SECONDS) -> AbstractContextManager[None]:
    """Context of what a rank does last, and what waits for a device that may wait for another rank.

    Args:
        seconds: longest time; a process that still waits says so and is killed.
    """
    if not _DEADLINES:
        return nullcontext()
    return _DEADLINES[0].within(
        seconds,
        f"ranks: expected {place_of()} to leave within {seconds:g} s, received no answer from its device. Remedy: all "
        "ranks leave at the same point of the loop; reset() every torch.cuda.CUDAGraph of your own before leave().",
    )


def place_of(rank: int | None = None) -> str:
    """This process, for messages: rank, host and number of the process."""
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    return f"rank {rank} (host {socket.gethostname()}, process {os.getpid()})"


def card_of(settings: Mapping[str, Any] | Sequence[str]) -> dict[str, str]:
    """What ranks have to have in common, as text.

    Args:
        settings: of the run, or its arguments.
    """
    from importlib.metadata import version

    given = settings.items() if isinstance(settings, Mapping) else [("arguments", " ".join(settings))]
    return {
        "torchrl_perf": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "tensordict", "torchrl")},
        **{str(name): repr(value) for name, value in given},
    }


def compare(ranks: Ranks, settings: Mapping[str, Any] | Sequence[str]) -> None:
    """Refuse ranks with other versions or settings than the first.

    Args:
        ranks: the processes.
        settings: of the run, or its arguments.

    Raises:
        RankError: on the first rank, with what differs.
        RankStoppedError: on the others.
    """
    if not ranks.several:
        return
    cards = ranks.values((place_of(ranks.rank), card_of(settings)))
    own = cards[0][1]
    problems = [
        f"{name}: expected {own.get(name)} on all ranks, as rank 0 has it, received {card.get(name)} on {place}."
        for place, card in cards[1:]
        for name in sorted({*own, *card})
        if own.get(name) != card.get(name)
    ]
    if problems and ranks.first:
        differing = {name for _, card in cards[1:] for name in {*own, *card} if own.get(name) != card.get(name)}
        raise RankError(
            f"ranks: expected the same {', '.join(sorted(differing))} on all, received others. {' '.join(problems)} "
            "Remedy: the same command and packages on all hosts."
        )
    if problems:
        raise RankStoppedError(problems[0])


def _own_device() -> torch.device:
    """The GPU of this rank, which becomes the current one.

    Raises:
        RankError: on the first rank of a host that cannot have one.
        RankStoppedError: on its others, which have the same to say and no store yet by which to agree.
    """
    number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= there:
        kind = RankError if number == there else RankStoppedError
        raise kind(
            f"gpus: expected a GPU for each rank of this host, received {there} for {place_of()}. Remedy: "
            f"--nproc-per-node {max(there, 1)} or fewer, or --device cpu."
        )
    if not dist.is_nccl_available():
        kind = RankError if number == 0 else RankStoppedError
        raise kind(
            "ranks: expected a PyTorch with NCCL for several ranks on CUDA, received one without. Remedy: a build for "
            "Linux with CUDA, or --device cpu."
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _compare_devices(cards: Sequence[str], rank: int) -> None:
    """Refuse ranks of which some are on GPUs and some are not: their collectives would wait for each other.

    Args:
        cards: device and place of each rank.
        rank: of this process.

    Raises:
        RankError: on the first rank.
        RankStoppedError: on the others.
    """
    kind = cards[0].partition(" ")[0]
    if not (others := [card for card in cards if card.partition(" ")[0] != kind]):
        return
    problem = (
        f"ranks: expected all on {kind}, as rank 0 is, received {', '.join(others)}. Remedy: the same --device on all "
        "hosts; of 'auto' each takes a GPU where PyTorch sees one."
    )
    raise RankError(problem) if rank == 0 else RankStoppedError(problem)


def _start(place: torch.device, seconds: float) -> None:
    """Makes the process group: gloo for values, and for tensors where they are on a CPU."""
    options: dict[str, Any] = {"backend": "gloo"}
    if place.type == "cuda":
        for name, value in WITHOUT_MULTICAST.items():
            os.environ.setdefault(name, value)
        # with its device the communicator is made here, and not at the first collective
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": place}
    try:
        rank, size = int(os.environ["RANK"]), world_size()
        store = agent_store(seconds)
        if store is not None:
            store = meet(store, rank, size, seconds)
        else:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(*address, size, rank == 0, timedelta(seconds=seconds), multi_tenant=True)
        cards = words_of_all(store, rank, size, f"{place.type} on {place_of(rank)}", seconds)
        _compare_devices(cards, rank)
        options |= {"store": dist.PrefixStore("group", store), "rank": rank, "world_size": size}
        dist.init_process_group(timeout=timedelta(seconds=seconds), **options)
    except (RankError, RankStoppedError):
        raise
    except (RuntimeError, ValueError, TimeoutError, KeyError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        first = str(error).strip().partition("\n")[0]
        raise RankError(
            f"ranks: expected {world_size()} processes that meet at {where}, received at {place_of()}: {first}. Remedy:"
            " another --master-port where it is in use; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets "
            "them."
        ) from error
    if place.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=place))  # used once before anything is captured
    dist.barrier()
