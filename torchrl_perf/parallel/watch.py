"""Who is still there: each rank tells the others that it lives, so that a lost one is noticed and named."""

import contextlib
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch.distributed as dist

from torchrl_perf.launch import note_that_it_was_told
from torchrl_perf.parallel.join import RankError, RankLostError, place_of, world_size
from torchrl_perf.parallel.meeting import has_agent_store, met
from torchrl_perf.parallel.place import Place, began, own_place
from torchrl_perf.parallel.ranks import Ranks, RankStoppedError
from torchrl_perf.streams import say

__all__ = [
    "BEAT_SECONDS",
    "SILENT_BEATS",
    "Lost",
    "RankWatch",
    "beginning",
    "first_to_tell",
    "of_collective",
    "watched",
]

BEAT_SECONDS = 0.5
SILENT_BEATS = 60
"""Beats without a word after which a rank counts as lost; one of this host also when its process is gone."""
HURRIED_BEATS = 10
"""The same once a collective of this rank has failed: one that is silent then is most likely why."""
EXPLAIN_SECONDS = 10.0
"""How long a rank whose collective has failed looks for the one that is why."""
GRACE_SECONDS = 20.0
"""How long a rank may take to end by itself once another is lost: it may hang in a collective on the device."""
HANGS = ("silent", "still")
"""States of a rank whose process is there."""

_WATCHES: list["RankWatch"] = []
"""The one of this process, while there is one."""


class Lost(NamedTuple):
    """A rank that is no longer there."""

    rank: int
    state: str
    """``"failed"`` where it has said itself what is wrong, ``"ended"``, ``"silent"``, ``"still"`` where the others wait
    for it; the rank is only the first of all where they are ``"stuck"``, being equally far, or ``"unanswered"`` by the
    store."""


NOBODY, STORE = Lost(-1, "lives"), Lost(-1, "ended")
"""What a look has found where all live, and where the store is gone."""


