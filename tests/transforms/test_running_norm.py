"""Running normalisation: exact over batches, in envs and on batches, saved, frozen, without host waits."""

import copy

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from torchrl_perf.envs import CartPole
from torchrl_perf.functional.moments import Moments, merged_moments, moments_of
from torchrl_perf.modules import DiscountedReturnNormalization, EmpiricalNormalization
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.transforms import RunningNorm, RunningRewardNorm


def batch_of(rows, **others):
    return TensorDict({"observation": rows, **others}, rows.shape[:-1])


def test_statistics_are_those_of_all_rows_whatever_the_batches():
    rows = torch.randn(1000, 3) * torch.tensor([1.0, 1e-3, 50.0]) + torch.tensor([0.0, 1e4, -7.0])
    layer = EmpiricalNormalization(3)
    for part in rows.split([1, 499, 7, 493]):
        layer.update(part)
    wide = rows.to(torch.float64)
    torch.testing.assert_close(layer.mean, wide.mean(0), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(layer.variance, wide.var(0, correction=0), rtol=1e-8, atol=0)
    expected = (rows - wide.mean(0).float()) * (wide.var(0, correction=0) + 1e-8).rsqrt().float()
    torch.testing.assert_close(layer(rows), expected.clamp(-10, 10), rtol=1e-5, atol=1e-5)


def test_merging_follows_a_table():
    one, other = moments_of(torch.tensor([[1.0], [3.0]])), moments_of(torch.tensor([[5.0]]))
    merged = merged_moments(one, other)
    assert [value.item() for value in merged] == [3.0, 3.0, 8.0]  # 1, 3, 5: squares 4 + 0 + 4
    none = moments_of(torch.zeros(0, 1))
    assert merged_moments(merged, none) == Moments(*merged)
    assert [value.item() for value in merged_moments(none, none)] == [0.0, 0.0, 0.0]


def test_rows_that_do_not_count_change_nothing():
    rows = torch.randn(5, 6, 2)
    valid = torch.rand(5, 6) < 0.5
    rows[~valid] = 1e30
    rows[valid.nonzero()[0].split(1)] = torch.nan  # nor does one that is not finite, whatever its flag
    good = rows[valid & rows.isfinite().all(-1)].to(torch.float64)
    layer = EmpiricalNormalization(2)
    layer.update(rows, valid)
    assert layer.count == len(good)
    torch.testing.assert_close(layer.mean, good.mean(0))
    torch.testing.assert_close(layer.variance, good.var(0, correction=0))
    before = copy.deepcopy(layer.state_dict())
    layer.update(rows, torch.zeros(5, 6, dtype=torch.bool))
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_a_layer_without_rows_changes_nothing_and_a_frozen_one_stays():
    layer, rows = EmpiricalNormalization(2), torch.randn(7, 2)
    assert torch.equal(layer(rows), rows)
    layer.update(rows)
    layer.freeze()
    before = layer(rows)
    layer.update(rows + 100)
    assert torch.equal(layer(rows), before)
    other = EmpiricalNormalization(2)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(rows), before)
    layer.unfreeze()
    layer.update(rows + 100)
    assert not torch.equal(layer(rows), before)


@pytest.mark.parametrize(
    "options", [{"num_features": 0}, {"num_features": 1, "eps": 0.0}, {"num_features": 1, "clip": -1.0}]
)
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=r"expected .* received .* Remedy"):
        EmpiricalNormalization(**options)


def test_an_env_is_normalised_and_its_statistics_are_those_of_what_it_gave():
    norm = RunningNorm({"observation": 4}, out_keys=["normal"])
    env = TransformedEnv(CartPole(16), norm)
    raw = env.rollout(12, break_when_any_done=False)
    # the first observation, one for each step, and one for each episode that began
    begun = raw["observation"][:, 1:][raw["next", "done"][:, :-1].squeeze(-1)]
    assert len(begun)
    seen = torch.cat([raw["observation"][:, :1], raw["next", "observation"]], 1).flatten(0, 1)
    seen = torch.cat([seen, begun]).to(torch.float64)
    count = norm.of("observation").count.clone()
    assert count == len(seen)
    torch.testing.assert_close(norm.of("observation").mean, seen.mean(0))
    last = raw["next"][:, -1]
    assert torch.equal(last["normal"], norm.of("observation")(last["observation"]))
    norm.freeze()
    env.rollout(3)
    assert norm.of("observation").count == count
    check_env_specs(TransformedEnv(CartPole(3), RunningNorm({"observation": 4})))


