"""The learning-curve picture, the split of time by phase, and what importing the package pulls in."""

import subprocess
import sys
import time

import pytest
import torch

from torchrl_perf.metrics import PhaseTimer, ProgressCSVLogger, save_learning_curve
from torchrl_perf.metrics.plot import read_progress


def write_run(folder, rows):
    logger = ProgressCSVLogger("run", folder)
    for step, row in rows:
        logger.log_metrics(row, step=step)
    logger.close()
    return folder / "progress.csv"


def test_picture_is_written(tmp_path):
    path = write_run(
        tmp_path, [(0, {"a": 1.0}), (10, {"episode/mean_return": 5.0}), (20, {"episode/mean_return": 9.0})]
    )
    picture = save_learning_curve(path, tmp_path / "curve.png", title="CartPole")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("values", [[], [3.0]])
def test_picture_of_a_very_short_run(tmp_path, values):
    rows = [
        (0, {"episode/mean_return": float("nan")}),
        *((i + 1, {"episode/mean_return": v}) for i, v in enumerate(values)),
    ]
    assert save_learning_curve(write_run(tmp_path, rows), tmp_path / "curve.png").exists()


def test_rows_without_a_finite_value_are_left_out(tmp_path):
    path = write_run(tmp_path, [(0, {"a": 1.0}), (5, {"b": float("nan")}), (9, {"b": 2.0})])
    data = read_progress(path, "b")
    assert (data["step"], data["b"]) == ([9.0], [2.0])
    with pytest.raises(KeyError, match=r"received \['step', 'wall_time', 'a', 'b'\]"):
        read_progress(path)


class TestPhases:
    def test_phases_add_up_and_start_anew(self, device):
        timer = PhaseTimer(device)
        for _ in range(3):
            for name in ("collect", "update"):
                with timer.phase(name):
                    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        row = timer.flush()
        assert list(row) == ["total", "collect", "update"]
        assert row["collect"] > 0
        assert list(timer.flush()) == ["total"]

    def test_phases_cover_no_more_than_the_total(self):
        timer = PhaseTimer("cpu")
        with timer.phase("outer"), timer.phase("inner"):
            sum(range(10_000))
        row = timer.flush()
        assert 0 < row["inner"] <= row["outer"] <= row["total"]

    def test_a_failed_phase_is_not_counted(self):
        timer = PhaseTimer("cpu")
        with pytest.raises(KeyError), timer.phase("collect"):
            raise KeyError
        assert list(timer.flush()) == ["total"]

    def test_total_is_reserved(self):
        with pytest.raises(ValueError, match="another name than 'total'"), PhaseTimer("cpu").phase("total"):
            pass

    def test_memory_is_bounded_without_a_flush(self):
        timer = PhaseTimer("cpu")
        for _ in range(3000):
            with timer.phase("a"):
                pass
        assert len(timer._pending) + len(timer._spare) < 1100

    @pytest.mark.gpu
    def test_capture_reports_the_whole_only(self):
        timer = PhaseTimer("cuda")
        x = torch.zeros(1024, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), timer.phase("inside"):
            x.add_(1)
        with timer.phase("iteration"):
            graph.replay()
        assert list(timer.flush()) == ["total", "iteration"]


def test_import_is_light():
    code = (
        "import sys, tensordict\n"
        "before = set(sys.modules)\n"  # where there is triton, tensordict imports it
        "import torchrl_perf.metrics\n"
        "heavy = {'wandb', 'tyro', 'triton', 'matplotlib', 'tensorboard'} & set(sys.modules) - before\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_phases_of_an_interval_are_read_later(device):
    timer = PhaseTimer(device)
    with timer.phase("a"):
        pass
    timer.start_flush()
    with timer.phase("b"):
        pass
    timer.start_flush()
    with timer.phase("c"):
        pass
    assert set(timer.finish_flush()) == {"total", "a"}
    assert set(timer.finish_flush()) == {"total", "b"}
    assert timer.finish_flush() is None
    assert set(timer.flush()) == {"total", "c"}
    timer.start_flush()
    with timer.phase("d"):
        pass
    assert set(timer.flush()) == {"total", "d"}


def test_many_phases_without_a_flush_stay_bounded_and_keep_their_interval():
    timer = PhaseTimer("cpu")
    for _ in range(700):
        with timer.phase("a"):
            pass
    timer.start_flush()
    for _ in range(1500):
        with timer.phase("b"):
            pass
    assert len(timer._pending) <= 1024
    assert set(timer.finish_flush()) == {"total", "a"}
    assert set(timer.flush()) == {"total", "b"}


def test_the_first_interval_begins_with_its_first_phase():
    timer = PhaseTimer("cpu")
    time.sleep(0.05)
    with timer.phase("a"):
        pass
    assert timer.flush()["total"] < 0.04
