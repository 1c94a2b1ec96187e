"""Counts the steps of a loop that is not ours: env steps, optimiser steps and iterations, in a script left as it is.

* An **env step** is one call of ``step`` or ``step_and_maybe_reset`` of a TorchRL env, or of ``step`` of a gymnasium
  env or vector env; a batch of envs steps once. Calls inside one another count once, steps in other processes do not.
* An **optimiser step** is one step of a ``torch.optim`` optimiser.
* An **iteration** is one batch of a TorchRL collector or of one of this package's, or one call of a function made with
  ``torchrl_perf.runtime.capture``; again only the outermost counts.

A CUDA graph of ``capture`` hides the steps inside it: a replay counts as many as the call that recorded it.
"""

import _thread
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchrl_perf.runtime.waits.interception import replace

__all__ = ["Counts", "LoopMarks", "StepLimit"]

ENV_STEPS = {
    "torchrl.envs.common": {"EnvBase": ("step", "step_and_maybe_reset")},
    "torchrl.envs.batched_envs": {
        "BatchedEnvBase": ("step_and_maybe_reset",),
        "ParallelEnv": ("step_and_maybe_reset",),
    },
    "torchrl.envs.async_envs": {"AsyncEnvPool": ("step_and_maybe_reset",)},
    "gymnasium.wrappers.common": {"OrderEnforcing": ("step",), "PassiveEnvChecker": ("step",), "TimeLimit": ("step",)},
    "gymnasium.vector.sync_vector_env": {"SyncVectorEnv": ("step",)},
    "gymnasium.vector.async_vector_env": {"AsyncVectorEnv": ("step_wait",)},
}
ITERATIONS = {
    "torchrl_perf.runtime.capture": {"Captured": ("__call__",)},
    "torchrl_perf.collectors.device_collector": {"DeviceCollector": ("collect",)},
    "torchrl_perf.collectors.host_collector": {"HostCollector": ("collect",)},
    "torchrl.collectors._base": {"BaseCollector": ("next",)},
}
BATCHES = {
    "torchrl.collectors._base": {"BaseCollector": ("__iter__",)},
    "torchrl.collectors._async_batched": {"AsyncBatchedCollector": ("__iter__",)},
}


_END = object()


class StepLimit(BaseException):
    """Raised inside the script to end it once it has taken as many steps as were asked for."""


class Counts(NamedTuple):
    """How many of each there were."""

    env_steps: int = 0
    optimizer_steps: int = 0
    iterations: int = 0


class _Depth(threading.local):
    env = 0
    iteration = 0


