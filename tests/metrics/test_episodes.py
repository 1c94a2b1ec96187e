"""EpisodeStatistics against a float64 loop over identifiable rewards."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics
from torchrl_perf.runtime import no_host_sync


def identifiable_rewards(num_envs, steps, start=0):
    """Reward 1000 * env + step, ``[N, T, 1]`` on time-major memory."""
    time_major = 1000.0 * torch.arange(num_envs) + torch.arange(start, start + steps).unsqueeze(1)
    return time_major.t().unsqueeze(-1)


def oracle(reward, done):
    """Return and length of finished episodes in the order "time, then env"; Python floats are float64."""
    num_envs, steps = reward.shape[:2]
    returns, lengths, finished = [0.0] * num_envs, [0] * num_envs, []
    for t in range(steps):
        for n in range(num_envs):
            returns[n] += float(reward[n, t, 0])
            lengths[n] += 1
            if done[n, t, 0]:
                finished.append((returns[n], float(lengths[n])))
                returns[n], lengths[n] = 0.0, 0
    return finished


def same_state(first, second):
    first, second = first.state_dict(), second.state_dict()
    return all(torch.equal(first[name], second[name]) for name in first)


def check(statistics, finished):
    last = finished[-statistics.window :]
    assert int(statistics.count) == len(finished)
    if not last:
        assert statistics.mean_return.isnan()
        assert statistics.mean_length.isnan()
        assert statistics.max_return.isnan()
        return
    returns, lengths = zip(*last, strict=True)
    assert float(statistics.mean_return) == pytest.approx(sum(returns) / len(last), rel=1e-12)
    assert float(statistics.mean_length) == pytest.approx(sum(lengths) / len(last), rel=1e-12)
    assert float(statistics.max_return) == max(returns)
    for k in range(len(finished) - len(last), len(finished)):
        assert tuple(statistics.ring[k % statistics.window].tolist()) == finished[k]


def test_by_hand(device):
    statistics = EpisodeStatistics(2, device, window=3)
    reward = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], device=device).unsqueeze(-1)
    done = torch.tensor([[False, True, False], [False, True, True]], device=device).unsqueeze(-1)
    statistics.update(reward, done)
    # Env 0 finishes 1 + 2 and carries 3; env 1 finishes 10 + 20, then 30.
    assert statistics.ring.tolist() == [[3.0, 2.0], [30.0, 2.0], [30.0, 1.0]]
    assert statistics.running.tolist() == [[3.0, 1.0], [0.0, 0.0]]
    assert (int(statistics.count), int(statistics.batch_count)) == (3, 3)
    assert float(statistics.batch_return_sum) == 63.0
    statistics.update(reward[:, :1], torch.tensor([[[True]], [[False]]], device=device))
    # 3 carried + 1: the fourth episode replaces the first.
    assert statistics.ring.tolist() == [[4.0, 2.0], [30.0, 2.0], [30.0, 1.0]]
    assert float(statistics.mean_return) == pytest.approx(64 / 3)
    assert float(statistics.max_return) == 30.0
    assert int(statistics.batch_count) == 1
    assert float(statistics.batch_return_sum) == 4.0


@pytest.mark.parametrize(("num_envs", "steps"), [(1, 1), (1, 7), (5, 1), (4, 6)])
@pytest.mark.parametrize("pattern", ["none", "all", "random"])
@pytest.mark.parametrize("window", [1, 3, 100])
def test_degenerate_shapes_and_patterns(device, num_envs, steps, pattern, window):
    reward = identifiable_rewards(num_envs, steps).to(device)
    done = {"none": torch.zeros, "all": torch.ones}.get(pattern, torch.rand)(num_envs, steps, 1, device=device) > 0.5
    statistics = EpisodeStatistics(num_envs, device, window=window)
    statistics.update(reward, done)
    check(statistics, oracle(reward, done))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_does_not_depend_on_how_the_stream_is_cut(data):
    num_envs, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    flags = data.draw(st.lists(st.booleans(), min_size=num_envs * steps, max_size=num_envs * steps))
    cuts = sorted({0, steps, *data.draw(st.sets(st.integers(0, steps)))})
    window = data.draw(st.integers(1, 6))
    done = torch.tensor(flags).reshape(num_envs, steps, 1)
    reward = identifiable_rewards(num_envs, steps)
    whole, pieces = (EpisodeStatistics(num_envs, "cpu", window=window) for _ in range(2))
    whole.update(reward, done)
    returned = 0.0
    for begin, end in pairwise(cuts):
        pieces.update(reward[:, begin:end], done[:, begin:end])
        returned += float(pieces.batch_return_sum)
    for name in ("running", "ring", "count"):
        assert torch.equal(getattr(whole, name), getattr(pieces, name)), name
    assert returned == float(whole.batch_return_sum)
    check(whole, oracle(reward, done))


def test_float64_rewards_and_env_major_memory():
    reward = torch.randn(3, 40, 1, dtype=torch.float64)
    done = torch.rand(3, 40, 1) > 0.8
    statistics = EpisodeStatistics(3, "cpu", window=5, dtype=torch.float64)
    statistics.update(reward, done)
    finished = oracle(reward, done)
    assert float(statistics.mean_return) == pytest.approx(sum(r for r, _ in finished[-5:]) / 5, abs=1e-12)


def test_nan_reward_stays_in_its_episode(device):
    statistics = EpisodeStatistics(1, device, window=2)
    reward = torch.tensor([[[math.nan], [1.0], [2.0], [3.0]]], device=device)
    statistics.update(reward, torch.tensor([[[False], [True], [False], [True]]], device=device))
    assert statistics.ring[0, 0].isnan()
    assert float(statistics.ring[1, 0]) == 5.0
    statistics.update(reward[:, 1:], torch.tensor([[[True], [True], [False]]], device=device))
    assert statistics.ring[:, 0].tolist() == [1.0, 2.0]
    assert float(statistics.mean_return) == 1.5


def test_mean_over_finished_episodes_only_through_device_metrics(device):
    statistics, metrics = EpisodeStatistics(2, device), DeviceMetrics(device)
    reward = torch.ones(2, 3, 1, device=device)
    for step, ends in enumerate([False, True]):
        done = torch.zeros(2, 3, 1, dtype=torch.bool, device=device)
        done[0, 2] = ends
        statistics.update(reward, done)
        metrics.add("episode/mean_return", statistics.mean_return, mask=statistics.batch_count > 0)
        row = metrics.flush(step)
        # Env 1 never finishes and must not pull the mean down; the first interval has no episode and no entry.
        assert row == ({"episode/mean_return": 6.0} if ends else {})


def test_state_resumes_bitwise(device):
    reward, done = identifiable_rewards(3, 8).to(device), torch.rand(3, 8, 1, device=device) > 0.6
    first, second = (EpisodeStatistics(3, device, window=4) for _ in range(2))
    first.update(reward, done)
    second.load_state_dict(first.state_dict())
    running = second.running
    for statistics in (first, second):
        statistics.update(reward, done)
    assert second.running is running
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_errors():
    statistics = EpisodeStatistics(2, "cpu")
    done = torch.zeros(2, 3, 1, dtype=torch.bool)
    for reward, bad in [
        (torch.ones(2, 3), done),
        (torch.ones(3, 3, 1), done),
        (torch.ones(2, 3, 1), done.float()),
        (torch.ones(2, 3, 1, device="meta"), done),
        (torch.ones(2, 0, 1), done[:, :0]),
    ]:
        with pytest.raises(ValueError, match=r"shape \[2, T, 1\] on cpu, received reward"):
            statistics.update(reward, bad)
    with pytest.raises(ValueError, match="window=0"):
        EpisodeStatistics(2, "cpu", window=0)
    with pytest.raises(KeyError, match="missing"):
        statistics.load_state_dict({})
    with pytest.raises(ValueError, match=r"running of shape \(2, 2\)"):
        statistics.load_state_dict(EpisodeStatistics(3, "cpu").state_dict())


def test_update_reads_nothing_on_the_host():
    statistics = EpisodeStatistics(4, "cpu")
    reward, done = identifiable_rewards(4, 5), torch.rand(4, 5, 1) > 0.5
    with no_host_sync():
        statistics.update(reward, done)
        _ = statistics.mean_return + statistics.mean_length + statistics.max_return


@pytest.mark.gpu
def test_graph_replay_equals_eager():
    eager, captured = (EpisodeStatistics(16, "cuda", window=7) for _ in range(2))
    reward, done = torch.zeros(8, 16, 1, device="cuda"), torch.zeros(8, 16, 1, dtype=torch.bool, device="cuda")
    reward, done = reward.transpose(0, 1), done.transpose(0, 1)
    start = captured.state_dict()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.update(reward, done)
    torch.cuda.current_stream().wait_stream(stream)
    captured.load_state_dict(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.update(reward, done)
        mean = captured.mean_return
    for step in range(4):
        reward.copy_(identifiable_rewards(16, 8, 8 * step))
        done.copy_(torch.rand(16, 8, 1) > 0.7)
        graph.replay()
        eager.update(reward, done)
        assert float(mean) == float(eager.mean_return)
    assert all(
        torch.equal(a, b) for a, b in zip(eager.state_dict().values(), captured.state_dict().values(), strict=True)
    )
