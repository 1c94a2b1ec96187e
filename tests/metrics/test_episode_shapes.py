"""EpisodeStatistics on batches of every shape and dtype, against a loop over single steps."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.trainers.torchrl.log import DeviceLogHook

T, N, A = 5, 3, 2


def stream(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randint(1, 9, shape, generator=generator).float()
    return reward, torch.rand(shape, generator=generator) < 0.3


def expected(reward, done):
    """Returns and lengths of finished episodes of ``[streams, T]``, ordered by time, then by stream."""
    found = []
    totals = [[0.0, 0] for _ in reward]
    for t in range(reward.shape[1]):
        for n in range(len(reward)):
            totals[n] = [totals[n][0] + float(reward[n, t]), totals[n][1] + 1]
            if done[n, t]:
                found.append(tuple(totals[n]))
                totals[n] = [0.0, 0]
    return found, totals


def assert_holds(statistics, reward, done):
    found, totals = expected(reward, done)
    assert int(statistics.count) == len(found)
    assert [tuple(row) for row in statistics.ring[: len(found)].tolist()] == found
    assert statistics.running.tolist() == [[float(a), float(b)] for a, b in totals]


# streams, shape of the reward, how its streams [streams, T] are laid out in it
SHAPES = {
    "[T]": (1, (T,), lambda x: x.view(T)),
    "[T, 1]": (1, (T, 1), lambda x: x.view(T, 1)),
    "[1, T]": (1, (1, T), lambda x: x),
    "[1, T, 1]": (1, (1, T, 1), lambda x: x.unsqueeze(-1)),
    "[N, T]": (N, (N, T), lambda x: x),
    "[N, T, 1]": (N, (N, T, 1), lambda x: x.unsqueeze(-1)),
    "[N, T, A]": (N * A, (N, T, A), lambda x: x.view(N, A, T).transpose(1, 2)),
    "[N, T, A, 1]": (N * A, (N, T, A, 1), lambda x: x.view(N, A, T).transpose(1, 2).unsqueeze(-1)),
    "[N, T, 1, 1]": (N, (N, T, 1, 1), lambda x: x.view(N, T, 1, 1)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_of_a_batch(name):
    streams, shape, layout = SHAPES[name]
    reward, done = stream(streams, T)
    assert layout(reward).shape == shape
    statistics = EpisodeStatistics(streams)
    statistics.update(layout(reward), layout(done))
    assert_holds(statistics, reward, done)
    # and in two batches
    if T in shape:
        dim = shape.index(T)
        halves = EpisodeStatistics(streams)
        for r, d in zip(layout(reward).split([2, 3], dim), layout(done).split([2, 3], dim), strict=True):
            halves.update(r, d)
        assert_holds(halves, reward, done)


@pytest.mark.parametrize("last", [(), (1,)])
@pytest.mark.parametrize("streams", [1, N])
def test_step_by_step(streams, last):
    reward, done = stream(streams, T)
    statistics = EpisodeStatistics(streams)
    for t in range(T):
        statistics.update(reward[:, t].reshape(-1, *last), done[:, t].reshape(-1, *last))
    assert_holds(statistics, reward, done)
    if streams == 1:
        single = EpisodeStatistics([])
        for t in range(T):
            single.update(reward[0, t], done[0, t])
        assert_holds(single, reward, done)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((T, N, 1), 0), ((T, N), 0), ((2, N, T, 1), -2), ((2, N, T), 2), ((T, 2, N), 0), ((2, T, N, 1), 1)],
)
def test_time_where_it_is_said_to_be(shape, dim):
    reward, done = stream(*shape)
    streams = torch.Size(shape).numel() // T
    rows = [value.movedim(dim, -1).reshape(streams, T) for value in (reward, done)]
    statistics = EpisodeStatistics(streams)
    statistics.update(reward, done, time_dim=dim)
    assert_holds(statistics, *rows)


@pytest.mark.parametrize("done_shape", [(N, T, 1), (N, T, 1, 1)])
def test_an_end_for_all_agents(done_shape):
    reward, _ = stream(N * A, T)
    _, done = stream(N, T)
    statistics = EpisodeStatistics((N, A))
    layout = SHAPES["[N, T, A, 1]"][2]
    statistics.update(layout(reward), done.view(done_shape), valid=torch.ones(done_shape, dtype=torch.bool))
    assert_holds(statistics, reward, done.repeat_interleave(A, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8])
@pytest.mark.parametrize("flag", [torch.bool, torch.uint8, torch.int64])
def test_every_dtype(dtype, flag):
    reward, done = stream(N, T)
    statistics = EpisodeStatistics(N, "cpu", dtype=torch.float64)
    statistics.update(reward.to(dtype), done.to(flag))
    assert_holds(statistics, reward, done)
    only = EpisodeStatistics(N)
    only.update(reward > 4, done)
    assert_holds(only, (reward > 4).float(), done)


def test_half_rewards_are_added_in_float32():
    statistics = EpisodeStatistics(1)
    reward = torch.full((4000,), 0.1, dtype=torch.bfloat16)
    statistics.update(reward, torch.arange(4000) == 3999)
    assert statistics.mean_return.item() == pytest.approx(4000 * reward[0].item(), rel=1e-4)


def test_bad_numbers_stay_in_their_episode():
    reward = torch.tensor([1.0, torch.nan, 1.0, 2.0, 3.0])
    statistics = EpisodeStatistics(1)
    statistics.update(reward, torch.tensor([False, True, False, True, False]))
    assert statistics.ring[0, 0].isnan()
    assert statistics.ring[1].tolist() == [3.0, 2.0]
    assert statistics.running.tolist() == [[3.0, 1.0]]


WRONG = {
    "other envs": (2, (N, T, 1), (N, T, 1), None),
    "agents in a team": (N, (N, T, A, 1), (N, T, 1), None),
    "time first": (N, (T, N, 1), (T, N, 1), None),
    "end of other steps": (N, (N, T, 1), (N, 1, 1), None),
    "end without time": (N, (N, T, 1), (N, 1), None),
    "end of other envs": (N * A, (N, T, A, 1), (1, T, 1), None),
    "no steps": (N, (N, 0, 1), (N, 0, 1), None),
    "no such dim": (N, (N, T, 1), (N, T, 1), 5),
    "another dim": (N, (N, T, 1), (N, T, 1), 0),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name):
    streams, reward, done, dim = WRONG[name]
    statistics = EpisodeStatistics(streams)
    with pytest.raises(ValueError, match=r"expected reward and bool done of shape .*, received reward .*pass"):
        statistics.update(torch.ones(reward), torch.ones(done, dtype=torch.bool), time_dim=dim)
    assert not statistics.running.any()


def test_no_host_waits():
    reward, done = stream(N * A, T)
    layout = SHAPES["[N, T, A, 1]"][2]
    statistics = EpisodeStatistics(N * A)
    with no_host_sync():
        statistics.update(layout(reward), layout(done).int())
        statistics.update(layout(reward)[:, 0], layout(done)[:, 0])


@pytest.mark.parametrize(("batch", "agents"), [([T], ()), ([N, T], ()), ([N, T], (A,)), ([2, N, T], ()), ([T], (A,))])
def test_the_hook_of_torchrls_trainers_takes_every_batch(batch, agents):
    reward, done = stream(*batch, *agents, 1)
    time_dim = len(batch) - 1
    td = TensorDict({"next": {"reward": reward, "done": done}}, batch)
    hook = DeviceLogHook(DeviceMetrics("cpu"), interval=1)
    hook.add(td)
    assert_holds(hook.episodes, *(value.movedim(time_dim, -1).reshape(-1, T) for value in (reward, done)))
