"""The monitor: its view of a run as text, JSON and panel; how it ends; that it does not load torch."""

import io
import json
import os
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from torchrl_perf.cli import main, monitor
from torchrl_perf.cli.monitor import Monitor, phase_shares
from torchrl_perf.cli.monitor_view import BAR_WIDTH, as_panel, as_text, bar, describe, duration, sparkline

GPU = {"gpu/utilization": 83.0, "gpu/memory_used_mib": 512.0, "gpu/memory_total_mib": 1024.0, "gpu/power_w": 350.0}
HEADER = (
    "step,wall_time,episode/mean_return,train/first_bad_iteration,time/steps_per_second,time/experiences_per_second,"
    "time/total_seconds,time/total,time/collect,time/update,memory/rss_mib,nonfinite/loss"
)


@pytest.fixture
def run(tmp_path):
    """A run of two rows that goes on in this process."""
    folder = tmp_path / "runs" / "ppo-[x]-0"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "000000002.pt").touch()
    (folder / "config.json").write_text(json.dumps({"total_steps": 1000, "device": "cpu"}))
    (folder / "progress.csv").write_text(
        f"{HEADER}\n100,1,10,-1,50,400,7,2,1,0.5,300,0\n200,2,nan,-1,100,800,9,2,1,0.5,301,0\n"
    )
    set_state(folder, "running")
    return folder


def set_state(folder, state):
    (folder / "status.json").write_text(json.dumps({"pid": os.getpid(), "state": state, "step": 200}))


class TestSnapshot:
    def test_what_it_holds(self, run):
        snapshot = Monitor(run, lambda: GPU).snapshot()
        json.dumps(snapshot, allow_nan=False)
        assert (snapshot["state"], snapshot["pid"], snapshot["step"]) == ("running", os.getpid(), 200)
        assert snapshot["seconds_left"] == 8.0  # 800 steps at 100 a second
        assert (snapshot["steps_per_second"], snapshot["experiences_per_second"]) == (100.0, 800.0)
        assert snapshot["mean_return"] == 10.0  # the newest that is finite
        assert snapshot["phases"] == {"collect": 0.5, "update": 0.25, "other": 0.25}
        assert snapshot["gpu"] == {
            "utilization": 83.0, "memory_used_mib": 512.0, "memory_total_mib": 1024.0, "power_w": 350.0
        }  # fmt: skip
        assert snapshot["memory"] == {"rss_mib": 301.0}
        assert snapshot["checkpoint"] == "000000002.pt"
        assert snapshot["nonfinite"] == {}
        assert snapshot["first_bad_iteration"] is None
        assert snapshot["curves"]["steps_per_second"] == [50.0, 100.0]

    def test_a_run_without_a_row(self, run):
        (run / "progress.csv").unlink()
        (run / "config.json").write_text("{")
        snapshot = Monitor(run, dict).snapshot()
        json.dumps(snapshot, allow_nan=False)
        assert snapshot["step"] == 200  # the status has it
        assert snapshot["row_age"] is snapshot["steps_per_second"] is snapshot["total_steps"] is None
        assert "steps" in as_text(snapshot)

    def test_the_readings_of_the_run_where_there_are_none_here(self, run):
        (run / "progress.csv").write_text("step,gpu/utilization\n1,77\n")
        assert Monitor(run, dict).snapshot()["gpu"] == {"utilization": 77.0}

    def test_trouble(self, run):
        with (run / "progress.csv").open("a") as file:
            file.write("300,3,12,5,100,800,11,2,1,0.5,301,12\n")
        snapshot = Monitor(run, dict).snapshot()
        alarms = [f"{line.label}: {line.text}" for line in describe(snapshot) if line.is_alarm]
        assert alarms == ["not finite: 12 in loss", "first bad: in iteration 5"]

    def test_infinite_numbers_are_left_out(self, run):
        (run / "progress.csv").write_text("step,time/steps_per_second,time/total,time/collect\n1,inf,nan,1\n")
        snapshot = Monitor(run, dict).snapshot()
        json.dumps(snapshot, allow_nan=False)
        assert snapshot["steps_per_second"] is None
        assert snapshot["phases"] == {}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, {}),
        ({"time/total": 0.0, "time/collect": 1.0}, {}),
        ({"time/total": 2.0, "time/collect": 2.0, "time/steps_per_second": 9.0}, {"collect": 1.0}),
        ({"time/total": 2.0, "time/outer": 2.0, "time/inner": 1.0}, {"outer": 1.0, "inner": 0.5}),  # nested
        ({"time/total": 2.0}, {"other": 1.0}),
    ],
)
def test_phase_shares(row, expected):
    assert phase_shares(row) == expected


