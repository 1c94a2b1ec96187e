"""progress.csv: one rising row per step, whatever is logged late, killed, or refused by the disk."""

import csv
import errno
import io
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_perf.metrics import ProgressCSVLogger
from torchrl_perf.metrics.progress_csv import read_rows

TEN = {f"loss/m{i}": i + 0.5 for i in range(10)}


def rows_of(path):
    with (path / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_ten_metrics_are_one_row(tmp_path):
    logger = ProgressCSVLogger("run", tmp_path)
    logger.log_metrics(TEN, step=128)
    (row,) = rows_of(tmp_path)
    assert list(row) == ["step", "wall_time", *TEN]
    assert row["step"] == "128"
    assert {name: float(row[name]) for name in TEN} == TEN


def test_new_and_missing_metrics(tmp_path):
    logger = ProgressCSVLogger("run", tmp_path)
    for step, row in enumerate([{"a": 1.0}, {"b": 2.0}, {"a": math.nan, "b": 3.0}]):
        logger.log_metrics(row, step=step)
    logger.close()
    assert [(r["a"], r["b"]) for r in rows_of(tmp_path)] == [("1.0", ""), ("", "2.0"), ("nan", "3.0")]
    assert [r["step"] for r in rows_of(tmp_path)] == ["0", "1", "2"]


def test_returns_and_speed_come_first_and_faults_last(tmp_path):
    logger = ProgressCSVLogger("run", tmp_path)
    names = ["nonfinite/loss", "train/loss", "episode/count", "time/total", "time/steps_per_second"]
    logger.log_metrics(dict.fromkeys([*names, "episode/mean_return"], 1.0), step=1)
    logger.log_metrics({"fault/row": 2.0, "eval/mean_return": 3.0, "train/loss": 4.0}, step=2)
    first, second = rows_of(tmp_path)
    returns = ["episode/mean_return", "eval/mean_return", "time/steps_per_second", "episode/count"]
    assert list(second) == ["step", "wall_time", *returns, "train/loss", "time/total", "nonfinite/loss", "fault/row"]
    assert (first["nonfinite/loss"], first["eval/mean_return"], second["fault/row"]) == ("1.0", "", "2.0")
    assert (second["eval/mean_return"], second["train/loss"]) == ("3.0", "4.0")


def test_a_file_with_another_order_is_continued(tmp_path):
    (tmp_path / "progress.csv").write_text("step,wall_time,nonfinite/loss,episode/mean_return\n1,0.5,0.0,7.0\n")
    logger = ProgressCSVLogger("run", tmp_path)
    logger.log_metrics({"episode/mean_return": 8.0, "nonfinite/loss": 1.0}, step=2)
    assert list(rows_of(tmp_path)[1].values())[0::2] == ["2", "1.0"]
    logger.log_metrics({"episode/mean_return": 9.0, "nonfinite/loss": 2.0, "train/loss": 3.0}, step=3)
    rows = rows_of(tmp_path)
    assert list(rows[0]) == ["step", "wall_time", "episode/mean_return", "train/loss", "nonfinite/loss"]
    assert [(row["episode/mean_return"], row["nonfinite/loss"]) for row in rows] == [
        *(("7.0", "0.0"), ("8.0", "1.0"), ("9.0", "2.0"))
    ]


def test_rows_are_on_disk_at_once_and_a_file_is_continued(tmp_path):
    first = ProgressCSVLogger("run", tmp_path)
    first.log_metrics({"a": 1.0}, step=1)
    assert len(rows_of(tmp_path)) == 1
    second = ProgressCSVLogger("run", tmp_path)
    assert second.last_step == 1
    second.log_metrics({"a": 2.0}, step=2)
    rows = rows_of(tmp_path)
    assert [row["a"] for row in rows] == ["1.0", "2.0"]
    assert float(rows[1]["wall_time"]) >= float(rows[0]["wall_time"])


def test_first_row_of_a_resumed_run_replaces_what_followed_the_checkpoint(tmp_path):
    logger = ProgressCSVLogger("run", tmp_path)
    for step in (1, 2, 3):
        logger.log_metrics({"a": float(step)}, step=step)
    resumed = ProgressCSVLogger("run", tmp_path)
    resumed.log_metrics({"a": 20.0}, step=2)
    resumed.log_metrics({"a": 30.0, "b": 1.0}, step=3)
    assert [(r["step"], r["a"], r["b"]) for r in rows_of(tmp_path)] == [
        ("1", "1.0", ""),
        ("2", "20.0", ""),
        ("3", "30.0", "1.0"),
    ]


def test_loading_a_state_drops_the_rows_after_it(tmp_path):
    logger = ProgressCSVLogger("run", tmp_path)
    logger.log_metrics({"a": 1.0}, step=1)
    state = logger.state_dict()
    logger.log_metrics({"a": 2.0}, step=2)
    resumed = ProgressCSVLogger("run", tmp_path)
    resumed.load_state_dict(state)
    resumed.log_metrics({"a": 3.0}, step=2)
    assert [(row["step"], row["a"]) for row in rows_of(tmp_path)] == [("1", "1.0"), ("2", "3.0")]


def test_late_metrics_join_the_row_of_their_step(tmp_path):
    logger = ProgressCSVLogger("run", tmp_path)
    for step in (10, 20, 30):
        logger.log_metrics({"a": float(step), "b": 0.0} if step == 20 else {"a": float(step)}, step=step)
    logger.log_scalar("b", 3.0, step=30)  # of the last row, written in place
    logger.log_scalar("b", 9.0, step=30)  # what a row says already stands
    logger.log_scalar("b", 1.0, step=10)
    logger.log_scalar("b", 1.5, step=15)
    logger.log_scalar("a", 40.0, step=40)
    assert [(r["step"], r["a"], r["b"]) for r in rows_of(tmp_path)] == [
        ("10", "10.0", "1.0"),
        ("15", "", "1.5"),
        ("20", "20.0", "0.0"),
        ("30", "30.0", "3.0"),
        ("40", "40.0", ""),
    ]
    times = [float(row["wall_time"]) for row in rows_of(tmp_path)]
    assert times == sorted(times)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entries=st.lists(st.tuples(st.integers(0, 6), st.sampled_from("abc"), st.integers(0, 99)), min_size=1, max_size=12)
)
def test_any_order_gives_rising_steps_and_keeps_the_first_value(tmp_path_factory, entries):
    folder = tmp_path_factory.mktemp("run")
    logger, expected = ProgressCSVLogger("run", folder), {}
    for step, name, value in entries:
        logger.log_scalar(name, value, step=step)
        expected.setdefault(step, {}).setdefault(name, str(value))
    rows = rows_of(folder)
    assert [int(row["step"]) for row in rows] == sorted(expected)
    for row in rows:
        got = {name: text for name, text in row.items() if text and name not in ("step", "wall_time")}
        assert got == expected[int(row["step"])]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_line_cut_off_anywhere_is_repaired(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    logger = ProgressCSVLogger("run", folder)
    for step in (1, 2, 3):
        logger.log_metrics({"a": step / 4, "b": "x,y"}, step=step)
    content = (folder / "progress.csv").read_bytes()
    kept = data.draw(st.integers(0, len(content)))
    (folder / "progress.csv").write_bytes(content[:kept])
    whole = max(content[:kept].count(b"\n") - 1, 0)
    resumed = ProgressCSVLogger("run", folder)
    assert resumed.last_step == (whole or None)
    resumed.log_metrics({"a": 9.0, "b": "z"}, step=4)
    rows = rows_of(folder)
    assert [int(row["step"]) for row in rows] == [*range(1, whole + 1), 4]
    assert rows[-1]["a"] == "9.0"


@pytest.mark.parametrize("written", [0, 3, 1000])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch, written):
    """The disk takes some bytes of the row, then none: the row is not half there, and may be tried again."""
    logger = ProgressCSVLogger("run", tmp_path)
    logger.log_metrics({"a": 1.0, "b": 1.0}, step=1)
    logger.log_scalar("a", 2.0, step=2)
    content = (tmp_path / "progress.csv").read_bytes()
    space = {"left": written}

    class Disk(io.FileIO):
        def write(self, data):
            if space["left"] == 0 and bytes(data) not in content:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = bytes(data)[: space["left"]] if bytes(data) not in content else bytes(data)
            space["left"] -= len(taken) if taken not in content else 0
            return super().write(taken)

    def open_(path, mode="r", buffering=-1, **options):
        return Disk(path, mode.replace("b", "")) if buffering == 0 else open(path, mode, buffering, **options)

    monkeypatch.setattr("pathlib.Path.open", open_)
    late, new = {"b": 123456.0}, {"a": 3.0, "b": 3.25}
    if written < 1000:
        for step, row in ((3, new), (2, late)):
            with pytest.raises(OSError, match="No space left"):
                logger.log_metrics(row, step=step)
            assert (tmp_path / "progress.csv").read_bytes() == content
            space["left"] = written
    space["left"] = 10_000
    logger.log_metrics(late, step=2)
    logger.log_metrics(new, step=3)
    monkeypatch.undo()
    assert [(r["step"], r["a"], r["b"]) for r in rows_of(tmp_path)] == [
        ("1", "1.0", "1.0"),
        ("2", "2.0", "123456.0"),
        ("3", "3.0", "3.25"),
    ]


