"""DeviceMetrics in two parts: an interval is ended and sent on its way now, and its row is read later."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.runtime import no_host_sync


class Rows:
    """A logger that keeps its rows."""

    def __init__(self):
        self.rows = []

    def log_metrics(self, row, step=None):
        self.rows.append((step, row))

    def log_histogram(self, name, data, **kwargs):
        pass


def test_rows_are_read_an_interval_later(device):
    rows = Rows()
    metrics = DeviceMetrics(device, logger=rows)
    for step in (1, 2, 3):
        metrics.add("a", torch.tensor([step, step + 1.0], device=device))
        metrics.add("h", torch.tensor([0.0, 1.0], device=device) * step, reduce="histogram")
        metrics.start_flush(step * 10)
        assert metrics.last_step == step * 10
        if step > 1:
            assert metrics.finish_flush({"host": step - 1}) == {"a": step - 0.5, "host": step - 1}
            assert metrics.last_histograms["h"].edges[-1] >= step - 1
        assert metrics.pending == 1
    assert metrics.finish_flush() == {"a": 3.5}
    assert metrics.finish_flush() is None
    assert [step for step, _ in rows.rows] == [10, 20, 30]


def test_equals_flush(device):
    now, later = DeviceMetrics(device), DeviceMetrics(device)
    expected, got = [], []
    for step in range(6):
        for metrics in (now, later):
            for reduce in ("mean", "sum", "max", "last"):
                metrics.add(reduce, torch.arange(3.0, device=device) * step, reduce=reduce)
        expected.append(now.flush(step))
        later.start_flush(step)
        got += [later.finish_flush()] if later.pending == 2 else []
    got.append(later.finish_flush())
    assert got == expected


def test_two_intervals_at_most_and_the_third_is_kept(device):
    metrics = DeviceMetrics(device)
    for step in (1, 2):
        metrics.add("a", torch.tensor(float(step), device=device))
        metrics.start_flush(step)
    metrics.add("a", torch.tensor(3.0, device=device))
    with pytest.raises(RuntimeError, match="a start with all 2 in flight"):
        metrics.start_flush(3)
    assert metrics.last_step == 2
    assert [metrics.finish_flush(), metrics.finish_flush()] == [{"a": 1.0}, {"a": 2.0}]
    assert metrics.flush(3) == {"a": 3.0}


def test_flush_finishes_what_is_under_way(device):
    rows = Rows()
    metrics = DeviceMetrics(device, logger=rows)
    metrics.add("a", torch.tensor(1.0, device=device))
    metrics.start_flush(1)
    metrics.add("a", torch.tensor(2.0, device=device))
    assert metrics.flush(2) == {"a": 2.0}
    assert rows.rows == [(1, {"a": 1.0}), (2, {"a": 2.0})]


def test_errors_keep_the_interval(device):
    metrics = DeviceMetrics(device)
    metrics.add("a", torch.tensor(1.0, device=device))
    metrics.start_flush(5)
    with pytest.raises(ValueError, match="at least 5"):
        metrics.start_flush(4)
    with pytest.raises(ValueError, match="extra names"):
        metrics.finish_flush({"a": 2.0})
    assert metrics.finish_flush() == {"a": 1.0}


def test_a_summary_is_part_of_the_row_that_is_logged(device):
    rows = Rows()
    metrics = DeviceMetrics(device, logger=rows)
    metrics.add("a", torch.tensor(2.0, device=device))
    metrics.start_flush(7)
    wanted = {"a": 2.0, "host": 1.0, "both": 3.0}
    assert metrics.finish_flush({"host": 1.0}, summarise=lambda row: row | {"both": row["a"] + row["host"]}) == wanted
    assert rows.rows == [(7, wanted)]


def test_loading_a_state_drops_what_is_under_way(device):
    metrics = DeviceMetrics(device)
    metrics.add("a", torch.tensor(1.0, device=device))
    state = metrics.state_dict()
    metrics.start_flush(1)
    metrics.load_state_dict(state)
    assert metrics.pending == 0
    assert metrics.flush(1) == {"a": 1.0}


def test_start_waits_for_nothing(device):
    metrics = DeviceMetrics(device)
    value = torch.ones(4, device=device)
    metrics.add("a", value)
    metrics.start_flush(1)
    metrics.finish_flush()
    with no_host_sync():
        metrics.add("a", value)
        metrics.start_flush(2)
    assert metrics.finish_flush() == {"a": 1.0}


@settings(max_examples=20, deadline=None)
@given(plan=st.lists(st.sampled_from(["add", "start", "finish", "flush"]), max_size=20))
def test_no_value_is_lost_or_counted_twice(plan):
    rows, added = Rows(), 0.0
    metrics = DeviceMetrics("cpu", logger=rows)
    for step, action in enumerate(plan):
        if action == "add":
            metrics.add("n", torch.tensor(1.0), reduce="sum")
            added += 1
        elif action == "start" and metrics.pending < 2:
            metrics.start_flush(step)
        elif action == "finish":
            metrics.finish_flush()
        elif action == "flush":
            metrics.flush(step)
    metrics.flush(len(plan))
    assert sum(row["n"] for _, row in rows.rows) == added
    steps = [step for step, _ in rows.rows]
    assert steps == sorted(set(steps))