class RankWatch:
    """Tells the other ranks by the store of ``torch.distributed`` that this one lives, and looks whether they do.

    A process of this host that is gone is noticed within a second, one that is silent after ``SILENT_BEATS`` beats, as
    one of another host is that is gone. A rank that is behind the others, where none has moved for ``ranks.seconds``,
    counts as lost as well. Where all are equally far and none has moved for as long, as where each waits for its GPU,
    no rank is named, and all end. A rank that hangs is killed by the others of its host and by itself, so that their
    collectives fail. The rank that notices ends by an exception of :meth:`explain` where a collective fails, as gloo's
    do; where it hangs in one, as on a GPU, the watch says what has happened and ends the process after
    ``GRACE_SECONDS``.

    Args:
        ranks: several processes, which make it together.
        iteration: gives the number of iterations that this rank has done.
        store: where they leave word; by default that of ``MASTER_ADDR`` and ``MASTER_PORT``.

    Attributes:
        iteration: as given.
    """

    def __init__(self, ranks: Ranks, iteration: Callable[[], int], store: dist.Store | None = None) -> None:
        self.iteration = iteration
        self._ranks = ranks
        base = _own_connection() if store is None else store
        # torchrun keeps its store over restarts
        self._store = dist.PrefixStore(ranks.of_first(lambda: uuid.uuid4().hex), base)
        self._store_is_gone = False
        self._places: list[Place] = ranks.values(own_place())
        self._state, self._beats, self._silent = "lives", 0, dict.fromkeys(range(ranks.size), 0)
        self._heard = [""] * ranks.size
        self._reached: dict[int, tuple[int, int]] = {}  # iterations and collectives of each rank
        self._still = 0  # beats for which it has been so
        self._lock, self._end, self._found = threading.Lock(), threading.Event(), threading.Event()
        self._lost: Lost | None = None
        self._silent_beats = SILENT_BEATS
        self._chosen: bool | None = None  # to say what has happened
        self._answers: SimpleQueue[Lost | None] = SimpleQueue()
        self._beat()
        ranks.values(None)  # everyone has left a word
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    # -- what the loop asks -------------------------------------------------------------------------------------------

    @property
    def lives(self) -> bool:
        """Whether this rank has not left word that it ends."""
        return self._state == "lives"

    def explain(self, error: BaseException, step: int | None, *, stopped: bool = False) -> None:
        """After an exception of this rank: raises where another rank is why, and else leaves word that it is this one.

        Args:
            error: of the loop.
            step: env steps of the whole run so far, or None where that is not known.
            stopped: whether a signal asks this rank to stop, as torchrun does where another has ended.

        Raises:
            RankLostError: on the rank that tells it.
            RankStoppedError: on the others, and where the other rank has told why it failed.
        """
        # an error that does not come from a collective needs no search
        collective = isinstance(error, RuntimeError) and of_collective(error)
        if collective:
            self._silent_beats = min(HURRIED_BEATS, SILENT_BEATS)
        seconds = EXPLAIN_SECONDS if collective else 4 * BEAT_SECONDS if stopped else 0.0
        if not seconds or not self._found.wait(seconds) or self._lost is None:
            self.mark("failed")
            return
        lost = self._lost
        if lost.state == "failed" or not self._tells():
            self.mark("follows")
            stopped = RankStoppedError(f"rank {lost.rank}")
            raise stopped from error
        self.mark("follows")
        lost_rank = RankLostError(self._words(lost, step))
        raise lost_rank from error

    def mark(self, state: str) -> None:
        """Leaves word of what this rank does from now on: ``"left"``, ``"failed"``, or ``"follows"`` another."""
        self._state = state
        if self._store_is_gone:  # a call would wait for the one that waits
            return
        with contextlib.suppress(RuntimeError):
            self._beat()

    def fail(self) -> None:
        """Leaves word that an exception ends this rank, where nothing else was said."""
        if self._state == "lives":
            self.mark("failed")

    def close(self) -> None:
        """Ends the watch of this rank, which leaves in good order."""
        self._end.set()
        if self._state == "lives":
            self.mark("left")
        # a thread that the interpreter ends within a call of the store would abort the process
        self._thread.join(timeout=2 * EXPLAIN_SECONDS + BEAT_SECONDS)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Beats and looks, until this rank ends or one is lost: torch may wait without end for a store that hangs."""
        found = NOBODY
        try:
            while found is NOBODY and not self._end.wait(BEAT_SECONDS):
                self._beat()
                found = self._look() or NOBODY
                self._answers.put(found)
        except RuntimeError:  # the store is gone, and with it the process that holds it
            self._answers.put(STORE)
        self._answers.put(None)

    def _run(self) -> None:
        threading.Thread(target=self._ask, name="rank-store", daemon=True).start()
        unanswered = 0  # counted and not timed: a run that was stopped as a whole may go on
        while self._lost is None:
            try:
                answer = self._answers.get(timeout=BEAT_SECONDS)
            except Empty:
                unanswered += 1
                if unanswered < self._silent_beats:
                    continue
                answer = None if self._end.is_set() else STORE
            if answer is None:
                return
            if answer is STORE:
                self._store_is_gone = True
                self._lost = self._of_store(hangs=unanswered >= self._silent_beats)
            elif answer is not NOBODY:
                self._lost = answer
            unanswered = 0
        if self._lost.state == "stuck":
            self._tells()  # decided while all are there: they end at the same time, and the store with one of them
        self._found.set()
        if self._lost.state in HANGS:
            self._kill_hanging(self._lost)
        if not self._end.wait(GRACE_SECONDS):
            if self._lost.state != "failed" and self._tells():
                say(f"torchrl-perf: {self._words(self._lost, None)}")
                note_that_it_was_told()
            os.kill(os.getpid(), signal.SIGKILL)  # the main thread waits in a driver, where no exception reaches it

    def _beat(self) -> None:
        with self._lock:
            self._beats += 1
            self._store.set(
                f"{self._ranks.rank}", f"{self._beats} {self._state} {self.iteration()} {self._ranks.begun}"
            )

    def _look(self) -> Lost | None:
        """Hears what all ranks have said last; the one that is lost."""
        reached: dict[int, tuple[int, int]] = {}
        words = self._store.multi_get([f"{rank}" for rank in range(self._ranks.size)])
        for rank, word in enumerate(words):
            text = word.decode()
            _, state, iteration, begun = text.split()
            self._silent[rank] = self._silent[rank] + 1 if text == self._heard[rank] else 0
            self._heard[rank] = text
            if state == "failed" or state in HANGS:
                return Lost(rank, state)
            if state != "lives":
                continue
            reached[rank] = int(iteration), int(begun)
            if self._is_gone(rank):
                return Lost(rank, "ended")
            if self._silent[rank] >= self._silent_beats:
                return Lost(rank, "silent" if self._is_near(rank) else "ended")
        self._still = self._still + 1 if reached == self._reached else 0
        self._reached = reached
        if self._still * BEAT_SECONDS < self._ranks.seconds:
            return None
        if len(set(reached.values())) > 1:
            return Lost(min(reached, key=reached.__getitem__), "still")
        # one that writes its last files while others have left in good order may take its time
        return Lost(0, "stuck") if len(reached) == self._ranks.size else None

    def _of_store(self, hangs: bool = False) -> Lost:
        """Who is lost where the store is gone or hangs, which the host of the first rank holds."""
        others = [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]
        gone = [rank for rank in others if self._is_gone(rank)]
        if not gone and self._ranks.rank and not self._is_near(0):
            gone = [0]
        if hangs and not gone:
            return Lost(0, "unanswered" if has_agent_store() or not self._ranks.rank else "silent")
        return Lost(gone[0] if gone else max(others, key=self._silent.__getitem__), "ended")

    def _is_near(self, rank: int) -> bool:
        """Whether the process of a rank can be looked at."""
        return bool(self._places[rank].started) and self._places[rank].kernel == self._places[self._ranks.rank].kernel

    def _is_gone(self, rank: int) -> bool:
        return self._is_near(rank) and began(self._places[rank].pid) != self._places[rank].started

    def _kill_hanging(self, lost: Lost) -> None:
        """Kills a process that is there and hangs, after word was left why; one of another host does so itself."""
        if not self._is_near(lost.rank) or self._is_gone(lost.rank):
            return
        if not self._store_is_gone:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{lost.rank}", f"0 {lost.state} 0 0")
        with contextlib.suppress(OSError):
            os.kill(self._places[lost.rank].pid, signal.SIGKILL)

    def _tells(self) -> bool:
        """Whether this rank says it: the first that asks, or the lowest where there is no one to ask."""
        if self._chosen is None:
            self._chosen = self._ranks.rank == min({0, 1} - {0 if self._lost is None else self._lost.rank})
            if not self._store_is_gone:
                with contextlib.suppress(RuntimeError):
                    self._chosen = self._store.add("told", 1) == 1
        return self._chosen

    def _words(self, lost: Lost, step: int | None) -> str:
        # ranks are never more than one collective apart
        at = f"iteration {self.iteration() + 1}" + ("" if step is None else f" (env step {step:,})")
        if lost.state == "stuck":
            return (
                f"ranks: expected an iteration or a collective to end within {self._ranks.seconds:g} s, received none "
                f"on any of the {self._ranks.size} ranks in {at}: rank {self._ranks.rank} waits in {_main_thread()}. "
                "All stop. Remedy: a larger --rank-timeout where an iteration or a compilation takes so long; else "
                "the newest checkpoint, with --resume."
            )
        if lost.state == "unanswered":
            seconds = self._silent_beats * BEAT_SECONDS
            return (
                f"ranks: expected the store of torchrun to answer within {seconds:g} s, received nothing in {at}. All "
                "stop. Remedy: its process or host hangs; then the newest checkpoint, with --resume."
            )
        place = self._places[lost.rank]
        why = {
            "ended": "has ended or cannot be reached",
            "silent": f"has given no sign of life for {self._silent_beats * BEAT_SECONDS:g} s",
            "still": f"has come no further for {self._ranks.seconds:g} s, while the others wait",
        }
        return (
            f"rank {lost.rank} of {self._ranks.size} was lost in {at}: its process {place.pid} on host {place.host} "
            f"{why[lost.state]}. Rank {self._ranks.rank} and the others stop."
        )


@contextlib.contextmanager
def beginning() -> Iterator[None]:
    """Within it, while ranks do not watch each other yet, a collective that fails is told as what it is.

    Raises:
        RankError: where another rank has ended.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankStoppedError) or not of_collective(error):
            raise
        first = str(error).strip().partition("\n")[0]
        raise RankError(
            f"ranks: expected all {world_size()} to begin the run, received at {place_of()} that another has ended: "
            f"{first}. Remedy: what that one has said, or the log of its host."
        ) from error


