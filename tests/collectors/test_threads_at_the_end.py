"""A process ends with its own exit code while its threads still work for a collector that nobody closed."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_a_thread_that_works_does_not_abort_the_process():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, timeout=120, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (3, "")
