"""Episodes without exploration: alone, and during a run."""

import csv
import dataclasses
import math

import gymnasium
import pytest
import torch
from config_runs import KINDS, SMALL, make
from gymnasium.wrappers.vector import ClipReward
from tensordict.nn import TensorDictModule
from tiny_runs import TINY, at, newest, rows_of
from torch import nn

from torchrl_perf.cli import main
from torchrl_perf.collectors import HostCollector, host_specs
from torchrl_perf.envs import CartPole, DeviceEnv, MountainCar
from torchrl_perf.metrics.aggregates import bootstrap_interval, interquartile_mean, mean
from torchrl_perf.trainers import DQNTrainer, PPOTrainer, evaluate_episodes, load_policy, make_q_policy, train
from torchrl_perf.trainers.evaluation import Episodes, Evaluation, episode_limit
from torchrl_perf.trainers.sources import given_source


class Countdown(DeviceEnv):
    """Row n ends after 2 n + 1 steps, n the order of its rows, each with reward 1 + action."""

    num_state, num_reset_noise = 2, 0
    observation_low, observation_high = (0.0, 0.0), (99.0, 99.0)
    num_actions = 2
    default_episode_steps = None

    def initial_state(self, uniform):
        length = 2.0 * torch.arange(len(uniform), device=uniform.device) + 1
        return torch.stack([torch.zeros_like(length), length], -1)

    def dynamics(self, state, action):
        after = torch.stack([state[:, 0] + 1, state[:, 1]], -1)
        return after, 1.0 + action, after[:, 0] >= after[:, 1]

    def observe(self, state):
        return state


class One(nn.Module):
    """Values of two actions, the second one better."""

    def forward(self, observation):
        return torch.ones(*observation.shape[:-1], 1, dtype=torch.int64).squeeze(-1)


def always_one():
    return TensorDictModule(One(), ["observation"], ["action"])


class TestEpisodes:
    def test_one_whole_episode_of_each_row(self):
        found = evaluate_episodes(always_one(), Countdown(20, device="cpu"))
        assert found.lengths == [2 * n + 1 for n in range(20)]  # beyond one chunk of 32 steps
        assert found.returns == [2.0 * length for length in found.lengths]
        assert found.unfinished == 0

    def test_cut_off_at_the_greatest_length(self):
        found = evaluate_episodes(always_one(), Countdown(5, device="cpu"), max_steps=4)
        assert found.lengths == [1, 3, 4, 4, 4]
        assert found.unfinished == 3
        assert "3 cut off" in str(found)

    def test_figures(self):
        found = Episodes([1.0, 2.0, 3.0, 6.0], [1, 2, 3, 4])
        assert (found.mean_return, found.mean_length) == (3.0, 2.5)
        assert found.return_deviation == pytest.approx(math.sqrt(14 / 3))
        low, high = found.interval()
        assert 1.0 <= low < 3.0 < high <= 6.0
        assert math.isnan(Episodes([1.0], [1]).return_deviation)
        assert math.isnan(Episodes([1.0], [1]).interval()[0])

    def test_leaves_the_random_numbers_alone_and_repeats_itself(self):
        env = MountainCar(4, device="cpu")
        before = torch.get_rng_state()
        evaluation = Evaluation(given_source(env, torch.device("cpu")), _idle(), seed=5)
        first = evaluation.run()
        assert first == evaluation.run()
        assert torch.equal(torch.get_rng_state(), before)
        assert evaluation.max_steps == 200
        assert first.lengths == [200] * 4  # a truncated episode is a whole one

    def test_limit_of_an_env_below_others(self):
        assert episode_limit(CartPole(1, device="cpu")) == 500
        assert episode_limit(Countdown(1, device="cpu")) is None
        assert episode_limit(object()) is None


def _idle():
    return TensorDictModule(lambda x: torch.ones(x.shape[:-1], dtype=torch.int64), ["observation"], ["action"])


class TestAggregates:
    def test_interquartile_mean_by_hand(self):
        assert interquartile_mean([1.0, 2.0, 3.0, 100.0]) == 2.5
        assert interquartile_mean([5.0]) == 5.0
        # of five, the second and fourth count (0.4 - 0.25) / 0.2 = three quarters
        assert interquartile_mean([0.0, 1.0, 2.0, 3.0, 50.0]) == pytest.approx((0.75 * 1 + 2 + 0.75 * 3) / 2.5)
        assert interquartile_mean([[4.0, 1.0, 3.0, 2.0], [0.0, 0.0, 0.0, 8.0]]).tolist() == [2.5, 0.0]

    def test_bootstrap_interval_has_the_width_of_the_standard_error(self):
        values = torch.randn(400, generator=torch.Generator().manual_seed(0)).tolist()
        low, high = bootstrap_interval(values)
        error = torch.tensor(values).std().item() / 20
        assert high - low == pytest.approx(2 * 1.96 * error, rel=0.05)
        assert low < mean(values) < high
        assert bootstrap_interval([3.0, 3.0], interquartile_mean) == (3.0, 3.0)
        assert bootstrap_interval(values) == (low, high)


def options(tmp_path, **more):
    return {"run_dir": str(tmp_path), "eval_interval": 2, "eval_episodes": 3, **more}


