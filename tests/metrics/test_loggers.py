"""Loggers that agree row by row: progress.csv, an offline W&B run read back from its file, TensorBoard; configuration,
names, resume."""

import csv
import importlib.util
import json
import math
import time

import pytest
import torch

from torchrl_perf.metrics import DeviceMetrics, LoggerGroup, log_row, make_loggers
from torchrl_perf.metrics.histogram import Histogram
from torchrl_perf.metrics.wandb_file import last_stored_step, read_history, read_records, run_files

TEN = {f"loss/m{i}": i + 0.5 for i in range(10)}


def rows_of(path):
    with (path / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def wandb_id(run_dir):
    return json.loads((run_dir / "wandb.json").read_text())["id"]


def wandb_history(run_dir, starts=1):
    """Rows of the W&B run of a folder, once the last record of each of its files is on disk.

    The W&B service is another process, and its writer may lag behind ``finish`` by a moment on a busy machine.
    """
    paths = run_files(run_dir, wandb_id(run_dir))
    assert len(paths) == starts
    deadline = time.monotonic() + 30
    while not all(any(r.HasField("exit") for r in read_records(path)) for path in paths):
        assert time.monotonic() < deadline, f"{paths} have no exit record"
        time.sleep(0.05)
    return [row for path in paths for row in read_history(path)]


def wandb_config(run_dir):
    (path,) = run_files(run_dir, wandb_id(run_dir))
    config = {}
    for record in read_records(path):
        updates = [*record.config.update, *record.run.config.update]
        config |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}
    return config


def tensorboard_scalars(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}, events


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No key and no W&B settings of the person who runs the tests."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_three_loggers_agree_row_by_row(tmp_path, offline):
    pytest.importorskip("tensorboard")
    logger = make_loggers("csv,wandb,tensorboard", tmp_path, "project", "run", {"gamma": 0.99})
    metrics = DeviceMetrics("cpu", logger=logger, histogram_bins=4)
    expected = {}
    for step in (100, 200, 300):
        metrics.add_all({name: torch.tensor(value * step) for name, value in TEN.items()})
        metrics.add("loss/bad", torch.tensor(math.nan))
        metrics.add("loss/h", torch.tensor([0.0, 1.0, 1.0, 3.0]), reduce="histogram")
        metrics.start_flush(step)
        expected[step] = metrics.finish_flush({"time/host": step / 8})
    logger.close()
    assert logger.problems == ()

    history = wandb_history(tmp_path)
    names = [*TEN, "time/host"]
    assert [row["_step"] for row in history] == [100, 200, 300]
    scalars, events = tensorboard_scalars(tmp_path)
    for file_row, wandb_row, (step, want) in zip(rows_of(tmp_path), history, expected.items(), strict=True):
        assert int(file_row["step"]) == step
        assert {name: float(file_row[name]) for name in names} == {name: want[name] for name in names}
        assert {name: wandb_row[name] for name in names} == {name: want[name] for name in names}
        assert {name: dict(scalars[name])[step] for name in names} == {name: want[name] for name in names}
        assert str(wandb_row["loss/bad"]).lower() == file_row["loss/bad"] == "nan"
        assert wandb_row["loss/h/values"] == [1, 2, 0, 1]
        assert wandb_row["loss/h/bins"] == [0, 1, 2, 3, 4]
    assert all(len(points) == 3 for points in scalars.values())
    assert [(h.step, h.histogram_value.num) for h in events.Histograms("loss/h")] == [(100, 4), (200, 4), (300, 4)]


def test_configuration_and_machine_card_are_stored_without_credentials(tmp_path, offline, monkeypatch):
    pytest.importorskip("tensorboard")
    secret = "k9-Zf31-very-private"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("sys.argv", ["train", "--api-key", secret, f"--note=see https://me:{secret}@host/x"])
    config = {"gamma": 0.99, "api_key": secret, "nested": {"note": f"it is {secret}"}}
    logger = make_loggers("csv,wandb,tensorboard", tmp_path, "project", "run", config)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.close()
    wandb_history(tmp_path)
    stored = json.loads((tmp_path / "hparams.json").read_text())
    assert stored["gamma"] == 0.99
    assert stored["api_key"] == "[redacted]"
    assert stored["nested"] == {"note": "it is [redacted]"}
    assert stored["machine"]["command"] == "train --api-key [redacted] --note=see https://[redacted]@host/x"
    assert {"commit", "cores", "packages"} <= set(stored["machine"])
    config = wandb_config(tmp_path)
    assert config["gamma"] == 0.99
    assert config["machine"]["commit"] == stored["machine"]["commit"]
    (text,) = tensorboard_scalars(tmp_path)[1].Tensors("config/text_summary")
    assert '"gamma": 0.99' in text.tensor_proto.string_val[0].decode()
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert leaks == []


def test_wandb_mode_follows_the_key(tmp_path, offline, monkeypatch):
    from torchrl_perf.metrics.wandb_sink import wandb_mode

    assert wandb_mode() == "offline"
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password none\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() == "disabled"


