"""Folders in bad states, streams that are gone, a run's folder that vanishes while it runs: told, and no run ends."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import at, in_use, make, names, newest, resumed, status_of, steps_of

from torchrl_perf.cli import main
from torchrl_perf.metrics.progress import ProgressLine
from torchrl_perf.metrics.progress_csv import ProgressCSVLogger
from torchrl_perf.runtime.files import FolderLock
from torchrl_perf.streams import say
from torchrl_perf.trainers import RunFolderError, train

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--num-envs", "4", "--num-steps", "8", "--log-interval", "1", "--device", "cpu", "--total-steps", "96"]
TINY += ["--epochs", "1", "--minibatches", "1", "--hidden-size", "32", "--checkpoint-interval", "1"]


def command(tmp_path, *options):
    return main(["train", "ppo", *TINY, "--no-progress", "--run-dir", str(tmp_path / "runs"), *options])


def loop(path):
    path.symlink_to(path)


BAD_RUNS = {
    "a dangling link": lambda path: path.symlink_to(path.with_name("gone")),
    "a link to itself": loop,
    "an empty folder": Path.mkdir,
    "no config": lambda path: (path / "checkpoints").mkdir(parents=True),
    "a config that is torn": lambda path: (path.mkdir(), (path / "config.json").write_text('{"env": "Cart')),
    "a config that is a folder": lambda path: (path / "config.json").mkdir(parents=True),
}


def of_a_run(path, spoil):
    """A whole run at a path, in which one thing is spoilt."""
    main(["train", "ppo", *TINY, "--no-progress", "--run-dir", str(path.parent), "--total-steps", "64"])
    spoil(path)


def no_files(path):
    for file in (path / "checkpoints").iterdir():
        file.unlink()


def link_of(path):
    no_files(path)
    (path / "checkpoints" / "000000009.pt").symlink_to(path / "gone.pt")


def a_file(path):
    shutil.rmtree(path / "checkpoints")
    (path / "checkpoints").touch()


def torn_file(path):
    for file in (path / "checkpoints").iterdir():
        file.write_bytes(b"")


BAD_CHECKPOINTS = {"none": no_files, "a link to nothing": link_of, "a file": a_file, "torn": torn_file}


class TestAuto:
    @pytest.mark.parametrize("spoil", BAD_RUNS.values(), ids=BAD_RUNS.keys())
    def test_a_folder_that_is_no_run_is_passed_over(self, tmp_path, spoil, capsys):
        runs = tmp_path / "runs"
        runs.mkdir()
        spoil(runs / "ppo-CartPole-0")
        assert command(tmp_path, "--resume", "auto") == 0
        assert "a new one starts" in capsys.readouterr().err
        assert steps_of(runs / "ppo-CartPole-0-2") == [0, 1, 1]  # of 64 rows

    @pytest.mark.parametrize("spoil", [no_files, link_of], ids=["none", "a link to nothing"])
    def test_a_run_without_a_checkpoint_is_passed_over(self, tmp_path, spoil, capsys):
        of_a_run(tmp_path / "runs" / "ppo-CartPole-0", spoil)
        assert command(tmp_path, "--resume", "auto") == 0
        assert "it has no checkpoint" in capsys.readouterr().err
        assert (tmp_path / "runs" / "ppo-CartPole-0-2" / "progress.csv").is_file()

    def test_a_link_to_a_run_is_that_run(self, tmp_path):
        of_a_run(tmp_path / "elsewhere" / "ppo-CartPole-0", lambda path: None)
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "ppo-CartPole-0").symlink_to(tmp_path / "elsewhere" / "ppo-CartPole-0")
        assert command(tmp_path, "--resume", "auto") == 0
        assert names(tmp_path / "elsewhere" / "ppo-CartPole-0")[0] == "000000003.pt"


class TestNamed:
    @pytest.mark.parametrize("spoil", [*BAD_RUNS.values()], ids=[*BAD_RUNS])
    def test_a_folder_that_is_no_run_is_one_sentence(self, tmp_path, spoil, capsys):
        spoil(tmp_path / "run")
        assert main(["train", "ppo", "--resume", str(tmp_path / "run"), "--no-progress"]) == 1
        error = capsys.readouterr().err
        assert "expected" in error
        assert "Traceback" not in error

    @pytest.mark.parametrize("spoil", BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS.keys())
    def test_bad_checkpoints_are_one_sentence(self, tmp_path, spoil, capsys):
        run_dir = tmp_path / "runs" / "ppo-CartPole-0"
        of_a_run(run_dir, spoil)
        before = sorted(run_dir.rglob("*"))
        capsys.readouterr()
        assert main(["train", "ppo", "--resume", str(run_dir), "--total-steps", "128", "--no-progress"]) == 1
        error = capsys.readouterr().err
        assert "checkpoint: expected" in error
        assert "Remedy" in error
        assert sorted(run_dir.rglob("*")) == before

    @pytest.mark.parametrize("path", ["x" * 5_000, "a\0b"], ids=["too long", "with a null"])
    def test_paths_that_there_cannot_be(self, path, capsys):
        assert main(["train", "ppo", "--resume", path, "--no-progress"]) == 1
        assert main(["train", "ppo", "--config", path, "--no-progress"]) == 1
        assert capsys.readouterr().err.count("torchrl-perf: ") == 2


class TestRunDir:
    @pytest.mark.parametrize("kind", ["file", "link to nothing", "loop"])
    def test_what_is_in_the_way_is_named(self, tmp_path, kind, capsys):
        place = tmp_path / "runs"
        {"file": Path.touch, "link to nothing": lambda p: p.symlink_to(tmp_path / "gone"), "loop": loop}[kind](place)
        assert command(tmp_path) == 1
        error = capsys.readouterr().err
        assert "expected a folder that can be written to" in error
        assert str(place) in error
        assert "Remedy" in error

    def test_the_holder_of_a_folder_is_the_process_that_has_its_lock(self, tmp_path):
        run_dir = train(make(tmp_path, logger="none"), progress=False).run_dir
        (run_dir / "status.json").write_text(json.dumps({"pid": 1, "state": "running", "step": 0}))
        with in_use(run_dir) as holder:
            assert FolderLock(run_dir).holder() == holder.pid
            with pytest.raises(RunFolderError, match=f"which process {holder.pid} has"):
                train(make(tmp_path), run_dir, progress=False)
        assert FolderLock(run_dir).holder() is None


class Broken(io.StringIO):
    """A stream on a full disk."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


