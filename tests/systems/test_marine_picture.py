"""Recordings of robots, which leave the env unchanged, and pictures of them."""

import pytest
import torch

from torchrl_perf.envs.agent_streams import AgentStreams
from torchrl_perf.envs.marine import Curriculum, MarineNavigation, scenario_set, scripted_action
from torchrl_perf.envs.marine.currents import CORE_STRENGTH, current
from torchrl_perf.envs.marine.recording import Recording, record
from torchrl_perf.systems.marine import picture as marine_picture
from torchrl_perf.systems.marine.picture import COLORS, animate, draw_trajectories


def marine(worlds=2, robots=3, obstacles=2, cores=2, **settings):
    stage = {"robots": robots, "obstacles": obstacles, "cores": cores, "distance": 30.0}
    curriculum = Curriculum(frames=(0,), **{name: (value,) for name, value in stage.items()})
    env = MarineNavigation(worlds, curriculum=curriculum, candidates=64, device="cpu", seed=0, **settings)
    layout = scenario_set(3, worlds, robots=robots, obstacles=obstacles, cores=cores, distance=30.0)
    env.load_layout(layout)
    return env


def scripted(env):
    return lambda td: td.set(("agents", "action"), scripted_action(env))


@pytest.fixture(scope="module")
def recording():
    env = marine()
    return record(env, scripted(env), 60)


def test_shapes_and_ends(recording):
    assert recording.steps == 60
    assert recording.position.shape == (61, 2, 3, 2)
    assert recording.active.dtype == torch.bool
    assert recording.event.dtype == torch.int8
    assert recording.active[0].all()
    ended = recording.event.amax(0) > 0
    # a robot acts until the step that ends it, rests afterwards, and has one event at most
    assert ((recording.event > 0).sum(0) <= 1).all()
    for t, world, robot in (recording.event > 0).nonzero().tolist():
        assert recording.active[: t + 1, world, robot].all()
        assert not recording.active[t + 1 :, world, robot].any()
        rest = recording.position[t + 1 :, world, robot]
        assert torch.equal(rest, rest[:1].expand_as(rest))
        assert recording.last_step[world, robot] == t + 1
    assert ended.any()


def test_the_goal_is_reached_where_the_event_says(recording):
    there = (recording.event == 1).nonzero()
    assert len(there)
    for t, world, robot in there.tolist():
        apart = (recording.position[t + 1, world, robot] - recording.goal[world, robot]).norm()
        before = (recording.position[t, world, robot] - recording.goal[world, robot]).norm()
        assert apart <= 2.0 < before


def test_same_way_as_in_the_env():
    env, same = marine(observation_noise=False), marine(observation_noise=False)
    seen = record(env, scripted(env), 8)
    root = same._root(same._state())
    for t in range(8):
        now = same.snapshot()
        assert torch.equal(now["position"], seen.position[t])
        assert torch.equal(now["active"], seen.active[t])
        stepped, root = same.step_and_maybe_reset(root.set(("agents", "action"), scripted_action(same)))
        assert torch.equal(stepped["next", "agents", "event"].squeeze(-1), seen.event[t])


def test_the_env_is_left_as_it_was():
    env = marine()
    before = {name: value.clone() for name, value in env.state_dict().items()}
    record(env, scripted(env), 5)
    assert all(torch.equal(before[name], value) for name, value in env.state_dict().items())

    def broken(td):
        if env.elapsed[0] > 2:
            raise RuntimeError("broken")
        return scripted(env)(td)

    with pytest.raises(RuntimeError, match="broken"):
        record(env, broken, 5)
    assert all(torch.equal(before[name], value) for name, value in env.state_dict().items())


def test_time_limit_ends_the_way():
    env = marine(max_episode_steps=4)
    seen = record(env, scripted(env), 9)
    assert (seen.last_step == 4).all()
    assert not seen.event.any()


def test_streams_show_the_policy_one_agent_a_row():
    env = AgentStreams(marine(action="discrete"))

    def policy(td):
        assert td["observation"].shape == (6, 37)
        assert td["valid"].shape == (6, 1)
        counter = td.get("counter", torch.zeros(6, 1))
        return td.set("action", torch.full((6,), 24)).set("counter", counter + 1)

    seen = record(env, policy, 3)
    assert seen.position.shape == (4, 2, 3, 2)
    assert (seen.position[-1] != seen.position[0]).any()


