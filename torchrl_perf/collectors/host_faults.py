"""What a host collector raises when an env fails."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

if TYPE_CHECKING:
    from torchrl_perf.collectors.host_groups import HostGroup


class EnvTimeoutError(TimeoutError):
    """A step or reset that took longer than the collector's ``timeout``.

    Args:
        what: "step" or "reset".
        seconds: the limit.
        silent: numbers of the envs that have not answered, in their group; empty where the vector env does not tell.
        offset: number of the group's first env.

    Attributes:
        silent: as given.
    """

    def __init__(self, what: str, seconds: float, silent: Sequence[int], offset: int) -> None:
        self.silent = list(silent)
        who = ", ".join(str(offset + i) for i in silent) or "which one the vector env does not tell"
        super().__init__(f"expected a {what} to take at most timeout={seconds:g} s, still waiting for env {who}")


def _large_seed(seed: int | None) -> str:
    """A word on seeds that some envs cannot take."""
    if seed is None or seed < 2**31:
        return ""
    return "Its seed is beyond 31 bits; an env that takes no more wants the collector's seed below 46,341. "


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

    @classmethod
    def of(cls, group: HostGroup, error: BaseException, batch: TensorDictBase) -> HostEnvError:
        """The error for what a group raised."""
        local = group.failed_env(error)
        env_index = None if local is None else group.offset + local
        seed = None if group.seeds is None else group.seeds[local or 0]
        who = "an env" if local is None else f"env {env_index} (number {local} of its group)"
        return cls(
            f"{who} in group {group.index}, a {type(group.envs.unwrapped).__name__}, seed {seed}, raised "
            f"{type(error).__name__} at vector step {group.steps}: {error}. All envs are closed; {batch.shape[1]} "
            f"complete steps are in this error's `batch`. {_large_seed(seed)}Remedy: mend the env, or go on from a "
            "checkpoint with new vector envs.",
            group=group.index,
            env_index=env_index,
            seed=seed,
            step=group.steps,
            batch=batch,
        )


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