class TestStreams:
    @pytest.mark.parametrize("make_stream", [Broken, closed, lambda: None], ids=["full", "closed", "none"])
    def test_a_line_that_cannot_be_shown_is_not(self, make_stream, monkeypatch):
        stream = make_stream()
        monkeypatch.setattr(sys, "stderr", stream)
        line = ProgressLine(100)
        line.update(10, mean_return=1.0, steps_per_second=1.0)
        line.close()
        assert not say("text")

    @pytest.mark.parametrize("make_stream", [Broken, closed], ids=["full", "closed"])
    def test_a_run_goes_on_without_its_streams(self, tmp_path, make_stream, monkeypatch):
        monkeypatch.setattr(sys, "stderr", make_stream())
        monkeypatch.setattr(sys, "stdout", make_stream())
        assert main(["train", "ppo", *TINY, "--run-dir", str(tmp_path)]) == 0
        assert status_of(tmp_path / "ppo-CartPole-0")["state"] == "finished"

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
    def test_a_process_without_streams_ends_with_0(self, tmp_path):
        call = f"{sys.executable} -m torchrl_perf train ppo {' '.join(TINY)} --run-dir {tmp_path} >/dev/full 2>&- <&-"
        done = subprocess.run(["sh", "-c", call], cwd=ROOT, check=False)
        assert done.returncode == 0
        run_dir = tmp_path / "ppo-CartPole-0"
        assert status_of(run_dir) == {"pid": status_of(run_dir)["pid"], "state": "finished", "step": 96}
        newest(run_dir)  # no line of a stream is in a file


