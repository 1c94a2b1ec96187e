"""DeviceEnv inside TorchRL's own loops: rollout, Collector, TransformedEnv."""

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs import (
    Compose,
    InitTracker,
    ObservationNorm,
    RewardSum,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole, MountainCarContinuous, Pendulum

FLAGS = ("done", "terminated", "truncated")


def assert_consecutive(data, scale=1.0):
    """Root t+1 is ("next") t where t did not end, and an initial state of CartPole where it did."""
    done = data["next", "done"][:, :-1]
    follow, final = data["observation"][:, 1:], data["next", "observation"][:, :-1]
    assert torch.equal(torch.where(done, 0, follow), torch.where(done, 0, final))
    assert (torch.where(done, follow, 0).abs() <= 0.05 * scale + 1e-7).all()
    assert not any(data[flag].any() for flag in FLAGS)
    ended_by_fall = data["next", "terminated"].squeeze(-1)
    final = data["next", "observation"] / scale
    fallen = (final[..., 0].abs() > 2.4) | (final[..., 2].abs() > 12 * 2 * torch.pi / 360)
    assert torch.equal(ended_by_fall, fallen)


def assert_init_follows_done(data):
    done = data["next", "done"]
    assert data["is_init"][:, 0].all()
    assert torch.equal(data["is_init"][:, 1:], done[:, :-1])
    assert not data["next", "is_init"].any()


def steps_in_episode(done):
    """Slow loop: steps taken in its episode up to and including each step, [N, T, 1]."""
    counts = torch.zeros_like(done, dtype=torch.int64)
    for row in range(done.shape[0]):
        count = 0
        for t in range(done.shape[1]):
            count += 1
            counts[row, t] = count
            count = 0 if done[row, t] else count
    return counts


def test_rollout_without_break():
    data = CartPole(4, max_episode_steps=30, seed=0).rollout(120, break_when_any_done=False)
    assert data.batch_size == (4, 120)
    assert data.names == [None, "time"]
    assert_consecutive(data)
    assert_init_follows_done(data)
    counts = steps_in_episode(data["next", "done"])
    assert counts.max() <= 30
    assert torch.equal(data["next", "truncated"], counts == 30)


def test_rollout_that_breaks_at_the_first_end():
    data = CartPole(4, max_episode_steps=9, seed=0).rollout(50)
    assert data["next", "done"][:, :-1].any().logical_not()
    assert data["next", "done"][:, -1].any()


def test_rollout_until_all_are_done():
    env = CartPole(4, seed=0)
    data = env.rollout(400, break_when_any_done=False, break_when_all_done=True)
    assert data["next", "done"][:, -1].all()
    ended = data["next", "done"].squeeze(-1)
    first = ended.int().argmax(-1)
    for row in range(4):
        # TorchRL repeats the final step of a row that ended early.
        assert ended[row, first[row] :].all()
        assert (data["next", "observation"][row, first[row] :] == data["next", "observation"][row, first[row]]).all()


@pytest.mark.parametrize("track", [True, False])
def test_collector(track):
    env = CartPole(4, max_episode_steps=25, seed=0)
    collector = Collector(env, env.rand_action, frames_per_batch=160, total_frames=320, track_traj_ids=track)
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    assert [batch.numel() for batch in batches] == [160, 160]
    data = torch.cat(batches, -1)
    assert_consecutive(data)
    assert_init_follows_done(data)
    if track:
        ids, done = data["collector", "traj_ids"], data["next", "done"].squeeze(-1)
        assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])


def transforms():
    return Compose(
        StepCounter(max_steps=12),
        RewardSum(),
        InitTracker(),
        ObservationNorm(loc=0.0, scale=2.0, in_keys=["observation"], standard_normal=False),
    )


@pytest.mark.parametrize("source", ["rollout", "collector"])
def test_transformed_env(source):
    env = TransformedEnv(CartPole(4, max_episode_steps=100, seed=0), transforms())
    if source == "rollout":
        data = env.rollout(60, break_when_any_done=False)
    else:
        collector = Collector(env, env.rand_action, frames_per_batch=240, total_frames=240)
        data = next(iter(collector)).clone()
        collector.shutdown()
    assert_consecutive(data, scale=2.0)
    assert_init_follows_done(data)
    done = data["next", "done"]
    counts = steps_in_episode(done)
    assert torch.equal(data["next", "step_count"], counts)
    assert torch.equal(data["step_count"], counts - 1)
    assert torch.equal(data["next", "episode_reward"], counts.float())
    assert torch.equal(data["next", "truncated"], counts == 12)
    # StepCounter's truncation reaches the env: its rows were drawn anew although its own limit is 100.
    assert env.base_env.elapsed.max() <= 12


def test_transformed_env_resets_a_row_once():
    # 5 rows end in the env at step 3 (auto-reset); TorchRL resets them again, which must not draw a second state.
    env = TransformedEnv(Pendulum(5, max_episode_steps=3, seed=0), RewardSum())
    td = env.reset()
    for _ in range(3):
        env.rand_action(td)
        before = env.base_env.state.clone()
        td, root = env.step_and_maybe_reset(td)
        inside = env.base_env.state.clone()
        td = root
    assert (inside != before).all()
    assert torch.equal(td["observation"], env.base_env.observe(inside))
    assert td["is_init"].all()
    assert (td["episode_reward"] == 0).all()


