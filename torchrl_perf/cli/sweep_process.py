"""The process of one run of a sweep: ``torchrl-perf train`` that stops when the process that has started it is gone."""

import ctypes
import os
import signal
import sys

from torchrl_perf.cli import main

__all__ = ["end_with_parent"]

PR_SET_PDEATHSIG = 1
"""Of Linux: which signal a process gets when its parent has ended."""


def end_with_parent() -> None:
    """Asks the kernel to stop this process when its parent is killed; elsewhere than on Linux it goes on."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:  # it was killed before
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(["train", *sys.argv[1:]]))