class TestVanishing:
    def test_a_folder_that_is_deleted_is_said_and_made_again(self, tmp_path, caplog):
        run_dir = tmp_path / "ppo-CartPole-0"
        trainer = at(make(tmp_path, log_interval=1, checkpoint_interval=2), 5, lambda: shutil.rmtree(run_dir))
        result = train(trainer, progress=False)
        assert (result.exit_code, result.steps, result.problem) == (0, 640, "")
        assert caplog.text.count(f"the folder of the run {run_dir} was deleted while the run goes on") == 1
        assert names(run_dir)[0] == "000000010.pt"
        assert json.loads((run_dir / "config.json").read_text())["env"] == "CartPole"
        again = resumed(make(tmp_path, total_steps=704), run_dir)
        assert train(again, run_dir, progress=False).steps == 704

    def test_a_folder_that_is_replaced_by_that_of_another_run_is_left_alone(self, tmp_path):
        run_dir, other = tmp_path / "ppo-CartPole-0", tmp_path / "other"

        def replace():
            run_dir.rename(tmp_path / "moved")
            other.mkdir()
            (other / "config.json").write_text('{"algorithm": "dqn", "env": "CartPole"}')
            other.rename(run_dir)

        with pytest.raises(RunFolderError, match="which is one of dqn"):
            train(at(make(tmp_path, log_interval=1), 5, replace), progress=False)
        assert [path.name for path in run_dir.iterdir() if path.suffix != ".lock"] == ["config.json"]

    def test_a_table_that_is_deleted_or_cut_is_said(self, tmp_path, caplog):
        table = tmp_path / "progress.csv"
        log = ProgressCSVLogger("run", tmp_path)
        log.log_metrics({"a": 1.0}, step=1)
        table.unlink()
        log.log_metrics({"a": 2.0}, step=2)
        assert caplog.text.count("progress.csv was deleted: the rows up to step 1 are lost") == 1
        log.log_metrics({"a": 3.0}, step=3)
        os.truncate(table, table.stat().st_size - 3)
        log.log_metrics({"a": 4.0}, step=4)
        assert "progress.csv was cut from" in caplog.text
        steps = [line.partition(",")[0] for line in table.read_text().splitlines()]
        assert steps == ["step", "2", "4"]
        table.unlink()
        log.log_metrics({"b": 5.0}, step=4)  # joins a row that is gone
        assert table.read_text().splitlines()[-1].startswith("4,")

    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (lambda table: os.truncate(table, table.stat().st_size - 4), "ended in the middle of a row"),
            (lambda table: table.write_text("garbage\n" + table.read_text()), "is damaged"),
            (
                lambda table: table.write_text(table.read_text() + "a,b\nmore\n"),
                "is damaged: 2 of its lines are no rows",
            ),
            (lambda table: table.unlink(), "is missing: the rows before the resume are lost"),
        ],
        ids=["cut", "no header", "foreign lines", "gone"],
    )
    def test_a_resumed_run_says_what_its_table_has_lost(self, tmp_path, caplog, spoil, words):
        run_dir = train(make(tmp_path, log_interval=1), progress=False).run_dir
        spoil(run_dir / "progress.csv")
        trainer = resumed(make(tmp_path, log_interval=1, total_steps=704), run_dir)
        train(trainer, run_dir, progress=False)
        assert words in caplog.text
        assert steps_of(run_dir)[-1] == 11

    def test_a_whole_run_says_nothing(self, tmp_path, caplog):
        run_dir = train(make(tmp_path, log_interval=1), progress=False).run_dir
        train(resumed(make(tmp_path, log_interval=1, total_steps=704), run_dir), run_dir, progress=False)
        assert not [record for record in caplog.records if "progress.csv" in record.getMessage()]
        assert steps_of(run_dir) == list(range(1, 12))


class TestBestMetric:
    @pytest.mark.parametrize(
        ("metric", "remedy"),
        [
            ("episode/mean_retrun", "best_metric='episode/mean_return', the nearest"),
            ("-train/loss_critik", "best_metric='-train/loss_critic', the nearest"),
            ("accuracy!?", "best_metric='episode/mean_return'"),
        ],
    )
    def test_one_that_does_not_exist_is_refused_before_a_run(self, tmp_path, capsys, metric, remedy):
        assert command(tmp_path, "--best-metric", metric) == 1
        error = capsys.readouterr().err
        assert "best_metric: expected one of the run's metrics, episode/count, episode/mean_length," in error
        assert f"Remedy: {remedy}" in error
        assert not (tmp_path / "runs").exists()

    def test_a_loop_of_ones_own_is_told_at_the_first_checkpoint(self, tmp_path, caplog):
        train(make(tmp_path, best_metric="episode/mean_retrun", checkpoint_interval=2, log_interval=1), progress=False)
        assert caplog.text.count("received 'episode/mean_retrun'. Remedy: best_metric='episode/mean_return'") == 1