@pytest.mark.parametrize("task", [CartPole, MountainCarContinuous])
def test_transformed_env_passes_the_spec_check(task):
    check_env_specs(TransformedEnv(task(3), Compose(StepCounter(), RewardSum(), InitTracker())))


def test_mark_on_the_wrapper_is_refused():
    env = TransformedEnv(CartPole(2), RewardSum())
    env.__dict__["_torchrl_native_autoreset"] = True
    td = env.reset()
    env.rand_action(td)
    with pytest.raises(RuntimeError, match="remove it from the wrapper"):
        env.step_and_maybe_reset(td)


def test_sync_free_loop_over_a_transformed_env():
    """The loop that the class docstring recommends equals TorchRL's own."""
    limit = 7

    def make():
        return TransformedEnv(CartPole(4, max_episode_steps=100), Compose(StepCounter(max_steps=limit), RewardSum()))

    env = make()
    env.set_seed(0)
    td = env.reset()
    rewards = []
    for _ in range(20):
        env.rand_action(td)
        nxt = env.step(td)["next"].clone()
        rewards.append(nxt["episode_reward"])
        root = nxt.exclude("reward")
        root["_reset"] = nxt["done"]
        fresh = env._reset(root)
        td = root.exclude("_reset")
        for key in fresh.keys():
            mask = nxt["done"]
            td[key] = torch.where(mask, fresh[key], root[key])
        assert torch.equal(td["observation"], env.base_env.state)
        assert torch.equal(td["is_init"], nxt["done"])
    assert torch.stack(rewards).max() == limit


class TwiceAsGood(Pendulum):
    """A task whose author overrides the step, as TorchRL's own envs are made."""

    def _step(self, tensordict):
        stepped = super()._step(tensordict)
        return stepped.set("reward", 2 * stepped["reward"])


class Marked(Pendulum):
    """A task that observes something more, which its reset says differently."""

    def _make_specs(self):
        super()._make_specs()
        self.observation_spec["mark"] = Unbounded((*self.batch_size, 1), device=self.device)

    def _step(self, tensordict):
        return super()._step(tensordict).set("mark", torch.zeros(*self.batch_size, 1, device=self.device))

    def _reset(self, tensordict=None, **kwargs):
        root = super()._reset(tensordict, **kwargs)
        return root.set("mark", torch.full((*self.batch_size, 1), 7.0, device=self.device))


def assert_episodes_of(data, length):
    ended = data["next", "done"].squeeze(-1)
    steps = torch.arange(1, ended.shape[-1] + 1)
    assert torch.equal(ended, (steps % length == 0).expand_as(ended))


class TestOverriddenSteps:
    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    @pytest.mark.parametrize("wrapped", [False, True])
    @pytest.mark.parametrize("mode", ["eager", "compile", "auto"])
    def test_a_collector_takes_them(self, device, wrapped, mode):
        env = TwiceAsGood(4, max_episode_steps=5, seed=0, device=device)
        env = TransformedEnv(env, StepCounter()) if wrapped else env
        collector = DeviceCollector(env, None, frames_per_batch=48, mode=mode)
        batch = [collector.collect().clone() for _ in range(4)][-1]
        cosine, sine, speed = batch["observation"].unbind(-1)
        torque = batch["action"].squeeze(-1)
        cost = torch.atan2(sine, cosine) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
        torch.testing.assert_close(batch["next", "reward"].squeeze(-1), -2 * cost, rtol=1e-3, atol=1e-4)
        assert batch["next", "done"].any()
        collector.shutdown()

    def test_rollouts_take_them(self):
        plain, twice = (task(4, max_episode_steps=5, seed=0) for task in (Pendulum, TwiceAsGood))
        batches = []
        for env in (plain, twice):
            torch.manual_seed(1)
            batches.append(env.rollout(12, break_when_any_done=False))
        assert torch.equal(batches[1]["next", "reward"], 2 * batches[0]["next", "reward"])
        assert torch.equal(batches[1]["observation"], batches[0]["observation"])

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    @pytest.mark.parametrize("wrapped", [False, True])
    @pytest.mark.parametrize("mode", ["eager", "compile", "auto"])
    def test_an_overridden_reset_is_called_for_rows_that_end(self, device, wrapped, mode):
        env = Marked(4, max_episode_steps=5, seed=0, device=device)
        env = TransformedEnv(env, StepCounter()) if wrapped else env
        collector = DeviceCollector(env, None, frames_per_batch=48, mode=mode)
        batch = [collector.collect().clone() for _ in range(4)][-1]
        begins = batch["is_init"].squeeze(-1)
        assert begins[:, 1:].any()
        assert torch.equal(batch["mark"].squeeze(-1), torch.where(begins, 7.0, 0.0))
        assert collector.mode == (
            "graph" if (device, mode) == ("cuda", "auto") else "eager" if mode == "auto" else mode
        )
        collector.shutdown()

    def test_a_rollout_calls_it_as_well(self):
        env = Marked(4, max_episode_steps=5, seed=0)
        check_env_specs(env)
        data = env.rollout(12, break_when_any_done=False)
        assert torch.equal(data["mark"], torch.where(data["is_init"], 7.0, 0.0))
        assert_episodes_of(data, 5)
