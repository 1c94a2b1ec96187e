"""Where parts record themselves in a test: on CUDA, or on a CPU that emulates its graphs."""

from collections.abc import Iterator
from contextlib import contextmanager

import emulated_graph
import pytest
import torch

from torchrl_perf.runtime.self_capture import DEVICES, held, in_place, recording


@contextmanager
def emulated_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it, calls on a CPU become graphs as those on CUDA do."""
    for module in (recording, in_place, held):
        monkeypatch.setattr(module, "record", emulated_graph.record)
    DEVICES.append("cpu")  # the same list everywhere
    try:
        yield
    finally:
        DEVICES.remove("cpu")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def recording_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of the device; a test takes it as ``device = recording_device``."""
    if request.param == "cuda":
        torch.zeros(1, device="cuda")  # what has made no context has nothing to record
        yield "cuda"
        return
    with emulated_graphs(monkeypatch):
        yield "cpu"
