"""MarineNavigation against the same equations written for one world in Python floats."""

import math

import pytest
import torch
from marine_twin import Robot, World, water

from torchrl_perf.envs import Curriculum, MarineNavigation, scenario_set, scripted_action
from torchrl_perf.envs.marine.colregs import turn_angle
from torchrl_perf.envs.marine.currents import CORE_STRENGTH, current


def worlds_of(layout):
    """A twin for each world of a layout."""
    worlds = []
    for row in range(layout["heading"].shape[0]):
        parts = (layout[name][row].tolist() for name in ("position", "heading", "goal"))
        robots = [Robot(*position, heading, goal) for position, heading, goal in zip(*parts, strict=True)]
        worlds.append(World(robots, layout["obstacles"][row].tolist(), layout["cores"][row].tolist()))
    return worlds


def crowded(seed, scale, rows=12):
    """Layouts in which much happens: short ways, robots under way to each other, obstacles and vortices."""
    layout = scenario_set(seed, rows, robots=4, obstacles=2, cores=3, distance=12.0)
    layout["position"] = layout["position"] * scale
    layout["goal"] = layout["goal"] * scale
    layout["obstacles"][..., :2] += 2.0
    gap = (layout["position"].unsqueeze(2) - layout["obstacles"][..., :2].unsqueeze(1)).norm(dim=-1)
    layout["obstacles"][..., 0] += (gap.amin(1) < 5.0) * 200.0  # out of the way
    return {name: value.double() if value.is_floating_point() else value for name, value in layout.items()}


@pytest.mark.parametrize("policy", ["random", "scripted"])
@pytest.mark.parametrize("seed", [0, 1])
def test_whole_episodes_equal_the_twin(policy, seed):
    layout = crowded(seed, scale=0.5 if policy == "random" else 1.0)
    env = MarineNavigation(
        12,
        curriculum=Curriculum.fixed(4, 2, 3, 12.0),
        observation_noise=False,
        max_episode_steps=None,
        dtype=torch.float64,
    )
    td, worlds = env.load_layout(layout), worlds_of(layout)
    counts, turned, running = torch.zeros(3), 0, [True] * 12
    for _ in range(60):
        action = scripted_action(env) if policy == "scripted" else torch.rand(12, 4, 2, dtype=torch.float64) * 2 - 0.8
        td["agents", "action"] = action
        td, root = env.step_and_maybe_reset(td)
        nxt = td["next", "agents"]
        for row, world in enumerate(worlds):
            if not running[row]:
                continue
            results = world.step(action[row].clamp(-1, 1).tolist())
            wanted = torch.tensor(results, dtype=torch.float64)
            assert nxt["event"][row, :, 0].tolist() == wanted[:, 1].tolist()
            torch.testing.assert_close(nxt["reward"][row, :, 0], wanted[:, 0], rtol=0, atol=1e-9)
            torch.testing.assert_close(nxt["colregs"][row, :, 0], wanted[:, 2], rtol=0, atol=1e-8)
            seen = torch.tensor([world.observation(i) for i in range(4)], dtype=torch.float64)
            torch.testing.assert_close(nxt["observation"][row], seen, rtol=0, atol=1e-9)
            assert nxt["active"][row, :, 0].tolist() == [robot.active for robot in world.robots]
            counts += torch.bincount(wanted[:, 1].long(), minlength=3)
            turned += int((wanted[:, 2] > 0).sum())
            running[row] = bool(any(robot.active for robot in world.robots))
            assert td["next", "terminated"][row].item() == (not running[row])
        td = root
    assert counts[2] > 5 and turned > 20, (counts, turned)
    assert counts[1] > 5 or policy == "random"


@pytest.mark.parametrize(("distance", "speed"), [(0.25, 1.5), (0.5, 3.0), (1.0, 1.5), (5.0, 0.3)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_vortex_speeds(distance, speed, sign):
    core = torch.tensor([[[2.0, 1.0, sign, CORE_STRENGTH]]], dtype=torch.float64)
    for angle in (0.0, 1.0, 2.5):
        x, y = 2 - distance * math.cos(angle), 1 - distance * math.sin(angle)
        place = torch.tensor([[x, y]], dtype=torch.float64)
        cx, cy = current(place[:, :1], place[:, 1:], core)
        # the way to the core is (cos, sin); turned by +90 degrees it is (-sin, cos)
        assert cx.item() == pytest.approx(-sign * speed * math.sin(angle), abs=1e-12)
        assert cy.item() == pytest.approx(sign * speed * math.cos(angle), abs=1e-12)


def test_currents_add_up_and_are_still_at_the_centre():
    cores = torch.rand(1, 6, 4, dtype=torch.float64) * 10
    cores[..., 2] = torch.tensor([1.0, -1, 1, 1, -1, -1])
    place = torch.cat((torch.rand(1, 20, 2, dtype=torch.float64) * 10, cores[:, :1, :2]), 1)
    cx, cy = current(place[..., 0], place[..., 1], cores)
    for index, (x, y) in enumerate(place[0].tolist()):
        assert [cx[0, index].item(), cy[0, index].item()] == pytest.approx(water(x, y, cores[0].tolist()), abs=1e-9)
    alone = current(cores[:, :1, 0], cores[:, :1, 1], cores[:, :1])
    assert all(part.item() == 0 for part in alone)


def test_turn_angles_equal_the_twin_for_many_random_pairs():
    torch.manual_seed(3)
    rows, robots = 400, 3
    position = torch.rand(rows, robots, 2, dtype=torch.float64) * 24
    ground = (torch.rand(rows, robots, 2, dtype=torch.float64) * 2 - 1) * 3
    ground[:50] *= 0.2
    active = torch.rand(rows, robots) < 0.9
    angles = turn_angle(position, ground, active)
    positive = 0
    for row in range(rows):
        world = World([Robot(*place, 0.0, (0.0, 0.0)) for place in position[row].tolist()])
        for robot, velocity in zip(world.robots, ground[row].tolist(), strict=True):
            robot.nx, robot.ny = velocity
        for index in range(robots):
            wanted = world.turn(index, active[row].tolist()) if active[row, index] else 0.0
            assert angles[row, index].item() == pytest.approx(wanted, abs=1e-9)
            positive += wanted > 0
    assert positive > 50
