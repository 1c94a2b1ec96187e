"""Clocks give seconds in order, and count their calls."""

import time

import pytest
import torch

from torchrl_perf.runtime import Stopwatch, synchronize, time_cuda


def test_synchronize_does_nothing_on_a_cpu():
    synchronize("cpu")
    synchronize()


def test_a_stopwatch_measures_a_stretch():
    with Stopwatch("cpu") as watch:
        time.sleep(0.02)
    assert 0.02 <= watch.seconds < 2
    assert watch.host_seconds == watch.seconds


def test_time_cuda_counts_and_orders(device):
    calls = []
    timing = time_cuda(lambda: calls.append(1), 7, warmup=3, device=device)
    assert len(calls) == 10
    assert timing.repeats == 7
    assert 0 <= timing.p10 <= timing.median <= timing.p90


def test_no_repeats_are_refused():
    with pytest.raises(ValueError, match="received 0"):
        time_cuda(lambda: None, 0, device="cpu")


@pytest.mark.gpu
def test_events_measure_the_device_and_not_the_launch():
    x = torch.randn(4096, 4096, device="cuda")
    x @ x
    synchronize()
    with Stopwatch() as watch:
        for _ in range(20):
            x @ x
    assert watch.seconds > watch.host_seconds * 0.5
    assert watch.seconds > 1e-4
