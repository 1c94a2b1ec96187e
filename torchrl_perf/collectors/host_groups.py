"""One gymnasium vector env as a collector drives it: send actions, receive outcomes, in any auto-reset mode."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing import TimeoutError as PipeTimeoutError
from multiprocessing import connection
from typing import Any, Literal

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from tensordict import TensorDictBase

from torchrl_perf.collectors.host_faults import EnvTimeoutError, HostEnvError
from torchrl_perf.collectors.host_finals import FinalWatch, protect_finals, unprotect_finals
from torchrl_perf.collectors.host_info import read_info
from torchrl_perf.collectors.host_spaces import Leaf
from torchrl_perf.collectors.host_thread import CallThread
from torchrl_perf.runtime.seeds import block_seed, stream_seeds

AutoReset = Literal["next_step", "same_step", "disabled"]
_MODES: dict[str, AutoReset] = {"nextstep": "next_step", "samestep": "same_step", "disabled": "disabled"}
_AUTO_TIMEOUT = 600.0
_PATIENCE = 2.0  # seconds that a worker process gets to end by itself
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
    in a thread of its own if ``threaded``, else inside :meth:`receive`. In mode SAME_STEP its envs are made to keep
    their final observations, or are watched for whether they do, see ``host_finals``.

    Args:
        envs: the vector env.
        index: number of the group.
        offset: number of its first env among all.
        leaves: of the observation of one env.
        threaded: whether other groups can work meanwhile.
        timeout: seconds that a step or a reset may take. ``"auto"``: 600 where the envs step in processes or a thread
            of their own, and no limit where a limit would cost a thread.
        info_leaves: entries of ``info`` that count as leaves too, behind those of the observation.

    Attributes:
        mode: when it resets.
        steps: vector steps since its start.
        in_flight: whether an action has been sent whose outcome has not been received.
    """

    def __init__(
        self,
        envs: VectorEnv,
        index: int,
        offset: int,
        leaves: Sequence[Leaf],
        *,
        threaded: bool,
        timeout: float | Literal["auto"] | None = "auto",
        info_leaves: Sequence[Leaf] = (),
    ) -> None:
        self.envs: Any = envs
        self.index = index
        self.num_envs = int(envs.num_envs)
        self.offset = offset
        self.mode = autoreset_mode(envs)
        self.steps = 0
        self.in_flight = False
        self.seeds: list[int] | None = None
        self._leaves, self._info_leaves = leaves, info_leaves
        self._final: list[np.ndarray] | None = None
        self._thread: CallThread | None = None
        inner = envs.unwrapped
        own_process = isinstance(envs, AsyncVectorEnv)
        atari = type(envs).__module__.startswith("ale_py.")
        wants_thread = threaded and not atari
        if timeout == "auto":
            wants_thread = wants_thread or isinstance(inner, AsyncVectorEnv)
        elif timeout is not None:
            wants_thread = True
        if not own_process and wants_thread:
            self._thread = CallThread()
        self._timeout = _AUTO_TIMEOUT if timeout == "auto" and (own_process or self._thread) else timeout
        self._timeout = None if self._timeout == "auto" else self._timeout
        if own_process:
            self._send, self._receive = envs.step_async, self._wait_for_processes
        elif self._thread is not None:
            thread = self._thread
            self._send, self._receive = (lambda action: thread.send(self.envs.step, action)), self._wait_for_thread
        elif atari:
            self._send, self._receive = self.envs.send, self.envs.recv
        else:
            self._send, self._receive = self._hold, self._step_held
        protected = self.mode != "same_step" or protect_finals(inner)
        self._watch = None if protected else FinalWatch()
        self._root_info: list[np.ndarray] = []

    # -- stepping -----------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None, *, start: int = 0, total: int | None = None) -> list[Any]:
        """Starts all episodes over; returns the leaves.

        Args:
            seed: of the run; None for none.
            start: number of the start, so that a resumed run gets other seeds than the first start.
            total: number of the envs of all groups.
        """
        observation, info = self._reset(seed=self._make_seeds(seed, start, total))
        leaves = self._read(observation, info)
        if self._watch is not None:
            self._watch.remember(leaves)
        return leaves

    def _make_seeds(self, seed: int | None, start: int, total: int | None) -> Any:
        """What the vector env's ``reset`` takes: a list, an array or, of unknown kinds, one number to count on from."""
        if seed is None:
            return None
        inner = self.envs.unwrapped
        if isinstance(inner, SyncVectorEnv | AsyncVectorEnv) or type(inner).__module__.startswith("ale_py."):
            self.seeds = stream_seeds(seed, self.num_envs, start=start, first=self.offset, total=total)
            return self.seeds if isinstance(inner, SyncVectorEnv | AsyncVectorEnv) else np.array(self.seeds)
        first = block_seed(seed, self.num_envs, start=start, number=self.index)
        self.seeds = list(range(first, first + self.num_envs))
        return first

    def _reset(self, **arguments: Any) -> Any:
        if isinstance(self.envs, AsyncVectorEnv):
            self.envs.reset_async(**arguments)
            try:
                return self.envs.reset_wait(self._timeout)
            except PipeTimeoutError as error:
                raise self._timed_out("reset") from error
        if self._thread is None:
            return self.envs.reset(**arguments)
        self._thread.send(lambda: self.envs.reset(**arguments))
        return self._wait_for_thread("reset")

    def reset_done(self, done: np.ndarray) -> list[Any]:
        """Resets the envs that are done (mode ``"disabled"``); returns the leaves of all envs."""
        observation, info = self._reset(options={"reset_mask": np.array(done)})
        leaves = self._read(observation, info)
        for leaf, before in zip(leaves[len(self._leaves) :], self._root_info, strict=True):
            leaf[~done] = before[~done]  # the info of a reset tells of the envs that were reset alone
        return leaves

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
        leaves = self._read(observation, info)
        self._root_info = leaves[len(self._leaves) :]
        final = self._read_final(info, done, leaves) if self.mode == "same_step" and done.any() else None
        if self._watch is not None:
            self._watched(leaves, final, done)
        return Outcome(leaves, np.asarray(reward), terminated, truncated, done, final)

    def _read(self, observation: Any, info: Any) -> list[Any]:
        leaves = [leaf.read(observation) for leaf in self._leaves]
        return leaves + [read_info(leaf, info, self.num_envs) for leaf in self._info_leaves]

    def _read_final(self, info: dict[str, Any], done: np.ndarray, leaves: Sequence[Any]) -> list[np.ndarray]:
        """The rows that are done, from an object array of single observations or from a batched observation."""
        final = next((info[key] for key in FINAL_KEYS if key in info), None)
        if final is None:
            raise ValueError(
                f"envs: expected info['final_obs'] from {type(self.envs).__name__}, which resets in the same step, "
                f"received info keys {sorted(map(str, info))}. Remedy: an env that gives it, or another mode."
            )
        final_info = [read_info(leaf, info.get("final_info", {}), self.num_envs) for leaf in self._info_leaves]
        if not (isinstance(final, np.ndarray) and final.dtype == object):
            batched = [leaf.read(final) for leaf in self._leaves]
            self._refuse_shared(batched, leaves)
            return batched + final_info
        if self._final is None:
            kinds = [np.asarray(leaf.read(final[np.argmax(done)])).dtype for leaf in self._leaves]
            shapes = [(self.num_envs, *leaf.shape) for leaf in self._leaves]
            self._final = [np.zeros(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
        for i in np.flatnonzero(done):
            one = [leaf.read(final[i]) for leaf in self._leaves]
            self._refuse_shared(one, leaves)
            for row, value in zip(self._final, one, strict=True):
                row[i] = value
        return self._final + final_info

    def _refuse_shared(self, final: Sequence[Any], leaves: Sequence[Any]) -> None:
        if self._watch is None:
            return
        for one, leaf in zip(final, leaves, strict=False):
            if self._watch.share_memory(one, leaf):
                self._refuse_overwritten("shares the memory of the observation behind the reset")

    def _watched(self, leaves: Sequence[Any], final: Sequence[Any] | None, done: np.ndarray) -> None:
        assert self._watch is not None
        count = len(self._leaves)
        if final is not None and self._watch.look_alike(final[:count], leaves[:count], done):
            self._refuse_overwritten("equals the observation behind the reset at each of the first ends of episodes")
        if self._watch.is_over:
            self._watch = None
        else:
            self._watch.remember(leaves[:count])

    def _refuse_overwritten(self, how: str) -> None:
        raise ValueError(
            f"envs: expected the true final observations in info['final_obs'] of {type(self.envs.unwrapped).__name__}, "
            f"which resets in the same step; received one that {how}. Remedy: let the env return a copy of its "
            "observation where an episode ends, or autoreset_mode=AutoresetMode.DISABLED or NEXT_STEP."
        )

    def _wait_for_processes(self) -> Any:
        try:
            return self.envs.step_wait(self._timeout)
        except PipeTimeoutError as error:
            raise self._timed_out("step") from error

    def _wait_for_thread(self, what: str = "step") -> Any:
        assert self._thread is not None
        try:
            return self._thread.receive(self._timeout)
        except TimeoutError as error:
            if self._thread.is_busy:
                raise self._timed_out(what) from error
            raise  # of the env itself

    def _timed_out(self, what: str) -> EnvTimeoutError:
        inner = self.envs.unwrapped
        frame = None if self._thread is None else self._thread.frame()
        silent = _silent_workers(inner, frame) if isinstance(inner, AsyncVectorEnv) else _env_in_frame(frame, inner)
        return EnvTimeoutError(what, self._timeout or 0.0, silent, self.offset)

    def _hold(self, action: np.ndarray) -> None:
        self._held = action

    def _step_held(self) -> Any:
        return self.envs.step(self._held)

    # -- ends -----------------------------------------------------------------------------------------------------

    def failed_env(self, error: BaseException) -> int | None:
        """Which env of the group raised, or whose process died, as far as the vector env lets one know."""
        if isinstance(error, EnvTimeoutError):
            return error.silent[0] if error.silent else None
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
            found = _env_at(trace.tb_frame, inner)
            if found is not None:
                return found
            trace = trace.tb_next
        return None

    def env_error(self, error: BaseException, batch: TensorDictBase) -> HostEnvError:
        """What a collector raises for the error of an env of this group.

        Args:
            error: what the step or reset has raised.
            batch: ``[N, t]`` of the complete steps that were not yet returned.
        """
        local = self.failed_env(error)
        env_index = None if local is None else self.offset + local
        seed = None if self.seeds is None else self.seeds[local or 0]
        who = "an env" if local is None else f"env {env_index} (number {local} of its group)"
        return HostEnvError(
            f"{who} in group {self.index}, a {type(self.envs.unwrapped).__name__}, seed {seed}, raised "
            f"{type(error).__name__} at vector step {self.steps}: {error}. All envs are closed; {batch.shape[1]} "
            f"complete steps are in this error's `batch`. {_large_seed(seed)}Remedy: mend the env, or go on from a "
            "checkpoint with new vector envs.",
            group=self.index,
            env_index=env_index,
            seed=seed,
            step=self.steps,
            batch=batch,
        )

    def close(self, *, broken: bool = False) -> None:
        """Closes the vector env; with ``broken``, whatever state it is in and without a further error."""
        if self._thread is not None:
            self._thread.stop()
        inner = self.envs.unwrapped
        unprotect_finals(inner)
        if not broken:
            self.envs.close()
            return
        processes = inner.processes if isinstance(inner, AsyncVectorEnv) else []
        for process in processes:
            # ``close`` would wait for a worker that waits for its pipe or does not stop
            process.terminate()
        if processes:
            inner.closed = True
            _close_pipes(inner)
            return
        if self._thread is not None and self._thread.is_busy:
            return  # ``close`` would wait for an env that hangs too; its thread ends with the process
        try:
            self.envs.close()
        except Exception as error:
            self.close_error = error  # the fault that led here is the one to report

    def release(self) -> None:
        """Lets go of the vector env without closing it."""
        if self._thread is not None:
            self._thread.stop()
        unprotect_finals(self.envs.unwrapped)


def _large_seed(seed: int | None) -> str:
    """A sentence on seeds that are too large for some envs."""
    if seed is None or seed < 2**31:
        return ""
    return "Its seed is beyond 31 bits; an env that takes no more wants the collector's seed below 46,341. "


def _env_at(frame: Any, inner: Any) -> int | None:
    """Number of the env that a frame of ``SyncVectorEnv`` is at, in its loop over them."""
    variables = frame.f_locals
    if variables.get("self") is inner and isinstance(variables.get("i"), int):
        return variables["i"]
    return None


def _env_in_frame(frame: Any, inner: Any) -> list[int]:
    while frame is not None:
        found = _env_at(frame, inner)
        if found is not None:
            return [found]
        frame = frame.f_back
    return []


def _silent_workers(envs: AsyncVectorEnv, frame: Any) -> list[int]:
    """Numbers of the envs whose workers have not answered; those before the one that a thread waits for have."""
    pipes = envs.parent_pipes
    awaited = 0
    while frame is not None:
        reader = frame.f_locals.get("self")
        awaited = max(awaited, *(i if pipe is reader else 0 for i, pipe in enumerate(pipes)))
        frame = frame.f_back
    return [i for i, pipe in enumerate(pipes) if i >= awaited and pipe is not None and not pipe.poll(0)]


def _close_pipes(envs: Any) -> None:
    for pipe in envs.parent_pipes:
        if pipe is not None:
            pipe.close()
    for process in envs.processes:
        process.join(_PATIENCE)
        if process.is_alive():  # it ignores SIGTERM
            process.kill()
            process.join()
