"""Faults of the world around logging: W&B's process killed or hanging, no network, disk full, folder not writable."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
import types

import pytest

from torchrl_perf.metrics import make_loggers


def steps_of(folder):
    with (folder / "progress.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def service_pid():
    """The process that W&B has started for this one."""
    import wandb.sdk.wandb_setup as setup

    return setup._singleton._connection._proc._process.pid


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def log_some(group, first, last):
    """Seconds that the training thread spends on logging these rows."""
    start = time.perf_counter()
    for step in range(first, last):
        group.log_metrics({f"m{i}": float(step) for i in range(20)}, step=step)
    return time.perf_counter() - start


def open_service(group):
    log_some(group, 0, 3)
    assert group.drain(60.0)
    return service_pid()


def test_a_killed_wandb_process_is_reported_once(tmp_path, offline):
    group = make_loggers("csv,wandb", tmp_path, "p", "r", {"a": 1})
    os.kill(open_service(group), signal.SIGKILL)
    assert log_some(group, 3, 300) < 10.0
    start = time.perf_counter()
    group.close()
    assert time.perf_counter() - start < 20.0
    assert steps_of(tmp_path) == list(range(300))
    failed, missing = group.problems
    assert "W&B has failed and gets no more rows" in failed
    assert "W&B misses" in missing
    # The next run of this process has a new service.
    again = make_loggers("wandb", tmp_path, "p", "r", resume=True)
    log_some(again, 300, 303)
    again.close()
    assert again.problems == ()


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_imports_do_not_ask_a_harmed_wandb_process(tmp_path, offline, harm):
    from wandb.sdk.lib import import_hooks, telemetry

    group = make_loggers("wandb", tmp_path, "p", "r", {"a": 1})
    os.kill(open_service(group), harm)
    watched = telemetry.list_telemetry_imports() - set(sys.modules)
    assert watched
    start = time.perf_counter()
    for name in watched:
        import_hooks.notify_module_loaded(types.ModuleType(name))  # what every import calls at its end
    assert time.perf_counter() - start < 10.0
    group.close(timeout=1.0)


def test_a_hanging_wandb_process_neither_slows_nor_holds_up_the_exit(tmp_path, offline):
    group = make_loggers("csv,wandb", tmp_path, "p", "r", {"a": 1})
    os.kill(open_service(group), signal.SIGSTOP)
    assert log_some(group, 3, 3000) < 20.0
    start = time.perf_counter()
    group.close(timeout=1.0)
    assert time.perf_counter() - start < 20.0
    assert steps_of(tmp_path) == list(range(3000))
    # the second is for both members: where the CSV file takes some of it, less is left for W&B
    assert any(re.search("W&B was not finished within [01] s", line) for line in group.problems)


HARMED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import test_logging_faults as faults
for harm in ("SIGKILL", "SIGSTOP"):
    if os.fork() == 0:  # imports take longer than the test
        group = faults.make_loggers("csv,wandb", f"{sys.argv[1]}/{harm}", "p", "r")
        group._threads[1].sink.close_limit = 1.0
        os.kill(faults.open_service(group), getattr(signal, harm))
        faults.log_some(group, 3, 100)
        break
    print(os.wait()[1], flush=True)
"""


def test_the_process_ends_after_its_wandb_service_was_harmed(tmp_path):
    command = [sys.executable, "-c", HARMED, str(tmp_path), os.path.dirname(__file__)]
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["0", "0"], done.stderr
    assert "Traceback" not in done.stderr
    for harm in ("SIGKILL", "SIGSTOP"):
        assert steps_of(tmp_path / harm) == list(range(100))
    assert 2 <= sum(line.startswith("logging: W&B") for line in done.stderr.splitlines()) <= 4


def test_a_server_that_cannot_be_reached_leaves_the_run_offline(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr("torchrl_perf.metrics.wandb_sink._INIT_LIMIT", 2)
    group = make_loggers("csv,wandb", tmp_path, "p", "r", {"a": 1})
    assert log_some(group, 0, 100) < 10.0
    group.close()
    assert steps_of(tmp_path) == list(range(100))
    assert "a" * 40 not in "".join(group.problems)
    assert capfd.readouterr().err.count("W&B cannot be reached") == 1
    assert list(tmp_path.glob("wandb/offline-run-*"))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB, where this machine lets us make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(command, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_rows_wait_while_the_disk_is_full(small_disk, monkeypatch):
    monkeypatch.setattr("torchrl_perf.metrics.logger_thread._FIRST_RETRY", 0.02)
    monkeypatch.setattr("torchrl_perf.metrics.logger_thread._LONGEST_RETRY", 0.02)
    group = make_loggers("csv", small_disk, "p", "r")
    log_some(group, 0, 10)
    group.flush()
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
    log_some(group, 10, 200)
    start = time.perf_counter()
    group.flush(30.0)  # a full disk is not waited for at each checkpoint
    group.flush(30.0)
    assert time.perf_counter() - start < 15.0
    before = steps_of(small_disk)
    assert before == list(range(len(before)))
    assert len(before) < 200
    filler.unlink()
    deadline = time.perf_counter() + 60
    while len(steps_of(small_disk)) < 200:
        assert time.perf_counter() < deadline
        time.sleep(0.02)
    group.close()
    assert steps_of(small_disk) == list(range(200))
    (problem,) = group.problems
    assert "No space left on device" in problem


def test_what_is_lost_on_a_full_disk_is_counted(small_disk):
    group = make_loggers("csv", small_disk, "p", "r")
    group.flush()
    log_some(group, 0, 1000)
    group.close()
    kept = steps_of(small_disk)
    assert kept == list(range(len(kept)))
    assert f"progress.csv misses {1000 - len(kept)} rows of this run" in group.problems[-1]


def test_a_folder_that_cannot_be_written_is_reported(tmp_path, offline):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    group = make_loggers("csv,tensorboard,wandb", tmp_path / "file" / "run", "p", "r", {"a": 1})
    assert log_some(group, 0, 100) < 10.0
    group.close()
    for name in ("progress.csv", "TensorBoard", "W&B"):
        assert any(line.startswith(f"logging: {name}") for line in group.problems), group.problems


KILLED = """
import os, signal, sys, time
from torchrl_perf.metrics import make_loggers
for attempt in range(6):
    child = os.fork()  # imports take longer than the test
    if child == 0:
        group = make_loggers("csv", sys.argv[1], "p", "r", resume=True)
        step = group.last_step or 0
        while True:
            step += 1
            group.log_metrics({f"m{i}": float(step) for i in range(20)}, step=step)
            if step % 50 == 0:
                time.sleep(0.001)
    time.sleep(0.1 + 0.03 * attempt)
    os.kill(child, signal.SIGKILL)
    os.wait()
"""


def test_no_row_is_torn_or_doubled_by_kills(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True, timeout=100)
    group = make_loggers("csv", tmp_path, "p", "r", resume=True)
    group.log_metrics({"m0": 0.0}, step=10**9)
    group.close()
    steps = steps_of(tmp_path)
    assert steps[:-1] == list(range(1, len(steps)))
    assert len(steps) > 50
