"""DeviceCollector: every field of every row, against loops over identifiable data."""

import pytest
import torch
from counting_env import (
    TIME_LIMIT,
    CountingEnv,
    ReusingEnv,
    counting_policy,
    expected_rows,
    expected_trajectory_ids,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.runtime import host_syncs, no_host_sync


def make_collector(num_envs=5, num_steps=3, device="cpu", **options):
    env = CountingEnv(num_envs, device=device, max_episode_steps=TIME_LIMIT)
    return DeviceCollector(env, counting_policy(), frames_per_batch=num_envs * num_steps, **options)


def gather(collector, batches):
    """``batches`` batches along time: ``[N, batches * T]``."""
    return torch.cat([collector.collect().clone() for _ in range(batches)], 1).cpu()


class TestRows:
    @pytest.mark.parametrize(("num_envs", "num_steps", "batches"), [(5, 3, 9), (1, 1, 12), (1, 7, 3), (7, 1, 8)])
    def test_every_field_of_every_row(self, num_envs, num_steps, batches, device):
        data = gather(make_collector(num_envs, num_steps, device, mode="eager"), batches)
        expected = expected_rows(num_envs, num_steps * batches)
        assert expected["terminated"].any()
        torch.testing.assert_close(data["observation"], expected["obs"].float(), rtol=0, atol=0)
        torch.testing.assert_close(data["next", "observation"], expected["next_obs"].float(), rtol=0, atol=0)
        torch.testing.assert_close(data["next", "reward"].squeeze(-1), expected["reward"].float(), rtol=0, atol=0)
        torch.testing.assert_close(data["note"], expected["obs"].float().sum(-1), rtol=0, atol=0)
        assert torch.equal(data["action"], expected["action"])
        assert torch.equal(data["is_init"].squeeze(-1), expected["is_init"])
        for key in ("done", "terminated", "truncated"):
            assert torch.equal(data["next", key].squeeze(-1), expected[key]), key
            assert not data[key].any(), key
        assert not data["next", "is_init"].any()

    def test_both_kinds_of_end_occur_and_keep_the_final_observation(self):
        data = gather(make_collector(mode="eager"), 8)
        done, truncated = data["next", "done"].squeeze(-1), data["next", "truncated"].squeeze(-1)
        terminated = data["next", "terminated"].squeeze(-1)
        assert (terminated & ~truncated).any()
        assert (truncated & ~terminated).any()
        final, root = data["next", "observation"][:, :-1][done[:, :-1]], data["observation"][:, 1:][done[:, :-1]]
        assert (final[:, 1] >= 2).all()
        assert (root[:, 1] == 0).all()
        assert torch.equal(root[:, 2], final[:, 2] + 1)
        goes_on = ~done[:, :-1]
        assert torch.equal(data["next", "observation"][:, :-1][goes_on], data["observation"][:, 1:][goes_on])

    @pytest.mark.parametrize(("num_envs", "num_steps"), [(5, 3), (1, 1), (3, 8)])
    def test_trajectory_ids_equal_a_loop(self, num_envs, num_steps):
        data = gather(make_collector(num_envs, num_steps, mode="eager"), 8)
        ids = data["collector", "traj_ids"]
        assert torch.equal(ids, expected_trajectory_ids(data["next", "done"].squeeze(-1)))
        assert ids.dtype == torch.int64

    def test_batch_is_time_major_and_named(self):
        batch = make_collector(5, 3, mode="eager").collect()
        assert batch.shape == (5, 3)
        assert batch.names == [None, "time"]
        for key, leaf in batch.items(True, True):
            assert leaf.transpose(0, 1).is_contiguous(), key

    def test_excluded_keys_are_not_stored(self):
        keys = make_collector(mode="eager", exclude_keys=("note", "is_init")).collect().keys(True, True)
        assert "note" not in keys
        assert "is_init" not in keys
        assert ("next", "is_init") in keys


class TestReusedBuffers:
    """An env may return its own buffers and overwrite them at the next step."""

    @pytest.mark.parametrize("backend", ["traced", pytest.param("fresh_dynamo", marks=pytest.mark.slow)])
    @pytest.mark.parametrize("masked", [True, False])
    def test_nothing_is_kept_by_reference_when_compiled(self, masked, backend, request):
        request.getfixturevalue(backend)
        self.test_nothing_is_kept_by_reference("compile", masked)

    @pytest.mark.parametrize("mode", ["eager", "auto"])
    @pytest.mark.parametrize("masked", [True, False])
    def test_nothing_is_kept_by_reference(self, mode, masked):
        collector = DeviceCollector(ReusingEnv(2, masked=masked), None, frames_per_batch=8, mode=mode)
        for start in (0.0, 4.0):
            batch = collector.collect()
            count = torch.arange(4.0).expand(2, 4) + start
            assert torch.equal(batch["obs"].squeeze(-1), count)
            assert torch.equal(batch["next", "obs"].squeeze(-1), count + 1)
            assert torch.equal(batch["next", "reward"].squeeze(-1), count + 1)

    @pytest.mark.parametrize("mode", ["eager", "compile", "auto"])
    def test_resets_of_reused_buffers_leave_the_stored_rows_alone(self, mode, traced):
        collector = DeviceCollector(ReusingEnv(2, length=3), None, frames_per_batch=14, mode=mode)
        batch = collector.collect()
        assert batch["obs"][0].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]
        assert batch["next", "obs"][0].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1]
        assert batch["next", "done"][0].flatten().tolist() == [False, False, True] * 2 + [False]
        assert batch["collector", "traj_ids"].tolist() == [[0, 0, 0, 2, 2, 2, 4], [1, 1, 1, 3, 3, 3, 5]]