def test_a_batch_is_normalised_with_what_follows_and_nothing_waits():
    norm = RunningNorm({"observation": 2}, out_keys=["normal"], valid_key="valid")
    rows = torch.randn(4, 5, 2)
    batch = batch_of(rows, valid=torch.rand(4, 5, 1) < 0.8)
    batch["next"] = TensorDict({"observation": rows + 1}, [4, 5])
    with no_host_sync():
        norm.update(batch)
        norm(batch)
    layer = norm.of("observation")
    assert torch.equal(batch["normal"], layer(rows))
    assert torch.equal(batch["next", "normal"], layer(rows + 1))
    assert torch.equal(batch["observation"], rows)
    with pytest.raises(KeyError, match="other"):
        norm(TensorDict({"other": rows}, [4, 5]))
    with pytest.raises(ValueError, match="shapes: expected"):
        RunningNorm({})


def test_rewards_are_gymnasiums():
    gamma, steps, num_envs = 0.9, 40, 3
    generator = np.random.default_rng(0)
    rewards = generator.normal(2.0, 3.0, (steps, num_envs)).astype(np.float32)
    ends = generator.random((steps, num_envs)) < 0.2
    returns, seen = np.zeros(num_envs), []
    for reward, ended in zip(rewards, ends, strict=True):
        returns = returns * gamma + reward
        seen.append(returns.copy())
        returns[ended] = 0
    layer = DiscountedReturnNormalization(num_envs, gamma=gamma)
    reward, done = (torch.from_numpy(x).T.unsqueeze(-1) for x in (rewards, ends))
    for part in zip(reward.split(9, 1), done.split(9, 1), strict=True):
        layer.update(*part)
    expected = np.var(np.stack(seen))
    np.testing.assert_allclose(layer.statistics.variance.item(), expected, rtol=1e-6)
    torch.testing.assert_close(layer(reward), reward / float(np.sqrt(expected + 1e-8)))


class Once(gymnasium.Env):
    """Rewards from a list, in one long episode."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, rewards):
        self.rewards = iter(rewards)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, float(next(self.rewards)), False, False, {}


def test_a_step_at_a_time_gives_what_gymnasiums_wrapper_does():
    rewards = np.random.default_rng(1).normal(1.0, 2.0, 200)
    theirs = gymnasium.wrappers.NormalizeReward(Once(rewards), gamma=0.9)
    theirs.reset()
    ours = DiscountedReturnNormalization(1, gamma=0.9)
    for reward in rewards:
        _, expected, *_ = theirs.step(0)
        step = torch.tensor([[[reward]]], dtype=torch.float32)
        ours.update(step, torch.zeros(1, 1, 1, dtype=torch.bool))
        received = ours(step).item()
    # Gymnasium begins with a variance of 1 that counts as 1e-4 rows
    assert received == pytest.approx(float(expected), rel=1e-3)


def test_an_env_gives_normalised_rewards():
    norm = RunningRewardNorm(8, gamma=0.9, clip=0.5)
    env = TransformedEnv(CartPole(8), norm)
    check_env_specs(env)
    rollout = env.rollout(10, break_when_any_done=False)
    assert (rollout["next", "reward"] <= 0.5).all()  # all are 1
    assert (rollout["next", "reward"] > 0.0).all()
    count = norm.statistics.statistics.count.clone()
    norm.freeze()
    env.rollout(3)
    assert norm.statistics.statistics.count == count
    batch = TensorDict(
        {"next": {"reward": torch.ones(8, 4, 1), "done": torch.zeros(8, 4, 1, dtype=torch.bool)}}, [8, 4]
    )
    norm.unfreeze()
    with no_host_sync():
        norm.update(batch)
        norm(batch)
    assert norm.statistics.statistics.count == count + 32
    with pytest.raises(ValueError, match="clip: expected"):
        RunningRewardNorm(8, gamma=0.9, clip=0.0)
    with pytest.raises(ValueError, match="gamma in"):
        DiscountedReturnNormalization(8, gamma=1.5)
