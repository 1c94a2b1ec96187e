"""Python's thread pools: the interpreter ends their threads itself, after those that it waits for."""

import concurrent.futures.thread
import threading


def pool_threads() -> set[threading.Thread]:
    """The threads of every ``ThreadPoolExecutor``, idle ones too."""
    return set(concurrent.futures.thread._threads_queues)  # pyright: ignore[reportAttributeAccessIssue]
