"""The pure functions of marine navigation: motion, perception, rules of the road, layouts, curriculum."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.envs.marine import Curriculum, MarineNavigation, Stage, scenario_set
from torchrl_perf.envs.marine.colregs import turn_angle
from torchrl_perf.envs.marine.layouts import Contents, draw_layout, place_pairs, place_points
from torchrl_perf.envs.marine.outcomes import events, reward
from torchrl_perf.envs.marine.sensing import (
    OBJECT_SCALE,
    observe_objects,
    observe_self,
    sensor_noise,
    split_observation,
    von_mises_quantiles,
)
from torchrl_perf.envs.marine.vehicle import VEHICLE_RADIUS, drive

NO_CORES = torch.zeros(1, 0, 4, dtype=torch.float64)


def steady(left, right, steps=200, dtype=torch.float64):
    """Surge, sway and yaw rate after a long time under constant thrust."""
    position, heading, velocity = torch.zeros(1, 1, 2), torch.zeros(1, 1), torch.zeros(1, 1, 3)
    thrust = torch.tensor([[[left, right]]], dtype=dtype)
    state = [value.to(dtype) for value in (position, heading, velocity)]
    for _ in range(steps):
        state = list(drive(*state, thrust, NO_CORES.to(dtype)))
    _, heading, velocity = state
    vx, vy, r = velocity.flatten().tolist()
    c, s = math.cos(heading.item()), math.sin(heading.item())
    return c * vx + s * vy, c * vy - s * vx, r


@pytest.mark.parametrize(
    ("thrust", "expected"),
    [
        ((1000.0, 1000.0), (3.3333, 0.0, 0.0)),
        ((500.0, 500.0), (2.2701, 0.0, 0.0)),
        ((500.0, -500.0), (0.0, 0.0, 0.7419)),
        ((1000.0, 500.0), (2.0095, -1.8773, 0.4860)),
        ((1000.0, -500.0), (0.1831, -0.6224, 0.9815)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steady_states(thrust, expected, dtype):
    assert steady(*thrust, dtype=dtype) == pytest.approx(expected, abs=6e-5 if dtype == torch.float64 else 2e-4)


def test_steady_states_in_closed_form():
    assert steady(1000.0, 1000.0)[0] == pytest.approx((-100 + math.sqrt(100**2 + 4 * 150 * 2000)) / 300, abs=1e-9)
    assert steady(500.0, -500.0)[2] == pytest.approx((-980 + math.sqrt(980**2 + 4 * 950 * 1250)) / 1900, abs=1e-9)


def test_first_substeps_by_hand():
    # From rest 2,000 N of thrust give 2000 / 380 m/s^2; the vehicle moves in the second substep.
    position, heading, velocity = torch.zeros(1, 1, 2), torch.zeros(1, 1), torch.zeros(1, 1, 3)
    thrust = torch.full((1, 1, 2), 1000.0)
    args = [value.double() for value in (position, heading, velocity, thrust)]
    args[1].fill_(math.pi / 2)
    position, _, velocity = drive(*args, NO_CORES, substeps=1)
    assert position.flatten().tolist() == [0, 0]
    assert velocity.flatten().tolist() == pytest.approx([0, 0.05 * 2000 / 380, 0], abs=1e-12)
    position, _, _ = drive(*args, NO_CORES, substeps=2)
    assert position.flatten().tolist() == pytest.approx([0, 0.05 * 0.05 * 2000 / 380], abs=1e-12)


def test_vortices_that_are_not_there_change_nothing():
    torch.manual_seed(0)
    shapes = ((7, 3, 2), (7, 3), (7, 3, 3), (7, 3, 2))
    args = [torch.rand(*shape, dtype=torch.float64) for shape in shapes]
    absent = torch.rand(7, 4, 4, dtype=torch.float64)
    absent[..., 3] = 0.0
    for one, other in zip(drive(*args, NO_CORES.expand(7, 0, 4)), drive(*args, absent), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def scene(places, obstacles=(), active=None):
    """One world of robots at places, heading north and at rest."""
    position = torch.tensor([places])
    robots = position.shape[1]
    blocks = torch.tensor([list(obstacles)]).view(1, -1, 3)
    there = torch.ones(1, robots, dtype=torch.bool) if active is None else torch.tensor([active])
    exists = torch.ones(1, blocks.shape[1], dtype=torch.bool)
    return position, torch.zeros(1, robots), torch.zeros(1, robots, 2), there, blocks, exists


def objects_of(values, robot=0):
    """Objects [5, 5] in metres, and flags [5], of one robot of the first world."""
    _, objects, mask = split_observation(torch.cat((torch.zeros(*values.shape[:-1], 7), values), -1))
    return objects[0, robot] / torch.tensor(OBJECT_SCALE), mask[0, robot]


def test_objects_come_in_the_order_of_their_surface():
    # surfaces at 10 - 2.795 (robot), 9 - 1, 7 - 1, and out of range from 21 m on
    args = scene([[0.0, 0.0], [0.0, 10.0]], [[9.0, 0.0, 1.0], [-7.0, 0.0, 1.0], [0.0, -21.5, 1.0]])
    objects, mask = objects_of(observe_objects(*args))
    assert mask.tolist() == [True, True, True, False, False]
    expected = torch.tensor([[-7.0, 0, 0, 0, 1], [0, 10, 0, 0, VEHICLE_RADIUS], [9, 0, 0, 0, 1]])
    torch.testing.assert_close(objects[:3], expected)
    assert not objects[3:].any()


def test_gone_robots_and_absent_obstacles_are_not_seen():
    places = [[0.0, 0.0], [4.0, 0.0], [0.0, 6.0]]
    args = scene(places, [[-8.0, 0.0, 1.0]], active=[True, False, True])
    objects, mask = objects_of(observe_objects(*args))
    assert mask.sum() == 2
    assert objects[0, :2].tolist() == [0, 6]
    *rest, _ = args
    assert objects_of(observe_objects(*rest, torch.zeros(1, 1, dtype=torch.bool)))[1].sum() == 1


def test_only_the_nearest_five_are_seen_and_ties_go_by_index():
    args = scene([[0.0, 0.0]], [[d, 0.0, 1.0] for d in (9.0, 4.0, 8.0, 5.0, 7.0, 6.0, -4.0)])
    objects, mask = objects_of(observe_objects(*args))
    assert mask.all()
    torch.testing.assert_close(objects[:, 0], torch.tensor([4.0, -4.0, 5.0, 6.0, 7.0]))


def test_own_part_by_hand():
    # heading east: what lies north is to port
    args = (torch.zeros(1, 1, 2), torch.full((1, 1), math.pi / 2), torch.tensor([[[0.5, 3.4]]]))
    own = observe_self(*args, torch.full((1, 1), 0.3), torch.tensor([[[5.5, 11.0]]]), torch.tensor([[[-500.0, 1000]]]))
    assert own.flatten().tolist() == pytest.approx([0.2, -0.1, 1.0, -0.5 / 3.4, 0.3, -0.5, 1.0], abs=1e-6)


def test_noise_is_added_to_what_is_perceived():
    args = scene([[0.0, 0.0]], [[6.0, 0.0, 1.0]])
    noise = torch.tensor([0.1, -0.2, 0.3, -0.4, 0.9]).expand(1, 1, 2, 5)
    objects, mask = objects_of(observe_objects(*args, noise))
    torch.testing.assert_close(objects[0], torch.tensor([6.1, -0.2, 0.3, -0.4, 0.9]))
    assert mask.sum() == 1
    assert not objects[1:].any()


def test_von_mises_quantiles_follow_the_distribution():
    quantiles = von_mises_quantiles()
    assert quantiles[0] == -math.pi and quantiles[-1] == pytest.approx(math.pi)
    assert (quantiles.diff() > 0).all()
    torch.testing.assert_close(quantiles, -quantiles.flip(0), rtol=0, atol=1e-7)
    # E[cos] = I1(1) / I0(1) and E[cos 2x] = I2(1) / I0(1)
    uniform = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    noise = sensor_noise(torch.zeros(200_000, 4, dtype=torch.float64), uniform, quantiles)
    angle = (noise[:, 4] - 0.8) * math.pi / 0.2
    i0, i1, i2 = (torch.special.i0(torch.ones((), dtype=torch.float64)), 0.565159103992485, 0.135747669767038)
    assert angle.cos().mean().item() == pytest.approx(i1 / i0.item(), abs=1e-5)
    assert (2 * angle).cos().mean().item() == pytest.approx(i2 / i0.item(), abs=1e-5)
    assert noise[:, 4].min() >= 0.6 and noise[:, 4].max() <= 1.0
    drawn = sensor_noise(torch.randn(50_000, 4), torch.rand(50_000), quantiles.float())
    assert drawn[:, :4].std(0).tolist() == pytest.approx([0.05] * 4, rel=0.03)


@pytest.mark.parametrize(
    ("place", "ground", "applies"),
    [
        ([12.0, 0.0], [-2.0, 0.0], True),  # head on
        ([12.0, 4.6], [-2.0, 0.0], False),  # beside the zone
        ([18.0, 0.0], [-2.0, 0.0], False),  # too far ahead
        ([12.0, 0.0], [-0.4, 0.0], False),  # not under way
        ([0.0, -8.0], [0.0, 2.0], True),  # crossing from the left
        ([0.0, 8.0], [0.0, -2.0], False),  # from the right: the other gives way
        ([0.0, -18.0], [0.0, 2.0], False),
        ([11.0, -2.0], [0.0, 2.0], False),  # already ahead
    ],
)
def test_who_gives_way(place, ground, applies):
    # the other vehicle lies at the origin and goes along x
    angle = turn_angle(torch.tensor([[place, [0.0, 0.0]]]), torch.tensor([[ground, [2.0, 0.0]]]), torch.ones(1, 2) > 0)
    assert (angle[0, 0] > 0).item() == applies


def test_turn_angle_by_hand():
    angle = turn_angle(torch.tensor([[[10.0, 0.0], [0.0, 0.0]]]).double(), torch.tensor([[[-2.0, 0], [2, 0]]]).double(),
                       torch.ones(1, 2) > 0)  # fmt: skip
    base = VEHICLE_RADIUS + 1
    expected = math.asin(base / 10) + math.atan2(VEHICLE_RADIUS, math.sqrt(100 - base**2))
    assert angle.flatten().tolist() == pytest.approx([expected, expected], abs=1e-12)
    # gone or alone, the rules ask for nothing
    gone = turn_angle(
        torch.tensor([[[10.0, 0.0], [0.0, 0.0]]]), torch.tensor([[[-2.0, 0], [2, 0]]]), torch.tensor([[True, False]])
    )
    assert not gone.any()


@settings(max_examples=30, deadline=None)
@given(x=st.floats(-6, 6), y=st.floats(-6, 6), course=st.floats(-4, 4), other=st.floats(-4, 4), speed=st.floats(0, 8))
def test_turn_angle_is_finite_however_close(x, y, course, other, speed):
    place = torch.tensor([[[x, y], [0.0, 0.0]]])
    ground = torch.tensor([[[speed * math.cos(course), speed * math.sin(course)], [math.cos(other), math.sin(other)]]])
    angle = turn_angle(place, ground, torch.ones(1, 2) > 0)
    assert angle.isfinite().all()
    assert (angle >= 0).all() and (angle <= math.pi + 1e-6).all()


def test_events_and_rewards_by_hand():
    # 0 and 1 touch, 2 is at its goal, 3 is at its goal on an obstacle, 4 is gone and lies on 5, which goes on
    place = torch.tensor([[[0.0, 0], [5.5, 0], [30, 0], [60, 0], [90, 0], [90, 1]]])
    goal = place + torch.tensor([[[9.0, 0], [9, 0], [1.9, 0], [0, 0], [9, 0], [9, 0]]])
    active = torch.tensor([[True, True, True, True, False, True]])
    blocks, exists = torch.tensor([[[60.0, 3.7, 1.0], [30.0, 0.0, 1.0]]]), torch.tensor([[True, False]])
    event = events(place, goal, active, blocks, exists)
    assert event.tolist() == [[2, 2, 1, 2, 0, 0]]
    before = place - torch.tensor([1.0, 0.0])
    worth = reward(before, place, goal, event, torch.full((1, 6), 0.5))
    # the one at its goal on an obstacle came 1 m closer too
    assert worth.flatten().tolist() == pytest.approx([-4.15, -4.15, 10.85, -4.15, 0.85, 0.85], abs=1e-5)


@pytest.mark.parametrize(
    ("robots", "distance", "candidates", "least"),
    [(3, 30.0, 64, 0.998), (4, 35.0, 64, 0.998), (5, 40.0, 64, 0.96), (5, 40.0, 128, 0.995), (5, 40.0, 256, 1.0)],
)
def test_share_of_worlds_that_fit_by_candidates(robots, distance, candidates, least):
    start, goal, miss = place_pairs(torch.rand(1000, robots, candidates, 4), distance)
    share = (miss.amax(1) == 0).float().mean()
    assert share >= least
    assert candidates != 64 or robots != 5 or share < 0.995
    fits = (miss == 0).all(1).view(-1, 1, 1)
    assert ((start >= 2) & (start <= 53) & (goal >= 2) & (goal <= 53)).all()
    pairs = torch.triu(torch.ones(robots, robots, dtype=torch.bool), 1)
    for points in (start, goal):
        gap = (points.unsqueeze(1) - points.unsqueeze(2)).norm(dim=-1)
        assert (gap[(fits & pairs).expand_as(gap)] >= 10 - 1e-4).all()
    assert ((start - goal).norm(dim=-1)[fits.squeeze(-1).expand(-1, robots)] >= distance - 1e-4).all()


def test_the_first_candidate_that_fits_else_the_one_that_misses_least():
    uniform = torch.zeros(1, 2, 3, 4)
    corners = torch.tensor([0.0, 0.0, 1.0, 1.0])
    uniform[0, 0] = torch.stack((torch.zeros(4), corners, corners.flip(0)))
    uniform[0, 1] = torch.stack((torch.tensor([0.1, 0, 1, 1]), torch.tensor([0.15, 0, 1, 0.85]), torch.zeros(4)))
    start, goal, miss = place_pairs(uniform, 40.0)
    assert start[0, 0].tolist() == [2, 2] and goal[0, 0].tolist() == [53, 53]
    # nothing fits beside the first robot: 7.65 m is the least of all misses
    torch.testing.assert_close(start[0, 1], torch.tensor([2 + 51 * 0.15, 2.0]))
    torch.testing.assert_close(miss, torch.tensor([[0.0, 10 - 51 * 0.15]]))


def test_points_keep_off_what_counts():
    torch.manual_seed(1)
    keep_off = torch.rand(300, 4, 2) * 51 + 2
    counts = torch.tensor([True, True, True, False])
    points, miss = place_points(torch.rand(300, 3, 64, 2), keep_off, counts)
    assert not miss.any()
    gap = (points.unsqueeze(2) - keep_off.unsqueeze(1)).norm(dim=-1)
    assert (gap[..., :3] >= 8 - 1e-4).all() and (gap[..., 3] < 8).any()
    assert ((points[:, 0] - points[:, 1]).norm(dim=-1) >= 8 - 1e-4).all()


@pytest.mark.parametrize("stage", Curriculum().stages[3:])
def test_worlds_with_obstacles_fit(stage):
    numbers = (torch.tensor(stage.robots), torch.tensor(stage.obstacles), torch.tensor(0), torch.tensor(stage.distance))
    layout, miss = draw_layout(torch.rand, Contents(*numbers), (500, 5, 4, 2))
    assert (miss == 0).float().mean() >= 0.998
    assert layout["active"].sum(1).eq(stage.robots).all()
    assert (layout["cores"][..., 3] == 0).all()
    assert layout["obstacles"][..., 2].eq(1).all()


def test_scenarios_depend_on_their_seed_alone():
    torch.manual_seed(4)
    state = torch.get_rng_state()
    one, other = scenario_set(3, 5), scenario_set(3, 5)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["position"], scenario_set(4, 5)["position"])
    assert all(value.shape[0] == 5 for value in one.values())


def test_curriculum_stages():
    assert Curriculum().stages[0] == Stage(3, 0, 0, 30.0)
    assert Curriculum().stages[-1] == Stage(5, 4, 0, 40.0)
    assert Curriculum.fixed(2, 1, 3, 20.0).stages == (Stage(2, 1, 3, 20.0),)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"frames": (0, 2e6, 1e6, 3e6, 4e6, 5e6)}, "frames that rise from 0.*does not go backwards"),
        ({"frames": (1, 2, 3, 4, 5, 6)}, "rise from 0"),
        ({"frames": (0, 1, 1, 2, 3, 4)}, "rise from 0"),
        ({"robots": (3, 4)}, "one robots for each of 6 stages"),
        ({"robots": (0, 4, 5, 5, 5, 5)}, "robots of ints >= 1"),
        ({"obstacles": (0, 0, 0, 2.5, 3, 4)}, "obstacles of ints >= 0"),
        ({"distance": (30.0, 35.0, 40.0, 40.0, 40.0, math.nan)}, "distances >= 0"),
    ],
)
def test_bad_curricula_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        Curriculum(**arguments)


def test_split_observation_is_the_envs():
    own, objects, mask = MarineNavigation.split_observation(torch.arange(74.0).view(2, 37))
    assert own.shape == (2, 7) and objects.shape == (2, 5, 5) and mask.shape == (2, 5)
    assert objects[0, 1, 0] == 12
