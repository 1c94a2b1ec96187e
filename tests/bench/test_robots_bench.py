"""The benchmark of robots: its rows, what its shares are of, and how it compares physics with MuJoCo's C code."""

import json

import pytest
import torch

from torchrl_perf.bench import robots
from torchrl_perf.bench.robots_agreement import compare_returns, compare_steps
from torchrl_perf.cli import evaluate
from torchrl_perf.envs.mujoco import Humanoid, InvertedPendulum

pytest.importorskip("mujoco_warp", reason="the extra mujoco-warp is not installed")


def test_rows_have_speeds_and_shares(tmp_path, capsys):
    options = "--tasks InvertedPendulum --worlds 4 --repeats 1 --device cpu --variants physics eager env followed ppo"
    assert robots.main([*options.split(), "--out", str(tmp_path)]) == 0
    rows = {row["variant"]: row for row in json.loads((tmp_path / "robots.json").read_text())["rows"]}
    assert list(rows) == ["physics", "eager", "env", "followed", "ppo"]
    for row in rows.values():
        assert row["steps_per_second"] == pytest.approx(4 / row["ms"] * 1e3)
    assert rows["env"]["of"] == "physics"
    assert rows["ppo"]["share"] == pytest.approx(rows["ppo"]["steps_per_second"] / rows["env"]["steps_per_second"])
    assert rows["followed"]["of"] == "env"
    own = rows["ppo"]["steps_per_second"] / rows["followed"]["steps_per_second"]
    assert rows["ppo"]["share_followed"] == pytest.approx(own)
    assert "written to" in capsys.readouterr().out


def test_recorded_actions_lead_the_same_worlds_the_same_way():
    options = robots.BenchRobots(tasks=("InvertedPendulum",), worlds=4, repeats=1, device="cpu")
    task = robots.Task("InvertedPendulum", options, torch.device("cpu"))
    trainer = task._started()
    begin, seen = trainer.collector.state_dict(), []
    collect = robots.DeviceCollector.collect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robots.DeviceCollector, "collect", lambda self: seen.append(collect(self).clone()) or seen[-1])
        task.followed()
    assert len(seen) == 3, "PPO's own rollout, one to warm up and one that is timed"
    assert torch.equal(seen[-1]["action"], seen[0]["action"])
    ends = seen[0]["next", "done"][..., 0].int()
    first = (ends.cumsum(1) - ends) == 0  # worlds that begin anew draw other places
    for key in (("next", "observation"), ("next", "done"), ("next", "reward")):
        torch.testing.assert_close(seen[-1][key][first], seen[0][key][first])
    after = trainer.collector.state_dict()
    assert all(torch.equal(one, other) for one, other in zip(begin["root"], after["root"], strict=True))


def test_a_training_has_a_curve_a_return_in_c_and_a_policy_that_is_kept(tmp_path, capsys):
    options = "--tasks InvertedPendulum --device cpu --learn 0.01 --seeds 1"
    options += " --learn-worlds 4 --settings num_steps=12 eval_episodes=7 epochs=1 minibatches=1"
    options += f" --policies {tmp_path} --out {tmp_path} --variants"
    assert robots.main(["--first-seed", "7", *options.split()]) == 0
    row = json.loads((tmp_path / "robots.json").read_text())["rows"][-1]
    assert (row["variant"], row["algorithm"], row["seed"], row["episodes"]) == ("learn", "ppo", 7, 7)
    assert row["settings"] == {"num_steps": 12, "eval_episodes": 7, "epochs": 1, "minibatches": 1}
    assert row["steps"] == 10 * 12 * 4, "as many iterations as lie between two points, after which the time is over"
    assert row["curve"] == [[row["seconds"], row["steps"], row["curve"][0][2]]]
    assert row["mean_return"] == sum(row["returns"]) / 7 >= 1
    assert row["deviation"] >= 0
    capsys.readouterr()
    assert evaluate.main([row["policy"], "--episodes", "7", "--seed", "10007", "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["steps"] == row["steps"] + 4 * 12 * 4, "those before the clock ran count as well"
    assert judged["tasks"][0]["returns"] == row["returns"], "the same policy in the same episodes"


def test_a_policy_of_a_replaying_learner_is_kept_without_its_replay(tmp_path, monkeypatch):
    learnt = "minibatch_size=8 learning_starts=8 capacity=64 num_steps=1 hidden_sizes=[8] log_interval=1"
    options = f"--tasks InvertedPendulum --device cpu --learn 0.01 --seeds 1 --algorithms sac --settings {learnt}"
    options += f" --learn-worlds 4 --policies {tmp_path} --out {tmp_path} --variants"
    monkeypatch.setattr(robots, "episodes_in_c", lambda trainer: 1 / 0)  # a judge that fails
    with pytest.raises(ZeroDivisionError):
        robots.main(options.split())
    (row,) = json.loads((tmp_path / "robots.json").read_text())["rows"]
    assert "mean_return" not in row
    assert "replay" not in torch.load(row["policy"])["parts"]
    assert evaluate.main([row["policy"], "--episodes", "3"]) == 0


def test_rewards_of_places_are_compared_where_episodes_begin():
    torch.manual_seed(0)
    env = Humanoid(4, device="cpu", seed=0, max_episode_steps=3)
    row = compare_steps(env, 7)
    assert row["qvel"][2] < 1e-2
    assert row["reward"][2] < 1e-2, "the speed of a fresh world is not that since the last place of another episode"


@pytest.mark.parametrize("option", ["--tasks CartPole", "--variants env jax", "--algorithms dqn"])
def test_unknown_names_are_refused(option, capsys):
    assert robots.main([*option.split(), "--device", "cpu"]) == 1
    assert "Remedy: these names." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("seed=3 gamma=0.9", "received seed. Remedy: --tasks, --first-seed"),
        ("gama=0.9", "the nearest is gamma"),
        ("gamma=2.0", "gamma: expected"),
        ("gamma=0.9 --device gpu", "device: expected 'auto', 'cpu'"),
        ("learning_starts=9", "learning_starts"),  # of SAC, not of PPO
    ],
)
def test_settings_that_cannot_be_run_are_refused_before_anything_is(settings, words, capsys):
    options = "--device cpu --learn 9 --algorithms sac ppo --variants --settings " + settings
    assert robots.main(options.split()) == 1
    assert words in capsys.readouterr().err


def test_physics_is_compared_step_by_step_and_by_returns():
    torch.manual_seed(0)
    env = InvertedPendulum(8, device="cpu", seed=0, max_episode_steps=6)
    row = compare_steps(env, 10)
    assert row["steps"] == 80
    assert row["ends"] == 0
    assert 0 < row["qvel"][0] <= row["qvel"][1] <= row["qvel"][2] < 1e-4
    assert row["reward"] == [0.0, 0.0, 0.0]
    episodes = compare_returns(env, lambda seen: 0.0 * seen[:, :1])
    assert episodes["episodes"] == 8
    assert episodes["warp"][0] == episodes["c"][0] == 6, "upright until the time limit"
    assert episodes["apart"] == 0