class TestView:
    @pytest.mark.parametrize(
        ("values", "expected"), [([], ""), ([1.0], "▅"), ([2.0, 2.0], "▅▅"), ([0.0, 1.0], "▁█"), ([-1, 0, 1], "▁▅█")]
    )
    def test_sparkline(self, values, expected):
        assert sparkline(values) == expected

    @pytest.mark.parametrize(("share", "full"), [(0.0, 0), (0.5, 5), (1.0, 10), (1.7, 10), (-1.0, 0)])
    def test_bar(self, share, full):
        assert bar(share, 10) == "█" * full + "░" * (10 - full)

    @pytest.mark.parametrize(("seconds", "expected"), [(0.4, "0:00:00"), (67, "0:01:07"), (-3, "0:00:00")])
    def test_duration(self, seconds, expected):
        assert duration(seconds) == expected

    def render(self, snapshot, width):
        console = Console(width=width, file=io.StringIO(), no_color=True)
        console.print(as_panel(snapshot, width))
        return console.file.getvalue()

    def test_the_panel(self, run):
        text = self.render(Monitor(run, lambda: GPU).snapshot(), 80)
        assert f"ppo-[x]-0: running, process {os.getpid()}" in text  # brackets are no markup
        for words in ("200 of 1,000, 0:00:08 left", "83 %, 350 W", "512 of 1,024 MiB", "000000002.pt", "▁█"):
            assert words in text
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= 80

    def test_a_narrow_terminal_gets_no_bars(self, run):
        text = self.render(Monitor(run, dict).snapshot(), 60)
        assert "█" not in text
        assert "experiences/s" in text

    def test_plain_text(self, run):
        lines = as_text(Monitor(run, dict).snapshot()).splitlines()
        assert lines[0].startswith("ppo-[x]-0: running")
        assert lines[1].split() == ["steps", "200", "of", "1,000,", "0:00:08", "left", bar(0.2, BAR_WIDTH)]


class TestCommand:
    def test_once(self, run, capsys):
        assert main(["monitor", str(run), "--once", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step"] == 200

    def test_the_newest_run_is_the_default(self, run, capsys):
        assert main(["monitor", "--run-dir", str(run.parent), "--once"]) == 0
        assert capsys.readouterr().out.startswith("ppo-[x]-0: running")

    def test_no_run(self, tmp_path, capsys):
        assert main(["monitor", "--run-dir", str(tmp_path)]) == 2
        assert "expected a run below" in capsys.readouterr().err

    @pytest.mark.parametrize("interval", ["0", "-1", "x", "nan", "inf"])
    def test_an_interval_is_positive(self, interval, capsys):
        with pytest.raises(SystemExit) as stop:
            main(["monitor", "--interval", interval])
        assert stop.value.code == 2
        assert "expected seconds" in capsys.readouterr().err

    def test_it_ends_with_the_run(self, run, capsys):
        timer = threading.Timer(0.3, set_state, (run, "finished"))
        timer.start()
        assert main(["monitor", str(run), "--json", "--interval", "0.1"]) == 0
        timer.join()
        states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
        assert set(states[:-1]) == {"running"}
        assert states[-1] == "finished"

    def test_the_live_screen(self, run, monkeypatch, capsys):
        set_state(run, "finished")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        assert main(["monitor", str(run)]) == 0
        assert "ppo-[x]-0: finished" in capsys.readouterr().out

    def test_without_rich(self, run, monkeypatch, capsys):
        set_state(run, "finished")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        for name in ("rich.console", "rich.live"):
            monkeypatch.setitem(sys.modules, name, None)
        assert main(["monitor", str(run)]) == 0
        assert "finished" in capsys.readouterr().out

    def test_interrupts_end_it(self, run, monkeypatch):
        def interrupt(seconds):
            raise KeyboardInterrupt

        monkeypatch.setattr(monitor.time, "sleep", interrupt)
        assert main(["monitor", str(run), "--json"]) == 0

    def test_a_reader_that_has_gone(self, run):
        command = f"{sys.executable} -m torchrl_perf monitor '{run}' --json --interval 0.05 | head -n 2"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=240, check=True)
        assert len(done.stdout.splitlines()) == 2
        assert done.stderr == ""

    def test_it_loads_no_torch_without_a_driver(self, run):
        code = (
            "import sys; from torchrl_perf.cli import main, monitor; monitor._has_driver = lambda: False; "
            f"main(['monitor', {str(run)!r}, '--once']); print('torch' in sys.modules, 'rich' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
        assert done.stdout.splitlines()[-1] == "False False"


class TestDevice:
    def test_a_cpu_run_has_no_gpu(self, monkeypatch):
        monkeypatch.setattr(monitor, "_has_driver", lambda: True)
        assert monitor._gpu_reader("cpu", None)() == {}

    def test_the_environment_of_the_run_counts(self, monkeypatch):
        made = []
        monkeypatch.setattr(monitor, "_has_driver", lambda: True)

        class Reader:
            def __init__(self, device, environ):
                made.append((device, environ.get("CUDA_VISIBLE_DEVICES")))

            def read(self):
                return GPU

        monkeypatch.setattr("torchrl_perf.runtime.nvml.GpuReader", Reader)
        monkeypatch.setattr(monitor, "_environment", lambda pid: {"CUDA_VISIBLE_DEVICES": str(pid)})
        assert monitor._gpu_reader("auto", 7)() == GPU
        assert made == [("cuda", "7")]

    def test_the_environment_of_a_process(self):
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, "CUDA_VISIBLE_DEVICES": "3"}
        )
        if os.path.exists(f"/proc/{child.pid}/environ"):
            for _ in range(200):
                if monitor._environment(child.pid).get("CUDA_VISIBLE_DEVICES") == "3":
                    break
                monitor.time.sleep(0.01)
            assert monitor._environment(child.pid)["CUDA_VISIBLE_DEVICES"] == "3"
        child.communicate(b"\n")
        assert monitor._environment(None) == dict(os.environ)
