"""Signals get the handlers back that they had."""

import signal
import threading

import pytest

from torchrl_perf.launch import kept_handlers

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def handle(signum, frame):
    """Does nothing."""


def test_handlers_that_a_library_leaves_are_taken_back():
    before = {number: signal.getsignal(number) for number in NUMBERS}
    with pytest.raises(RuntimeError, match="of the library"), kept_handlers():
        for number in NUMBERS:
            signal.signal(number, handle)
        raise RuntimeError("of the library")
    assert {number: signal.getsignal(number) for number in NUMBERS} == before


def test_another_thread_than_the_main_one_sets_nothing():
    failed = []

    def run():
        try:
            with kept_handlers():
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed
