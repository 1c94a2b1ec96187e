"""The benchmarks run at small sizes, do the same work as what they compare with, and feed the README."""

import importlib.util
import json
import math
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from torchrl_perf.bench import collector, gae, offpolicy, ppo, replay
from torchrl_perf.bench.peers import flashbax as flashbax_peer
from torchrl_perf.bench.peers import jax as jax_peer
from torchrl_perf.bench.peers.baselines import TorchRLPPO
from torchrl_perf.bench.report import RESULTS, format_table, json_text, read_results, write_results
from torchrl_perf.envs import CartPole
from torchrl_perf.trainers import PPOConfig

ROOT = Path(__file__).parents[2]


def test_table_has_one_line_a_row_and_empty_cells_for_missing_values() -> None:
    table = format_table([{"a": 1234567.0, "b": "x"}, {"a": 0.01234}], ("a", "b"))
    assert table.splitlines() == ["| a         | b |", "| --------- | - |", "| 1,234,567 | x |", "| 0.0123    |   |"]


def test_results_keep_rows_and_machine(tmp_path: Path) -> None:
    path = write_results("x", [{"variant": "eager", "ms": 1.5}], tmp_path)
    assert path == tmp_path / "x.json"
    result = read_results("x", tmp_path)
    assert result["rows"] == [{"variant": "eager", "ms": 1.5}]
    assert result["machine"]["packages"]["torch"] == version("torch")


def test_gae_benchmark_reports_its_own_error_and_the_floor(tmp_path: Path) -> None:
    assert gae.main(["--shapes", "8x16", "--repeats", "3", "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gae_cpu.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["torchrl loop", "torchrl vectorised", "torchrl_perf"]
    ours = rows[-1]
    assert ours["max_error"] < 1e-4
    assert ours["of_copy_bandwidth"] == pytest.approx(ours["floor_us"] / ours["us"])


def test_collector_benchmark_counts_frames(tmp_path: Path) -> None:
    options = ["--num-envs", "4", "--num-steps", "8", "--repeats", "2", "--device", "cpu", "--out", str(tmp_path)]
    assert collector.main([*options, "--variants", "torchrl", "eager"]) == 0
    rows = json.loads((tmp_path / "collector_cpu.json").read_text())["rows"]
    for row in rows:
        assert row["frames_per_second"] == pytest.approx(4e6 / row["us_per_step"])


def test_ppo_benchmark_measures_baseline_and_trainer(tmp_path: Path) -> None:
    options = ["--shapes", "8x8", "--repeats", "2", "--device", "cpu", "--no-learn", "--out", str(tmp_path)]
    assert ppo.main([*options, "--variants", "torchrl", "eager"]) == 0
    rows = json.loads((tmp_path / "ppo.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["torchrl", "eager"]
    assert all(row["steps_per_second"] == pytest.approx(64 / row["ms"] * 1e3) for row in rows)


def test_ppo_benchmark_of_other_networks_and_of_a_robot(tmp_path: Path) -> None:
    options = ["--shapes", "8x8", "--repeats", "2", "--device", "cpu", "--out", str(tmp_path)]
    networks = ["--hidden-sizes", "16", "8", "4", "--activation", "elu"]
    assert ppo.main([*options, "--no-learn", "--variants", "torchrl", "eager", *networks]) == 0, "not TorchRL's loop"
    rows = json.loads((tmp_path / "ppo_16-8-4_elu.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["eager"]
    assert ppo.main([*options, "--task", "robot", "--variants", "eager-plain", "--hidden-sizes", "8"]) == 0
    assert (tmp_path / "ppo_robot_8.json").exists()
    robot = ppo.BenchPPO(task="robot")
    assert robot.changes == {"hidden_sizes": (512, 256, 128), "activation": "elu", "epochs": 5}
    assert ppo.BenchPPO().changes == {}


def test_runs_that_learn_have_the_networks_of_the_benchmark() -> None:
    options = ppo.BenchPPO(variants=("eager",), hidden_sizes=(16, 8), seeds=2)
    learning = [job for job in ppo._jobs(options, "cpu") if job.func is ppo.time_to_solve]
    assert [job.args[0] for job in learning] == [0, 1]
    assert all(job.keywords["hidden_sizes"] == (16, 8) for job in learning)


@pytest.mark.parametrize("task", ["CartPole", "robot"])
def test_the_jax_peer_has_the_networks_of_the_benchmark(task: str) -> None:
    pytest.importorskip("optax")
    options = ppo.BenchPPO(task=task, hidden_sizes=(16, 8), activation="elu")
    config = ppo._config("4x8", "cpu", **options.changes)
    iteration, state = jax_peer.make_iteration(config, task)
    inputs, outputs = {"CartPole": (4, 2), "robot": (48, 12)}[task]
    shapes = [weight.shape for weight, _ in state[0]["actor"]]
    assert shapes == [(inputs, 16), (16, 8), (8, outputs)]
    before = float(abs(state[0]["actor"][0][0]).sum())
    state = iteration(state)
    assert float(abs(state[0]["actor"][0][0]).sum()) != before


def test_a_ppo_benchmark_that_is_stopped_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ppo, "time_to_solve", stop)
    options = ["--shapes", "8x8", "--repeats", "2", "--device", "cpu", "--variants", "eager", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        ppo.main(options)
    assert [row["variant"] for row in json.loads((tmp_path / "ppo.json").read_text())["rows"]] == ["eager"]


def test_time_to_solve_stops_at_its_target() -> None:
    row = ppo.time_to_solve(0, "cpu", target=15.0, num_envs=16, num_steps=16, total_steps=5_000)
    assert row["mean_return"] >= 15.0
    assert math.isfinite(row["seconds"])


def test_baseline_takes_as_many_optimiser_steps_as_the_trainer() -> None:
    config = PPOConfig(num_envs=4, num_steps=8, epochs=2, minibatches=4, device="cpu")
    baseline = TorchRLPPO(CartPole(4), config)
    baseline.step()
    baseline.close()
    (state, *_) = baseline.optimizer.state.values()
    assert int(state["step"]) == 8


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_jax_peer_runs_the_same_updates() -> None:
    row = jax_peer.measure(PPOConfig(num_envs=4, num_steps=8), 2)
    assert row["steps_per_second"] == pytest.approx(32 / row["ms"] * 1e3)


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    rows = [{"mean": math.nan, "seconds": -math.inf, "each": (1.0, math.nan), "of": {"none": math.inf}, "n": 3}]
    write_results("x", rows, tmp_path)
    assert read_results("x", tmp_path)["rows"] == [
        {"mean": None, "seconds": None, "each": [1.0, None], "of": {"none": None}, "n": 3}
    ]
    assert json.loads(json_text(rows[0]), parse_constant=pytest.fail)["mean"] is None


def test_committed_json_is_json() -> None:
    files = list((ROOT / "torchrl_perf").rglob("*.json"))
    assert len(files) > 20
    for path in files:
        json.loads(path.read_text(), parse_constant=lambda word, path=path: pytest.fail(f"{path}: {word}"))


def test_committed_results_name_their_machine() -> None:
    for path in RESULTS.glob("*.json"):
        machine = json.loads(path.read_text())["machine"]
        assert machine["gpu"] or machine["cpu"], path.name
        assert machine["packages"]["torchrl"], path.name


def test_replay_benchmark_measures_every_operation(tmp_path: Path) -> None:
    options = ["--capacity", "1024", "--batches", "32", "--extend", "64", "--repeats", "2", "--device", "cpu"]
    assert replay.main([*options, "--peers", "torchrl", "gather", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "replay_cpu.json").read_text())["rows"]
    seen = {(row["operation"], row["variant"]) for row in rows}
    for operation in ("sample", "extend", "epoch sample", "slice sample"):
        assert {(operation, "torchrl"), (operation, "torchrl_perf")} <= seen
    assert ("prioritised sample + update", "torchrl_perf") in seen
    assert all(row["times_floor"] == pytest.approx(row["us"] / row["floor_us"]) for row in rows)


def test_offpolicy_benchmark_counts_updates_and_frames(tmp_path: Path) -> None:
    options = ["--variants", "torchrl", "eager", "--tasks", "sac", "dqn", "--dqn-envs", "8", "--repeats", "2"]
    assert offpolicy.main([*options, "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "offpolicy_sac-dqn_cpu.json").read_text())["rows"]
    counts = [(row["task"], row["variant"], round(row["per_second"] * row["us"] / 1e6)) for row in rows]
    assert counts == [
        ("SAC updates", "torchrl", 16),
        ("SAC updates", "eager", 16),
        ("DQN env steps", "eager", 8 * 16),
    ]


def test_offpolicy_benchmark_of_other_sizes(tmp_path: Path) -> None:
    options = ["--variants", "torchrl", "eager", "--tasks", "sac", "td3", "ddpg", "--repeats", "2", "--batch", "32"]
    sizes = ["--hidden-sizes", "16", "12", "8", "--precision", "bf16"]
    assert offpolicy.main([*options, *sizes, "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "offpolicy_sac-td3-ddpg_32_16-12-8_bf16_cpu.json").read_text())["rows"]
    tasks = [(row["task"], row["variant"]) for row in rows]
    assert tasks == [("SAC updates", "torchrl"), *((f"{name} updates", "eager") for name in ("SAC", "TD3", "DDPG"))]
    for row in rows:
        assert row["batch"] == 32 and row["hidden_sizes"] == [16, 12, 8] and row["precision"] == "bf16"
        name = row["task"].split()[0].lower()
        flops = 2 * 32 * offpolicy.products(name, (16, 12, 8))
        assert row["tflops"] == pytest.approx(row["per_second"] * flops / 1e12)


def test_names_of_off_policy_results() -> None:
    assert offpolicy.BenchOffPolicy().file == "offpolicy"
    assert offpolicy.BenchOffPolicy(tasks=("td3",)).file == "offpolicy_td3"
    assert offpolicy.BenchOffPolicy(batch=32).file == "offpolicy_32_256-256_tf32"


def test_products_of_an_update() -> None:
    critic, actor = 23 * 8 + 8, 17 * 8 + 8 * 12
    assert offpolicy.products("sac", (8,)) == 6 * 2 * critic + 4 * actor
    actor = 17 * 8 + 8 * 6
    assert offpolicy.products("ddpg", (8,)) == 6 * critic + 4 * actor
    assert offpolicy.products("td3", (8,)) == 5 * 2 * critic + 2.5 * actor


def test_offpolicy_benchmark_refuses_what_it_does_not_measure() -> None:
    for options in ({"tasks": ("ppo",)}, {"batch": 0}, {"hidden_sizes": ()}, {"hidden_sizes": (8, 0)}):
        with pytest.raises(ValueError, match="tasks, batch, hidden_sizes: expected"):
            offpolicy.BenchOffPolicy(**options)


def test_time_to_solve_off_policy_stops_at_its_target() -> None:
    config = replace(
        offpolicy.LEARN, num_envs=16, total_steps=4_000, learning_starts=512, minibatch_size=64, hidden_size=32
    )
    row = offpolicy.time_to_solve(0, torch.device("cpu"), config, target=12.0)
    assert row["mean_return"] >= 12.0
    assert math.isfinite(row["seconds"])


@pytest.mark.skipif(not flashbax_peer.available(), reason="Flashbax is not installed")
def test_flashbax_peer_measures_the_same_operations() -> None:
    rows = list(flashbax_peer.measure(256, (32,), 64, 2))
    assert [row["operation"] for row in rows] == [
        "sample",
        "extend",
        "prioritised sample + update",
        "prioritised extend",
    ]
    assert all(row["us"] > 0 for row in rows)
