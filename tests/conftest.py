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


def pytest_configure(config: pytest.Config) -> None:
    """Keep torch to one thread: the tensors of a test are small, and more threads only wait for one another.

    A shell has what it starts in the background ignore Ctrl-C, and so would the runs that tests interrupt.
    """
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no CUDA, and drop the graph variant on a CPU, which has no graphs."""
    impossible = [item for item in items if _is_graph_on_cpu(item)]
    if impossible:
        dropped = set(impossible)
        config.hook.pytest_deselected(items=impossible)
        items[:] = [item for item in items if item not in dropped]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


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
    """One way to run a function: `variant(fn)` returns it as it is, compiled, or captured into a CUDA graph.

    Attributes:
        name: "eager", "compiled" or "graph".
        device: where the test makes its tensors; "graph" only ever comes with CUDA.
    """

    name: str
    device: torch.device

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn` in this variant. A graph owns its outputs: read them before the next call."""
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
