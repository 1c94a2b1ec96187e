"""EpisodeStatistics of rows that do not all count: agents that are gone until their env restarts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.metrics import EpisodeStatistics
from torchrl_perf.runtime import no_host_sync


def column(rows, device="cpu", dtype=torch.float32):
    return torch.tensor(rows, dtype=dtype, device=device).unsqueeze(-1)


def test_by_hand(device):
    statistics = EpisodeStatistics(2, device, window=4)
    reward = column([[1.0, 2.0, float("nan"), 9.0, 4.0], [10.0, 20.0, 30.0, 40.0, 50.0]], device)
    done = column([[False, True, False, True, False], [False, False, False, True, False]], device, torch.bool)
    valid = column([[True, True, False, False, True], [True, True, True, True, True]], device, torch.bool)
    with no_host_sync():
        statistics.update(reward, done, valid)
    assert int(statistics.count) == 2
    assert statistics.ring[:2].tolist() == [[3.0, 2.0], [100.0, 4.0]]
    assert statistics.running.tolist() == [[4.0, 1.0], [50.0, 1.0]]
    assert float(statistics.batch_return_sum) == 103.0


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 12), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_against_a_loop_and_in_any_cut(num_envs, steps, p_done, p_valid, seed):
    random = torch.Generator().manual_seed(seed)
    shape = (num_envs, steps, 1)
    reward = torch.randint(-5, 6, shape, generator=random).float()
    done, valid = (torch.rand(shape, generator=random) < p for p in (p_done, p_valid))
    finished, sums = [], [[0.0, 0.0] for _ in range(num_envs)]
    for t in range(steps):
        for n in range(num_envs):
            if valid[n, t]:
                sums[n] = [sums[n][0] + float(reward[n, t]), sums[n][1] + 1]
                if done[n, t]:
                    finished.append(tuple(sums[n]))
                    sums[n] = [0.0, 0.0]
    whole, parts = (EpisodeStatistics(num_envs, "cpu", window=5) for _ in range(2))
    whole.update(reward, done, valid)
    for t in range(steps):
        parts.update(*(value[:, t : t + 1] for value in (reward, done, valid)))
    assert int(whole.count) == len(finished)
    for k in range(max(0, len(finished) - 5), len(finished)):
        assert tuple(whole.ring[k % 5].tolist()) == finished[k]
    assert whole.running.tolist() == sums
    for name in ("ring", "running", "count"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))


def test_all_valid_is_as_without():
    reward, done = torch.randn(3, 9, 1), torch.rand(3, 9, 1) < 0.3
    one, other = (EpisodeStatistics(3, "cpu") for _ in range(2))
    one.update(reward, done)
    other.update(reward, done, torch.ones_like(done))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_none_valid_counts_nothing():
    statistics = EpisodeStatistics(3, "cpu")
    done = torch.ones(3, 4, 1, dtype=torch.bool)
    statistics.update(torch.ones(3, 4, 1), done, ~done)
    assert int(statistics.count) == 0
    assert not statistics.running.any()


@pytest.mark.parametrize("valid", [torch.ones(3, 4, dtype=torch.bool), torch.ones(3, 4, 1)])
def test_another_shape_or_dtype_is_refused(valid):
    statistics = EpisodeStatistics(3, "cpu")
    with pytest.raises(ValueError, match=r"expected bool valid of shape \(3, 4, 1\) .* received .*pass 'valid'"):
        statistics.update(torch.ones(3, 4, 1), torch.ones(3, 4, 1, dtype=torch.bool), valid)
