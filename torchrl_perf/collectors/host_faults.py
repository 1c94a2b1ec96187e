"""What a host collector raises when an env fails."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

if TYPE_CHECKING:
    from torchrl_perf.collectors.host_groups import HostGroup


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
    def of(cls, group: HostGroup, error: BaseException, start_seed: int | None, batch: TensorDictBase) -> HostEnvError:
        """The error for what a group raised."""
        local = group.failed_env(error)
        env_index = None if local is None else group.offset + local
        seed = None if start_seed is None else start_seed + (env_index or group.offset)
        who = "an env" if local is None else f"env {env_index} (number {local} of its group)"
        return cls(
            f"{who} in group {group.index}, a {type(group.envs.unwrapped).__name__}, seed {seed}, raised "
            f"{type(error).__name__} at vector step {group.steps}: {error}. All envs are closed; {batch.shape[1]} "
            "complete steps are in this error's `batch`. Remedy: mend the env, or go on from a checkpoint with new "
            "vector envs.",
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
