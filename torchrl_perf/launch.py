"""Starts the processes of a run on this host, as ``torchrun`` does.

It imports nothing of the package but what is light: the processes import the rest, and begin as soon as it has ended.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrl_perf.streams import say

__all__ = ["kept_handlers", "launch_ranks", "note_that_it_was_told"]

TOLD = "TORCHRL_PERF_TOLD"
"""Variable of the ranks: a file that one makes which has said why it will be killed."""


def launch_ranks(arguments: Sequence[str], ranks: int) -> int:
    """Starts ``python`` with arguments once for each rank, and waits for all; where one fails, the others are ended.

    Args:
        arguments: such as ``("-m", "torchrl_perf", "train", "ppo")``.
        ranks: processes.

    Returns:
        Exit code: 0, or that of a rank that ended with one of its own, or 128 + the signal that ended this process's
        ranks.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # the ranks say what is wrong; a second account of it is not wanted
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of connections that a lost rank leaves
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        max_restarts=0,
        monitor_interval=0.1,
    )
    with tempfile.TemporaryDirectory() as folder, kept_handlers():
        told = Path(folder) / "told"
        os.environ[TOLD] = str(told)
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            codes = [failure.exitcode for failure in error.failures.values()]
            own = [code for code in codes if code > 0]
            if not own and not told.exists():
                say(f"torchrl-perf: {_words(error)}")
            return own[0] if own else 1
        except SignalException as error:
            return 128 + int(error.sigval)
        finally:
            del os.environ[TOLD]
    return 0


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Gives each signal the handler back that it has now: some libraries set their own, and leave them set."""
    is_main = threading.current_thread() is threading.main_thread()  # elsewhere Python lets nobody set one
    known = {number: signal.getsignal(number) for number in signal.valid_signals()} if is_main else {}
    try:
        yield
    finally:
        for number, handler in known.items():
            # None: a handler that C code has set, which cannot be set again
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def note_that_it_was_told() -> None:
    """Leaves word for whoever has started this rank that it has said why it ends, before a signal ends it."""
    if TOLD in os.environ:
        Path(os.environ[TOLD]).touch()


def _words(error: Any) -> str:
    """What is known of ranks that a signal has ended before one could say more."""
    rank, failure = error.get_first_failure()
    return (
        f"rank {rank} (process {failure.pid}): expected to run to its end, received signal {-failure.exitcode} "
        f"({failure.signal_name()}), which ended it. The others were ended. Remedy: where nobody sent it, the memory "
        "of the host may not be enough for so many ranks (its log names processes that it has killed for that)."
    )
