"""``bench recurrent``: layers that are timed compute the same, rows are written, tasks have settings that hold."""

import math

import pytest
import torch

from torchrl_perf.bench import recurrent
from torchrl_perf.bench.recurrent_sequences import SEQUENCES, make_sequence
from torchrl_perf.bench.recurrent_tasks import TASKS
from torchrl_perf.bench.report import read_results

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["cudnn-gru", "cudnn-lstm", "torchrl-pad"])
def test_layers_of_equal_weights_compute_the_same(name):
    layer, call = make_sequence("lstm" if name == "cudnn-lstm" else "gru", 4, CPU)
    other, call_other = make_sequence(name, 4, CPU)
    for parameter, value in zip(other.parameters(), layer.parameters(), strict=True):
        parameter.data.copy_(value)
    x, begins = torch.randn(3, 9, 4), torch.rand(3, 9) < 0.3
    begins &= not name.startswith("cudnn")  # which knows no resets
    torch.testing.assert_close(call(x, begins), call_other(x, begins))


def test_rows_of_sequences(tmp_path, capsys):
    names = [name for name in SEQUENCES if name not in ("torchrl-scan", "torchrl-triton")]
    options = ["--parts", "sequence", "--shapes", "2x3", "--hidden", "4", "--repeats", "1", "--device", "cpu"]
    assert recurrent.main([*options, "--sequences", *names, "--out", str(tmp_path)]) == 0
    rows = read_results("recurrent", tmp_path)["rows"]
    assert [row["variant"] for row in rows] == names
    assert all(row["both_ms"] > 0 and row["forward_ms"] > 0 for row in rows)
    assert "torchrl-pad" in capsys.readouterr().out


def test_a_layer_that_does_not_run_here_is_told(monkeypatch):
    def fails(name, *_):
        raise RuntimeError(f"{name} requires another package.\nmore")

    monkeypatch.setattr(recurrent, "make_sequence", fails)
    row = recurrent.measure_sequence("torchrl-triton", "2x3", 4, CPU, 1)
    assert row["error"] == "torchrl-triton requires another package."
    assert "both_ms" not in row


def test_rows_of_training(tmp_path):
    options = ["--parts", "training", "--shapes", "4x8", "--hidden", "4", "--repeats", "1", "--device", "cpu"]
    options += ["--mode", "eager", "--memories", "mingru", "none", "--out", str(tmp_path)]
    assert recurrent.main(options) == 0
    rows = read_results("recurrent", tmp_path)["rows"]
    assert [row["variant"] for row in rows] == ["mingru, eager", "none, eager"]
    assert all(row["steps_per_second"] == pytest.approx(32 / row["ms"] * 1e3) for row in rows)


@pytest.mark.parametrize("name", TASKS)
def test_settings_of_tasks(name):
    config = TASKS[name].config("gru", device="cpu")
    assert config.num_envs % config.minibatches == 0
    assert config.memory == "gru"
    assert TASKS[name].config("none", device="cpu").memory == "none"


def test_learning_ends_at_the_return(monkeypatch):
    task = recurrent.TASKS["tmaze-20"]
    small = {"num_envs": 4, "num_steps": 8, "total_steps": 320, "memory_size": 4, "minibatches": 2}
    easy = type(task)("TMaze", -1e9, {**task.settings, **small})
    monkeypatch.setitem(recurrent.TASKS, "tmaze-20", easy)
    options = recurrent.BenchRecurrent(mode="eager")
    row = recurrent.measure_learning("tmaze-20:mingru", 0, options, "cpu")
    assert row["steps"] < 320  # the first episode that ends is enough
    assert row["seconds"] < math.inf
    assert row["variant"] == "tmaze-20:mingru"


def test_the_peer_learns():
    pytest.importorskip("jax")
    from torchrl_perf.bench.peers import jax_recurrent

    settings = {"num_envs": 16, "num_steps": 16, "memory_size": 16, "learning_rate": 3e-3, "minibatches": 2}
    config = TASKS["stateless-cartpole"].config("gru", device="cpu", **settings)
    row = jax_recurrent.measure(config, 100)
    assert row["mean_return"] > 20
