"""train(): files of a run, early stop, signals."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest
from tiny_runs import (
    TINY,
    assert_same_parameters,
    at,
    in_use,
    make,
    names,
    newest,
    resumed,
    rows_of,
    status_of,
    steps_of,
)

from torchrl_perf.metrics import ProgressLine
from torchrl_perf.runtime import signals
from torchrl_perf.runtime.signals import StopRequest
from torchrl_perf.trainers import PPOConfig, train
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder, read_checkpoint
from torchrl_perf.trainers.run.files import RunFolderError, StatusFile, make_run_dir


class TestFiles:
    def test_a_run_leaves_config_rows_checkpoints_and_picture(self, tmp_path):
        result = train(make(tmp_path, log_interval=3), progress=False)
        run_dir = result.run_dir
        assert run_dir == tmp_path / "ppo-CartPole-0"
        expected = dataclasses.replace(TINY, run_dir=str(tmp_path), log_interval=3)
        assert PPOConfig.from_dict(json.loads((run_dir / "config.json").read_text())) == expected
        assert json.loads((run_dir / "machine.json").read_text())["packages"]["torch"] == version("torch")
        assert status_of(run_dir) == {"pid": os.getpid(), "state": "finished", "step": 640}
        assert (run_dir / "learning_curve.png").stat().st_size > 1000
        assert names(run_dir) == ["000000010.pt"]
        assert newest(run_dir)["counters"]["iterations_done"] == 10
        assert steps_of(run_dir) == [3, 6, 9, 10]
        assert (result.steps, result.exit_code, result.solved, result.problem) == (640, 0, False, "")
        assert "640 steps" in str(result)
        assert not list(run_dir.rglob("*.partial"))

    def test_the_progress_line_counts_env_steps(self, tmp_path, monkeypatch):
        shown = []
        monkeypatch.setattr(ProgressLine, "update", lambda self, step, **numbers: shown.append((step, self.total)))
        train(make(tmp_path, log_interval=3), progress=True)
        assert shown == [(192, 640), (384, 640), (576, 640), (640, 640)]

    def test_a_second_run_gets_a_folder_of_its_own(self, tmp_path):
        folders = {train(make(tmp_path, total_steps=64, logger="none"), progress=False).run_dir.name for _ in range(3)}
        assert folders == {"ppo-CartPole-0", "ppo-CartPole-0-2", "ppo-CartPole-0-3"}

    def test_rows_tell_both_speeds_and_the_memory(self, tmp_path):
        run_dir = train(make(tmp_path, epochs=3, log_interval=5), progress=False).run_dir
        with (run_dir / "progress.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                assert float(row["time/experiences_per_second"]) == pytest.approx(
                    3 * float(row["time/steps_per_second"])
                )
                assert float(row["time/steps_per_second"]) == pytest.approx(5 * 64 / float(row["time/total"]), rel=0.5)
                assert float(row["memory/rss_mib"]) > 10

    def test_checkpoints_at_an_interval_and_at_the_end(self, tmp_path):
        run_dir = train(make(tmp_path, checkpoint_interval=4, logger="none"), progress=False).run_dir
        assert names(run_dir) == ["000000010.pt", "000000008.pt", "000000004.pt"]

    def test_the_newest_are_kept_and_the_last_is_not_written_twice(self, tmp_path, monkeypatch):
        written = []
        write = CheckpointFolder.write
        monkeypatch.setattr(CheckpointFolder, "write", lambda self, s, i: written.append(i) or write(self, s, i))
        options = {"checkpoint_interval": 2, "keep_checkpoints": 2, "logger": "none"}
        run_dir = train(make(tmp_path, **options), progress=False).run_dir
        assert written == [2, 4, 6, 8, 10]
        assert names(run_dir) == ["000000010.pt", "000000008.pt"]

    def test_a_checkpoint_waits_for_its_rows(self, tmp_path, monkeypatch):
        seen = {}
        write = CheckpointFolder.write

        def look(self, state, iteration):
            seen[iteration] = steps_of(self.path.parent)
            return write(self, state, iteration)

        monkeypatch.setattr(CheckpointFolder, "write", look)
        train(make(tmp_path, checkpoint_interval=3, log_interval=1), progress=False)
        assert seen == {n: list(range(1, n + 1)) for n in (3, 6, 9, 10)}

    def test_a_file_in_the_way_and_a_folder_in_use(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(RunFolderError, match="expected a folder that can be written to"):
            train(make(tmp_path / "file"), progress=False)
        run_dir = make_run_dir(dataclasses.replace(TINY, run_dir=str(tmp_path)))
        StatusFile(run_dir).write("running", 0)
        with (
            in_use(run_dir) as holder,
            pytest.raises(RunFolderError, match=rf"received .*ppo-CartPole-0, which process {holder.pid} has. Remedy"),
        ):
            train(make(tmp_path), run_dir, progress=False)
        train(make(tmp_path), run_dir, progress=False)

    def test_partial_files_of_a_kill_are_gone_at_the_next_start(self, tmp_path):
        run_dir = make_run_dir(dataclasses.replace(TINY, run_dir=str(tmp_path)))
        (run_dir / "checkpoints").mkdir()
        for path in (run_dir / "checkpoints" / "000000003.pt.partial", run_dir / "config.json.partial"):
            path.touch()
        train(make(tmp_path, logger="none"), run_dir, progress=False)
        assert not list(run_dir.rglob("*.partial"))


class TestStop:
    def test_it_stops_one_iteration_after_the_row_that_reaches_the_return(self, tmp_path):
        result = train(make(tmp_path, stop_return=1.0, log_interval=2, num_steps=64, total_steps=5120), progress=False)
        assert result.solved
        assert result.mean_return >= 1.0
        with (result.run_dir / "progress.csv").open(newline="") as file:
            reached = [row["step"] for row in csv.DictReader(file) if row.get("episode/mean_return")]
        assert result.steps == int(reached[0]) + 512
        assert status_of(result.run_dir)["state"] == "finished"

    def test_a_run_that_is_killed_before_it_stops_stops_at_the_same_iteration(self, tmp_path):
        options = {
            "stop_return": 1.0,
            "log_interval": 2,
            "num_steps": 64,
            "total_steps": 5120,
            "checkpoint_interval": 1,
        }
        whole = train(make(tmp_path, keep_checkpoints=9, **options), progress=False)
        row = whole.steps // 512 - 1
        state = read_checkpoint(whole.run_dir / "checkpoints" / f"{row:09d}.pt")
        trainer = make(tmp_path, **options)
        trainer.load_state_dict(state)
        assert train(trainer, tmp_path / "again", progress=False).steps == whole.steps

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_finishes_the_iteration_and_writes_a_checkpoint(self, tmp_path, number):
        trainer = at(make(tmp_path, log_interval=100), 3, lambda: os.kill(os.getpid(), number))
        handlers = [signal.getsignal(each) for each in StopRequest.SIGNALS]
        result = train(trainer, progress=False)
        assert result.exit_code == 128 + number
        assert result.steps == 4 * 64
        assert newest(result.run_dir)["counters"]["iterations_done"] == 4
        assert steps_of(result.run_dir) == [4]  # the last interval is written
        assert status_of(result.run_dir)["state"] == "stopped"
        assert [signal.getsignal(each) for each in StopRequest.SIGNALS] == handlers

    @pytest.mark.parametrize("stop_at", [2, 5, 6])
    def test_a_stopped_run_goes_on_to_the_same_rows_and_parameters(self, tmp_path, stop_at):
        whole = make(tmp_path / "whole", log_interval=3)
        expected = train(whole, progress=False).run_dir
        part = at(make(tmp_path, log_interval=3), stop_at, lambda: os.kill(os.getpid(), signal.SIGTERM))
        run_dir = train(part, progress=False).run_dir
        assert steps_of(run_dir)[-1] == stop_at + 1
        again = resumed(make(tmp_path, log_interval=3), run_dir)
        train(again, run_dir, progress=False)
        assert_same_parameters(whole, again)
        assert rows_of(run_dir) == rows_of(expected)

    def test_a_signal_in_the_last_iteration_leaves_a_finished_run(self, tmp_path):
        result = train(at(make(tmp_path), 9, lambda: os.kill(os.getpid(), signal.SIGTERM)), progress=False)
        assert (result.exit_code, result.steps) == (0, 640)

    def test_a_signal_during_a_save_lets_it_end(self, tmp_path, monkeypatch):
        replace, sent = os.replace, []

        def signalled(*args):
            if "000000004" in str(args[1]) and not sent:
                sent.append(os.kill(os.getpid(), signal.SIGTERM))
            return replace(*args)

        monkeypatch.setattr(os, "replace", signalled)
        result = train(make(tmp_path, checkpoint_interval=4, logger="none"), progress=False)
        assert result.exit_code == 143
        assert names(result.run_dir) == ["000000005.pt", "000000004.pt"]

    def test_what_a_signal_to_the_group_breaks_is_not_an_error_of_the_run(self, tmp_path, caplog):
        def broken():
            os.kill(os.getpid(), signal.SIGTERM)
            raise BrokenPipeError("the compiler was killed")

        trainer = at(make(tmp_path, checkpoint_interval=2, log_interval=1), 4, broken)
        result = train(trainer, progress=False)
        assert result.exit_code == 143
        assert names(result.run_dir) == ["000000004.pt", "000000002.pt"]
        assert "was cut off by signal 15" in caplog.text
        assert status_of(result.run_dir)["state"] == "stopped"

    def test_a_process_that_is_terminated_with_its_group_says_so(self, tmp_path):
        code = """
import sys
from torchrl_perf.trainers import PPOConfig, PPOTrainer, train
config = PPOConfig(num_envs=8, num_steps=8, total_steps=10**9, hidden_size=32, device="cpu", run_dir=sys.argv[1],
                   logger="none", log_interval=1)
trainer = PPOTrainer(config)
step = trainer.step
def announced():
    step()
    print("stepped", flush=True)
trainer.step = announced
sys.exit(train(trainer, progress=False).exit_code)
"""
        command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout.readline() == "stepped\n"
        process.send_signal(signal.SIGTERM)
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 143
        assert len(names(tmp_path / "ppo-CartPole-0")) == 1


class TestSignals:
    def test_a_second_one_interrupts_at_once_but_not_one_that_is_passed_on(self, monkeypatch):
        clock = [100.0]
        monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            clock[0] += 0.4
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.exit_code == 130
            clock[0] += 0.2
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)

    def test_an_ignored_one_stays_ignored(self):
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with StopRequest() as stop:
                os.kill(os.getpid(), signal.SIGINT)
                assert not stop.requested
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, previous)
