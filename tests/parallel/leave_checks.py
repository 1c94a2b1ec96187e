"""Ways in which a rank ends: what ``test_leave.py`` starts, by ``rank_processes.run``."""

import subprocess
import sys


def left_by_exception() -> None:
    """The processes have met, and what is asked for is refused; the ranks leave when their processes end."""
    _ends_like_a_script("", "by_host=True")


def left_by_interrupt() -> None:
    """A loop of one's own that Ctrl-C ends."""
    _ends_like_a_script("raise KeyboardInterrupt")


def left_without_a_word() -> None:
    """The same, without a call of leave()."""
    _ends_like_a_script("")


def left_in_order() -> None:
    """The same, by a call of leave(), and a collective behind it."""
    _ends_like_a_script("leave()\ntry:\n    ranks.values(1)\nexcept RuntimeError as error:\n    print(error)")


def _ends_like_a_script(last: str, asked: str = "") -> None:
    """Becomes a process of its own, whose end is that of an interpreter and not that of a fork."""
    script = (
        "import atexit, os, torch\n"
        "import torch.distributed as dist\n"
        "from torchrl_perf.parallel import join, leave\n"
        "names = lambda: [open(f'/proc/self/task/{one}/comm').read() for one in os.listdir('/proc/self/task')]\n"
        "gloo = lambda: sum('gloo' in name for name in names())\n"
        "atexit.register(lambda: print(f'{gloo()} threads of gloo at the end', flush=True))  # behind those of join()\n"
        "destroy = dist.destroy_process_group\n"
        "dist.destroy_process_group = lambda: (destroy(), print('destroy_process_group() was called', flush=True))\n"
        f"ranks = join('cpu', {asked})\n"
        "ranks.values(float(ranks.sum_(torch.ones(3)).sum()))\n"
        "print(f'{gloo() and 1} or more before', flush=True)\n"
    )
    raise SystemExit(abs(subprocess.run([sys.executable, "-c", script + last], check=False).returncode))
