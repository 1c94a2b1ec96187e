"""train(): the best checkpoint; faults of disks, envs, clocks and numbers; which run to go on with."""

import contextlib
import csv
import dataclasses
import logging
import os
import subprocess
import time

import pytest
import torch
from tiny_runs import TINY, assert_same_parameters, at, in_use, make, names, newest, resumed, status_of, steps_of

from torchrl_perf.trainers import train
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder, read_checkpoint
from torchrl_perf.trainers.run.files import RunFolderError, StatusFile, find_resumable, make_run_dir


class TestBest:
    def run(self, tmp_path, values, **options):
        """A run whose row of each iteration has one of these values of a metric."""
        options = {"log_interval": 1, "checkpoint_interval": 1, "best_metric": "score", "logger": "none"} | options
        trainer = make(tmp_path, total_steps=64 * len(values), **options)
        step = trainer.step

        def scored():
            step()
            value = values[trainer.iterations_done]
            trainer.metrics.add("score", torch.tensor(value), reduce="last")

        trainer.step = scored
        return train(trainer, progress=False).run_dir

    def best(self, run_dir):
        state = read_checkpoint(run_dir / "checkpoints" / "best.pt")
        return state["counters"]["iterations_done"], state["notes"]["best"]["value"]

    def test_the_highest_value_is_kept_beside_the_newest(self, tmp_path):
        run_dir = self.run(tmp_path, [1.0, 5.0, 3.0, 5.0, 2.0], keep_checkpoints=1)
        assert self.best(run_dir) == (2, 5.0)
        assert names(run_dir) == ["000000005.pt"]

    def test_the_lowest_value_where_that_is_asked_for(self, tmp_path):
        assert self.best(self.run(tmp_path, [3.0, 1.0, 2.0], best_metric="-score")) == (2, 1.0)

    @pytest.mark.parametrize("metric", ["", "unknown"])
    def test_none_without_a_metric(self, tmp_path, metric):
        run_dir = self.run(tmp_path, [3.0, 1.0], best_metric=metric)
        assert not (run_dir / "checkpoints" / "best.pt").exists()

    def test_it_survives_a_resume(self, tmp_path):
        run_dir = self.run(tmp_path, [1.0, 5.0])
        trainer = resumed(make(tmp_path, log_interval=1, checkpoint_interval=1, best_metric="score"), run_dir)
        step = trainer.step
        trainer.step = lambda: (step(), trainer.metrics.add("score", torch.tensor(4.0), reduce="last"))
        train(trainer, run_dir, progress=False)
        assert self.best(run_dir) == (2, 5.0)

    def test_a_kill_between_the_checkpoint_and_its_mark_is_mended(self, tmp_path):
        run_dir = self.run(tmp_path, [1.0, 5.0])
        (run_dir / "checkpoints" / "best.pt").unlink()
        trainer = make(tmp_path, total_steps=192, logger="none", best_metric="score")
        train(resumed(trainer, run_dir), run_dir, progress=False)
        assert self.best(run_dir) == (2, 5.0)


