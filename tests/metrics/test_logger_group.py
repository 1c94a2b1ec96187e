"""LoggerGroup: rows in order, isolation of members, a slow or hanging one costs nothing, bounded queue, reports."""

import gc
import logging
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_perf.metrics import DeviceMetrics, LoggerGroup, ProgressCSVLogger
from torchrl_perf.metrics.logger_thread import LoggerThread
from torchrl_perf.metrics.sinks import LoggerSink


class Recorder:
    """A sink that keeps its rows; it can be made to wait, to be slow, and to fail."""

    name, retries, is_local, opens_with_first_row, close_limit = "recorder", False, True, False, 5.0

    def __init__(self, *, retries=False, seconds=0.0, errors=(), name="recorder"):
        self.rows, self.calls, self.closed, self.abandoned = [], [], 0, []
        self.name, self.retries, self.seconds, self.errors = name, retries, seconds, list(errors)
        self.gate = threading.Event()
        self.gate.set()

    def open(self, first_step):
        return self

    def write(self, logger, row, histograms, step):
        self.gate.wait(30)
        time.sleep(self.seconds)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.rows.append((step, dict(row)))

    def call(self, logger, method, arguments, options):
        self.calls.append((method, arguments, options))

    def close(self, logger):
        self.closed += 1

    def abandon(self, *, hanging):
        self.abandoned.append(hanging)
        self.gate.set()
        return False


@pytest.fixture
def reports(caplog):
    caplog.set_level(logging.WARNING, logger="torchrl_perf")
    return lambda: [record.getMessage() for record in caplog.records]


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(st.integers(0, 10**9), max_size=30), members=st.integers(1, 3))
def test_every_member_gets_every_row_in_order(steps, members):
    sinks = [Recorder() for _ in range(members)]
    group = LoggerGroup(sinks)
    for index, step in enumerate(steps):
        group.log_metrics({"a": float(index)}, step=step)
    group.close()
    for sink in sinks:
        assert sink.rows == [(step, {"a": float(index)}) for index, step in enumerate(steps)]
        assert sink.closed == 1


def test_a_tensor_keeps_the_value_that_it_had():
    sink = Recorder()
    sink.gate.clear()
    group = LoggerGroup([sink])
    value, row = torch.tensor(1.0), {"host": 1.0}
    group.log_metrics({"a": value, "b": 2}, step=1)
    group.log_metrics(TensorDict({"loss": {"a": value}}), step=2)
    group.log_row(row, {}, 3)
    value.fill_(9.0)
    row["host"] = 9.0
    sink.gate.set()
    group.close()
    assert sink.rows == [(1, {"a": 1.0, "b": 2}), (2, {"loss/a": 1.0}), (3, {"host": 1.0})]


def test_steps_are_counted_where_none_is_given():
    sink = Recorder()
    group = LoggerGroup([sink])
    assert group.last_step is None
    group.log_scalar("a", 1.0)
    group.log_scalar("a", 2.0, step=10)
    group.log_scalar("a", 3.0)
    assert group.last_step == 11
    group.close()
    assert [step for step, _ in sink.rows] == [0, 10, 11]


def test_a_slow_member_slows_nobody():
    slow, quick = Recorder(seconds=1.0, name="slow"), Recorder(name="quick")
    group = LoggerGroup([slow, quick])
    metrics = DeviceMetrics("cpu", logger=group)
    start = time.perf_counter()
    for step in range(50):
        metrics.add("a", torch.tensor(float(step)))
        metrics.flush(step)
    assert time.perf_counter() - start < 15.0  # the slow one takes fifty
    while len(quick.rows) < 50:
        assert time.perf_counter() - start < 30.0
        time.sleep(0.001)
    start = time.perf_counter()
    group.flush(0.1)  # waited for once, and then no more until it has caught up
    group.flush(10.0)
    assert time.perf_counter() - start < 8.0
    group.close(timeout=0.2)
    assert [step for step, _ in quick.rows] == list(range(50))


def test_a_failing_member_is_reported_once_and_let_go(reports):
    bad, good = Recorder(errors=[RuntimeError("the service is gone")], name="bad"), Recorder()
    group = LoggerGroup([bad, good])
    for step in range(20):
        group.log_metrics({"a": 1.0}, step=step)
        group.flush()
    group.close()
    assert [step for step, _ in good.rows] == list(range(20))
    assert bad.rows == []
    assert bad.abandoned == [False]
    assert (
        reports()
        == list(group.problems)
        == [
            "logging: bad has failed and gets no more rows: RuntimeError: the service is gone. Training goes on.",
            "logging: bad misses 20 rows of this run. Training goes on.",
        ]
    )


def test_a_row_that_is_refused_does_not_end_a_member(reports):
    sink = Recorder(errors=[ValueError("no such column")])
    group = LoggerGroup([sink])
    for step in range(3):
        group.log_metrics({"a": 1.0}, step=step)
    group.close()
    assert [step for step, _ in sink.rows] == [1, 2]
    assert "refused what it was given: ValueError: no such column" in reports()[0]


