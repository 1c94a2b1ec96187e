"""What MarineNavigation owes to captured, batched and resumed runs."""

import pytest
import torch

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import Curriculum, MarineNavigation, scenario_set
from torchrl_perf.envs.marine.colregs import turn_angle
from torchrl_perf.envs.marine.sensing import observe_objects
from torchrl_perf.envs.marine.vehicle import drive
from torchrl_perf.runtime import capture, host_syncs
from torchrl_perf.runtime.compile import compiled

SMALL = Curriculum.fixed(2, 1, 1, 15.0)


def assert_close(left, right, **tolerance):
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        torch.testing.assert_close(left[key], right[key], **tolerance)


@pytest.mark.parametrize("action", ["continuous", "discrete"])
def test_no_host_reads_with_and_without_ends(action):
    for limit in (1, 50):
        env = MarineNavigation(6, action=action, curriculum=SMALL, max_episode_steps=limit, fresh_layouts=2)
        td = env.rand_action(env.reset())
        chosen, mask = td["agents", "action"].clone(), torch.tensor([[True], [False]] * 3)
        with host_syncs("cpu") as report:
            for _ in range(3):
                _, td = env.step_and_maybe_reset(td.set(("agents", "action"), chosen))
            env._reset(td.set("_reset", mask))
            env._reset(None)
        assert report.total == 0, str(report)


@pytest.mark.gpu
def test_no_synchronisation_on_cuda():
    env = MarineNavigation(64, curriculum=SMALL, max_episode_steps=2, device="cuda")
    td = env.rand_action(env.reset())
    chosen, mask = td["agents", "action"].clone(), torch.arange(64, device="cuda").view(64, 1) % 2 == 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            _, td = env.step_and_maybe_reset(td.set(("agents", "action"), chosen))
        env._reset(td.set("_reset", mask))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_env_equals_its_row_of_a_thousand(device):
    curriculum = Curriculum.fixed(3, 2, 2, 20.0)
    layout = scenario_set(0, 1000, robots=3, obstacles=2, cores=2, distance=20.0)
    layout["position"] *= 0.6  # so that something happens
    options = {"curriculum": curriculum, "observation_noise": False, "device": device, "max_episode_steps": None}
    layout["obstacles"][..., 0] += 60.0
    many, one = MarineNavigation(1000, **options), MarineNavigation(1, **options)
    td = many.load_layout(layout)
    actions = [(torch.rand(1000, 3, 2) * 2 - 0.7).to(device) for _ in range(25)]
    steps = []
    for action in actions:
        td, root = many.step_and_maybe_reset(td.set(("agents", "action"), action))
        steps.append(td)
        td = root
    for row in (0, 7, 500, 999):
        single = one.load_layout({name: value[row : row + 1] for name, value in layout.items()})
        for action, step in zip(actions, steps, strict=True):
            single, root = one.step_and_maybe_reset(single.set(("agents", "action"), action[row : row + 1]))
            for key in ("observation", "reward", "event", "colregs", "active", "done"):
                ours, theirs = single["next", "agents", key][0], step["next", "agents", key][row]
                if device.type == "cpu":
                    assert torch.equal(ours, theirs), (key, row)
                else:
                    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            if step["next", "done"][row]:
                break
            single = root


def episodes(step, env, steps=8):
    """The log of a run under one seed; ``step`` is the env's, in any form."""
    env.set_seed(0)
    td, log = env._reset(None), []
    actions = torch.linspace(-1, 1, steps * env.num_envs * env.max_robots * 2).view(steps, env.num_envs, -1, 2)
    for action in actions:
        td, root = step(td.set(("agents", "action"), action))
        log.append(td.clone())
        td = root
    return torch.stack(log)


@pytest.mark.slow  # the same step is traced below a collector in `test_modes_agree`
@pytest.mark.usefixtures("fresh_dynamo")
def test_traced_whole_equals_eager_and_compiles_once():
    options = {"curriculum": SMALL, "max_episode_steps": 5, "fresh_layouts": 2, "candidates": 32}
    eager, traced = MarineNavigation(4, **options), MarineNavigation(4, **options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        step = compiled(traced.step_and_maybe_reset, backend="aot_eager")
        ours = episodes(step, traced)
    theirs = episodes(eager.step_and_maybe_reset, eager)
    assert theirs["next", "done"].any() and not theirs["next", "done"].all()
    assert_close(ours, theirs, rtol=0, atol=0)
    for name, value in eager._state().items():
        assert torch.equal(value, traced._state()[name]), name
    assert eager.frames == traced.frames == 32


@pytest.mark.slow_compiled
def test_parts_agree_in_all_forms(variant):
    """Motion, perception and rules compiled by themselves: the whole step takes the compiler a minute."""
    device, (rows, robots, blocks) = variant.device, (5, 2, 2)
    position = torch.rand(rows, robots, 2, device=device) * 20
    heading = torch.rand(rows, robots, device=device) * 6 - 3
    velocity, thrust = torch.randn(rows, robots, 3, device=device), torch.rand(rows, robots, 2, device=device) * 1000
    cores = torch.rand(rows, 1, 4, device=device) * 10
    obstacles = torch.rand(rows, blocks, 3, device=device) * 20
    active, exists = position[..., 0] > 3, obstacles[..., 0] > 5
    noise = torch.rand(rows, robots, robots + blocks, 5, device=device)

    def parts(position, heading, velocity, thrust):
        place, course, speed = drive(position, heading, velocity, thrust, cores, substeps=1)
        seen = observe_objects(place, course, speed[..., :2], active, obstacles, exists, noise)
        return place, course, speed, seen, turn_angle(place, speed[..., :2], active)

    args, run = (position, heading, velocity, thrust), variant(parts)
    for _ in range(4):  # a graph is recorded in the third call
        result = run(*args)
    for ours, theirs in zip(result, parts(*args), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("compile_it", [False, True])
def test_a_captured_step_equals_eager_between_resets(compile_it, fresh_dynamo):
    options = {"curriculum": Curriculum.fixed(4, 2, 2, 15.0), "observation_noise": False, "device": "cuda"}
    env, other = MarineNavigation(64, max_episode_steps=30, **options), MarineNavigation(64, **options)
    action = torch.rand(64, 4, 2, device="cuda") * 2 - 0.7
    root = env.reset().set(("agents", "action"), action)
    step = capture(lambda td: env.step_and_maybe_reset(td)[0].get("next"), compile=compile_it)
    ends = 0
    for _ in range(80):
        other.load_state_dict(env.state_dict())
        expected = other.step(root.clone())["next"]
        nxt = step(root)
        ends += int(nxt["done"].sum())
        assert torch.equal(nxt["agents", "event"], expected["agents", "event"])
        for key in ("observation", "reward", "colregs"):
            torch.testing.assert_close(nxt["agents", key], expected["agents", key], rtol=1e-4, atol=1e-4)
        going = ~nxt["done"].squeeze(-1)
        for name, value in env._state().items():
            torch.testing.assert_close(value[going], other._state()[name][going], rtol=1e-4, atol=1e-4)
        assert (env._state()["active"].any(-1)).all()
    assert ends > 64
    assert env.frames == 80 * 64


def test_seed_gives_the_same_data_twice(device):
    env = MarineNavigation(3, curriculum=SMALL, max_episode_steps=4, device=device)
    action = torch.zeros(3, 2, 2, device=device)

    def data(seed):
        env.set_seed(seed)
        td, log = env._reset(None), []
        for _ in range(6):
            td, root = env.step_and_maybe_reset(td.set(("agents", "action"), action))
            log.append(td.clone())
            td = root
        return torch.stack(log)

    first = data(11)
    assert_close(first, data(11), rtol=0, atol=0)
    assert not torch.equal(first["agents", "observation"], data(12)["agents", "observation"])


def test_state_dict_resumes_bitwise(tmp_path):
    options = {"curriculum": SMALL, "max_episode_steps": 6}
    env = MarineNavigation(4, seed=0, **options)
    episodes(env.step_and_maybe_reset, env, 4)
    torch.save(env.state_dict(), tmp_path / "env.pt")
    other = MarineNavigation(4, seed=9, **options)
    other.load_state_dict(torch.load(tmp_path / "env.pt", weights_only=True))
    logs = []
    for each in (env, other):
        each.set_seed(2)
        td, log = each._root(each._state()), []
        for _ in range(9):
            td, root = each.step_and_maybe_reset(td.set(("agents", "action"), torch.full((4, 2, 2), 0.4)))
            log.append(td.clone())
            td = root
        logs.append(torch.stack(log))
    assert_close(*logs, rtol=0, atol=0)


def test_in_the_device_collector():
    env = MarineNavigation(6, curriculum=SMALL, max_episode_steps=7, seed=0)
    data = DeviceCollector(env, None, frames_per_batch=120, mode="eager").collect()
    assert data.batch_size == (6, 20)
    done = data["next", "done"]
    assert done.any()
    assert torch.equal(data["is_init"][:, 1:], done[:, :-1])
    same = (data["agents", "observation"][:, 1:] == data["next", "agents", "observation"][:, :-1]).flatten(2).all(-1)
    assert torch.equal(same, ~done[:, :-1].squeeze(-1))
    active = data["agents", "active"]
    assert torch.equal(data["next", "agents", "event"] > 0, active & data["next", "agents", "terminated"])