def test_takes_tensors_and_nested_tensordicts(tmp_path):
    logger = ProgressCSVLogger("run", tmp_path)
    logger.log_metrics(TensorDict({"loss": {"a": torch.tensor(1.5)}, "b": torch.tensor(2)}), step=0)
    logger.log_scalar("b", 3, step=1)
    assert [(row["loss/a"], row["b"]) for row in rows_of(tmp_path)] == [("1.5", "2"), ("", "3")]


def test_refuses_what_has_no_place(tmp_path):
    logger = ProgressCSVLogger("run", tmp_path)
    with pytest.raises(ValueError, match="step=None"):
        logger.log_metrics({"a": 1.0})
    with pytest.raises(ValueError, match="rename the metric"):
        logger.log_metrics({"step": 1.0}, step=0)
    with pytest.raises(NotImplementedError, match="histogram 'h'"):
        logger.log_histogram("h", [1.0])
    with pytest.raises(NotImplementedError, match="video 'v'"):
        logger.log_video("v", torch.zeros(1))


def test_lines_that_are_no_rows_are_left_out(tmp_path):
    (tmp_path / "progress.csv").write_text("step,wall_time,a\n1,0.1,1\ngarbage\n2,0.2,2,7\n3,0.3,3\n")
    logger = ProgressCSVLogger("run", tmp_path)
    assert logger.last_step == 3
    logger.log_metrics({"b": 1.0}, step=4)
    assert [row["step"] for row in rows_of(tmp_path)] == ["1", "3", "4"]


def test_rows_of_a_file_that_is_being_written(tmp_path):
    path = tmp_path / "progress.csv"
    assert list(read_rows(path)) == []
    path.write_text("step,wall_time,a,b\n1,0.5,2.0,\nno row\n2,1.0,,nan\n3,1.5,4")
    first, second = read_rows(path)
    assert first == (1, {"wall_time": 0.5, "a": 2.0})
    assert second[0] == 2
    assert math.isnan(second[1]["b"])