def test_errors_that_pass_are_retried_in_order(reports, monkeypatch):
    monkeypatch.setattr("torchrl_perf.metrics.logger_thread._FIRST_RETRY", 0.01)
    sink = Recorder(retries=True, errors=[OSError("disk full")] * 3)
    group = LoggerGroup([sink])
    for step in range(5):
        group.log_metrics({"a": 1.0}, step=step)
    deadline = time.perf_counter() + 60
    while len(sink.rows) < 5 and time.perf_counter() < deadline:
        time.sleep(0.01)
    group.close()
    assert [step for step, _ in sink.rows] == list(range(5))
    assert reports() == [
        "logging: recorder cannot be written: OSError: disk full. Up to 10000 rows wait and are tried again. "
        "Training goes on."
    ]


def test_closing_tries_once_more(reports):
    sink = Recorder(retries=True, errors=[OSError("disk full")])
    group = LoggerGroup([sink])
    group.log_metrics({"a": 1.0}, step=1)
    while sink.errors:
        time.sleep(0.001)
    group.close()
    assert sink.rows == [(1, {"a": 1.0})]
    assert len(reports()) == 1


def test_rows_beyond_the_bound_are_dropped_counted_and_reported(reports):
    sink = Recorder()
    sink.gate.clear()
    group = LoggerGroup([sink], capacity=4)
    group.log_metrics({"a": 1.0}, step=0)
    while not group._threads[0]._busy or group._threads[0]._queue:
        time.sleep(0.001)
    for step in range(1, 11):
        group.log_metrics({"a": 1.0}, step=step)
    sink.gate.set()
    group.close()
    assert [step for step, _ in sink.rows] == [0, 7, 8, 9, 10]
    assert reports() == ["logging: recorder misses 6 rows of this run. Training goes on."]


def test_a_hanging_member_is_let_go_at_the_end(reports):
    hanging, good = Recorder(name="hanging"), Recorder()
    hanging.gate.clear()
    group = LoggerGroup([hanging, good])
    for step in range(3):
        group.log_metrics({"a": 1.0}, step=step)
    start = time.perf_counter()
    group.close(timeout=0.3)
    assert time.perf_counter() - start < 20.0  # the gate opens after thirty
    assert hanging.abandoned == [True]
    assert [step for step, _ in good.rows] == [0, 1, 2]
    assert reports() == [
        "logging: hanging was not finished within 0 s and was let go; 3 rows not written. Training goes on."
    ]
    group.close()  # more calls do nothing
    assert not group.is_alive


def test_other_calls_reach_members_without_credentials(tmp_path):
    sink = Recorder()
    group = LoggerGroup([sink, ProgressCSVLogger("run", tmp_path)])
    group.log_hparams({"lr": 0.1, "token": "abc"})
    data = torch.tensor([1.0, 2.0])
    group.log_histogram("h", data, step=3, bins=2)
    data.fill_(0.0)
    group.close()
    assert sink.calls[0] == ("log_hparams", ({"lr": 0.1, "token": "[redacted]"},), {})
    method, (name, kept), options = sink.calls[1]
    assert (method, name, kept.tolist(), options) == ("log_histogram", "h", [1.0, 2.0], {"step": 3, "bins": 2})
    assert '"token": "[redacted]"' in (tmp_path / "hparams.json").read_text()
    assert group.problems == ()


def test_flush_has_the_rows_on_disk(tmp_path):
    group = LoggerGroup([ProgressCSVLogger("run", tmp_path)])
    for step in range(100):
        group.log_metrics({"a": step}, step=step)
    group.flush()
    assert len((tmp_path / "progress.csv").read_text().splitlines()) == 101
    assert group.state_dict()["local"] == {"last_step": 99}
    group.close()


def test_loading_a_state_cuts_the_file(tmp_path):
    group = LoggerGroup([ProgressCSVLogger("run", tmp_path)])
    group.log_metrics({"a": 1}, step=1)
    state = group.state_dict()
    group.log_metrics({"a": 2}, step=2)
    group.load_state_dict(state)
    assert group.last_step == 1
    group.log_metrics({"a": 3}, step=2)
    group.close()
    assert [line.split(",")[::2] for line in (tmp_path / "progress.csv").read_text().splitlines()[1:]] == [
        ["1", "1"],
        ["2", "3"],
    ]


def test_rows_are_written_at_exit_without_close(tmp_path):
    code = (
        "import sys; from torchrl_perf.metrics import make_loggers\n"
        "group = make_loggers('csv', sys.argv[1], 'p', 'r')\n"
        "for step in range(500): group.log_metrics({'a': step}, step=step)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    assert len((tmp_path / "progress.csv").read_text().splitlines()) == 501


def test_histories_are_bounded():
    sink = LoggerSink(ProgressCSVLogger.__new__(ProgressCSVLogger), "none")
    sink.retries, sink.write = False, lambda *_: None
    thread = LoggerThread(sink, capacity=10)
    for step in range(1000):
        thread.put_row({"a": 1.0}, {}, step)
    assert len(thread._queue) <= 10
    thread.start_closing()
    del thread
    gc.collect()
