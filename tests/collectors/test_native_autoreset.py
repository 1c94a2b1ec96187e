"""Envs that reset themselves under TorchRL's mark, in every mode, below transforms too; and repeated steps."""

import math

import pytest
import torch
from counting_env import CountingEnv, episode_length
from native_env import NativeEnv
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import Bounded
from torchrl.envs import SerialEnv, TransformedEnv
from torchrl.envs.transforms import (
    CatFrames,
    Compose,
    FrameSkipTransform,
    InitTracker,
    MultiAction,
    NoopResetEnv,
    ObservationNorm,
    RandomTruncationTransform,
    RenameTransform,
    RewardSum,
    StepCounter,
)

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.trainers import DQNConfig, DQNTrainer, SACConfig, SACTrainer

NAN = math.nan
MODES = ["eager", "auto", "compile", pytest.param("graph", marks=pytest.mark.gpu)]


def column(value):
    return value.squeeze(-1).cpu()


def same(got, wanted):
    torch.testing.assert_close(column(got).float(), torch.tensor(wanted), rtol=0, atol=0, equal_nan=True)


def device_for(mode):
    return "cuda" if mode == "graph" else "cpu"


class TestConvention:
    @pytest.mark.parametrize("mode", MODES)
    def test_nan_under_next_and_no_reset_but_the_first(self, mode, request):
        request.getfixturevalue("fresh_dynamo" if mode == "graph" else "traced")
        env = NativeEnv(device=device_for(mode))
        collector = DeviceCollector(env, None, frames_per_batch=8, mode=mode)
        data = torch.cat([collector.collect().clone() for _ in range(2)], -1)
        roots = [100.0, 101, 102, 200, 201, 202, 300, 301, 302, 400, 401, 402, 500, 501, 502, 600]
        after = [101.0, 102, NAN, 201, 202, NAN, 301, 302, NAN, 401, 402, NAN, 501, 502, NAN, 601]
        same(data["obs"], roots)
        same(data["next", "obs"], after)
        assert env.resets == 1
        assert not data["done"].any()

    def test_equals_torchrl(self):
        ours = DeviceCollector(NativeEnv(), None, frames_per_batch=10).collect()
        (stock,) = Collector(NativeEnv(), None, frames_per_batch=10, total_frames=10)
        for key in ("obs", "done", ("next", "obs"), ("next", "reward"), ("next", "truncated")):
            torch.testing.assert_close(ours[key], stock[key], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ours["collector", "traj_ids"], stock["collector", "traj_ids"])

    def test_integers_have_no_nan(self):
        batch = DeviceCollector(NativeEnv(dtype=torch.int64), None, frames_per_batch=4).collect()
        same(batch["next", "obs"], [101.0, 102, 0, 201])

    @pytest.mark.parametrize("mode", ["eager", "auto"])
    def test_rows_end_at_steps_of_their_own_and_an_env_may_keep_the_final_observation(self, mode, fresh_dynamo):
        env = NativeEnv(2, keeps_final=True)
        batch = DeviceCollector(env, None, frames_per_batch=12, mode=mode).collect()
        same(batch["obs"], [[100.0, 101, 102, 200, 201, 202], [100.0, 101, 102, 103, 200, 201]])
        same(batch["next", "obs"], [[101.0, 102, 103, 201, 202, 203], [101.0, 102, 103, 104, 201, 202]])
        assert env.resets == 1

    @pytest.mark.parametrize(("mode", "marked"), [("eager", "both"), ("compile", "base alone")])
    @pytest.mark.slow_compiled
    def test_below_transforms(self, mode, marked, fresh_dynamo):
        base = NativeEnv(2)
        norm = ObservationNorm(loc=0.0, scale=2.0, in_keys=["obs"])
        env = TransformedEnv(base, Compose(norm, InitTracker(), StepCounter(), RewardSum()))
        if marked == "base alone":
            del env._torchrl_native_autoreset
        batch = DeviceCollector(env, None, frames_per_batch=12, mode=mode).collect()
        same(batch["obs"], [[200.0, 202, 204, 400, 402, 404], [200.0, 202, 204, 206, 400, 402]])
        same(batch["next", "obs"], [[202.0, 204, NAN, 402, 404, NAN], [202.0, 204, 206, NAN, 402, 404]])
        same(batch["is_init"], [[1.0, 0, 0, 1, 0, 0], [1.0, 0, 0, 0, 1, 0]])
        same(batch["step_count"], [[0.0, 1, 2, 0, 1, 2], [0.0, 1, 2, 3, 0, 1]])
        same(batch["next", "episode_reward"], [[1.0, 2, 3, 1, 2, 3], [1.0, 2, 3, 4, 1, 2]])
        assert base.resets == 1

    def test_a_window_of_frames_does_not_reach_over_an_end(self):
        env = TransformedEnv(NativeEnv(1), CatFrames(N=2, dim=-1, in_keys=["obs"], out_keys=["two"]))
        batch = DeviceCollector(env, None, frames_per_batch=5, mode="eager").collect()
        assert batch["two"][0].tolist() == [[100, 100], [100, 101], [101, 102], [200, 200], [200, 201]]

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: TransformedEnv(NativeEnv(2), StepCounter(max_steps=2)), "no transform that ends episodes"),
            (
                lambda: TransformedEnv(NativeEnv(2), Compose(StepCounter(), RandomTruncationTransform(2, 3))),
                "no transform that ends episodes",
            ),
            (
                lambda: TransformedEnv(NativeEnv(2), FrameSkipTransform(2)),
                "no transform that repeats.*FrameSkipTransform",
            ),
            (lambda: TransformedEnv(NativeEnv(1), NoopResetEnv(2)), "no transform that repeats.*NoopResetEnv"),
        ],
    )
    def test_refused_above_such_an_env(self, make, words):
        with pytest.raises(ValueError, match=rf"env: expected {words}.*received.*|env: expected {words}.*Remedy"):
            DeviceCollector(make(), None, frames_per_batch=8)

    def test_refused_around_our_envs(self):
        env = CartPole(2)
        env._torchrl_native_autoreset = True
        with pytest.raises(ValueError, match="expected no mark '_torchrl_native_autoreset' on or around CartPole"):
            DeviceCollector(env, None, frames_per_batch=8)

    def test_refused_inside_a_batch(self):
        collector = DeviceCollector(SerialEnv(2, NativeEnv), None, frames_per_batch=8, mode="eager")
        with pytest.raises(ValueError, match=r"members of a batch.*NativeEnv with the mark"):
            collector.collect()

    def test_a_limit_of_the_collector_is_refused(self):
        with pytest.raises(ValueError, match="no transform that ends episodes"):
            DeviceCollector(NativeEnv(2), None, frames_per_batch=8, max_frames_per_traj=2)