@contextlib.contextmanager
def watched(ranks: Ranks, iteration: Callable[[], int]) -> Iterator[RankWatch | None]:
    """Within it ranks watch each other; nothing of a process alone, or of ranks without a common address.

    Args:
        ranks: the processes.
        iteration: as for :class:`RankWatch`; within a watch it is what that watch tells from now on.
    """
    if not ranks.several or "MASTER_ADDR" not in os.environ:
        yield None
        return
    if _WATCHES:
        _WATCHES[0].iteration = iteration
        yield _WATCHES[0]
        return
    with beginning():
        watch = RankWatch(ranks, iteration)
    _WATCHES.append(watch)
    try:
        yield watch
    except BaseException as error:
        if isinstance(error, RankStoppedError):
            watch.mark("follows")
        elif watch.lives:
            watch.explain(error, None)  # raises where another rank is why
        raise
    finally:
        _WATCHES.clear()
        watch.close()


def first_to_tell() -> bool:
    """Whether this process is the first of the run that asks, so that one rank alone says what all have come upon."""
    if world_size() == 1:
        return True
    if os.environ.get("RANK") == "0" and not dist.is_initialized() and not has_agent_store():
        return True  # the store would be here
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    life = met() or "/".join(os.environ.get(name, "") for name in names)
    try:
        store = dist.PrefixStore(life, _own_connection())
        return store.add("told", 1) == 1
    except (RuntimeError, ValueError, KeyError):
        return True  # the store is gone with the process that held it


def _own_connection() -> dist.TCPStore:
    """A connection that no collective waits on."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*place, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=EXPLAIN_SECONDS))


def of_collective(error: RuntimeError) -> bool:
    """Whether an error may come from a collective that another rank has left."""
    words = f"{type(error).__name__} {error}".lower()
    return any(word in words for word in ("gloo", "nccl", "connection", "dist", "peer", "socket", "timed out", "rank"))


def _main_thread() -> str:
    """Where the main thread is: the innermost line of Python."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