class TestFaults:
    def failing(self, monkeypatch, until, error=None):
        """Writes of checkpoints that fail for iterations below ``until``."""
        write = CheckpointFolder.write

        def fails(self, state, iteration):
            if iteration < until:
                raise error or OSError(28, "No space left on device")
            return write(self, state, iteration)

        monkeypatch.setattr(CheckpointFolder, "write", fails)

    def test_training_goes_on_after_a_save_that_failed_with_one_report(self, tmp_path, monkeypatch, caplog):
        self.failing(monkeypatch, until=7)
        result = train(make(tmp_path, checkpoint_interval=2), progress=False)
        assert (result.exit_code, result.steps, result.problem) == (0, 640, "")
        assert caplog.text.count("cannot be written") == 1
        assert "checkpoint of iteration 2 cannot be written: [Errno 28] No space left on device" in caplog.text
        assert caplog.text.count("checkpoints can be written again: iteration 8") == 1
        assert names(result.run_dir) == ["000000010.pt", "000000008.pt"]

    def test_a_last_save_that_fails_is_exit_code_1(self, tmp_path, monkeypatch):
        self.failing(monkeypatch, until=100)
        result = train(make(tmp_path, log_interval=10), progress=False)
        assert result.exit_code == 1
        assert "could not be written: [Errno 28]" in result.problem
        assert steps_of(result.run_dir) == [10]

    def test_a_state_that_could_not_be_loaded_is_told(self, tmp_path, caplog):
        trainer = make(tmp_path, checkpoint_interval=2)
        trainer.train_state.counters = {"odd": object()}
        result = train(trainer, progress=False)
        assert result.exit_code == 1
        assert "received builtins.object at /counters/odd" in result.problem

    def test_an_env_that_crashes_keeps_the_last_state_and_says_how_to_go_on(self, tmp_path):
        def crash():
            raise ZeroDivisionError("in the env")

        trainer = at(make(tmp_path, checkpoint_interval=3, log_interval=1), 6, crash)
        with pytest.raises(ZeroDivisionError, match="in the env") as error:
            train(trainer, progress=False)
        run_dir = tmp_path / "ppo-CartPole-0"
        assert names(run_dir) == ["000000006.pt", "000000003.pt"]  # the one that was under way, too
        assert steps_of(run_dir) == [1, 2, 3, 4, 5, 6]
        assert status_of(run_dir)["state"] == "failed"
        assert f"--resume {run_dir}" in error.value.__notes__[0]
        whole = make(tmp_path / "whole")
        train(whole, progress=False)
        again = resumed(make(tmp_path), run_dir)
        train(again, run_dir, progress=False)
        assert_same_parameters(whole, again)

    def test_a_crash_before_the_first_checkpoint(self, tmp_path):
        def crash():
            raise ZeroDivisionError("in the env")

        with pytest.raises(ZeroDivisionError) as error:
            train(at(make(tmp_path), 1, crash), progress=False)
        assert "has no checkpoint yet. Remedy: a checkpoint_interval" in error.value.__notes__[0]

    def test_a_clock_that_is_set_back_changes_nothing(self, tmp_path, monkeypatch):
        trainer = make(tmp_path, log_interval=1, checkpoint_interval=2)
        real, shift = time.time, [0.0]
        monkeypatch.setattr(time, "time", lambda: real() + shift[0])
        at(trainer, 4, lambda: shift.__setitem__(0, -1e6))
        result = train(trainer, progress=False)
        assert steps_of(result.run_dir) == list(range(1, 11))
        with (result.run_dir / "progress.csv").open(newline="") as file:
            table = list(csv.DictReader(file))
        walls = [float(row["wall_time"]) for row in table]
        assert walls == sorted(walls)
        assert all(float(row["time/steps_per_second"]) > 0 for row in table)
        assert 0 < result.seconds < 600
        assert names(result.run_dir)[0] == "000000010.pt"

    def test_a_status_file_that_cannot_be_written_is_reported_once(self, tmp_path, caplog):
        status = StatusFile(tmp_path / "nowhere")
        for state in ("running", "finished", "failed"):
            status.write(state, 0)
        assert caplog.text.count("cannot be written") == 1

    def test_the_status_is_written_once_a_second(self, tmp_path):
        status = StatusFile(tmp_path)
        for step in range(5):
            status.write("running", step)
        assert status_of(tmp_path)["step"] == 0
        status.write("finished", 9)
        assert status_of(tmp_path) == {"pid": os.getpid(), "state": "finished", "step": 9}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 400 KiB; skips the test where mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no permission to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=False)


def fill(folder):
    """Leaves no room on a disk."""
    with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


class TestRealDisks:
    def test_a_disk_that_is_full_for_a_while_loses_nothing(self, small_disk, caplog):
        trainer = make(small_disk, log_interval=1, checkpoint_interval=1, keep_checkpoints=1)
        trainer = at(trainer, 3, lambda: fill(small_disk))
        trainer = at(trainer, 7, (small_disk / "ballast").unlink)
        result = train(trainer, progress=False)
        assert (result.exit_code, result.steps) == (0, 640)
        assert caplog.text.count("No space left on device. Training goes on") == 1
        assert steps_of(result.run_dir) == list(range(1, 11))
        assert names(result.run_dir) == ["000000010.pt"]
        assert not list(result.run_dir.rglob("*.partial"))

    def test_a_disk_that_stays_full_keeps_the_last_checkpoint(self, small_disk):
        trainer = at(make(small_disk, checkpoint_interval=1, keep_checkpoints=1), 3, lambda: fill(small_disk))
        result = train(trainer, progress=False)
        assert result.exit_code == 1
        assert "No space left on device" in result.problem
        assert newest(result.run_dir)["counters"]["iterations_done"] == 2
        assert not list(result.run_dir.rglob("*.partial"))

    def test_a_read_only_folder_is_told_before_anything_runs(self, small_disk):
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(RunFolderError, match=r"Read-only file system. Remedy"):
            train(make(small_disk), progress=False)