class LoopMarks:
    """Context that counts the steps of the process and ends them at a limit.

    Args:
        on_first: called once, when the first step of each kind begins, with the name of the field of ``Counts``.
        max_steps: env steps (in a script without envs: optimiser steps) after which ``StepLimit`` is raised.
        max_iterations: iterations after which it is raised.

    Attributes:
        counts: the steps so far.
        marks: number of times that anything began or ended; grows with the loop.
        warming: not 0 while a function of ``capture`` warms up on CUDA, or is recorded.
    """

    def __init__(
        self,
        on_first: Callable[[str], None] = lambda kind: None,
        *,
        max_steps: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        self.marks = self.warming = 0
        self._numbers = {"env_steps": 0, "optimizer_steps": 0, "iterations": 0}
        self._on_first, self._seen = on_first, set()
        self._limits = max_steps, max_iterations
        self._depth = _Depth()
        self._stack = ExitStack()
        self._main = threading.get_ident()
        self._recorded: dict[int, tuple[int, int]] = {}

    @property
    def counts(self) -> Counts:
        """The steps so far."""
        return Counts(**self._numbers)

    def __enter__(self) -> Self:
        wrappers = [(ENV_STEPS, self._env_step), (ITERATIONS, self._iteration), (BATCHES, self._batches)]
        patches: dict[str, list[Callable[[ModuleType], None]]] = {}
        for table, wrap in wrappers:
            for module, classes in table.items():
                patches.setdefault(module, []).append(self._patch(classes, wrap))
        with ExitStack() as stack:
            self._stack = stack
            stack.callback(register_optimizer_step_pre_hook(self._optimizer_begins).remove)
            stack.callback(register_optimizer_step_post_hook(self._optimizer_ends).remove)
            stack.enter_context(on_import(patches))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _patch(self, classes: dict[str, tuple[str, ...]], wrap: Callable[[Any], Any]) -> Callable[[ModuleType], None]:
        def patch(module: ModuleType) -> None:
            for name, methods in classes.items():
                owner = getattr(module, name, None)
                for method in methods:
                    if owner is not None and method in vars(owner):
                        replace(self._stack, owner, method, wrap)

        return patch

    def _begin(self, kind: str) -> None:
        """Mark the beginning of a step, unless the limit is reached."""
        if kind not in self._seen:
            self._seen.add(kind)
            self._on_first(kind)
        self.marks += 1
        max_steps, max_iterations = self._limits
        if max_iterations is not None and kind == "iterations" and self._numbers[kind] >= max_iterations:
            self._end()
        limited = "env_steps" if "env_steps" in self._seen else "optimizer_steps"
        if max_steps is not None and kind == limited and self._numbers[kind] >= max_steps:
            self._end()

    def _end(self) -> None:
        if threading.get_ident() == self._main:
            raise StepLimit
        _thread.interrupt_main()  # an exception here would end this thread alone

    # -- wrappers ---------------------------------------------------------------------------------------------------

    def _env_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(env: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._depth.env:
                return original(env, *args, **kwargs)
            self._begin("env_steps")
            self._depth.env = 1
            try:
                return original(env, *args, **kwargs)
            finally:
                self._depth.env = 0
                self._numbers["env_steps"] += 1

        return step

    def _iteration(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def iteration(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(owner, *args, **kwargs)
            replays = getattr(owner, "captured", False)
            warms = getattr(owner, "mode", "") == "graph" and hasattr(owner, "captured") and not replays
            before = self.counts
            self.warming += warms
            try:
                with self._one_iteration() as outermost:
                    result = original(owner, *args, **kwargs)
            finally:
                self.warming -= warms
            self._numbers["iterations"] += outermost
            if replays:
                env_steps, optimizer_steps = self._recorded.get(id(owner), (0, 0))
                self._numbers["env_steps"] += env_steps
                self._numbers["optimizer_steps"] += optimizer_steps
            else:
                after = self.counts
                self._recorded[id(owner)] = (
                    after.env_steps - before.env_steps,
                    after.optimizer_steps - before.optimizer_steps,
                )
            return result

        return iteration

    def _batches(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def batches(collector: Any) -> Iterator[Any]:
            iterator = original(collector)
            try:
                while True:
                    with self._one_iteration() as outermost:
                        batch = next(iterator, _END)
                    if batch is _END:
                        return
                    self._numbers["iterations"] += outermost
                    yield batch
            finally:
                close = getattr(iterator, "close", None)
                if close is not None:
                    close()

        return batches

    @contextmanager
    def _one_iteration(self) -> Iterator[bool]:
        """Yields whether it is the outermost, which the caller counts once it has ended well."""
        if self._depth.iteration:
            yield False
            return
        self._begin("iterations")
        self._depth.iteration = 1
        try:
            yield True
        finally:
            self._depth.iteration = 0
            self.marks += 1

    def _optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._begin("optimizer_steps")

    def _optimizer_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._numbers["optimizer_steps"] += 1
        self.marks += 1


@contextmanager
def on_import(patches: dict[str, list[Callable[[ModuleType], None]]]) -> Iterator[None]:
    """Call functions on modules: at once on those that are loaded, on the others when the program imports them.

    Args:
        patches: functions by the full name of the module.
    """
    waiting = dict(patches)
    for name in list(waiting):
        module = sys.modules.get(name)
        if module is not None:
            for patch in waiting.pop(name):
                patch(module)
    finder = _Finder(waiting)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Finds nothing itself: wraps the loader of the modules that someone waits for."""

    def __init__(self, waiting: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self._waiting = waiting

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, for a module in the table; None for all others."""
        if name not in self._waiting:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._wrap(spec.loader, self._waiting.pop(name))
                return spec
        return None

    @staticmethod
    def _wrap(loader: Any, patches: list[Callable[[ModuleType], None]]) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for patch in patches:
                patch(module)

        loader.exec_module = exec_module