def test_bad_arguments():
    env = marine()
    with pytest.raises(ValueError, match="steps"):
        record(env, scripted(env), 0)
    with pytest.raises(TypeError, match="expected a MarineNavigation"):
        record(torch.nn.Linear(1, 1), scripted(env), 1)  # pyright: ignore[reportArgumentType]


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_picture(recording, tmp_path):
    from matplotlib.image import imread

    path = draw_trajectories(recording, tmp_path / "ways.png", title="scripted")
    picture = imread(path)
    assert picture.shape[0] > 400 < picture.shape[1]
    for color in COLORS[:3]:  # the line of each robot is there
        wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(picture[..., :3] - wanted).sum(-1) < 0.02).any()
    one = imread(draw_trajectories(recording, tmp_path / "one.png", scenarios=[1]))
    assert one.shape[1] < picture.shape[1]


def test_empty_worlds_and_a_robot_that_never_was(tmp_path):
    env = marine(worlds=1, robots=1, obstacles=0, cores=0, max_robots=2)
    seen = record(env, scripted(env), 2)
    assert seen.active[:, 0, 1].sum() == 0
    assert draw_trajectories(seen, tmp_path / "empty.png").stat().st_size > 0


def test_animation(recording, tmp_path):
    image = pytest.importorskip("PIL.Image")
    short = Recording(
        **{name: getattr(recording, name)[:4] for name in ("position", "heading", "velocity", "active")},
        **{name: getattr(recording, name) for name in ("goal", "obstacles", "num_obstacles", "cores", "num_cores")},
        event=recording.event[:3],
        step_seconds=recording.step_seconds,
    )
    path = animate(short, tmp_path / "ways.gif", frames_per_second=2)
    with image.open(path) as gif:
        assert gif.n_frames >= 4
        assert gif.info["duration"] == 500


def test_refused_pictures(recording, tmp_path):
    with pytest.raises(ValueError, match=r"ends in \.gif"):
        animate(recording, tmp_path / "ways.mp4")
    with pytest.raises(IndexError, match="expected scenarios of 0 to 1"):
        draw_trajectories(recording, tmp_path / "ways.png", scenarios=[2])
    with pytest.raises(ValueError, match="expected 1 to 9 scenarios"):
        draw_trajectories(recording, tmp_path / "ways.png", scenarios=[])


def test_the_map_shows_the_way_of_the_water():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # one robot that heads east, north of a positive vortex, whose water goes west there: anticlockwise on the map
    still = torch.zeros(1, 1)
    seen = Recording(
        position=torch.tensor([[[[30.0, 10.0]]], [[[30.0, 12.0]]]]),
        heading=torch.full((2, 1, 1), torch.pi / 2),
        velocity=torch.zeros(2, 1, 1, 2),
        active=torch.ones(2, 1, 1, dtype=torch.bool),
        event=torch.zeros(1, 1, 1, dtype=torch.int8),
        goal=torch.tensor([[[30.0, 40.0]]]),
        obstacles=torch.zeros(1, 0, 3),
        num_obstacles=torch.zeros(1, dtype=torch.int64),
        cores=torch.tensor([[[20.0, 20.0, 1.0, CORE_STRENGTH]]]),
        num_cores=torch.ones(1, dtype=torch.int64),
        step_seconds=0.5,
    )
    north, east = current(still + 25.0, still + 20.0, seen.cores)
    assert east < 0
    assert abs(north) < 1e-6
    scenario = marine_picture._scenario(seen, 0)
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    arrows = marine_picture._draw_world(axes, scenario)
    nearest = ((arrows.XY - [20.0, 25.0]) ** 2).sum(-1).argmin()
    assert arrows.U[nearest] < -0.9
    assert axes.texts[0].get_text() == "\N{ANTICLOCKWISE OPEN CIRCLE ARROW}"
    marine_picture._draw_ways(axes, scenario)
    (line,) = [line for line in axes.lines if len(line.get_xdata()) == 2]
    assert line.get_xdata().tolist() == [10.0, 12.0]
    assert line.get_ydata().tolist() == [30.0, 30.0]
    boat = axes.patches[-1].get_xy()
    assert boat[0].round(3).tolist() == [14.5, 30.0]  # the bow, 2.5 m east of the robot
    assert boat[1].round(3).tolist() == [12.8, 28.75]  # starboard of a boat that heads east is south
