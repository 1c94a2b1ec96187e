"""Where the processes of one life of a run meet, on a store that ``torchrun`` keeps over the lives."""

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

__all__ = ["agent_store", "has_agent_store", "meet", "met", "words_of_all"]

LOOK_SECONDS = 0.02
"""Between two looks of the first rank for others."""

WORD_LOOKS = 50
"""Looks for a word whose number is there already."""

_MET: list[str] = []
"""The name of the present life, once the processes have met."""


def has_agent_store() -> bool:
    """Whether the agent of ``torchrun`` holds the store; where it does not, the first rank does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def agent_store(seconds: float) -> dist.Store | None:
    """A connection to the store of ``torchrun``'s agent; None where the first rank is to hold one of its own.

    Args:
        seconds: longest wait for an answer.
    """
    if not has_agent_store():
        return None
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*place, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def meet(store: dist.Store, rank: int, size: int, seconds: float) -> dist.Store:
    """The part of a store that belongs to this life of the run; all of its processes ask at once.

    What a process of an earlier life has left, the address at which it listened say, must not be taken for that of its
    successor. So each rank asks with a word of its own, and the first rank answers it with a name that it has made.
    The count of restarts that ``torchrun`` gives would not do: it is that of each host.

    Args:
        store: of all lives.
        rank: of this process.
        size: number of processes.
        seconds: longest wait for all of them.

    Raises:
        TimeoutError: where not all have come, on the first rank.
        torch.distributed.DistStoreError: on the others.
    """
    shared = dist.PrefixStore("torchrl_perf/meeting", store)
    name = uuid.uuid4().hex
    if rank == 0:
        _answer(shared, name, size, seconds)
    else:
        shared.set(f"asks/{shared.add('asked', 1)}", name)
        shared.wait([f"answer/{name}"], timedelta(seconds=seconds))
        name = shared.get(f"answer/{name}").decode()
        shared.add(f"came/{name}", 1)
    _MET[:] = [name]
    return dist.PrefixStore(f"torchrl_perf/{name}", store)


def words_of_all(store: dist.Store, rank: int, size: int, word: str, seconds: float) -> list[str]:
    """A word of each process, in the order of ranks; for what has to be known before a group is made.

    Args:
        store: of this life.
        rank: of this process.
        size: number of processes.
        word: of this process.
        seconds: longest wait for the others'.

    Raises:
        torch.distributed.DistStoreError: where not all have come.
    """
    shared = dist.PrefixStore("torchrl_perf/words", store)
    shared.set(str(rank), word)
    names = [str(number) for number in range(size)]
    shared.wait(names, timedelta(seconds=seconds))
    found = [shared.get(name).decode() for name in names]
    shared.set(f"read/{rank}", "")
    if rank == 0:  # the store may be this process's, and end with it
        shared.wait([f"read/{name}" for name in names], timedelta(seconds=seconds))
    return found


def met() -> str:
    """The name of the present life; empty before the processes have met, or where no agent keeps a store."""
    return _MET[0] if _MET else ""


def _answer(shared: dist.Store, name: str, size: int, seconds: float) -> None:
    """Answers every word, those of earlier lives as well, until the others have come."""
    answered, looks = 0, 0
    while (came := shared.add(f"came/{name}", 0)) < size - 1:
        if answered < shared.add("asked", 0):
            answered += 1
            # one that was killed between its two calls has left a number without a word
            if _is_there(shared, f"asks/{answered}"):
                shared.set(f"answer/{shared.get(f'asks/{answered}').decode()}", name)
            continue
        if looks * LOOK_SECONDS > seconds:
            raise TimeoutError(
                f"ranks: expected {size} processes within {seconds:g} s, received {1 + came}. Remedy: start the "
                "others, or a larger --rank-timeout."
            )
        looks += 1
        time.sleep(LOOK_SECONDS)


def _is_there(shared: dist.Store, key: str) -> bool:
    """Whether a word is there, or comes within a moment of its number."""
    for _ in range(WORD_LOOKS):
        if shared.check([key]):
            return True
        time.sleep(LOOK_SECONDS)
    return False
