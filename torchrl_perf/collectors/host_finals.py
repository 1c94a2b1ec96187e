"""Final observations that a reset in the same step cannot overwrite.

In mode SAME_STEP gymnasium's vector envs keep an env's final observation by reference and reset the env before anyone
has copied it. If the env writes all observations into one buffer, the final one is lost: the reset overwrites it. Here
the env's ``step`` returns a copy where an episode ends, which costs one copy per episode.
"""

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

__all__ = ["FinalWatch", "protect_finals", "unprotect_finals"]

_ENDS = 3  # so many consecutive ends have to look overwritten before a vector env of unknown kind is refused


def protect_finals(envs: Any) -> bool:
    """Makes the envs of a vector env return copies of their final observations and infos.

    Args:
        envs: the innermost vector env, in mode SAME_STEP.

    Returns:
        Whether it could be done: for ``SyncVectorEnv``, and for ``AsyncVectorEnv`` with gymnasium's own workers.
    """
    if isinstance(envs, SyncVectorEnv):
        for env in envs.envs:
            if not _is_protected(env):
                env.step = _copying_step(env.step)
        return True
    if isinstance(envs, AsyncVectorEnv) and envs.worker is None:
        envs.set_attr("step", _StepOfWorker())
        return True
    return False


def unprotect_finals(envs: Any) -> None:
    """Undoes :func:`protect_finals` for a ``SyncVectorEnv``, whose envs may be used further without the collector."""
    for env in getattr(envs, "envs", ()):
        if _is_protected(env):
            del env.step


def _is_protected(env: Any) -> bool:
    return getattr(vars(env).get("step"), "hands_out_copies", False)


def _copying_step(original: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """An env's ``step`` that copies what it returns where an episode ends.

    It imports nothing from this package, so that it can be sent to a worker process that does not have it.

    Args:
        original: the env's own; None in a worker, where it is found at the first call.
    """

    def owned(value: Any) -> Any:
        from copy import deepcopy

        if isinstance(value, dict):
            return {key: owned(entry) for key, entry in value.items()}
        if type(value) in (list, tuple):
            return type(value)(owned(entry) for entry in value)
        return deepcopy(value) if hasattr(value, "__array__") else value

    def step(action: Any) -> Any:
        nonlocal original
        if original is None:
            import sys

            # ``set_attr`` sends a function without its env; in the worker's frame that calls it the env is ``env``
            env = sys._getframe(1).f_locals["env"]
            original = type(env).step.__get__(env)
        outcome = original(action)
        if outcome[2] or outcome[3]:
            observation, reward, terminated, truncated, info = outcome
            return owned(observation), reward, terminated, truncated, owned(info)
        return outcome

    step.hands_out_copies = True  # pyright: ignore[reportFunctionMemberAccess]
    return step


class _StepOfWorker:
    """What is sent to a worker; what arrives there is the function itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        import cloudpickle  # gymnasium depends on it for the same purpose: functions for its workers

        return pickle.loads, (cloudpickle.dumps(_copying_step(None)),)


class FinalWatch:
    """Finds out, for vector envs of unknown kind, whether a reset overwrites final observations.

    That is certain if both share memory. If they are only equal, while the episode's last root differs from both, it is
    assumed after the third consecutive end: an episode may also end where it began.

    Attributes:
        is_over: whether an end has shown that final observations are kept, so that watching can stop.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._alike = 0
        self._roots: list[np.ndarray] | None = None

    def share_memory(self, final: Any, following: Any) -> bool:
        """Whether the arrays of a final observation and of the one behind it are the same."""
        if not (isinstance(final, np.ndarray) and isinstance(following, np.ndarray)):
            return False
        with suppress(Exception):  # raised where it is too hard to tell
            return bool(np.shares_memory(final, following, max_work=100_000))
        return False

    def look_alike(self, final: Sequence[Any], following: Sequence[Any], done: np.ndarray) -> bool:
        """Whether too many ends in a row have looked as if they had been overwritten.

        Args:
            final: leaves ``[n, *shape]``, with the final observations in the rows that are done.
            following: leaves ``[n, *shape]`` of the observations behind the resets.
            done: ``[n]``.
        """
        if self._roots is None:
            return False
        for i in np.flatnonzero(done):
            moved = [k for k, leaf in enumerate(following) if not np.array_equal(self._roots[k][i], leaf[i])]
            if moved and any(not np.array_equal(final[k][i], following[k][i]) for k in moved):
                self.is_over = True
                return False
            self._alike += bool(moved)
        return self._alike >= _ENDS

    def remember(self, roots: Sequence[Any]) -> None:
        """Keeps a copy of the roots that the next step starts from."""
        self._roots = [np.array(leaf) for leaf in roots]
