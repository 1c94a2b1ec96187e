"""Starts ranks that share a run: ``python rank_processes.py FOLDER RANKS CHECK...``; forks, so that torch loads once.

Each check is a function of ``rank_checks``, or of the module that its name begins with. What it returns on a
rank is saved as FOLDER/CHECK-RANK.pt, the exit codes of all ranks as FOLDER/CHECK.json, and what they print as
FOLDER/CHECK-RANK.txt. No process outlives this one.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
LIMIT = 480.0
"""Seconds after which the ranks of a check are killed."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def run(folder: Path, ranks: int, *checks: str, timeout: float = 280.0) -> dict[str, list[int]]:
    """Runs checks in processes of their own; the exit codes of their ranks, by check.

    Args:
        folder: for what they leave.
        ranks: processes of each.
        *checks: names of functions, of ``rank_checks`` where they name no module.
        timeout: seconds for all of them.
    """
    words = [sys.executable, str(HERE / "rank_processes.py"), str(folder), str(ranks), *checks]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}"}
    done = subprocess.run(words, env=environment, timeout=timeout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {check: json.loads((folder / f"{check}.json").read_text())["codes"] for check in checks}


def results(folder: Path, check: str, ranks: int) -> list[Any]:
    """What a check returned on each rank."""
    return [torch.load(folder / f"{check}-{rank}.pt", weights_only=False) for rank in range(ranks)]


def said(folder: Path, check: str, rank: int) -> str:
    """What a rank of a check printed."""
    return (folder / f"{check}-{rank}.txt").read_text()


def _child(folder: Path, check: str, rank: int) -> int:
    output = os.open(folder / f"{check}-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.chdir(folder)
    try:
        module, _, name = check.rpartition(".")
        found = getattr(importlib.import_module(module or "rank_checks"), name)()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    torch.save(found, folder / f"{check}-{rank}.pt")
    return 0


def _ranks(folder: Path, ranks: int, check: str) -> dict[str, Any]:
    os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = _child(folder, check, rank)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children[pid] = rank
    codes, ended, start = [-1] * ranks, [0.0] * ranks, time.monotonic()
    left = set(children)
    while left and time.monotonic() - start < LIMIT:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.02)
            continue
        left.discard(pid)
        codes[children[pid]] = os.waitstatus_to_exitcode(status)
        ended[children[pid]] = time.monotonic() - start
    for pid in left:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return {"codes": codes, "seconds": ended}


if __name__ == "__main__":
    torch.set_num_threads(1)
    import rank_checks  # noqa: F401  loaded once, before the forks

    where = Path(sys.argv[1])
    for name in sys.argv[3:]:
        (where / f"{name}.json").write_text(json.dumps(_ranks(where, int(sys.argv[2]), name)))