class TestResume:
    def test_all_loggers_go_on_from_the_checkpoint(self, tmp_path, offline):
        pytest.importorskip("tensorboard")
        names = "csv,wandb,tensorboard"
        first = make_loggers(names, tmp_path, "project", "run", {"gamma": 0.99})
        for step in (10, 20, 30):
            first.log_metrics({"a": step + 0.5}, step=step)
        first.close()
        second = make_loggers(names, tmp_path, "project", "run", {"gamma": 0.99}, resume=True)
        assert second.last_step == 30
        for step in (20, 30, 40):  # the checkpoint was written at step 10
            second.log_metrics({"a": step + 0.5}, step=step)
        assert second.last_step == 40
        second.close()
        assert (*first.problems, *second.problems) == ()

        expected = [(step, step + 0.5) for step in (10, 20, 30, 40)]
        assert [(int(row["step"]), float(row["a"])) for row in rows_of(tmp_path)] == expected
        assert [(row["_step"], row["a"]) for row in wandb_history(tmp_path, starts=2)] == expected
        assert tensorboard_scalars(tmp_path)[0]["a"] == expected
        assert last_stored_step(tmp_path, wandb_id(tmp_path)) == 40

    def test_a_loaded_state_says_where_to_go_on(self, tmp_path, offline):
        """The stopped run has a row of half an interval, at step 25, that is no part of its checkpoint."""
        pytest.importorskip("tensorboard")
        names = "csv,wandb,tensorboard"
        first = make_loggers(names, tmp_path, "project", "run")
        for step in (10, 20, 25):
            first.log_metrics({"a": step + 0.5}, step=step)
        first.close()
        second = make_loggers(names, tmp_path, "project", "run", resume=True)
        second.load_state_dict({"local": {"last_step": 20}})
        assert second.last_step == 20
        second.flush()  # opens nothing in a way that would keep the row
        second.log_metrics({"a": 30.5}, step=30)
        second.close()
        assert second.problems == ()
        expected = [(step, step + 0.5) for step in (10, 20, 30)]
        assert [(int(row["step"]), float(row["a"])) for row in rows_of(tmp_path)] == expected
        assert tensorboard_scalars(tmp_path)[0]["a"] == expected
        assert [row["_step"] for row in wandb_history(tmp_path, starts=2)] == [10, 20, 25, 30]

    def test_a_flush_before_the_first_row_changes_nothing(self, tmp_path):
        pytest.importorskip("tensorboard")
        for values in ((1.0, 2.0), (3.0,)):
            logger = make_loggers("csv,tensorboard", tmp_path, "project", "run", {"x": 1}, resume=True)
            logger.flush()
            logger.log_hparams({"y": 2})
            for step, value in enumerate(values, start=3 - len(values)):
                logger.log_metrics({"a": value}, step=step)
            logger.close()
        assert tensorboard_scalars(tmp_path)[0]["a"] == [(1, 1.0), (2, 3.0)]

    def test_wandb_gets_the_rows_that_it_misses(self, tmp_path, offline):
        first = make_loggers("csv", tmp_path, "project", "run")
        for step in (10, 20, 30):
            first.log_metrics({"a": float(step)}, step=step)
        first.close()
        (tmp_path / "wandb.json").write_text('{"id": "abcd1234", "last_step": 10}')
        second = make_loggers("csv,wandb", tmp_path, "project", "run", resume=True)
        second.log_metrics({"a": 30.0}, step=30)
        second.close()
        assert wandb_id(tmp_path) == "abcd1234"
        assert [row["_step"] for row in wandb_history(tmp_path)] == [20, 30]

    def test_damaged_note_of_the_wandb_run_starts_a_new_one(self, tmp_path, offline):
        (tmp_path / "wandb.json").write_text('{"id": "ab')
        logger = make_loggers("wandb", tmp_path, "project", "run", resume=True)
        logger.log_metrics({"a": 1.0}, step=1)
        logger.close()
        assert logger.problems == ()
        assert [row["_step"] for row in wandb_history(tmp_path)] == [1]


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


def test_one_name_is_a_group_too(tmp_path):
    logger = make_loggers("csv", tmp_path, "project", "run")
    assert isinstance(logger, LoggerGroup)
    assert repr(logger) == "LoggerGroup(progress.csv)"
    logger.close()


def test_other_loggers_get_bin_centres():
    seen = []

    class Other:
        def log_metrics(self, row, step):
            seen.append((row, step))

        def log_histogram(self, name, data, **kwargs):
            seen.append((name, data, kwargs))

    log_row(Other(), {"a": 1.0}, {"h": Histogram([1.0, 0.0, 2.0], [0.0, 2.0, 4.0, 6.0], 0)}, 5)
    assert seen == [({"a": 1.0}, 5), ("h", [1.0, 5.0, 5.0], {"step": 5, "bins": 3})]


def test_a_configuration_that_is_there_already_is_not_stored_twice(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    make_loggers("csv", tmp_path, "project", "run", {"gamma": 0.99}).close()
    assert not (tmp_path / "hparams.json").exists()