class TestFrames:
    def test_iteration_yields_copies_and_collect_one_batch(self):
        collector = make_collector(mode="eager", total_frames=45)
        batches = list(collector)
        assert len(batches) == len(collector) == 3
        data = torch.cat(batches, 1)
        assert torch.equal(data["observation"], expected_rows(5, 9)["obs"].float())
        assert make_collector(mode="eager").collect() is not batches[0]
        assert collector.collect() is collector.collect()

    def test_frames_are_counted_exactly_and_rounded_up_to_batches(self):
        collector = make_collector(4, 3, mode="eager", total_frames=30)
        assert sum(batch.numel() for batch in collector) == 36
        assert collector._frames == 36
        assert int(collector.frames) == 36

    def test_next_and_reiteration(self):
        collector = make_collector(mode="eager", total_frames=30)
        first = collector.next()
        assert torch.equal(first["observation"], expected_rows(5, 3)["obs"].float())
        assert len(list(collector)) == 1

    @pytest.mark.parametrize(("wanted", "steps"), [(0, 0), (1, 1), (30, 4), (32, 4), (100, 13)])
    def test_random_frames_are_rounded_up_to_whole_steps(self, wanted, steps):
        env = CountingEnv(8, max_episode_steps=TIME_LIMIT)
        always = TensorDictModule(
            lambda obs: (torch.zeros(8, dtype=torch.long), torch.ones(8)), ["observation"], ["action", "p"]
        )
        collector = DeviceCollector(env, always, frames_per_batch=40, init_random_frames=wanted, mode="eager")
        data = gather(collector, 4)
        random = data["p"] == 0  # a random action has no log-probability
        assert random.sum() == steps * 8
        assert random[:, :steps].all()
        assert (data["action"][:, steps:] == 0).all()
        if steps:
            assert (data["action"][:, :steps] != 0).any()

    def test_no_policy_means_random_actions(self):
        collector = DeviceCollector(CountingEnv(64), None, frames_per_batch=64 * 4, mode="eager")
        assert sorted(collector.collect()["action"].unique().tolist()) == [0, 1, 2]

    def test_postproc_sees_what_iteration_yields(self):
        collector = make_collector(mode="eager", total_frames=15, postproc=lambda td: td.set("seen", td["note"] + 1))
        (batch,) = collector
        assert torch.equal(batch["seen"], batch["note"] + 1)
        assert "seen" not in collector.batch.keys()

    def test_reset_begins_new_episodes_with_numbers_of_their_own(self):
        collector = make_collector(3, 2, mode="eager")
        first = collector.collect().clone()
        collector.reset()
        second = collector.collect().clone()
        assert first["collector", "traj_ids"].max() < second["collector", "traj_ids"].min()
        assert (second["observation"][:, 0, 1] == 0).all()


class TestHostReads:
    @pytest.mark.parametrize("limit", [1, TIME_LIMIT, None], ids=["always done", "some done", "none done"])
    def test_none_in_a_batch(self, limit):
        env = CartPole(6, max_episode_steps=limit)
        collector = DeviceCollector(env, None, frames_per_batch=60, mode="eager")
        collector.collect()
        with no_host_sync():
            batch = collector.collect()
        assert batch["next", "done"].all() == (limit == 1)

    def test_stock_envs_do_wait_and_are_named(self):
        class Waiting(ReusingEnv):
            def _step(self, tensordict):
                self.t.sum().item()
                return super()._step(tensordict)

        collector = DeviceCollector(Waiting(), None, frames_per_batch=4, mode="auto")
        with pytest.warns(UserWarning, match=r"Waiting is collected in eager mode.*counting|test_device_collector"):
            collector.collect()
        assert collector.mode == "eager"
        with host_syncs() as report:
            collector.collect()
        assert report.total > 0


class TestWeights:
    def make(self):
        env = CountingEnv(2)
        net = torch.nn.Sequential(torch.nn.Linear(3, 3))
        policy = TensorDictModule(lambda obs: net(obs).argmax(-1), ["observation"], ["action"])
        policy.net = net
        return DeviceCollector(env, policy, frames_per_batch=4, mode="eager"), net

    @pytest.mark.parametrize("form", ["module", "tensordict", "data", "dict"])
    def test_weights_are_copied_in_place(self, form):
        collector, net = self.make()
        other, source = self.make()
        torch.nn.init.constant_(source[0].weight, 3.0)
        address = net[0].weight.data_ptr()
        given = {
            "module": other.policy,
            "tensordict": TensorDict.from_module(other.policy),
            "data": TensorDict.from_module(other.policy).data,
            "dict": other.policy.state_dict(),
        }[form]
        collector.update_policy_weights_(given)
        assert torch.equal(net[0].weight, torch.full((3, 3), 3.0))
        assert net[0].weight.data_ptr() == address
        assert net[0].weight.requires_grad

    def test_none_means_shared(self):
        collector, net = self.make()
        before = net[0].weight.clone()
        collector.update_policy_weights_()
        collector.update_policy_weights_(collector.policy)
        assert torch.equal(net[0].weight, before)


def test_shutdown_closes_the_env_once():
    collector = make_collector(mode="eager")
    collector.collect()
    collector.shutdown()
    collector.shutdown()
    assert collector.env.is_closed


def test_random_actions_have_no_weights_to_update():
    collector = DeviceCollector(CartPole(2), None, frames_per_batch=4, mode="eager")
    collector.update_policy_weights_()
    assert collector.collect().batch_size == (2, 2)
