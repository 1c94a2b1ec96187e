"""n-step returns against a loop in float64, and the numbers of textbook cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional.n_step import n_step_targets, n_step_window
from torchrl_perf.runtime import no_host_sync


def loop(rewards, dones, n, gamma):
    """``(returns, steps)`` of one stream, step by step."""
    returns, steps = [], []
    for t in range(len(rewards)):
        total, used = 0.0, 0
        for k in range(n):
            if t + k == len(rewards):
                break
            total += gamma**k * rewards[t + k]
            used += 1
            if dones[t + k]:
                break
        returns.append(total)
        steps.append(used)
    return returns, steps


@pytest.mark.parametrize(
    ("is_terminated", "expected"), [(True, [1.75, 1.5, 1.0, 2.5]), (False, [2.125, 2.25, 2.5, 2.5])]
)
def test_targets_at_an_episode_end(is_terminated, expected, device):
    """obs t, next t + 1, r = 1, V(s) = s, n = 3, gamma = .5, episode end at t = 2."""
    reward = torch.ones(1, 8, 1, device=device)
    done = (torch.arange(8, device=device) == 2).view(1, 8, 1)
    returns, steps, last = n_step_targets(reward, done, n=3, gamma=0.5)
    value = (last + 1).to(torch.float32)
    bootstrap = torch.where(done.expand_as(last).gather(1, last) & is_terminated, 0.0, value)
    # t = 3 starts a new episode whose observations go on from 3, so V(s_6) = 6 there: 1.75 + .125 * 6 = 2.5.
    torch.testing.assert_close((returns + 0.5**steps * bootstrap)[0, :4, 0].cpu(), torch.tensor(expected))


def test_window_counts_the_done_row_and_stops_at_what_there_is():
    reward = torch.tensor([[1.0, 2.0, 4.0]]).expand(4, 3)
    done = torch.tensor([[False] * 3, [False, True, False], [True, True, True], [False] * 3])
    returns, steps = n_step_window(reward, done, torch.tensor([3, 3, 3, 1]), 0.5)
    assert steps.tolist() == [3, 2, 1, 1]
    assert returns.tolist() == [3.0, 2.0, 1.0, 1.0]


def test_more_rows_than_the_window_are_the_window():
    _, steps = n_step_window(torch.ones(2), torch.zeros(2, dtype=torch.bool), torch.tensor(9), 0.5)
    assert steps == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_rewards_behind_the_window_reach_nothing(bad):
    reward = torch.tensor([[1.0, 1.0, bad, 1.0]]).view(1, 4, 1)
    done = torch.tensor([False, True, False, False]).view(1, 4, 1)
    returns, _, _ = n_step_targets(reward, done, n=4, gamma=0.5)
    assert returns[0, :2, 0].tolist() == [1.5, 1.0]
    assert returns[0, 3, 0] == 1.0
    assert not returns[0, 2, 0].isfinite()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 12), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.data())
def test_equals_the_loop(N, T, n, gamma, data):
    done = torch.tensor(data.draw(st.lists(st.booleans(), min_size=N * T, max_size=N * T))).view(N, T, 1)
    reward = torch.randn(N, T, 1, dtype=torch.float64)
    returns, steps, last = n_step_targets(reward, done, n=n, gamma=gamma)
    for env in range(N):
        expected, used = loop(reward[env, :, 0].tolist(), done[env, :, 0].tolist(), n, gamma)
        torch.testing.assert_close(returns[env, :, 0], torch.tensor(expected, dtype=torch.float64))
        assert steps[env, :, 0].tolist() == used
        assert last[env, :, 0].tolist() == [t + count - 1 for t, count in enumerate(used)]


@pytest.mark.parametrize("flag_shape", [(2, 5), (2, 5, 1), (2, 5, 1, 1), (2, 5, 3, 1)])
def test_agents_share_a_flag(flag_shape):
    """Reward [N, T, A, 1] with any done that lacks dimensions after time, or has size 1 there."""
    reward = torch.randn(2, 5, 3, 1)
    done = (torch.rand(2, 5) < 0.4).view(2, 5, *(1 for _ in flag_shape[2:])).expand(flag_shape)
    returns, steps, last = n_step_targets(reward, done, n=3, gamma=0.9, time_dim=1)
    one, used, _ = n_step_targets(reward[:, :, :1], done.reshape(2, 5, -1)[..., :1], n=3, gamma=0.9, time_dim=1)
    assert returns.shape == reward.shape
    assert steps.shape == last.shape == done.shape
    torch.testing.assert_close(returns[:, :, :1], one)
    assert steps.reshape(2, 5, -1)[..., 0].equal(used.reshape(2, 5, -1)[..., 0])


def test_half_precision_is_computed_in_float32():
    returns, _, _ = n_step_targets(
        torch.full((1, 64, 1), 0.01, dtype=torch.bfloat16), torch.zeros(1, 64, 1, dtype=torch.bool), n=64, gamma=1.0
    )
    assert returns.dtype == torch.float32
    torch.testing.assert_close(returns[0, 0, 0], torch.tensor(0.01, dtype=torch.bfloat16).float() * 64)


def test_variants_agree_without_host_waits(variant):
    reward = torch.randn(4, 6, 1, device=variant.device)
    done = torch.rand(4, 6, 1, device=variant.device) < 0.3
    expected = n_step_targets(reward, done, n=3, gamma=0.9)
    run = variant(lambda r, d: n_step_targets(r, d, n=3, gamma=0.9))
    with no_host_sync():
        n_step_targets(reward, done, n=3, gamma=0.9)
    for _ in range(4):
        received = run(reward, done)
    for got, wanted in zip(received, expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("reward", "done", "options", "error", "words"),
    [
        (torch.zeros(1, 2, 1), torch.zeros(1, 2, 1), {}, TypeError, "bool done"),
        (
            torch.zeros(1, 2, 1, dtype=torch.int64),
            torch.zeros(1, 2, 1, dtype=torch.bool),
            {},
            TypeError,
            "float reward",
        ),
        (torch.zeros(1, 2, 1), torch.zeros(1, 3, 1, dtype=torch.bool), {}, ValueError, r"\[1, 3, 1\]"),
        (torch.zeros(1, 2, 1), torch.zeros(1, 2, 1, dtype=torch.bool), {"n": 0}, ValueError, "n >= 1"),
        (torch.zeros(1, 2, 1), torch.zeros(1, 2, 1, dtype=torch.bool), {"time_dim": 3}, ValueError, "time_dim"),
    ],
)
def test_bad_input_is_refused(reward, done, options, error, words):
    with pytest.raises(error, match=words):
        n_step_targets(reward, done, **{"n": 2, "gamma": 0.9, **options})
