"""A process ends with its own exit code while its threads still work for a collector that nobody closed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import threading, time, torch
from torchrl_perf.collectors.background import Background
from torchrl_perf.collectors.host_thread import CallThread
numbers, begun = torch.ones(300, 300), threading.Semaphore(0)
def multiply():
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        numbers @ numbers
    return True
def work():
    begun.release()
    return multiply()
again = Background(multiply)
again.start()
Background(work).start()
CallThread().send(work)
begun.acquire()
begun.acquire()
again.stop()
again.start()
raise SystemExit(3)
"""

ENDED = """
import time
from torchrl_perf.collectors.background import Background
from torchrl_perf.collectors.host_thread import CallThread
calls = CallThread()
calls.send(lambda: time.sleep(0.1))
calls.stop()
again = Background(lambda: False)
again.start()
del calls, again
time.sleep(0.5)
"""


@pytest.mark.parametrize(("script", "code"), [(SCRIPT, 3), (ENDED, 0)], ids=["at work", "ended before"])
def test_a_thread_does_not_abort_the_process(script, code):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, timeout=120, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")
