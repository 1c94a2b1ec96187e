"""Trajectory numbers, one by one: each episode has its own, in the order in which they begin."""

import torch

from torchrl_perf.collectors.trajectories import TrajectoryIds


def make(device, num_envs=3, num_steps=4):
    return TrajectoryIds(num_envs, num_steps, device)


def update(ids, ends):
    """Ends of episodes, a row for each env."""
    ids.update(torch.tensor(ends, dtype=torch.bool, device=ids.ids.device).unsqueeze(-1))
    return ids.ids.T.tolist()


def test_each_end_begins_a_new_number(device):
    ids = make(device)
    assert update(ids, [[0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1]]) == [[0, 0, 4, 4], [1, 1, 1, 1], [2, 3, 5, 5]]
    assert update(ids, [[0] * 4, [0] * 4, [0] * 4]) == [[4] * 4, [1] * 4, [6] * 4]


def test_a_restart_of_all(device):
    ids = make(device)
    assert ids.restart().tolist() == [0, 1, 2]
    assert update(ids, [[0] * 4, [1, 0, 0, 0], [0] * 4]) == [[3] * 4, [4, 6, 6, 6], [5] * 4]


def test_a_restart_of_some_gives_up_theirs_alone(device):
    ids = make(device)
    for first in (3, 5):
        old = ids.restart(torch.tensor([True, False, True], device=device))
        assert len(old) == 2
        expected = [[first] * 4, [1] * 4, [first + 1] * 4]
        assert update(ids, [[0] * 4] * 3) == expected
    assert old.tolist() == [3, 4]
    assert update(ids, [[0] * 4, [0, 0, 0, 1], [0] * 4])[1] == [1] * 4
    assert update(ids, [[0] * 4] * 3) == [[5] * 4, [7] * 4, [6] * 4]  # none is given twice


def test_state(device):
    one, other = make(device), make(device)
    update(one, [[1, 1, 1, 1]] * 3)
    state = one.state_dict()
    other.load_state_dict(state)
    assert update(one, [[0, 1, 0, 1]] * 3) == update(other, [[0, 1, 0, 1]] * 3)
    assert state["next"] - state["current"].max() == 1  # the numbers of the copy, which later updates leave alone
