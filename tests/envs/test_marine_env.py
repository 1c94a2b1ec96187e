"""MarineNavigation: specs, episodes, robots that are gone, curriculum, layouts, the scripted controller, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.envs import check_env_specs

from torchrl_perf.envs import Curriculum, MarineNavigation, scenario_set, scripted_action

QUIET = {"observation_noise": False}
SMALL = Curriculum.fixed(3, 1, 1, 20.0)


def empty_worlds(bearings, distance=40.0):
    """Layouts of one robot that heads north, its goal at these bearings."""
    count = len(bearings)
    layout = scenario_set(0, count, robots=1, obstacles=0, distance=0.0)
    goal = torch.stack((bearings.cos(), bearings.sin()), -1) * distance
    return {**layout, "position": torch.zeros(count, 1, 2), "goal": goal.unsqueeze(1), "heading": torch.zeros(count, 1)}


def at(layout, **entries):
    """The layout with given entries, broadcast over the worlds."""
    changed = {name: torch.tensor(value).expand_as(layout[name]).clone() for name, value in entries.items()}
    return {**layout, **changed}


def play(env, td, steps, policy=scripted_action):
    """Step TensorDicts and the last root."""
    log = []
    for _ in range(steps):
        td["agents", "action"] = policy(env)
        td, root = env.step_and_maybe_reset(td)
        log.append(td.clone())
        td = root
    return log, td


def drift(env):
    return torch.zeros(env.num_envs, env.max_robots, 2, device=env.device)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("action", ["continuous", "discrete"])
def test_specs_pass_torchrl_check(action, num_envs, device):
    env = MarineNavigation(num_envs, action=action, device=device, curriculum=SMALL, max_episode_steps=4)
    check_env_specs(env)
    spec = env.full_action_spec["agents", "action"]
    assert spec.shape == ((num_envs, 3, 2) if action == "continuous" else (num_envs, 3))
    assert env.full_observation_spec["agents", "observation"].shape == (num_envs, 3, 37)
    assert env.reward_key == ("agents", "reward")
    assert env.group_map == {"agents": ["robot_0", "robot_1", "robot_2"]}


def test_scripted_controller_in_an_empty_world():
    bearings = (torch.arange(40) + 0.5) * (2 * math.pi / 40)
    env = MarineNavigation(40, curriculum=Curriculum.fixed(1, 0, 0), **QUIET)
    log, _ = play(env, env.load_layout(empty_worlds(bearings)), 45)
    total, steps, running = torch.zeros(40), torch.zeros(40), torch.ones(40, dtype=torch.bool)
    for td in log:
        total += td["next", "agents", "reward"].flatten() * running
        steps += running
        assert not (td["next", "agents", "event"].flatten().eq(2) & running).any()
        running &= td["next", "agents", "event"].flatten().eq(0)
    assert not running.any()
    assert steps.min() >= 30 and steps.max() <= 38
    assert steps.mean().item() == pytest.approx(34, abs=0.6)
    assert total.mean().item() == pytest.approx(45.3, abs=0.4)


def test_discrete_actions_are_the_continuous_ones_left_major():
    worlds = scenario_set(1, 25, robots=1, obstacles=0)
    one = MarineNavigation(25, curriculum=Curriculum.fixed(1, 0, 0), **QUIET)
    other = MarineNavigation(25, action="discrete", curriculum=Curriculum.fixed(1, 0, 0), **QUIET)
    levels = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])
    both = torch.cartesian_prod(levels, levels).unsqueeze(1)
    td = one.step(one.load_layout(worlds).set(("agents", "action"), both))
    assert torch.equal(one.snapshot()["thrust"], (both * 500).clamp(-500, 1000))
    same = other.step(other.load_layout(worlds).set(("agents", "action"), torch.arange(25).view(25, 1)))
    assert torch.equal(td["next", "agents", "observation"], same["next", "agents", "observation"])


def test_actions_and_thrusts_are_clipped():
    env = MarineNavigation(2, curriculum=SMALL, **QUIET)
    td = env.reset()
    for _ in range(4):
        td["agents", "action"] = torch.tensor([9.0, -9.0]).expand(2, 3, 2)
        _, td = env.step_and_maybe_reset(td)
    assert torch.equal(env.snapshot()["thrust"], torch.tensor([1000.0, -500.0]).expand(2, 3, 2))


def test_a_robot_that_is_gone_vanishes():
    # 0 arrives at once and rests 6 m from 1, and in the way of 2, which goes through it
    layout = at(
        scenario_set(0, 1, robots=3, obstacles=0, distance=0.0),
        position=[[[0.0, 0.0], [0.0, 7.0], [-7.0, 0.0]]],
        goal=[[[1.0, 0.0], [0.0, 90.0], [90.0, 0.0]]],
        heading=[[0.0, math.pi / 2, 0.0]],
    )
    env = MarineNavigation(1, curriculum=Curriculum.fixed(3, 0, 0, 0.0), **QUIET)
    root = env.load_layout(layout)
    flags = MarineNavigation.split_observation(root["agents", "observation"])[2]
    assert flags[0].sum(-1).tolist() == [2, 2, 2]
    log, root = play(env, root, 8)
    first = log[0]["next", "agents"]
    assert first["event"][0, :, 0].tolist() == [1, 0, 0]
    assert first["terminated"][0, :, 0].tolist() == [True, False, False]
    assert first["reward"][0, 0] > 9.5
    flags = MarineNavigation.split_observation(first["observation"])[2]
    assert flags[0].sum(-1).tolist() == [2, 1, 1]
    for td in log[1:]:
        assert td["agents", "active"][0, :, 0].tolist() == [False, True, True]
        nxt = td["next", "agents"]
        assert nxt["done"][0, :, 0].tolist() == [True, False, False]
        assert nxt["terminated"][0, 0] and not nxt["truncated"][0, 0]
        assert nxt["event"][0, :, 0].tolist() == [0, 0, 0]
        assert nxt["reward"][0, 0] == nxt["colregs"][0, 0] == 0
        assert torch.equal(nxt["observation"][0, 0, :7], first["observation"][0, 0, :7])
    assert env.snapshot()["position"][0, 2, 0] > 0  # through the one that is gone


def test_robots_that_touch_both_collide_and_the_env_ends_with_the_last():
    layout = at(
        scenario_set(0, 1, robots=2, obstacles=0, distance=0.0),
        position=[[[0.0, 0.0], [5.6, 0.0]]],
        goal=[[[90.0, 0.0], [-90.0, 0.0]]],
        heading=[[0.0, math.pi]],
    )
    env = MarineNavigation(1, curriculum=Curriculum.fixed(2, 0, 0, 10.0), **QUIET)
    log, root = play(env, env.load_layout(layout), 1)
    nxt = log[0]["next"]
    assert nxt["agents", "event"].flatten().tolist() == [2, 2]
    assert (nxt["agents", "reward"] < -4.5).all()
    assert nxt["done"].all() and nxt["terminated"].all() and not nxt["truncated"].any()
    assert root["is_init"].all() and root["agents", "active"].all()
    assert not root["agents", "event"].any()
    assert env.elapsed.item() == 0


def test_time_limit_truncates_the_robots_that_are_left():
    layout = empty_worlds(torch.zeros(3), distance=60.0)
    layout["goal"][0] = 1.0  # arrives at once
    env = MarineNavigation(3, curriculum=Curriculum.fixed(1, 0, 0), max_episode_steps=2, **QUIET)
    log, _ = play(env, env.load_layout(layout), 2, drift)
    assert log[0]["next", "terminated"].flatten().tolist() == [True, False, False]
    assert log[0]["next", "agents", "truncated"].sum() == 0
    assert log[1]["next", "truncated"].flatten().tolist() == [False, True, True]
    assert not log[1]["next", "terminated"].any()
    assert log[1]["next", "agents", "truncated"].flatten().tolist() == [False, True, True]
    assert not log[1]["next", "agents", "terminated"].any()


def test_terminal_transitions_are_all_kept():
    env = MarineNavigation(16, curriculum=Curriculum.fixed(4, 2, 0, 15.0), max_episode_steps=40, seed=0)
    log, _ = play(env, env.reset(), 80)
    events = sum((td["next", "agents", "event"] > 0).sum() for td in log)
    ended = sum((td["agents", "active"] & td["next", "agents", "terminated"]).sum() for td in log)
    assert events == ended > 60
    assert not any((td["next", "agents", "event"] > 0)[~td["agents", "active"]].any() for td in log)
    assert not any(td["agents", "done"].any() for td in log)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([0.0, 1e-4, 1.0, 10.0, 1e3]),
    speed=st.sampled_from([0.0, 0.5, 4.0, 12.0]),
    size=st.sampled_from([0.0, 1.0, 1e6]),
    action=st.sampled_from(["continuous", "discrete"]),
)
def test_no_state_gives_nan(seed, spread, speed, size, action):
    env = MarineNavigation(8, action=action, curriculum=Curriculum.fixed(4, 2, 3, 10.0), seed=seed)
    env.state_position.copy_((torch.rand(8, 4, 2) - 0.5) * spread)
    env.state_goal.copy_((torch.rand(8, 4, 2) - 0.5) * spread)
    env.state_obstacles[..., :2] = (torch.rand(8, 2, 2) - 0.5) * spread
    env.state_cores[..., :2] = env.state_position[:, :3]
    env.state_velocity.copy_((torch.rand(8, 4, 3) - 0.5) * 2 * speed)
    env.state_ground.copy_(env.state_velocity[..., :2])
    env.state_active.copy_(torch.rand(8, 4) < 0.8)
    td = env._root(env._state())
    for _ in range(3):
        if action == "discrete":
            td["agents", "action"] = torch.randint(25, (8, 4))
        else:
            td["agents", "action"] = torch.randn(8, 4, 2) * size
        td, root = env.step_and_maybe_reset(td)
        for key, value in td.items(True, True):
            assert value.isfinite().all(), key
        for name, value in env._state().items():
            assert value.isfinite().all(), name
        td = root


def test_curriculum_applies_at_resets_without_reallocation(tmp_path):
    stages = Curriculum((0, 20, 40), (1, 3, 2), (0, 1, 2), (0, 0, 1), (10.0, 12.0, 14.0))
    env = MarineNavigation(4, curriculum=stages, max_episode_steps=7, seed=0)
    pointers = {name: buffer.data_ptr() for name, buffer in env.named_buffers()}
    td, seen = env.reset(), []
    for step in range(1, 22):
        td["agents", "action"] = drift(env)
        td, root = env.step_and_maybe_reset(td)
        assert env.frames == 4 * step
        if td["next", "done"].all():
            assert root["is_init"].all()
            state = env.snapshot()
            seen.append((state["active"].sum(1), state["num_obstacles"], state["num_cores"], state["cores"][..., 3]))
        td = root
    # resets at frames 28, 56 and 84, or a step or two earlier for a robot that drifted into its goal
    assert [int(active[0]) for active, *_ in seen[:2]] == [3, 2]
    assert [int(obstacles[0]) for _, obstacles, *_ in seen[:2]] == [1, 2]
    assert [int(cores[0]) for _, _, cores, _ in seen[:2]] == [0, 1]
    assert (seen[0][3] == 0).all() and (seen[1][3] > 0).all()
    assert env.stage == 2
    assert pointers == {name: buffer.data_ptr() for name, buffer in env.named_buffers()}
    torch.save(env.state_dict(), tmp_path / "env.pt")
    other = MarineNavigation(4, curriculum=stages, max_episode_steps=7, seed=5)
    assert other.stage == 0
    other.load_state_dict(torch.load(tmp_path / "env.pt", weights_only=True))
    assert (other.stage, other.frames) == (2, 84)
    other._reset(None)
    assert other.snapshot()["active"].sum(1).tolist() == [2] * 4


def test_rooms_for_more_than_the_stage_has():
    env = MarineNavigation(3, curriculum=Curriculum.fixed(2, 1, 0, 20.0), max_robots=4, max_obstacles=3, max_cores=2)
    td, _ = env.step_and_maybe_reset(env.rand_action(env.reset()))
    assert td["agents", "active"].squeeze(-1).tolist() == [[True, True, False, False]] * 3
    assert td["next", "agents", "done"].squeeze(-1).tolist() == [[False, False, True, True]] * 3
    assert env.snapshot()["obstacles"].shape == (3, 3, 3)
    without = MarineNavigation(2, curriculum=Curriculum.fixed(1, 0, 0), max_obstacles=0)
    check_env_specs(without)


def test_fresh_layouts_are_shared_in_turns_only_beyond_their_number():
    env = MarineNavigation(24, curriculum=Curriculum.fixed(2, 0, 0), fresh_layouts=8, max_episode_steps=1, seed=0)
    play(env, env.reset(), 1, drift)
    start = env.snapshot()["position"]
    assert torch.equal(start[:8], start[8:16]) and torch.equal(start[:8], start[16:])
    assert len(start[:8].reshape(8, 4).unique(dim=0)) == 8
    env.reset()
    assert len(env.snapshot()["position"].reshape(24, 4).unique(dim=0)) == 24


def test_layouts_start_all_rows():
    env = MarineNavigation(5, curriculum=SMALL, max_robots=5, max_obstacles=4, max_cores=2, seed=0, device="cpu")
    play(env, env.reset(), 3, drift)
    root = env.load_layout(scenario_set(1, 5, robots=2, obstacles=1, cores=1, distance=20.0))
    state = env.snapshot()
    assert state["active"].tolist() == [[True, True, False, False, False]] * 5
    assert state["num_obstacles"].tolist() == state["num_cores"].tolist() == [1] * 5
    assert root["is_init"].all() and not env.elapsed.any()
    assert torch.equal(root["agents", "observation"], env.observe(env._state())["agents", "observation"])
    pointers = {buffer.data_ptr() for buffer in env.buffers()}
    assert not pointers & {value.data_ptr() for value in state.values()}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"goal": None}, KeyError, "expected the entries .*add \\['goal'\\]"),
        ({"position": torch.zeros(2, 4, 2)}, ValueError, r"'position' \[2, up to 3, ...\], received \[2, 4, 2\]"),
        ({"heading": torch.zeros(3, 2)}, ValueError, r"'heading' \[2, up to 3"),
        ({"obstacles": torch.zeros(2, 1, 3), "position": torch.zeros(2, 3, 2)}, ValueError, "starts free of obstacles"),
    ],
)
def test_bad_layouts_are_named(change, error, words):
    env = MarineNavigation(2, curriculum=SMALL)
    layout = {**scenario_set(0, 2, robots=3, obstacles=1, cores=1, distance=20.0), **change}
    layout = {name: value for name, value in layout.items() if value is not None}
    with pytest.raises(error, match=words):
        env.load_layout(layout)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_robots": 4}, ValueError, "at most max_robots=4 robots, received one with 5. Remedy: raise max_robots"),
        ({"max_obstacles": 3}, ValueError, "at most max_obstacles=3 obstacles, received one with 4"),
        (
            {"curriculum": Curriculum.fixed(5, 60, 0)},
            ValueError,
            "hold stage 0 .*obstacles=60.*leave every robot a free",
        ),
        ({"curriculum": Curriculum.fixed(12, 0, 0)}, ValueError, "take fewer robots or obstacles"),
        ({"curriculum": Curriculum.fixed(1, 0, 0, 80.0)}, ValueError, "0% of 32 trials"),
        ({"action": "hybrid"}, ValueError, "'continuous' or 'discrete', received 'hybrid'"),
        ({"max_robot": 4}, TypeError, r"received \['max_robot'\]"),
        ({"candidates": 0}, ValueError, "candidates >= 1"),
        ({"fresh_layouts": 0}, ValueError, "fresh_layouts >= 1"),
        ({"max_cores": -1}, ValueError, "max_cores >= 0"),
        ({"dtype": torch.float16}, TypeError, "float16"),
    ],
)
def test_bad_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        MarineNavigation(2, **arguments)


@pytest.mark.parametrize(
    ("kind", "action", "words"),
    [
        (
            "continuous",
            torch.zeros(2, 3, dtype=torch.int64),
            r"\('agents', 'action'\) \(2, 3, 2\) of floats, received \(2, 3\)",
        ),
        ("discrete", torch.zeros(2, 3, 2), r"\(2, 3\) of integer indices, received \(2, 3, 2\) .*not one-hot"),
    ],
)
def test_an_agent_that_does_not_fit_the_action_type(kind, action, words):
    env = MarineNavigation(2, action=kind, curriculum=SMALL)
    with pytest.raises(ValueError, match=words):
        env.step(env.reset().set(("agents", "action"), action))
