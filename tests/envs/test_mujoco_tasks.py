"""Gymnasium's MuJoCo tasks on MuJoCo Warp against Gymnasium's own."""

import gymnasium
import mujoco
import numpy as np
import pytest
import torch
from gymnasium_worlds import Worlds
from torchrl.envs.utils import check_env_specs

import torchrl_perf.envs.mujoco as robots
from torchrl_perf.registry import ROBOTS

pytest.importorskip("mujoco_warp", reason="the extra mujoco-warp is not installed")

PLANAR = ("HalfCheetah", "Hopper", "Walker2d", "Swimmer", "Reacher", "InvertedPendulum", "InvertedDoublePendulum")


def make(name, count=3, **settings):
    torch.manual_seed(0)
    return getattr(robots, name)(count, device="cpu", **settings)


def test_the_names_are_those_of_gymnasiums_tasks():
    assert {name for name in robots.__all__ if hasattr(getattr(robots, name), "gymnasium_id")} - {
        "GymnasiumTask"
    } == set(ROBOTS)
    for name in ROBOTS:
        kind, spec = getattr(robots, name), gymnasium.spec(f"{name}-v5")
        assert kind.gymnasium_id == spec.id
        assert kind.episode_steps == spec.max_episode_steps


@pytest.mark.parametrize("name", ROBOTS)
def test_observations_rewards_and_ends_are_gymnasiums_of_the_same_quantities(name):
    """The functions of a task, apart from physics: they read what MuJoCo's C code has computed."""
    env = make(name, 2)
    worlds = Worlds(env.gymnasium_id, 2)
    names = ("qpos", "qvel", *env.observed_quantities)
    worlds.start(env.state_qpos, env.state_qvel)
    before = worlds.quantities(names)
    for _ in range(40):
        action = env.action_spec.rand()
        observation, reward, terminated = worlds.step(action)
        after = worlds.quantities(names)
        np.testing.assert_allclose(env.features(after), observation, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(env.reward(before, action, after), reward, rtol=1e-4, atol=1e-3)
        assert env.is_terminated(after).tolist() == terminated.tolist()
        before = after


@pytest.mark.parametrize("name", ROBOTS)
def test_steps_are_gymnasiums_from_the_same_state(name):
    env = make(name)
    cone = None
    if name == "Ant":  # its frames of friction differ, which an elliptic cone does not feel
        env = make(name, cone="elliptic")
        cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    worlds = Worlds(env.gymnasium_id, 3, cone=cone)
    root = env.reset()
    np.testing.assert_allclose(root["observation"], worlds.start(env.state_qpos, env.state_qvel), rtol=1e-4, atol=1e-5)
    errors, speeds = [], []
    for _ in range(12):
        root["action"] = env.action_spec.rand()
        worlds.set(env.state_qpos, env.state_qvel)
        stepped, root = env.step_and_maybe_reset(root)
        observation, reward, terminated = worlds.step(stepped["action"])
        following = stepped["next"]
        np.testing.assert_allclose(following["reward"][:, 0], reward, rtol=1e-3, atol=5e-3)
        assert following["terminated"][:, 0].tolist() == terminated.tolist()
        errors.append(np.abs(following["observation"].numpy() - observation))
        alive = ~following["done"][:, 0]
        speeds.append((env.state_qvel - worlds.quantities(["qvel"])["qvel"])[alive].abs())
        if following["done"].any():
            worlds.start(env.state_qpos, env.state_qvel)
    assert np.median(errors) < 1e-4
    assert torch.cat(speeds).quantile(0.99) < (1e-3 if name in PLANAR else 5e-2)
    assert env.faults() == {}


@pytest.mark.parametrize("name", ["HalfCheetah", "Hopper", "Swimmer", "Humanoid", "Reacher", "Pusher"])
def test_initial_states_have_gymnasiums_distribution(name):
    env = make(name, 128)
    torch.manual_seed(1)
    poses = [torch.cat(env.draw_pose(), -1) for _ in range(8)]
    ours = torch.cat(poses).double()
    twin = gymnasium.make(env.gymnasium_id).unwrapped
    rows = []
    for seed in range(1024):
        twin.reset(seed=seed if seed == 0 else None)
        rows.append(np.concatenate([twin.data.qpos, twin.data.qvel]))
    theirs = torch.as_tensor(np.stack(rows))
    spread = theirs.std(0)
    # five standard errors of a difference of means, and of deviations
    assert ((ours.mean(0) - theirs.mean(0)).abs() <= 5 * spread * (2 / 1024) ** 0.5 + 1e-6).all()
    assert ((ours.std(0) - spread).abs() <= 5 * spread / 1024**0.5 + 1e-6).all()
    reach = (theirs - theirs.mean(0)).abs().amax(0)
    assert ((ours - theirs.mean(0)).abs().amax(0) <= 1.6 * reach + 1e-6).all()


def test_the_goal_of_the_pusher_is_never_near_the_cylinder():
    env = make("Pusher", 128)
    for _ in range(8):
        place = env.draw_pose()[0][:, -4:-2]
        assert (place.norm(dim=-1) > 0.17).all()


@pytest.mark.parametrize("name", ["Humanoid", "Reacher"])
def test_specs(name):
    check_env_specs(make(name, 2))


@pytest.mark.parametrize("name", ["Hopper", "Ant"])
def test_actions_beyond_the_range_count_as_its_ends(name):
    one, other = make(name), make(name)
    root, twin = one.reset(), other.reset()
    for key, value in one.state_dict().items():
        other.state_dict()[key].copy_(value)
    root["action"] = torch.full_like(one.action_spec.zero(), 7.0)
    twin["action"] = one.action_spec.space.high.clone()
    assert torch.equal(one.step(root)["next", "reward"], other.step(twin)["next", "reward"])
