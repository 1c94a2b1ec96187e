"""Loggers: progress.csv, an offline W&B run read back from its file, TensorBoard, groups, errors."""

import csv
import importlib.util
import json
import math
import struct
import time

import pytest
import torch
from tensordict import TensorDict

from torchrl_perf.metrics import DeviceMetrics, LoggerGroup, ProgressCSVLogger, log_row, make_loggers
from torchrl_perf.metrics.histogram import Histogram

TEN = {f"loss/m{i}": i + 0.5 for i in range(10)}


def rows_of(path):
    with (path / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def wandb_records(data):
    """Split the bytes of a W&B file into records.

    It is a LevelDB log: a 7-byte header, then blocks of 32768 bytes of pieces ``crc, length, kind, bytes``, where a
    record is one piece (kind 1) or a first (2), middle (3) and last (4) one.
    """
    from wandb.proto import wandb_internal_pb2

    position, parts = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if position + 7 + length > len(data):
            return  # the writer is in the middle of this piece
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def wandb_history(run_dir):
    """Read the history rows of the one offline run below a folder, once its last record is on disk.

    The W&B service is another process, and its writer may lag behind ``finish`` by a moment on a busy machine.
    """
    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    deadline, records = time.monotonic() + 30, []
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < deadline, f"{path} has no exit record: {path.stat().st_size} bytes"
        time.sleep(0.05)
        records = list(wandb_records(path.read_bytes()))
    items = [record.history.item for record in records if record.HasField("history")]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in row} for row in items]


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No key and no W&B settings of the person who runs the tests."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")


class TestProgressCSV:
    def test_ten_metrics_are_one_row(self, tmp_path):
        logger = ProgressCSVLogger("run", tmp_path)
        logger.log_metrics(TEN, step=128)
        (row,) = rows_of(tmp_path)
        assert list(row) == ["step", "wall_time", *TEN]
        assert row["step"] == "128"
        assert {name: float(row[name]) for name in TEN} == TEN

    def test_late_and_missing_metrics(self, tmp_path):
        logger = ProgressCSVLogger("run", tmp_path)
        for step, row in enumerate([{"a": 1.0}, {"b": 2.0}, {"a": math.nan, "b": 3.0}]):
            logger.log_metrics(row, step=step)
        logger.close()
        assert [(r["a"], r["b"]) for r in rows_of(tmp_path)] == [("1.0", ""), ("", "2.0"), ("nan", "3.0")]
        assert [r["step"] for r in rows_of(tmp_path)] == ["0", "1", "2"]

    def test_rows_are_on_disk_at_once_and_a_file_is_continued(self, tmp_path):
        first = ProgressCSVLogger("run", tmp_path)
        first.log_metrics({"a": 1.0}, step=1)
        assert len(rows_of(tmp_path)) == 1
        second = ProgressCSVLogger("run", tmp_path)
        second.log_metrics({"a": 2.0}, step=2)
        rows = rows_of(tmp_path)
        assert [row["a"] for row in rows] == ["1.0", "2.0"]
        assert float(rows[1]["wall_time"]) >= float(rows[0]["wall_time"])

    def test_resume_drops_the_rows_after_the_checkpoint(self, tmp_path):
        logger = ProgressCSVLogger("run", tmp_path)
        logger.log_metrics({"a": 1.0}, step=1)
        state = logger.state_dict()
        logger.log_metrics({"a": 2.0}, step=2)
        resumed = ProgressCSVLogger("run", tmp_path)
        resumed.load_state_dict(state)
        resumed.log_metrics({"a": 3.0}, step=2)
        assert [(row["step"], row["a"]) for row in rows_of(tmp_path)] == [("1", "1.0"), ("2", "3.0")]

    def test_takes_tensors_and_nested_tensordicts(self, tmp_path):
        logger = ProgressCSVLogger("run", tmp_path)
        logger.log_metrics(TensorDict({"loss": {"a": torch.tensor(1.5)}, "b": torch.tensor(2)}), step=0)
        logger.log_scalar("b", 3, step=1)
        assert [(row["loss/a"], row["b"]) for row in rows_of(tmp_path)] == [("1.5", "2"), ("", "3")]

    def test_refuses_what_has_no_place(self, tmp_path):
        logger = ProgressCSVLogger("run", tmp_path)
        with pytest.raises(ValueError, match="step=None"):
            logger.log_metrics({"a": 1.0})
        with pytest.raises(ValueError, match="rename the metric"):
            logger.log_metrics({"step": 1.0}, step=0)
        with pytest.raises(NotImplementedError, match="histogram 'h'"):
            logger.log_histogram("h", [1.0])
        with pytest.raises(NotImplementedError, match="video 'v'"):
            logger.log_video("v", torch.zeros(1))


