"""Histograms on the device: exact counts, even edges, independence of batches and order."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.metrics.histogram import empty_row, read_row, update_row_no_sync


def build(batches, bins=8, device="cpu"):
    row = empty_row(bins, torch.device(device))
    for batch in batches:
        update_row_no_sync(row, torch.tensor(batch, dtype=torch.float64, device=device), None)
    return read_row(row.to("cpu"))


def oracle(values, edges):
    return [float(sum(low <= v < high for v in values)) for low, high in pairwise(edges)]


def test_by_hand(device):
    # Range 0..7 in 8 bins: width 1, cells [0, 1), [1, 2), ...
    histogram = build([[0.0, 0.5, 7.0, 3.0]], device=device)
    assert histogram.edges == [float(i) for i in range(9)]
    assert histogram.counts == [2.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert histogram.nonfinite == 0


def test_range_grows_and_cells_merge(device):
    histogram = build([[1.0, 2.0], [-6.0], [7.5]], device=device)
    assert histogram.edges == [-6.0 + 2 * i for i in range(9)]
    assert histogram.counts == oracle([1.0, 2.0, -6.0, 7.5], histogram.edges)


@pytest.mark.parametrize("value", [0.0, 475.0, -1e-30, 1e30, -3.0])
def test_a_single_value_is_counted_in_its_bin(value):
    histogram = build([[value], [value]])
    assert sum(histogram.counts) == 2.0
    assert histogram.counts == oracle([value, value], histogram.edges)


def test_nonfinite_values_are_in_no_bin_and_reported(device):
    metrics = DeviceMetrics(device, histogram_bins=4)
    value = torch.tensor([math.nan, math.inf, 1.0], device=device)
    metrics.add("h", value, reduce="histogram")
    assert metrics.flush(0) == {"h/nonfinite": 2.0}
    assert sum(metrics.last_histograms["h"].counts) == 1.0
    metrics.add("h", value, reduce="histogram", mask=torch.tensor([False, False, True], device=device))
    assert metrics.flush(1) == {}


def test_histogram_starts_anew_in_each_interval(device):
    metrics = DeviceMetrics(device, histogram_bins=8)
    for low in (0.0, 100.0):
        value = torch.arange(low, low + 8, device=device)
        metrics.add("h", value, reduce="histogram")
        metrics.flush(int(low))
        histogram = metrics.last_histograms["h"]
        assert histogram.counts == oracle(value.tolist(), histogram.edges)
        assert histogram.edges[0] == low


finite = st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: 0.0 if abs(x) < 1e-9 else x)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(finite, min_size=1, max_size=8), min_size=1, max_size=5), st.integers(2, 9))
def test_equals_a_loop_and_does_not_depend_on_batches(batches, bins):
    flat = [v for batch in batches for v in batch]
    histogram = build(batches, bins)
    assert histogram == build([flat], bins)
    assert histogram == build([[v] for v in reversed(flat)], bins)
    assert histogram.counts == oracle(flat, histogram.edges)
    assert sum(histogram.counts) == len(flat)
