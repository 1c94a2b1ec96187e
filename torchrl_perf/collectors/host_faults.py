"""What a host collector raises when an env fails."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDictBase


class EnvTimeoutError(TimeoutError):
    """A step or reset that took longer than the collector's ``timeout``.

    Args:
        what: "step" or "reset".
        seconds: the limit.
        silent: numbers, within the group, of the envs that have not answered; empty if the vector env does not tell.
        offset: number of the group's first env.

    Attributes:
        silent: as given.
    """

    def __init__(self, what: str, seconds: float, silent: Sequence[int], offset: int) -> None:
        self.silent = list(silent)
        who = ", ".join(str(offset + i) for i in silent) or "which one the vector env does not tell"
        super().__init__(f"expected a {what} to take at most timeout={seconds:g} s, still waiting for env {who}")


class HostEnvError(RuntimeError):
    """An env raised, or its process died, while a collector stepped it.

    Attributes:
        group: number of the vector env.
        env_index: number of the env among all N of the collector, or None where the vector env does not tell.
        seed: of that env's first episode (of the group's first env, where ``env_index`` is None); None without seeds.
        step: vector steps that the group had taken.
        batch: TensorDict ``[N, t]`` of the steps that were complete in all envs and not yet returned; t may be 0.
    """

    def __init__(
        self,
        message: str,
        *,
        group: int,
        env_index: int | None,
        seed: int | None,
        step: int,
        batch: TensorDictBase,
    ) -> None:
        super().__init__(message)
        self.group, self.env_index, self.seed, self.step, self.batch = group, env_index, seed, step, batch


def ignore_interrupts(make_env: Callable[[], Any]) -> Callable[[], Any]:
    """Lets the processes of an ``AsyncVectorEnv`` outlive Ctrl-C, which reaches every process of a terminal.

    Without it they end before the training loop has finished its iteration and written its checkpoint. In the process
    that the loop runs in, nothing changes.

    Args:
        make_env: a function that makes an env.

    Returns:
        One for ``AsyncVectorEnv([...])`` to call in its processes.
    """

    def make() -> Any:
        if multiprocessing.parent_process() is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return make_env()

    return make
