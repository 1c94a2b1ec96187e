"""A block that takes longer than it may ends its process, which says why."""

import signal
import subprocess
import sys
import time

from torchrl_perf.runtime.deadline import Deadline

WAITS = """
import atexit, threading
from torchrl_perf.runtime.deadline import Deadline

deadline = Deadline()
with deadline.within(60.0, "not this one"):
    pass

def hang():
    with deadline.within(0.5, "expected an end, received none"):
        threading.Event().wait(200)

print("before", end="")
{call}
print("behind")
"""


def ended(call):
    """A process that hangs, when it has ended."""
    words = [sys.executable, "-c", WAITS.format(call=call)]
    return subprocess.run(words, capture_output=True, text=True, timeout=150, check=False)


def test_a_process_that_waits_longer_says_so_and_ends():
    done = ended("hang()")
    assert (done.returncode, done.stdout, done.stderr) == (
        -signal.SIGKILL,
        "before",
        "expected an end, received none\n",
    )


def test_it_does_so_while_the_interpreter_ends():
    done = ended("atexit.register(hang)")
    assert (done.returncode, done.stdout, done.stderr) == (
        -signal.SIGKILL,
        "before" + "behind\n",
        "expected an end, received none\n",
    )


def test_a_block_in_time_is_left_alone():
    deadline = Deadline()
    with deadline.within(0.05, "never said"):
        pass
    time.sleep(0.2)  # past the limit
    with deadline.within(60.0, "never said"):
        pass
