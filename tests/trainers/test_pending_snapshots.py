"""Snapshots wait for the verdicts of their intervals in order of time."""

import torch
from torch import nn

from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.trainers import NumericalGuard

GOOD = {"nonfinite/loss": 0.0, "nonfinite/gradient": 0.0}


def test_a_good_verdict_is_of_the_oldest_pending_snapshot():
    part = nn.Linear(1, 1, bias=False)
    guard = NumericalGuard(DeviceMetrics("cpu"), torch.ones(()), on_nan="rollback", parts=lambda: {"part": part})
    for value in (1.0, 2.0, 3.0):  # the first is good at once, two wait
        nn.init.constant_(part.weight, value)
        guard.snapshot()
    assert guard.verdict(GOOD) is None
    nn.init.constant_(part.weight, torch.nan)
    guard.rollback()
    assert part.weight.item() == 2.0


def test_an_older_snapshot_is_dropped_by_the_next_good_verdict():
    part = nn.Linear(1, 1, bias=False)
    guard = NumericalGuard(DeviceMetrics("cpu"), torch.ones(()), on_nan="rollback", parts=lambda: {"part": part})
    for value in (1.0, 2.0, 3.0):
        nn.init.constant_(part.weight, value)
        guard.snapshot()
    assert guard.verdict(GOOD) is None
    assert guard.verdict(GOOD) is None
    guard.rollback()
    assert part.weight.item() == 3.0
    assert guard.verdict(GOOD) is None  # what waited went with the rollback
    guard.rollback()
    assert part.weight.item() == 3.0