class TestNotFinite:
    def test_a_rollback_drops_the_checkpoint_and_goes_on(self, tmp_path, caplog):
        trainer = make(tmp_path, on_nan="rollback", log_interval=2, checkpoint_interval=1, keep_checkpoints=20)
        losses = trainer._losses_fn

        def poisoned(*args):
            total, statistics = losses(*args)
            return total * (torch.nan if trainer.iterations_done == 4 else 1.0), statistics

        trainer._losses_fn = poisoned
        result = train(trainer, progress=False)
        assert result.steps == 640
        assert "go back to the last good interval" in caplog.text
        assert {"000000005.pt", "000000006.pt"}.isdisjoint(names(result.run_dir))
        assert "000000004.pt" in names(result.run_dir)
        assert steps_of(result.run_dir) == [2, 4, 6, 8, 10]

    def test_skipping_is_reported_once(self, tmp_path, caplog):
        trainer = make(tmp_path, on_nan="skip", log_interval=1)
        losses = trainer._losses_fn
        count = [0]

        def poisoned(*args):
            count[0] += 1
            total, statistics = losses(*args)
            return total * (torch.nan if count[0] % 2 else 1.0), statistics

        trainer._losses_fn = poisoned
        assert train(trainer, progress=False).steps == 640
        assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


class TestFindResumable:
    def run(self, tmp_path, **options):
        return train(make(tmp_path, logger="none", checkpoint_interval=1, **options), progress=False).run_dir

    def find(self, tmp_path, **given):
        wanted = dataclasses.replace(TINY, run_dir=str(tmp_path), **given)
        return find_resumable(wanted, given)

    def test_none_and_complete_ones(self, tmp_path):
        assert self.find(tmp_path) == (None, [])
        run_dir = self.run(tmp_path)
        assert self.find(tmp_path) == (None, [f"{run_dir}: it is complete"])
        assert self.find(tmp_path, total_steps=1280) == (run_dir, [])
        assert self.find(tmp_path, seed=1) == (None, [])

    def test_the_newest_with_steps_left(self, tmp_path):
        runs = [self.run(tmp_path) for _ in range(3)]
        for number, run_dir in enumerate(runs):
            (run_dir / "checkpoints" / "000000010.pt").unlink()
            (run_dir / "status.json").unlink()
            os.utime(run_dir / "checkpoints" / "000000009.pt", (0, 100 + (number == 1)))
        assert self.find(tmp_path)[0] == runs[1]

    def test_others_are_left_out_with_the_reason(self, tmp_path):
        solved = self.run(tmp_path, stop_return=1.0, log_interval=1, num_steps=64, total_steps=640 * 8)
        empty = make_run_dir(dataclasses.replace(TINY, run_dir=str(tmp_path)))
        foreign = tmp_path / "ppo-CartPole-0-3"
        foreign.mkdir()
        (tmp_path / "ppo-CartPole-0-old").mkdir()
        found, left_out = self.find(tmp_path, num_steps=64)
        assert found is None
        assert left_out == [
            f"{solved}: it is complete",
            f"{empty}: it has another num_steps",
            f"{foreign}: its config.json is missing or of another run",
        ]
        assert self.find(tmp_path)[1][1] == f"{empty}: it has no checkpoint"

    def test_one_that_another_process_runs_is_left_alone(self, tmp_path):
        run_dir = self.run(tmp_path)
        with in_use(run_dir):
            assert self.find(tmp_path, total_steps=1280) == (None, [f"{run_dir}: another process runs it"])
        assert self.find(tmp_path, total_steps=1280) == (run_dir, [])
