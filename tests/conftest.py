"""Fixtures shared by all tests: device, variant (eager, traced, compiled, graph), seeds, one thread."""

import gc
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

VARIANTS = ["eager", "traced", "compiled", pytest.param("graph", marks=pytest.mark.gpu)]
SLOW_TIMEOUT = 1_200  # seconds for a test marked slow or long that names no limit of its own


def pytest_configure(config: pytest.Config) -> None:
    """Keep torch to one thread: the tensors of a test are small, and more threads only wait for one another.

    What is started in the background ignores Ctrl-C, or the end of its terminal, and so would the runs that tests stop.
    """
    torch.set_num_threads(1)
    _keep_caches_apart()
    if getattr(config.option, "dist", None) == "load":  # what `-n` alone means
        config.option.dist = "worksteal"  # neighbours share caches, and no worker waits beside another's long queue
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _keep_caches_apart() -> None:
    """Give each worker of a GPU's tests compiler caches of its own.

    Inductor chooses the block sizes of a kernel by timing them, and writes its choice beside the kernel. Two workers
    that compile the same kernel at once may choose differently, and a sum over other blocks is rounded differently: a
    run that is made again after that would not be the same to the bit.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not torch.cuda.is_available():
        return
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        folder = os.environ.get(name) or Path(tempfile.gettempdir()) / f"torchrl_perf_tests_{name.lower()}"
        os.environ[name] = str(Path(folder) / worker)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here, and give the tests marked slow or long time on a loaded machine.

    Tests of CUDA where there is none, and variants of the other device, are deselected, not skipped: two thousand skips
    would hide the one that says something. A test marked long is not also in the part marked slow.
    """
    with_cuda = torch.cuda.is_available()
    only_slow = config.option.markexpr == "slow"
    left_out = [
        item
        for item in items
        if _is_of_the_other_device(item) or (_has(item, "gpu") and not with_cuda) or (only_slow and _has(item, "long"))
    ]
    if left_out:
        dropped = set(left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in dropped]
    for item in items:
        if _is_compiled_on_cpu(item) and (_has(item, "slow_compiled") or "variant" in item.fixturenames):
            item.add_marker(pytest.mark.slow)
        if (_has(item, "slow") or _has(item, "long")) and not _has(item, "timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Keep modules and collected tests out of garbage collections: they stay, and looking through them takes a second.

    During the collection of tests itself it is a fifth of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say that the tests of CUDA did not run; ``pytest -m gpu`` then also exits with 5, since no test is left."""
    if not torch.cuda.is_available():
        terminalreporter.write_line("No CUDA device here: the tests marked gpu were left out.")


def _is_compiled_on_cpu(item: pytest.Item) -> bool:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    values = list(params.values())
    return any(value in ("compiled", "compile") for value in values if isinstance(value, str)) and "cuda" not in values


def _has(item: pytest.Item, marker: str) -> bool:
    return item.get_closest_marker(marker) is not None


def _is_of_the_other_device(item: pytest.Item) -> bool:
    """Graphs need CUDA; tracing alone saves time on a CPU, where the test that compiles is marked slow."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    found = (params.get("variant"), params.get("device"))
    return found in {("graph", "cpu"), ("traced", "cuda")} or (found[0] == "traced" and _has(item, "slow_compiled"))


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed Python, NumPy and torch (all devices) before each test; the seed itself is the value."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture(autouse=True)
def default_sync_debug_mode() -> Iterator[None]:
    """A failed test must not leave CUDA refusing every wait of the tests after it."""
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of the test: the CPU, and CUDA where there is one."""
    return torch.device(request.param)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Give a test that compiles an empty compiler cache, so that its recompilations are its own."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """Have what compiles trace its graphs and run them without Inductor, in a tenth of the time."""
    whole = torch.compile

    def compile_(fn: Callable[..., Any], *, backend: str = "inductor", **settings: Any) -> Callable[..., Any]:
        if backend == "inductor":
            settings.pop("options", None)
            backend = "aot_eager"
        return whole(fn, backend=backend, **settings)

    monkeypatch.setattr(torch, "compile", compile_)


@pytest.fixture(params=["traced", pytest.param("inductor", marks=pytest.mark.long)])
def backend(request: pytest.FixtureRequest) -> str:
    """What compiles a whole iteration: on a CPU, Inductor takes minutes for one."""
    request.getfixturevalue("traced" if request.param == "traced" else "fresh_dynamo")
    return request.param


@dataclass(frozen=True)
class Variant:
    """One way to run a function: ``variant(fn)`` returns it as it is, compiled, or captured into a CUDA graph.

    Attributes:
        name: "eager", "traced" (compiled without Inductor), "compiled" or "graph".
        device: where the test makes its tensors; "graph" only ever comes with CUDA.
    """

    name: str
    device: torch.device

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn`` in this variant. A graph owns its outputs: read them before the next call."""
        if self.name == "eager":
            return fn
        # Imported here, so that the runtime is loaded only by the tests that use it.
        if self.name in ("traced", "compiled"):
            from torchrl_perf.runtime.compile import compiled

            return compiled(fn)
        from torchrl_perf.runtime import capture

        return capture(fn)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Variant]:
    """Run the test eager, traced or compiled, and captured; a recompilation inside the test is an error."""
    if request.param == "eager":
        yield Variant("eager", device)
        return
    request.getfixturevalue("traced" if request.param == "traced" else "fresh_dynamo")
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield Variant(request.param, device)


@pytest.fixture
def small_heap(monkeypatch):
    """Collections that see the loops alone, also where the code under test would thaw what was frozen before it."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    gc.collect()
    gc.freeze()
