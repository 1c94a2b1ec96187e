"""What tests of several benchmarks need."""

import gc

import pytest


@pytest.fixture
def small_heap(monkeypatch):
    """Collections that see the loops alone: those of a whole test session take half a second each."""
    thaw = gc.unfreeze
    gc.collect()
    gc.freeze()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    yield
    thaw()
