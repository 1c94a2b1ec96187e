"""Reading a run's folder while it is being written: rows, state, checkpoints, the newest run."""

import csv
import json
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.cli import run_folder
from torchrl_perf.cli.run_folder import ProgressTail, find_run, newest_checkpoint, read_status
from torchrl_perf.metrics import ProgressCSVLogger
from torchrl_perf.run_layout import read_json

NOBODY = 2**22 + 1  # above the kernel's largest process number


def dead_pid():
    """Number of a process that has ended and been waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def append(path, text):
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


class TestTail:
    def test_rows_come_once(self, tmp_path):
        path = tmp_path / "progress.csv"
        tail = ProgressTail(path)
        assert not tail.poll()  # no file yet
        append(path, "step,wall")
        assert not tail.poll()  # no header yet
        append(path, "_time\n1,0.5\n2,")
        assert tail.poll()
        assert list(tail.rows) == [{"step": 1.0, "wall_time": 0.5}]
        assert not tail.poll()
        append(path, "0.75\n3,1\n")
        assert tail.poll()
        assert [row["step"] for row in tail.rows] == [1.0, 2.0, 3.0]
        assert tail.rows[1]["wall_time"] == 0.75

    def test_empty_and_odd_cells_are_left_out(self, tmp_path):
        path = tmp_path / "progress.csv"
        path.write_text('step,a,"b,c"\n1,,2\n2,x,nan\nbroken\n3,1,2,3\n')
        tail = ProgressTail(path)
        tail.poll()
        assert [sorted(row) for row in tail.rows] == [["b,c", "step"], ["b,c", "step"]]

    def test_a_column_more_rewrites_the_file(self, tmp_path):
        logger = ProgressCSVLogger("run", tmp_path)
        logger.log_metrics({"a": 1.0}, step=1)
        tail = ProgressTail(tmp_path / "progress.csv")
        assert tail.poll()
        logger.log_metrics({"a": 2.0, "b": 3.0}, step=2)
        assert tail.poll()
        assert [row["step"] for row in tail.rows] == [1.0, 2.0]
        assert tail.rows[-1]["b"] == 3.0

    def test_a_file_that_was_cut_in_place(self, tmp_path):
        path = tmp_path / "progress.csv"
        path.write_text("step\n" + "".join(f"{step}\n" for step in range(100)))
        tail = ProgressTail(path)
        tail.poll()
        path.write_text("step\n0\n1\n")
        assert tail.poll()
        assert [row["step"] for row in tail.rows] == [0.0, 1.0]

    def test_a_file_that_goes_away_keeps_the_rows(self, tmp_path):
        path = tmp_path / "progress.csv"
        path.write_text("step\n1\n")
        tail = ProgressTail(path)
        tail.poll()
        path.unlink()
        assert not tail.poll()
        assert len(tail.rows) == 1

    def test_of_a_long_file_only_the_end_is_read(self, tmp_path, monkeypatch):
        path = tmp_path / "progress.csv"
        path.write_text("step,a\n" + "".join(f"{step},1.25\n" for step in range(200_000)))
        sizes = []
        take = ProgressTail._take
        monkeypatch.setattr(
            ProgressTail, "_take", lambda self, block, *a, **k: sizes.append(len(block)) or take(self, block, *a, **k)
        )
        tail = ProgressTail(path)
        assert tail.poll()
        assert sizes == [run_folder.LATEST_BYTES]
        assert tail.rows[-1] == {"step": 199_999.0, "a": 1.25}
        assert len(tail.rows) == tail.history
        append(path, "200000,2\n")
        tail.poll()
        assert sizes[1:] == [9]

    @settings(max_examples=25, deadline=None)
    @given(cuts=st.lists(st.integers(0, 400), max_size=8))
    def test_any_cut_of_the_writes_gives_the_same_rows(self, tmp_path_factory, cuts):
        whole = "step,a\n" + "".join(f"{step},{step / 8}\n" for step in range(30))
        path = tmp_path_factory.mktemp("run") / "progress.csv"
        tail, start = ProgressTail(path), 0
        for end in [*sorted(min(cut, len(whole)) for cut in cuts), len(whole)]:
            append(path, whole[start:end])
            start = end
            tail.poll()
        expected = [{name: float(cell) for name, cell in row.items()} for row in csv.DictReader(whole.splitlines())]
        assert list(tail.rows) == expected


class TestStatus:
    def write(self, run, **values):
        (run / "status.json").write_text(json.dumps(values))

    def test_a_live_process_runs(self, tmp_path):
        self.write(tmp_path, pid=os.getpid(), state="running", step=12)
        status = read_status(tmp_path)
        assert (status.state, status.pid, status.step) == ("running", os.getpid(), 12)
        assert not status.is_over

    def test_a_process_that_is_gone_was_killed_once_it_is_quiet(self, tmp_path):
        self.write(tmp_path, pid=dead_pid(), state="running", step=12)
        assert read_status(tmp_path).state == "running"  # may be another machine's
        past = time.time() - 60
        os.utime(tmp_path / "status.json", (past, past))
        assert read_status(tmp_path).state == "killed"
        assert read_status(tmp_path).is_over
        (tmp_path / "progress.csv").touch()  # rows still come
        assert read_status(tmp_path).state == "running"

    def test_a_zombie_is_gone(self):
        process = subprocess.Popen([sys.executable, "-c", ""])
        for _ in range(500):
            if not run_folder._is_alive(process.pid):
                break
            time.sleep(0.01)
        assert not run_folder._is_alive(process.pid)
        process.wait()
        assert not run_folder._is_alive(NOBODY)

    @pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
    def test_the_end_of_a_run(self, tmp_path, state):
        self.write(tmp_path, pid=NOBODY, state=state, step=5)
        assert read_status(tmp_path).state == state
        assert read_status(tmp_path).is_over

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"state": 3, "pid": "x"}', '{"state": "dancing"}'])
    def test_a_broken_file_says_nothing(self, tmp_path, text):
        (tmp_path / "status.json").write_text(text)
        status = read_status(tmp_path)
        assert (status.state, status.is_over) == ("unknown", False)
        assert isinstance(read_json(tmp_path / "status.json"), dict)

    def test_no_file(self, tmp_path):
        assert read_status(tmp_path / "none").state == "unknown"


class TestFindRun:
    def test_the_newest_below_a_folder(self, tmp_path):
        for index, name in enumerate(["a", "c", "b"]):
            (tmp_path / name).mkdir()
            path = tmp_path / name / "progress.csv"
            path.touch()
            os.utime(path, (1000 + index, 1000 + index))
        (tmp_path / "not a run").mkdir()
        (tmp_path / "file").touch()
        assert find_run(None, tmp_path).name == "b"
        assert find_run(tmp_path / "a", tmp_path).name == "a"

    @pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.touch()])
    def test_none(self, tmp_path, make):
        make(tmp_path / "runs")
        with pytest.raises(FileNotFoundError, match="run: expected a run below"):
            find_run(None, tmp_path / "runs")
        with pytest.raises(FileNotFoundError, match="run: expected"):
            find_run(tmp_path / "runs", tmp_path)

    def test_a_foreign_folder_is_listed(self, tmp_path):
        (tmp_path / "notes.txt").touch()
        with pytest.raises(FileNotFoundError, match=r"received notes\.txt"):
            find_run(tmp_path, tmp_path)


def test_the_newest_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    assert newest_checkpoint(tmp_path) is None
    for name, age in (("000000001.pt", 50), ("000000002.pt", 20), ("best.pt", 60), ("000000003.pt.partial", 0)):
        (folder / name).touch()
        then = time.time() - age
        os.utime(folder / name, (then, then))
    found = newest_checkpoint(tmp_path)
    assert found.name == "000000002.pt"
    assert 19 < found.age < 30
    (folder / "best.pt").unlink()
    os.link(folder / "000000002.pt", folder / "best.pt")
    assert newest_checkpoint(tmp_path).name == "000000002.pt"
