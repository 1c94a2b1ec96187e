"""``bench recurrent``: layers that are timed compute the same, rows are written, tasks have settings that hold."""

import dataclasses

import pytest
import torch

from torchrl_perf.bench import recurrent
from torchrl_perf.bench.recurrent_sequences import SEQUENCES, make_sequence
from torchrl_perf.bench.recurrent_tasks import TASKS
from torchrl_perf.bench.report import read_results
from torchrl_perf.trainers import PPOTrainer

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


@pytest.mark.gpu
def test_torchrls_triton_back_end_computes_the_same_and_is_recorded():
    device = torch.device("cuda")
    layer, call = make_sequence("gru", 16, device)
    other, call_other = make_sequence("torchrl-triton", 16, device)
    for parameter, value in zip(other.parameters(), layer.parameters(), strict=True):
        parameter.data.copy_(value)
    x, begins = torch.randn(3, 9, 16, device=device), torch.rand(3, 9, device=device) < 0.3
    torch.testing.assert_close(call_other(x, begins), call(x, begins), atol=3e-3, rtol=3e-3)
    row = recurrent.measure_sequence("torchrl-triton", "4x8", 16, device, 1)
    assert row["graph_both_ms"] > 0 and "error" not in row


def test_torchrls_triton_back_end_has_a_row_without_a_gpu_too():
    row = recurrent.measure_sequence("torchrl-triton", "2x3", 4, CPU, 1)
    assert "both_ms" not in row
    assert row["error"]  # that Triton is not installed, or that the device is none of CUDA


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


@pytest.fixture
def tiny_maze(monkeypatch):
    task = recurrent.TASKS["tmaze-20"]
    small = {"num_envs": 4, "num_steps": 8, "total_steps": 320, "memory_size": 4, "minibatches": 2}

    def put(target):
        made = type(task)("TMaze", target, {**task.settings, **small})
        monkeypatch.setitem(recurrent.TASKS, "tmaze-20", made)

    return put


def test_learning_ends_at_the_return(tiny_maze, tmp_path):
    tiny_maze(-1e9)
    options = ["--parts", "learning", "--learning", "tmaze-20:mingru", "--mode", "eager", "--seeds", "0", "1"]
    assert recurrent.main([*options, "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = read_results("recurrent_learning", tmp_path)["rows"]
    assert [row["seed"] for row in rows] == [0, 1]
    assert all(row["learnt"] and row["seconds"] > 0 for row in rows)
    assert all(row["steps"] < 320 for row in rows)  # the first episode is enough
    assert all(row["curve"][-1] == [row["steps"], row["mean_return"]] for row in rows)
    assert {row["variant"] for row in rows} == {"tmaze-20:mingru"}
    assert not (tmp_path / "recurrent.json").exists()


def test_what_is_not_learnt_has_no_time(tiny_maze):
    tiny_maze(1e9)
    options = recurrent.BenchRecurrent(mode="eager", seeds=(0,))
    (row,) = recurrent.measure_learning("tmaze-20:none", options, "cpu")
    assert (row["steps"], row["learnt"], row["seconds"]) == (320, False, None)
    (row,) = recurrent.measure_learning("tmaze-20:none", dataclasses.replace(options, limit=0.0), "cpu")
    assert (row["steps"], row["learnt"]) == (64, False)  # the first look at the return is one too late


def test_a_seed_is_a_run_of_its_own(tiny_maze):
    """One trainer runs all seeds; each learns what a trainer that was made with the seed does."""
    tiny_maze(1e9)
    rows = list(
        recurrent.measure_learning("tmaze-20:gru", recurrent.BenchRecurrent(mode="eager", seeds=(0, 1, 2)), "cpu")
    )
    config = recurrent.TASKS["tmaze-20"].config("gru", seed=2, device="cpu", mode="eager", logger="none")
    alone = PPOTrainer(config)
    for _ in range(config.iterations):
        alone.step()
    assert rows[2]["mean_return"] == float(alone.episodes.mean_return)
    assert rows[2]["mean_return"] != rows[1]["mean_return"]


def test_the_peer_learns():
    pytest.importorskip("jax")
    from torchrl_perf.bench.peers import jax_recurrent

    settings = {"num_envs": 16, "num_steps": 16, "memory_size": 16, "learning_rate": 3e-3, "minibatches": 2}
    config = TASKS["stateless-cartpole"].config("gru", device="cpu", **settings)
    row = jax_recurrent.measure(config, 100)
    assert row["mean_return"] > 20
