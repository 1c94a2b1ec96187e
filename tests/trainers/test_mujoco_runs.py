"""Runs on MuJoCo Warp: presets, faults that are said, and the policy in MuJoCo's C code afterwards."""

import csv
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from torchrl_perf.cli import main
from torchrl_perf.envs.mujoco import Hopper, InvertedPendulum, MuJoCoEnv
from torchrl_perf.registry import ROBOTS, entry_of
from torchrl_perf.trainers import PPOConfig, PPOTrainer
from torchrl_perf.trainers.mujoco_c import episodes_in_c, task_in_c
from torchrl_perf.trainers.run.run import train

pytest.importorskip("mujoco_warp", reason="the extra mujoco-warp is not installed")

SMALL = "--num-envs 4 --num-steps 8 --total-steps 96 --minibatches 2 --epochs 1 --log-interval 1 --eval-episodes 3"


@pytest.mark.parametrize("algorithm", ["ppo", "sac", "td3"])
@pytest.mark.parametrize("task", ROBOTS)
def test_each_task_has_settings_of_robots(algorithm, task):
    config = entry_of(algorithm).load("config")(env=task)
    assert config.num_envs >= 1024
    assert config.normalize_observations
    assert config.total_steps >= 10_000_000


def test_a_run_is_judged_and_filmed_in_mujocos_c_code(tmp_path, capsys):
    command = f"train ppo --env InvertedPendulum --backend warp {SMALL} --run-dir {tmp_path} --device cpu --no-progress"
    assert main(command.split()) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "in MuJoCo's C code" in last
    (run,) = tmp_path.iterdir()
    assert main(["evaluate", str(run), "--episodes", "3"]) == 0
    said = capsys.readouterr().out
    assert "ppo on InvertedPendulum in MuJoCo's C code" in said
    assert main(["evaluate", str(run), "--episodes", "2", "--max-steps", "3", "--variant", "gain_noise=0.2"]) == 0
    assert "gain_noise=0.2" in capsys.readouterr().out, "of physics with other gains, on MuJoCo Warp"
    assert main(["play", str(run), "--max-steps", "6"]) == 0
    with Image.open(run / "play.gif") as film:
        assert film.n_frames >= 2


def test_a_run_is_judged_in_c_with_the_arguments_of_its_task(tmp_path, capsys):
    command = f"train ppo --env InvertedDoublePendulum {SMALL} --run-dir {tmp_path} --device cpu --no-progress"
    changed = "--env-args healthy_reward=100 max_episode_steps=4 frame_skip=1 gain_noise=0.1"
    assert main([*command.split(), *changed.split()]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert 390 < float(said.split("in MuJoCo's C code ")[1].split(" ")[0]) < 400, "100 a step, of 4 steps"
    (run,) = tmp_path.iterdir()
    assert main(["evaluate", str(run), "--episodes", "2", "--variant", "healthy_reward=1000", "--json"]) == 0
    own, other = json.loads(capsys.readouterr().out)["tasks"]
    assert own["lengths"] == other["lengths"] == [4, 4]
    assert 390 < own["mean_return"] < 400
    assert other["mean_return"] == pytest.approx(own["mean_return"] + 4 * 900)


def test_a_subclass_is_judged_in_c_only_where_it_says_so():
    class Own(InvertedPendulum):
        def reward(self, before, action, after):
            return after["qpos"][:, 0]

    class Same(InvertedPendulum):
        gymnasium_id = "InvertedPendulum-v5"

    assert task_in_c(Own(1, device="cpu")) == ""
    assert task_in_c(Same(1, device="cpu")) == "InvertedPendulum-v5"


def test_faults_of_the_physics_are_in_the_rows_and_said_once(tmp_path, caplog):
    config = PPOConfig(
        env="Hopper", num_envs=4, num_steps=24, total_steps=288, minibatches=2, log_interval=1, device="cpu"
    )
    trainer = PPOTrainer(config, env=Hopper(4, device="cpu", seed=0, nconmax=1, njmax=2, integrator="euler"))
    result = train(trainer, tmp_path / "run", progress=False)
    said = [record.getMessage() for record in caplog.records if "nconmax" in record.getMessage()]
    assert len(said) == 1
    assert "Remedy: a larger nconmax=." in said[0]
    with open(result.run_dir / "progress.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    counts = [float(row["env/contact_overflows"]) for row in rows]
    assert counts[-1] > 0
    assert counts == sorted(counts)
    assert all(float(row["env/broken_worlds"]) == 0 for row in rows)
    trainer.close()


def test_episodes_in_c_are_those_of_gymnasium_with_clipped_actions():
    config = PPOConfig.without_task(
        env="InvertedPendulum", num_envs=2, num_steps=4, total_steps=8, minibatches=1, eval_episodes=3, device="cpu"
    )
    trainer = PPOTrainer(config, env=InvertedPendulum(2, device="cpu", seed=0))
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter.fill_(3.0)  # pushes with all its force, beyond the range
    found = episodes_in_c(trainer)
    assert len(found.returns) == 3
    assert found.returns == [length - 1 for length in found.lengths]
    again = episodes_in_c(trainer)
    assert again.returns == found.returns
    trainer.close()


def test_only_gymnasiums_tasks_have_a_twin_in_c():
    assert task_in_c("Ant") == "Ant-v5"
    assert task_in_c("CartPole") == ""
    assert task_in_c(Hopper(1, device="cpu")) == "Hopper-v5"
    body = "<mujoco><worldbody><body><joint/><geom size='.1'/></body></worldbody></mujoco>"
    own = MuJoCoEnv(body, 1, reward=lambda before, action, after: after["qvel"][:, 0], device="cpu")
    assert task_in_c(own) == ""
    assert task_in_c(None) == ""


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_a_model_without_actuators_has_nothing_to_learn(algorithm):
    body = "<mujoco><worldbody><body><joint/><geom size='.1'/></body></worldbody></mujoco>"
    env = MuJoCoEnv(body, 2, reward=lambda before, action, after: after["qvel"][:, 0], device="cpu")
    entry = entry_of(algorithm)
    config = entry.load("config").without_task(env="own", num_envs=2, total_steps=80_000, device="cpu")
    with pytest.raises(ValueError, match=r"action_spec: expected a vector \[D\] .* received the shape \(0,\)"):
        entry.load("trainer")(config, env=env)


def test_a_model_of_ones_own_draws_itself():
    env = InvertedPendulum(2, device="cpu", seed=0)
    first = env.render(height=48, width=64)
    assert first.shape == (2, 48, 64, 3)
    assert first.dtype == torch.uint8
    env.state_qpos[0, 1] = math.pi / 2
    second = env.render(height=48, width=64)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert np.asarray(first[0]).std() > 5, "something is to be seen"
