"""What the tests of trainers share: runs without a picture, and compilation without Inductor."""

import pytest

from torchrl_perf.collectors import device_collector
from torchrl_perf.runtime import precision
from torchrl_perf.runtime.compile import compiled
from torchrl_perf.trainers.run import run


@pytest.fixture(autouse=True)
def no_picture(request, monkeypatch):
    """Drawing takes longer than the runs of these tests; one that is about the picture has it in its name.

    The value is the list of the titles that pictures would have had.
    """
    titles = []
    if "and_picture" not in request.node.name:
        monkeypatch.setattr(run, "_draw", lambda run_dir, title, mean: titles.append(title))
    return titles


@pytest.fixture
def traced_only(monkeypatch, fresh_dynamo):
    """What compiles is traced and run, by Dynamo and AOTAutograd but without Inductor: the same faults, much sooner."""
    for module in (precision, device_collector):
        monkeypatch.setattr(module, "compiled", lambda fn, **_: compiled(fn, backend="aot_eager"))
