"""Final observations that an environment does not give: where they are missing, and what takes their place."""

import torch

from torchrl_perf.functional.rows.missing import missing_rows, stand_in, stand_in_rows, steps_without_successor

NAN = torch.nan


def test_ends_of_episodes_and_of_the_batch(device):
    done = torch.tensor([[False, True, False, False]], device=device)
    assert steps_without_successor(done, 1).tolist() == [[False, True, False, True]]
    assert steps_without_successor(done.unsqueeze(-1), 1).squeeze(-1).tolist() == [[False, True, False, True]]
    assert steps_without_successor(done.T, 0).T.tolist() == [[False, True, False, True]]


def test_a_nan_elsewhere_stays(device):
    following = torch.tensor([[[NAN, 1.0], [NAN, 2.0]]], device=device)
    root = torch.tensor([[[5.0, 6.0], [7.0, 8.0]]], device=device)
    ended = torch.tensor([[[False], [True]]], device=device)
    expected = torch.tensor([[[NAN, 1.0], [7.0, 2.0]]], device=device)
    torch.testing.assert_close(stand_in(following, root, ended, 2), expected, equal_nan=True)
    # as a whole: the first number decides
    expected = torch.tensor([[[NAN, 1.0], [7.0, 8.0]]], device=device)
    torch.testing.assert_close(stand_in_rows(following, root, ended, 2), expected, equal_nan=True)


def test_agents_end_alone_or_with_any_of_the_step(device):
    following = torch.full((1, 2, 3), NAN, device=device)  # one env, two agents
    root = torch.arange(6.0, device=device).view(1, 2, 3)
    own = torch.tensor([[[False], [True]]], device=device)
    for function in (stand_in, stand_in_rows):
        got = function(following, root, own, 1)
        assert got[0, 0].isnan().all()
        assert torch.equal(got[0, 1], root[0, 1])
        assert torch.equal(function(following, root, own.squeeze(-1), 1), root)  # any ends the step of both


def test_an_agents_first_number_decides_for_it_alone(device):
    following = torch.tensor([[[NAN, 1.0], [2.0, 3.0]]], device=device)
    root = torch.tensor([[[5.0, 6.0], [7.0, 8.0]]], device=device)
    ended = torch.tensor([[[True], [True]]], device=device)
    assert stand_in_rows(following, root, ended, 1).tolist() == [[[5.0, 6.0], [2.0, 3.0]]]


def test_what_cannot_be_compared_is_left_alone(device):
    ended = torch.ones(2, 1, dtype=torch.bool, device=device)
    following = torch.full((2, 3), NAN, device=device)
    counts = torch.ones(2, 3, dtype=torch.int64, device=device)
    for function in (stand_in, stand_in_rows):
        assert function(following, torch.zeros(2, 4, device=device), ended, 1) is following
        assert function(counts, torch.zeros_like(counts), ended, 1) is counts
        assert function(following, following, ended, 1) is following
    empty = torch.zeros(2, 0, device=device)
    assert stand_in_rows(empty, torch.zeros_like(empty), ended, 1) is empty


def test_rows_that_are_missing_in_any_observation(device):
    done = torch.tensor([[True], [True], [False], [True]], device=device)
    position = torch.tensor([[NAN, 0.0], [0.0, 0.0], [NAN, NAN], [0.0, 0.0]], device=device)
    image = torch.zeros(4, 2, 2, device=device)
    image[3, 1, 1] = NAN
    counts = torch.zeros(4, 1, dtype=torch.int64, device=device)
    assert missing_rows([position, counts, image], done, 1).tolist() == [True, False, False, True]
    assert missing_rows([position, image], done.squeeze(-1), 1).tolist() == [True, False, False, True]


def test_nothing_to_look_at(device):
    done = torch.ones(2, 1, dtype=torch.bool, device=device)
    assert missing_rows([torch.zeros(2, 1, dtype=torch.int64, device=device)], done, 1) is None
    assert missing_rows([torch.full((2,), NAN, device=device)], done, 1) is None  # no dim beyond the batch
    assert missing_rows([torch.full((2, 3), NAN, device=device)], done.expand(2, 3), 1) is None
