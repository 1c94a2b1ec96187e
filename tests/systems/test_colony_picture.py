"""Recordings of a colony and their picture."""

import pytest
import torch

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import ColonyCurriculum, Durotaxis
from torchrl_perf.systems.durotaxis import draw_colony, record_colony, recorded_colony
from torchrl_perf.systems.durotaxis.picture import hull


def acting(env, *action):
    values = torch.tensor(action).repeat(env.num_envs, 1)
    return lambda td: td.set("action", values)


def test_recording_of_an_episode():
    env = Durotaxis(2, seed=0)
    recording = record_colony(env, acting(env, 0.25, 5.0, 2.0, 0.5, 0.0), row=1)
    assert [len(positions) for positions in recording.positions] == [5, 8, 12, 18, 28, 42, 64, 96, 144]
    assert (recording.outcome, recording.steps, recording.critical_nodes) == ("overgrowth", 8, 100)
    assert recording.goal == pytest.approx(380.0)
    assert recording.stiffness[0] == 1.0
    assert recording.stiffness[-1] == pytest.approx(4.99)
    assert (recording.centers[1:, 0] > recording.centers[:-1, 0]).all()
    assert recording.positions[0][:, 0].max() <= 40.0
    assert ((recording.positions[0][:, 1] >= 160.0) & (recording.positions[0][:, 1] <= 240.0)).all()


def test_recording_of_a_batch_and_of_its_stage():
    curriculum = ColonyCurriculum(goal=(0.5,), critical_nodes=(12,))
    env = Durotaxis(3, critical_nodes=20, curriculum=curriculum, seed=0)
    batch = DeviceCollector(env, acting(env, 0.5, 5.0, 2.0, 0.5, 0.0), frames_per_batch=12, total_frames=12).collect()
    recording = recorded_colony(batch, env, row=2)
    assert (recording.outcome, recording.steps, recording.critical_nodes) == ("running", 4, 12)
    assert recording.goal == pytest.approx(200.0)
    start = batch["nodes"][2, 0, :5, :2] * 400.0
    assert torch.equal(recording.positions[0], start)


@pytest.mark.parametrize(("delta", "outcome"), [(0.5, "running"), (0.4, "overgrowth"), (1.0, "empty")])
def test_picture(tmp_path, delta, outcome):
    env = Durotaxis(1, critical_nodes=30, delete_max=1.0, seed=0)
    recording = record_colony(env, acting(env, delta, 15.0, 0.5, 0.5, 0.1), max_steps=12)
    path = draw_colony(recording, tmp_path / "colony.png", shown=5)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000
    assert recording.outcome == outcome
    # an empty colony has no centre of its own
    assert recording.centers.isfinite().all()


def test_the_shape_of_a_colony_is_its_convex_hull():
    square = [[0.0, 0.0], [2.0, 0.0], [2.0, 2.0], [0.0, 2.0]]
    inside = [[1.0, 1.0], [0.5, 1.5], [1.0, 0.0], [2.0, 2.0]]  # one on an edge, one corner twice
    assert hull(inside + square) == square
    assert hull([[1.0, 2.0]]) == [[1.0, 2.0]]
    assert hull([[3.0, 1.0], [1.0, 1.0], [2.0, 1.0]]) == [[1.0, 1.0], [3.0, 1.0]]
    assert hull([]) == []


def test_title_and_one_moment(tmp_path):
    env = Durotaxis(1, seed=0)
    recording = record_colony(env, acting(env, 0.5, 5.0, 2.0, 0.5, 0.0), max_steps=1)
    assert draw_colony(recording, tmp_path / "colony.svg", title="a colony", shown=1).exists()


def test_bad_arguments(tmp_path):
    env = Durotaxis(2, critical_nodes=8, seed=0)
    policy = acting(env, 0.5, 5.0, 2.0, 0.5, 0.0)
    with pytest.raises(IndexError, match="expected one of the env's 2, received 2"):
        record_colony(env, policy, row=2)
    with pytest.raises(ValueError, match="max_steps: expected at least 1, received 0"):
        record_colony(env, policy, max_steps=0)
    batch = env.rollout(2, break_when_any_done=False)
    with pytest.raises(IndexError, match=r"received 5 of a batch \[2, 2\]"):
        recorded_colony(batch, env, row=5)
    with pytest.raises(KeyError, match=r"without \['graph'\]"):
        recorded_colony(batch.exclude("graph"), env)
    with pytest.raises(ValueError, match="shown: expected at least 1, received 0"):
        draw_colony(recorded_colony(batch, env), tmp_path / "colony.png", shown=0)
