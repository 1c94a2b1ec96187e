"""Fixtures shared by all tests: device, variant (eager, compiled, graph), seeds, one thread."""

import gc
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

VARIANTS = ["eager", "compiled", pytest.param("graph", marks=pytest.mark.gpu)]
SLOW_TIMEOUT = 1_200  # seconds for a test marked slow or long that names no limit of its own


def pytest_configure(config: pytest.Config) -> None:
    """Keep torch to one thread: the tensors of a test are small, and more threads only wait for one another.

    What is started in the background ignores Ctrl-C, or the end of its terminal, and so would the runs that tests stop.
    """
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here, and give the tests marked slow or long time on a loaded machine.

    Tests of CUDA where there is none, and graphs of a CPU, are deselected, not skipped: two thousand skips would hide
    the one that says something. A test marked long is not also in the part marked slow.
    """
    with_cuda = torch.cuda.is_available()
    only_slow = config.option.markexpr == "slow"
    left_out = [
        item
        for item in items
        if _is_graph_on_cpu(item) or (_has(item, "gpu") and not with_cuda) or (only_slow and _has(item, "long"))
    ]
    if left_out:
        dropped = set(left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in dropped]
    for item in items:
        if _has(item, "slow_compiled") and _is_compiled_on_cpu(item):
            item.add_marker(pytest.mark.slow)
        if (_has(item, "slow") or _has(item, "long")) and not _has(item, "timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))


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


def _is_graph_on_cpu(item: pytest.Item) -> bool:
    params = getattr(getattr(item, "callspec", None), "params", {})
    return params.get("variant") == "graph" and params.get("device") == "cpu"


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


@dataclass(frozen=True)
class Variant:
    """One way to run a function: ``variant(fn)`` returns it as it is, compiled, or captured into a CUDA graph.

    Attributes:
        name: "eager", "compiled" or "graph".
        device: where the test makes its tensors; "graph" only ever comes with CUDA.
    """

    name: str
    device: torch.device

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn`` in this variant. A graph owns its outputs: read them before the next call."""
        if self.name == "eager":
            return fn
        # Imported here, so that the runtime is loaded only by the tests that use it.
        if self.name == "compiled":
            from torchrl_perf.runtime.compile import compiled

            return compiled(fn)
        from torchrl_perf.runtime import capture

        return capture(fn)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Variant]:
    """Run the test eager, compiled and captured; a recompilation inside the test is an error."""
    if request.param == "eager":
        yield Variant("eager", device)
        return
    request.getfixturevalue("fresh_dynamo")
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield Variant(request.param, device)


@pytest.fixture
def small_heap(monkeypatch):
    """Collections that see the loops alone: those of a whole test session take half a second each."""
    thaw = gc.unfreeze
    gc.collect()
    gc.freeze()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    yield
    thaw()