class OnePerStep(CountingEnv):
    """Pays 1 a step and never terminates."""

    def dynamics(self, state, action):
        following, reward, terminated = super().dynamics(state, action)
        return following, torch.ones_like(reward), torch.zeros_like(terminated)


class TestFrameSkip:
    def make(self, skip, limit=5, n=3):
        return TransformedEnv(OnePerStep(n, max_episode_steps=limit), Compose(FrameSkipTransform(skip), RewardSum()))

    @pytest.mark.parametrize("skip", [2, 3, 7])
    @pytest.mark.parametrize("how", ["collector", "rollout", "TorchRL's collector"])
    def test_an_episode_has_no_more_reward_than_steps(self, skip, how):
        env, steps = self.make(skip), 12
        if how == "rollout":
            data = env.rollout(steps, break_when_any_done=False)
        elif how == "collector":
            data = DeviceCollector(env, None, frames_per_batch=3 * steps).collect()
        else:
            (data,) = Collector(env, None, frames_per_batch=3 * steps, total_frames=3 * steps)
        turns = -(-5 // skip)
        rewards = [float(skip)] * (turns - 1) + [5.0 - skip * (turns - 1)]
        assert column(data["next", "reward"]).tolist() == [(rewards * steps)[:steps]] * 3
        assert column(data["next", "done"]).tolist() == [([False] * (turns - 1) + [True]) * (steps // turns)] * 3
        assert (data["next", "episode_reward"][data["next", "done"]] == 5).all()
        final = data["next", "observation"][..., 1][column(data["next", "done"])]
        assert (final == 5).all()
        begun = data["observation"][:, 1:, 1][column(data["next", "done"])[:, :-1]]
        assert (begun == 0).all()

    @pytest.mark.slow
    def test_compiled(self, fresh_dynamo):
        batch = DeviceCollector(self.make(2, limit=3), None, frames_per_batch=12, mode="compile").collect()
        assert column(batch["next", "reward"]).tolist() == [[2.0, 1.0] * 2] * 3
        assert column(batch["next", "done"]).tolist() == [[False, True] * 2] * 3

    def test_rows_end_inside_a_turn_alone(self):
        env = TransformedEnv(CountingEnv(4, max_episode_steps=6), FrameSkipTransform(2))
        data = env.rollout(12, break_when_any_done=False)
        index, step, episode = data["next", "observation"].unbind(-1)
        done = column(data["next", "done"])
        lengths = episode_length(index, episode)
        assert torch.equal(done, step == lengths)
        assert {2, 3, 5} <= set(lengths[done].int().tolist())

    def test_no_ops_at_a_reset_step_only_where_a_row_is_reset(self):
        env = TransformedEnv(CountingEnv(1, max_episode_steps=4), NoopResetEnv(1, random=False))
        collector = DeviceCollector(env, None, frames_per_batch=9)
        steps = collector.collect()["observation"][0, :, 1].tolist()
        assert set(steps) <= {1.0, 2.0, 3.0}
        assert collector.waits_for_host


class NativeBox(NativeEnv):
    """The same with one continuous action."""

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.action_spec = Bounded(-1.0, 1.0, (num_envs, 1))


class MarkedClass(NativeEnv):
    """The same with the mark on the class, as TorchRL's wrappers of simulators may have it."""

    _torchrl_native_autoreset = True

    def __init__(self, num_envs):
        super().__init__(num_envs)
        del self._torchrl_native_autoreset


OFF_POLICY = {
    "num_envs": 4, "num_steps": 4, "total_steps": 128, "device": "cpu", "logger": "none", "hidden_size": 32,
    "capacity": 128, "learning_starts": 32, "minibatch_size": 32, "mode": "eager", "seed": 0,
}  # fmt: skip


class TestOffPolicyTrainers:
    @pytest.mark.parametrize("env", [NativeEnv, MarkedClass])
    @pytest.mark.parametrize("options", [{}, {"n_step": 3, "compact": True, "sampler": "prioritized"}])
    def test_an_end_without_its_observation_is_stored_as_terminal(self, env, options):
        """No number that is missing reaches the buffer, the guard or the networks, and no end is bootstrapped from."""
        trainer = DQNTrainer(DQNConfig(**{**OFF_POLICY, **options}), env=env(4))
        for _ in range(8):
            trainer.step()
        assert trainer.updates > 0 and trainer.first_bad_iteration == -1
        assert all(param.isfinite().all() for param in trainer.q_network.parameters())
        rows = trainer.buffer.sample(256)
        assert rows["next", "obs"].isfinite().all() and rows["obs"].isfinite().all()
        # env i is truncated after 3 + i steps, and its episode is the number in the hundreds
        steps = rows.get("steps_to_next_obs", torch.ones_like(rows["obs"]))
        last = 3 + torch.arange(4)
        ends = (rows["obs"] % 100 + steps) >= last.min()
        assert rows["next", "terminated"].any() and not rows["next", "terminated"][~ends].any()

    def test_critics_of_continuous_actions(self):
        env = TransformedEnv(NativeBox(4), RenameTransform(["obs"], ["observation"]))
        trainer = SACTrainer(SACConfig(**OFF_POLICY), env=env)
        for _ in range(8):
            trainer.step()
        assert trainer.updates > 0 and trainer.first_bad_iteration == -1
        assert all(param.isfinite().all() for param in trainer.loss.parameters())


class TestSeveralActions:
    """TorchRL's ``MultiAction`` holds rows that end within a turn by the mask "_step"."""

    @pytest.mark.parametrize("stacked", [True, False])
    @pytest.mark.parametrize("how", ["rollout", "TorchRL's collector"])
    def test_a_row_stays_at_its_end(self, how, stacked):
        env = TransformedEnv(CountingEnv(3, max_episode_steps=4), MultiAction(stack_rewards=stacked))
        actions = TensorDictModule(lambda obs: torch.ones(3, 3, dtype=torch.int64), ["observation"], ["action"])
        if how == "rollout":
            data = env.rollout(12, actions, break_when_any_done=False)
        else:
            (data,) = Collector(env, actions, frames_per_batch=36, total_frames=36)
        index, step, episode = data["observation"].unbind(-1)
        length = episode_length(index, episode).clamp(max=4)
        end = torch.minimum(step + 3, length)
        assert torch.equal(data["next", "observation"], torch.stack([index, end, episode], -1))
        assert torch.equal(column(data["next", "done"]), end == length)
        if stacked:
            taken = end - step
            rewards = taken * (10_000 * index + 100 * episode + 0.25) + (step + end + 1) * taken / 2
            torch.testing.assert_close(data["next", "reward"].flatten(2).sum(-1), rewards)

    def test_a_compiled_step_holds_rows_too(self, fresh_dynamo):
        env = CountingEnv(3)
        td = env.reset().set("action", torch.ones(3, dtype=torch.int64)).set("_step", torch.tensor([True, False, True]))
        following = torch.compile(env._step, backend="eager")(td)
        assert following["observation"][:, 1].tolist() == [1, 0, 1]
        assert following["reward"][1] == 0


def test_refused_around_the_transforms_of_our_envs():
    env = TransformedEnv(CartPole(2), StepCounter())
    env._torchrl_native_autoreset = True
    with pytest.raises(ValueError, match="expected no mark '_torchrl_native_autoreset' on or around CartPole"):
        DeviceCollector(env, None, frames_per_batch=8)