class TestDuringARun:
    @pytest.mark.parametrize("name", KINDS)
    def test_every_algorithm(self, name, tmp_path):
        trainer = make(name, options(tmp_path, log_interval=2))
        result = train(trainer, progress=False)
        trainer.close()
        with (result.run_dir / "progress.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        found = [float(row["eval/mean_return"]) for row in rows]
        assert len(found) == trainer.config.iterations // 2
        assert result.evaluated == found[-1]
        assert f"evaluated {found[-1]:.1f}" in str(result)
        # the best file is the one of the best evaluation, though checkpoints were asked for at the end alone
        best = newest(result.run_dir)["notes"]["best"]
        assert best["metric"] == "eval/mean_return"
        assert best["value"] == max(found)
        assert best["iteration"] == 2 * (found.index(max(found)) + 1)
        assert load_policy(result.run_dir, which="best").steps == best["iteration"] * trainer.config.batch_size

    def test_is_what_the_saved_policy_does(self, tmp_path):
        trainer = make("ppo", options(tmp_path))
        result = train(trainer, progress=False)
        trainer.close()
        env = CartPole(3, device="cpu")
        assert evaluate_episodes(load_policy(result.run_dir), env, seed=10_000).mean_return == result.evaluated

    def test_changes_nothing_of_the_run(self, tmp_path):
        plain = train(PPOTrainer(dataclasses.replace(TINY, run_dir=str(tmp_path / "a"))), progress=False)
        evaluated = dataclasses.replace(TINY, eval_interval=3, eval_episodes=2, run_dir=str(tmp_path / "b"))
        other = train(PPOTrainer(evaluated), progress=False)
        rows = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows_of(other.run_dir)]
        assert rows == rows_of(plain.run_dir)
        first, second = (newest(run.run_dir)["parts"]["actor"] for run in (plain, other))
        assert all(torch.equal(first[key], second[key]) for key in first)

    @pytest.mark.parametrize(("log_interval", "cut"), [(2, 4), (3, 4), (3, 5)])
    def test_a_resumed_run_writes_the_same_rows(self, tmp_path, log_interval, cut):
        settings = {"eval_interval": 2, "eval_episodes": 2, "log_interval": log_interval, "checkpoint_interval": 1}
        whole = dataclasses.replace(TINY, run_dir=str(tmp_path / "whole"), **settings)
        expected = train(PPOTrainer(whole), progress=False).run_dir
        config = dataclasses.replace(TINY, run_dir=str(tmp_path / "cut"), **settings)

        def stop():
            raise RuntimeError("power failure")

        with pytest.raises(RuntimeError, match="power failure"):
            train(at(PPOTrainer(config), cut, stop), progress=False)
        (run_dir,) = (tmp_path / "cut").iterdir()
        resumed = PPOTrainer(config)
        resumed.load(sorted((run_dir / "checkpoints").glob("0*.pt"))[-1])
        train(resumed, run_dir, progress=False)
        assert rows_of(run_dir) == rows_of(expected)
        assert newest(run_dir)["notes"] == newest(expected)["notes"]

    def test_another_metric_of_the_evaluation(self, tmp_path):
        trainer = make("ppo", options(tmp_path, best_metric="-eval/mean_length"))
        result = train(trainer, progress=False)
        trainer.close()
        best = newest(result.run_dir)["notes"]["best"]
        lengths = [float(row["eval/mean_length"]) for row in rows_of(result.run_dir) if "eval/mean_length" in row]
        assert best["metric"] == "-eval/mean_length"
        assert best["value"] <= min(lengths)

    def test_a_metric_of_the_run_that_is_asked_for(self, tmp_path):
        trainer = make("ppo", options(tmp_path, best_metric="episode/mean_length", log_interval=1))
        result = train(trainer, progress=False)
        trainer.close()
        assert newest(result.run_dir)["notes"]["best"]["metric"] == "episode/mean_length"

    def test_an_env_from_python_needs_another_one(self, tmp_path):
        config = dataclasses.replace(TINY, run_dir=str(tmp_path / "runs"), eval_interval=2)
        trainer = PPOTrainer(config, env=CartPole(8, device="cpu"))
        with pytest.raises(ValueError, match=r"eval_interval: expected an env of the settings, or "):
            train(trainer, progress=False)
        assert not (tmp_path / "runs").exists()
        trainer.evaluation_env = CartPole(2, device="cpu")
        assert math.isfinite(train(trainer, progress=False).evaluated)
        second = PPOTrainer(dataclasses.replace(config, seed=1), env=CartPole(8, device="cpu"))
        second.evaluation_env = trainer.evaluation_env  # it is left open
        assert math.isfinite(train(second, progress=False).evaluated)

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_envs_of_gymnasium(self, tmp_path, wrapped):
        def vector_env(number):
            envs = gymnasium.make_vec("CartPole-v1", num_envs=number, vectorization_mode="sync", max_episode_steps=20)
            return ClipReward(envs, max_reward=0.5) if wrapped else envs

        config = KINDS["dqn"].without_task(**{**SMALL["dqn"], **options(tmp_path), "logger": "csv"})
        policy = make_q_policy(host_specs(envs := vector_env(4)), config)
        collector = HostCollector(envs, policy, frames_per_batch=16, seed=0)
        trainer = DQNTrainer(config, collector=collector, policy=policy)
        if wrapped:
            with pytest.raises(ValueError, match=r"eval_interval: expected an env of the settings, or "):
                train(trainer, progress=False)
            trainer.evaluation_env = vector_env(3)
        result = train(trainer, progress=False)
        trainer.close()
        assert 0 < result.evaluated <= (10 if wrapped else 20)

    def test_command_line_and_picture(self, tmp_path, capsys):
        command = ["train", "ppo", "--num-envs", "4", "--num-steps", "8", "--total-steps", "320", "--device", "cpu"]
        command += ["--run-dir", str(tmp_path), "--no-progress", "--eval-interval", "1", "--eval-episodes", "2"]
        assert main([*command, "--best-metric", "eval/mean_length"]) == 0
        assert "evaluated " in capsys.readouterr().out
        (run_dir,) = tmp_path.iterdir()
        assert (run_dir / "learning_curve.png").stat().st_size > 10_000
        assert main([*command, "--eval-interval", "0", "--best-metric", "eval/mean_length"]) == 1
        assert "expected one of the run's metrics" in capsys.readouterr().err
