"""Gymnasium's MuJoCo tasks on MuJoCo Warp against Gymnasium's own."""

import importlib
import inspect

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


UNREAD = {"HumanoidStandup": {"uph_cost_weight"}}  # Gymnasium's env takes it, and its reward does not read it
WINDOWS = {"width", "height", "camera_id", "camera_name", "default_camera_config"}


@pytest.mark.parametrize("name", ROBOTS)
def test_arguments_and_their_defaults_are_gymnasiums(name):
    module, kind = gymnasium.spec(f"{name}-v5").entry_point.split(":")
    theirs = inspect.signature(getattr(importlib.import_module(module), kind).__init__).parameters
    left_out = {"self", "kwargs", *WINDOWS, *UNREAD.get(name, ())}
    usual = {each.name: each.default for each in theirs.values() if each.name not in left_out}
    kind = getattr(robots, name)
    assert {**kind.usual, "xml_file": kind.model_file} == usual


OTHERS = {
    "HalfCheetah": {"frame_skip": 3, "forward_reward_weight": 2.0, "ctrl_cost_weight": 0.7},
    "Hopper": {"healthy_reward": 3.0, "healthy_z_range": (1.2, 1.26), "healthy_state_range": (-1.0, 1.5)},
    "Walker2d": {"terminate_when_unhealthy": False, "healthy_angle_range": (-0.03, 0.1), "ctrl_cost_weight": 0.4},
    "Ant": {
        "main_body": "front_left_leg",
        "contact_force_range": (-0.3, 0.2),
        "contact_cost_weight": 2.0,
        "healthy_z_range": (0.3, 0.8),
        "include_cfrc_ext_in_observation": False,
    },
    "Humanoid": {
        "contact_cost_weight": 1e-3,
        "contact_cost_range": (1.0, 30.0),
        "healthy_z_range": (1.25, 1.41),
        "include_cinert_in_observation": False,
        "include_qfrc_actuator_in_observation": False,
    },
    "HumanoidStandup": {
        "impact_cost_weight": 1e-4,
        "impact_cost_range": (2.0, 3.0),
        "include_cvel_in_observation": False,
        "include_cfrc_ext_in_observation": False,
    },
    "Swimmer": {"frame_skip": 1, "ctrl_cost_weight": 0.5},
    "Reacher": {"reward_dist_weight": 3, "reward_control_weight": 0.2},
    "Pusher": {"reward_near_weight": 2.0, "reward_dist_weight": 0.3, "reward_control_weight": 0.7},
    "InvertedPendulum": {"reset_noise_scale": 0.15, "frame_skip": 5},
    "InvertedDoublePendulum": {"healthy_reward": 3.0, "reset_noise_scale": 0.3},
}


@pytest.mark.parametrize("others", [False, True], ids=["usual", "other arguments"])
@pytest.mark.parametrize("name", ROBOTS)
def test_observations_rewards_and_ends_are_gymnasiums_of_the_same_quantities(name, others):
    """The functions of a task, apart from physics: they read what MuJoCo's C code has computed."""
    arguments = OTHERS[name] if others else {}
    if others and "exclude_current_positions_from_observation" in getattr(robots, name).usual:
        arguments = {**arguments, "exclude_current_positions_from_observation": False}
    env = make(name, 2, **arguments)
    assert env.arguments_in_c() == arguments
    worlds = Worlds(env.gymnasium_id, 2, **arguments)
    names = ("qpos", "qvel", *env.observed_quantities)
    worlds.start(env.state_qpos, env.state_qvel)
    before = worlds.quantities(names)
    ends = 0
    for _ in range(40):
        action = env.action_spec.rand()
        observation, reward, terminated = worlds.step(action)
        after = worlds.quantities(names)
        np.testing.assert_allclose(env.features(after), observation, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(env.reward(before, action, after), reward, rtol=1e-4, atol=1e-3)
        assert env.is_terminated(after).tolist() == terminated.tolist()
        ends += int(terminated.sum())
        before = after
    assert env.rollout(2)["next", "observation"].shape[-1] == observation.shape[-1]
    if others and name in ("Hopper", "Ant", "Humanoid"):
        assert 0 < ends < 80, "of both kinds"


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"uph_cost_weight": 2.0}, TypeError, "uph_cost_weight"),
        ({"healthy_reward": True}, ValueError, "healthy_reward to be a number, received True"),
        ({"healthy_reward": float("nan")}, ValueError, "healthy_reward to be a number"),
        ({"healthy_z_range": (2.0, 1.0)}, ValueError, "healthy_z_range to be two numbers, the smaller one first"),
        ({"healthy_z_range": 1.0}, ValueError, "healthy_z_range to be two numbers"),
        ({"terminate_when_unhealthy": 1}, ValueError, "terminate_when_unhealthy to be True or False, received 1"),
        ({"reset_noise_scale": 0.1, "reset_noise": 0.2}, TypeError, "received both"),
        ({"xml_file": "nothing.xml"}, FileNotFoundError, "expected one of .*hopper.xml.*received 'nothing.xml'"),
        ({"reward": lambda before, action, after: after["qpos"][:, 0]}, TypeError, "own method reward is what counts"),
        ({"observe": lambda state: state["qpos"]}, TypeError, "own method features is what counts"),
        ({"terminated": lambda state: state["qpos"][:, 0] > 0}, TypeError, "own method is_terminated is what counts"),
        ({"observed": "xpos"}, ValueError, "observed: expected a sequence of names"),
    ],
)
def test_arguments_of_other_kinds_are_refused(settings, error, words):
    with pytest.raises(error, match=words) as caught:
        make("Hopper", 1, **settings)
    assert "Remedy: " in str(caught.value)


def test_what_a_subclass_observes_is_beside_what_its_task_does():
    class Further(robots.Ant):
        def features(self, state):
            return torch.cat([super().features(state), state["subtree_com"][:, 1]], -1)

    env = Further(2, device="cpu", observed=("subtree_com",))
    assert env.reset()["observation"].shape == (2, 108)


@pytest.mark.parametrize("name", ROBOTS)
def test_noise_of_the_start_is_taken_by_each_task(name):
    spread = make(name, 2, reset_noise=0.0).draw_pose()[0][:, :2].std(0).max()
    assert make(name, 64, reset_noise=0.2).draw_pose()[0][:, :2].std(0).min() > 0.05 > spread


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


@pytest.mark.parametrize("name", ROBOTS)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ROBOTS)
def test_a_compiler_sees_a_step_whole(name):
    torch.compiler.reset()  # the tasks share the code of their base
    env = make(name, 2)
    root = env.rand_action(env.reset())
    expected = env.step_and_maybe_reset(root.clone())
    again = make(name, 2)
    again.reset()
    found = torch.compile(again.step_and_maybe_reset, backend="eager", fullgraph=True)(root.clone())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.exclude("action"), other.exclude("action"))


@pytest.mark.parametrize("body", ["leg", 99, -3])
def test_a_body_that_is_not_there_is_named(body):
    with pytest.raises(ValueError, match=r"main_body to be one of world, torso, front_left_leg, aux_1, front_right"):
        make("Ant", 2, main_body=body)
