"""The benchmark of robots: its rows, what its shares are of, and how it compares physics with MuJoCo's C code."""

import json

import pytest
import torch

from torchrl_perf.bench import robots
from torchrl_perf.bench.robots_agreement import compare_returns, compare_steps
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


def test_a_training_has_a_curve_and_a_return_in_c(tmp_path):
    options = "--tasks InvertedPendulum --worlds 4 --repeats 1 --device cpu --variants physics --learn 0.01 --seeds 1"
    options += " --learn-worlds 4"
    assert robots.main([*options.split(), "--first-seed", "7", "--out", str(tmp_path)]) == 0
    row = json.loads((tmp_path / "robots.json").read_text())["rows"][-1]
    assert (row["variant"], row["algorithm"], row["seed"], row["episodes"]) == ("learn", "ppo", 7, 100)
    assert row["steps"] == 10 * 24 * 4, "as many iterations as lie between two points, after which the time is over"
    assert row["curve"] == [[row["seconds"], row["steps"], row["curve"][0][2]]]
    assert row["mean_return"] >= 1
    assert row["deviation"] >= 0


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
