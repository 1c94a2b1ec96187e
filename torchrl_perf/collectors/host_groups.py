"""One gymnasium vector env as a collector drives it: send actions, receive outcomes, in any auto-reset mode."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing import connection
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
from gymnasium.vector import AsyncVectorEnv, VectorEnv

from torchrl_perf.collectors.host_spaces import Leaf

AutoReset = Literal["next_step", "same_step", "disabled"]
_MODES: dict[str, AutoReset] = {"nextstep": "next_step", "samestep": "same_step", "disabled": "disabled"}
FINAL_KEYS = ("final_obs", "final_observation")  # gymnasium from 1.1 on, and before


def autoreset_mode(envs: Any) -> AutoReset:
    """When a vector env resets the envs that are done.

    Read from the innermost env's own ``autoreset_mode`` where it has one, since ``metadata`` may be shared by all
    objects of a class (``AtariVectorEnv``), then from ``metadata["autoreset_mode"]``.

    Raises:
        ValueError: where neither says it.
    """
    inner = getattr(envs, "unwrapped", envs)
    received = getattr(inner, "autoreset_mode", None) or (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    name = received.value if isinstance(received, Enum) else received
    mode = _MODES.get(str(name).lower().replace("_", "").replace("-", ""))
    if mode is None:
        raise ValueError(
            f"envs: expected metadata['autoreset_mode'] of {type(inner).__name__} to be one of NextStep, SameStep and "
            f"Disabled (gymnasium.vector.AutoresetMode), received {received!r}. Remedy: state how it behaves: "
            "envs.metadata = {**envs.metadata, 'autoreset_mode': AutoresetMode.NEXT_STEP}."
        )
    return mode


@dataclass
class Outcome:
    """What a step of a group gave, before any reset.

    Attributes:
        observation: one array ``[n, *shape]`` for each leaf; the env may own them.
        reward: ``[n]``.
        terminated: ``[n]`` bool.
        truncated: ``[n]`` bool.
        done: ``[n]`` bool.
        final: one array ``[n, *shape]`` a leaf with the true final observations in the rows that are done; None where
            ``observation`` holds them itself.
    """

    observation: list[Any]
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    done: np.ndarray
    final: list[np.ndarray] | None


class HostGroup:
    """A vector env whose steps may run while the host does something else.

    An ``AsyncVectorEnv`` steps in its own processes and an ``AtariVectorEnv`` in its own threads; any other one steps
    in a thread of its own if ``threaded``, else inside :meth:`receive`.

    Args:
        envs: the vector env.
        index: number of the group.
        offset: number of its first env among all.
        leaves: of the observation of one env.
        threaded: whether other groups can work meanwhile.

    Attributes:
        mode: when it resets.
        steps: vector steps since its start.
        in_flight: whether an action has been sent and its outcome not been received.
    """

    def __init__(self, envs: VectorEnv, index: int, offset: int, leaves: Sequence[Leaf], *, threaded: bool) -> None:
        self.envs: Any = envs
        self.index = index
        self.num_envs = int(envs.num_envs)
        self.offset = offset
        self.mode = autoreset_mode(envs)
        self.steps = 0
        self.in_flight = False
        self._leaves = leaves
        self._final: list[np.ndarray] | None = None
        self._thread: _StepThread | None = None
        if isinstance(envs, AsyncVectorEnv):
            self._send, self._receive = envs.step_async, envs.step_wait
        elif type(envs).__module__.startswith("ale_py."):
            self._send, self._receive = self.envs.send, self.envs.recv
        elif threaded:
            self._thread = _StepThread(envs.step)
            self._send, self._receive = self._thread.send, self._thread.receive
        else:
            self._send, self._receive = self._hold, self._step_held

    # -- stepping -----------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None) -> list[Any]:
        """Begins all episodes anew, env i of the group with ``seed + i``; returns the observation's leaves."""
        observation, _ = self.envs.reset(seed=seed)
        return self._read(observation)

    def reset_done(self, done: np.ndarray) -> list[Any]:
        """Resets the envs that are done (mode ``"disabled"``); returns the leaves of all envs."""
        observation, _ = self.envs.reset(options={"reset_mask": np.array(done)})
        return self._read(observation)

    def send(self, action: np.ndarray) -> None:
        """Starts a step."""
        self.in_flight = True
        self._send(action)

    def receive(self) -> Outcome:
        """Waits for the step and returns what it gave."""
        observation, reward, terminated, truncated, info = self._receive()
        self.in_flight = False
        self.steps += 1
        terminated, truncated = np.asarray(terminated, dtype=bool), np.asarray(truncated, dtype=bool)
        done = terminated | truncated
        final = self._read_final(info, done) if self.mode == "same_step" and done.any() else None
        return Outcome(self._read(observation), np.asarray(reward), terminated, truncated, done, final)

    def _read(self, observation: Any) -> list[Any]:
        return [leaf.read(observation) for leaf in self._leaves]

    def _read_final(self, info: dict[str, Any], done: np.ndarray) -> list[np.ndarray]:
        """The rows that are done, from an object array of single observations or from a batched observation."""
        final = next((info[key] for key in FINAL_KEYS if key in info), None)
        if final is None:
            raise ValueError(
                f"envs: expected info['final_obs'] from {type(self.envs).__name__}, which resets in the same step, "
                f"received info keys {sorted(map(str, info))}. Remedy: an env that gives it, or another mode."
            )
        if not (isinstance(final, np.ndarray) and final.dtype == object):
            return self._read(final)
        if self._final is None:
            kinds = [np.asarray(leaf.read(final[np.argmax(done)])).dtype for leaf in self._leaves]
            shapes = [(self.num_envs, *leaf.shape) for leaf in self._leaves]
            self._final = [np.zeros(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
        for i in np.flatnonzero(done):
            for row, leaf in zip(self._final, self._leaves, strict=True):
                row[i] = leaf.read(final[i])
        return self._final

    def _hold(self, action: np.ndarray) -> None:
        self._held = action

    def _step_held(self) -> Any:
        return self.envs.step(self._held)

    # -- ends -----------------------------------------------------------------------------------------------------

    def failed_env(self, error: BaseException) -> int | None:
        """Which env of the group raised, or whose process died, as far as the vector env lets one know."""
        inner = self.envs.unwrapped
        if isinstance(inner, AsyncVectorEnv):
            lost = [i for i, pipe in enumerate(inner.parent_pipes) if pipe is None or pipe.closed]
            if lost:
                return lost[0]
            # the pipe breaks a moment before the process counts as dead
            ended = connection.wait([process.sentinel for process in inner.processes], timeout=1.0)
            return next((i for i, process in enumerate(inner.processes) if process.sentinel in ended), None)
        trace = error.__traceback__
        while trace is not None:
            variables = trace.tb_frame.f_locals
            if variables.get("self") is inner and isinstance(variables.get("i"), int):
                return variables["i"]  # the loop of SyncVectorEnv over its envs
            trace = trace.tb_next
        return None

    def close(self, *, broken: bool = False) -> None:
        """Closes the vector env; with ``broken``, whatever state it is in and without a further error."""
        if self._thread is not None:
            self._thread.stop()
        if not broken:
            self.envs.close()
            return
        inner = self.envs.unwrapped
        processes = inner.processes if isinstance(inner, AsyncVectorEnv) else []
        for process in processes:
            # a worker that waits for its pipe, or runs on, would keep `close` waiting
            process.terminate()
        if processes:
            inner.closed = True
            _close_pipes(inner)
            return
        try:
            self.envs.close()
        except Exception as error:
            self.close_error = error  # the fault that led here is the one to report


def _close_pipes(envs: Any) -> None:
    for pipe in envs.parent_pipes:
        if pipe is not None:
            pipe.close()
    for process in envs.processes:
        process.join()


class _StepThread:
    """Runs one step at a time in a thread; what a step raises is raised by :meth:`receive`."""

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self._actions: SimpleQueue[Any] = SimpleQueue()
        self._results: SimpleQueue[Any] = SimpleQueue()
        self._step = step
        self.send = self._actions.put
        threading.Thread(target=self._run, name="torchrl_perf-envs", daemon=True).start()

    def _run(self) -> None:
        while (action := self._actions.get()) is not None:
            try:
                result = self._step(action)
            except BaseException as error:  # handed over, whatever it is: the other thread waits for an answer
                result = error
            self._results.put(result)

    def receive(self) -> Any:
        """Waits for the result of the step."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self) -> None:
        """Ends the thread after the step that it may be in."""
        self._actions.put(None)