def test_wandb_offline_run_is_read_back(tmp_path, offline):
    logger = make_loggers("csv,wandb", tmp_path, "project", "run", {"gamma": 0.99})
    assert isinstance(logger, LoggerGroup)
    metrics = DeviceMetrics("cpu", logger=logger, histogram_bins=4)
    expected = []
    for step in (100, 200):
        metrics.add_all({name: torch.tensor(value * step) for name, value in TEN.items()})
        metrics.add("loss/bad", torch.tensor(math.nan))
        metrics.add("loss/h", torch.tensor([0.0, 1.0, 1.0, 3.0]), reduce="histogram")
        expected.append(metrics.flush(step))
    logger.close()
    history = wandb_history(tmp_path)
    assert len(history) == 2
    for row, want, step in zip(history, expected, (100, 200), strict=True):
        assert {name: row[name] for name in TEN} == {name: want[name] for name in TEN}
        assert row["loss/step"] == step
        assert str(row["loss/bad"]).lower() == "nan"
        assert row["loss/h/values"] == [1, 2, 0, 1]
        assert row["loss/h/bins"] == [0, 1, 2, 3, 4]
    assert [float(row["loss/m3"]) for row in rows_of(tmp_path)] == [350.0, 700.0]
    assert json.loads((tmp_path / "hparams.json").read_text()) == {"gamma": 0.99}


def test_wandb_mode_follows_the_key(tmp_path, offline, monkeypatch):
    from torchrl_perf.metrics.loggers import _has_wandb_key

    assert not _has_wandb_key()
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password none\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert _has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not _has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert _has_wandb_key()


def test_tensorboard_is_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    logger = make_loggers("tensorboard", tmp_path, "project", "run", {"gamma": 0.99})
    metrics = DeviceMetrics("cpu", logger=logger, histogram_bins=4)
    metrics.add_all({name: torch.tensor(value) for name, value in TEN.items()})
    metrics.add("h", torch.tensor([0.0, 1.0, 1.0, 3.0]), reduce="histogram")
    metrics.flush(7)
    logger.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {name: [(e.step, e.value) for e in events.Scalars(name)] for name in TEN} == {
        name: [(7, value)] for name, value in TEN.items()
    }
    (histogram,) = events.Histograms("h")
    assert histogram.step == 7
    assert histogram.histogram_value.num == 4


def test_none_logs_nothing(tmp_path):
    logger = make_loggers("none", tmp_path / "run", "project", "run", {})
    assert logger.log_metrics({"a": 1.0}, step=0) == {"a": 1.0}
    logger.log_scalar("a", 1.0, step=0)
    logger.flush()
    logger.close()
    assert not logger.is_alive
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("name", ["", "csv,csv", "csv,none", "tsv", "csv,tsv"])
def test_unknown_names(tmp_path, name):
    with pytest.raises(ValueError, match="expected csv, wandb, tensorboard, none"):
        make_loggers(name, tmp_path, "project", "run")


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=f"pip install {name}"):
        make_loggers(f"csv,{name}", tmp_path, "project", "run")
    assert list(tmp_path.iterdir()) == []


def test_group_state_and_close_reach_every_member(tmp_path):
    first, second = ProgressCSVLogger("a", tmp_path / "a"), ProgressCSVLogger("b", tmp_path / "b")
    group = LoggerGroup([first, second])
    group.log_metrics({"x": 1.0}, step=1)
    state = group.state_dict()
    group.log_metrics({"x": 2.0}, step=2)
    group.load_state_dict(state)
    assert [len(rows_of(tmp_path / name)) for name in "ab"] == [1, 1]
    with pytest.raises(ValueError, match="1 loggers, got 2"):
        LoggerGroup([first]).load_state_dict(state)

    def fail(timeout=None):
        raise OSError("disk full")

    first.close = fail
    with pytest.raises(OSError, match="disk full"):
        group.close()
    assert not second.is_alive


def test_other_loggers_get_bin_centres():
    seen = []

    class Other:
        def log_metrics(self, row, step):
            seen.append((row, step))

        def log_histogram(self, name, data, **kwargs):
            seen.append((name, data, kwargs))

    log_row(Other(), {"a": 1.0}, {"h": Histogram([1.0, 0.0, 2.0], [0.0, 2.0, 4.0, 6.0], 0)}, 5)
    assert seen == [({"a": 1.0}, 5), ("h", [1.0, 5.0, 5.0], {"step": 5, "bins": 3})]
