"""DeviceSliceSampler: which windows are drawn, how often, and how they are marked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

from torchrl_perf.replay import DeviceReplayBuffer, DeviceSliceSampler, DeviceStorage


class World:
    """Streams of identifiable rows, and the list of all rows ever written."""

    def __init__(self, num_envs, p_done=0.2, p_active=1.0, device="cpu", with_init=False):
        self.num_envs, self.p_done, self.p_active, self.device = num_envs, p_done, p_active, device
        self.with_init = with_init
        self.done = torch.zeros(num_envs, 0, dtype=torch.bool)
        self.active = torch.zeros(num_envs, 0, dtype=torch.bool)

    @property
    def time(self):
        return self.done.shape[1]

    def batch(self, T, done=None):
        N, first = self.num_envs, self.time
        done = torch.rand(N, T) < self.p_done if done is None else torch.as_tensor(done).view(N, T)
        self.done = torch.cat([self.done, done], 1)
        self.active = torch.cat([self.active, torch.rand(N, T) < self.p_active], 1)
        time = torch.arange(first, first + T).expand(N, T).unsqueeze(-1)
        flag = done.unsqueeze(-1)
        final = torch.where(flag, -1, time + 1)  # unlike the next root, so that a compact storage keeps it apart
        following = {"time": final, "reward": torch.ones(N, T, 1), "done": flag, "terminated": torch.zeros_like(flag)}
        following["truncated"] = flag.clone()
        td = TensorDict({"time": time.clone(), "next": following}, [N, T])
        td["env"] = torch.arange(N).view(N, 1, 1).repeat(1, T, 1)
        td["active"] = self.active[:, first:].unsqueeze(-1)
        if self.with_init:
            td["is_init"] = torch.cat([torch.ones(N, 1, dtype=torch.bool), done[:, :-1]], 1).unsqueeze(-1)
        return td.to(self.device)

    def windows(self, L, length, within_episode=True, masked=False):
        """All (env, time) that a slice of L rows may start at."""
        found = set()
        for env in range(self.num_envs):
            for start in range(max(self.time - length, 0), self.time - L + 1):
                crosses = within_episode and self.done[env, start : start + L - 1].any()
                if not crosses and (not masked or self.active[env, start : start + L].all()):
                    found.add((env, start))
        return found


def make_buffer(world, capacity, slice_len, batch_size=None, compact=False, **options):
    return DeviceReplayBuffer(
        storage=DeviceStorage(capacity, device=world.device, compact=compact),
        sampler=DeviceSliceSampler(slice_len, **options),
        batch_size=batch_size,
    )


def starts_of(buffer):
    """The (env, time) of the rows with a positive weight."""
    slots = [slot for slot, weight in enumerate(buffer.sampler.tree.weights.tolist()) if weight > 0]
    rows = buffer.storage.get(torch.tensor(slots, dtype=torch.int64))
    return set(zip(rows["env"].flatten().tolist(), rows["time"].flatten().tolist(), strict=True))


def first_rows(sample, slice_len):
    rows = sample.view(-1, slice_len)[:, 0]
    return list(zip(rows["env"].flatten().tolist(), rows["time"].flatten().tolist(), strict=True))


class TestWhichWindows:
    @settings(max_examples=40, deadline=None)
    @given(
        num_envs=st.integers(1, 3),
        steps=st.integers(1, 13),
        slice_len=st.integers(1, 5),
        extends=st.lists(st.integers(1, 9), min_size=1, max_size=6),
        p_done=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
        options=st.sampled_from([{}, {"alpha": 0.7}, {"mask_key": "active"}, {"alpha": 0.7, "within_episode": False}]),
        late=st.booleans(),
    )
    def test_equal_the_oracle(self, num_envs, steps, slice_len, extends, p_done, options, late):
        """Any capacity, several extends, wrap-around, batches longer than the ring, rows that were there before."""
        slice_len = min(slice_len, steps)
        world = World(num_envs, p_done, 0.8 if "mask_key" in options else 1.0)
        buffer = make_buffer(world, num_envs * steps, slice_len, **options)
        if late:  # written before the sampler was there
            buffer.storage.write(world.batch(extends[0]))
        for T in extends:
            buffer.extend(world.batch(T))
            valid = world.windows(
                slice_len, min(world.time, steps), options.get("within_episode", True), "mask_key" in options
            )
            assert starts_of(buffer) == valid
        if valid and world.time >= slice_len:
            sample = buffer.sample(slice_len)
            assert first_rows(sample, slice_len)[0] in valid
            assert sample["time"].flatten().diff().eq(1).all()
            assert sample["env"].unique().numel() == 1
            if options.get("within_episode", True):
                assert sample["collector", "mask"].all()

    def test_flat_rows_are_one_stream(self):
        world = World(1)
        buffer = make_buffer(world, 9, 3)
        for _ in range(4):
            buffer.extend(world.batch(5)[0])
            assert starts_of(buffer) == world.windows(3, min(world.time, 9))

    def test_rows_that_a_compact_storage_forgot_start_none(self):
        world = World(2, p_done=0.6)
        buffer = make_buffer(world, 40, 2, compact=True)
        for _ in range(8):
            buffer.extend(world.batch(7))
            length = int(buffer.storage.ring.length)
            assert starts_of(buffer) == world.windows(2, length)
        assert length < 20  # the case that this test is about
        sample = buffer.sample(8)
        mid = sample["next", "done"] & ~world.done[sample["env"], sample["time"]]
        assert mid.view(4, 2)[:, 0].any().logical_not()

    def test_torchrl_finds_the_same_windows(self):
        world = World(1, p_done=0.25)
        batch = world.batch(40)
        ours = make_buffer(world, 40, 4)
        ours.extend(batch)
        theirs = TensorDictReplayBuffer(
            storage=LazyTensorStorage(40), sampler=SliceSampler(slice_len=4, end_key=("next", "done")), batch_size=400
        )
        theirs.extend(batch[0])
        assert starts_of(ours) == set(first_rows(theirs.sample(), 4))


class TestHowOften:
    @pytest.mark.parametrize("within_episode", [True, False])
    def test_windows_are_drawn_uniformly(self, within_episode, device):
        """Chi-square over all windows; the limit is mean + 4 standard deviations of the distribution."""
        world = World(3, p_done=0.15, device=device)
        buffer = make_buffer(world, 3 * 23, 4, within_episode=within_episode)
        for T in (11, 11, 11):
            buffer.extend(world.batch(T))
        valid = sorted(world.windows(4, 23, within_episode))
        drawn = [start for _ in range(60) for start in first_rows(buffer.sample(64), 4)]
        assert set(drawn) <= set(valid)
        expected = len(drawn) / len(valid)
        chi = sum((drawn.count(window) - expected) ** 2 / expected for window in valid)
        freedom = len(valid) - 1
        assert chi < freedom + 4 * (2 * freedom) ** 0.5

    def test_priorities_decide(self, device):
        """Four starts with priorities 1, 2, 3, 4: frequencies .1, .2, .3, .4 and weights 1, .5, .3333, .25."""
        world = World(1, device=device)
        buffer = make_buffer(world, 6, 3, alpha=1.0, beta=1.0)
        buffer.extend(world.batch(6, done=[False] * 6))
        index = torch.arange(4, device=device).unsqueeze(1) + torch.arange(3, device=device)
        priority = index.new_tensor([[1, 0, 1], [2, 2, 2], [3, 1, 0], [0, 0, 4]]).float()  # the largest of a slice
        buffer.update_priority(index, priority)
        counts, weights = torch.zeros(4), {}
        for _ in range(500):
            sample = buffer.sample(6)
            for start, weight in zip(
                sample["index"][::3].tolist(), sample["priority_weight"][::3].tolist(), strict=True
            ):
                counts[start] += 1
                weights[start] = weight
        expected = torch.tensor([100.0, 200.0, 300.0, 400.0])
        assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom, one in a thousand
        assert [round(weights[start], 4) for start in range(4)] == [1.0, 0.5, 0.3333, 0.25]
        assert sample["priority_weight"].view(2, 3).diff(dim=1).eq(0).all()

    def test_new_slices_get_the_largest_priority(self):
        world = World(1)
        buffer = make_buffer(world, 10, 2, alpha=0.7)
        buffer.extend(world.batch(4, done=[False] * 4))
        buffer.update_priority(torch.tensor([[0, 1]]), torch.tensor([100.0]))
        buffer.extend(world.batch(2, done=[False] * 2))
        weights = buffer.sampler.tree.weights[:5].tolist()
        assert weights == pytest.approx([100**0.7, 1, 1, 100**0.7, 100**0.7])


class TestPriorityUpdates:
    def make(self):
        world = World(1)
        buffer = make_buffer(world, 6, 3, batch_size=6, alpha=1.0)
        buffer.extend(world.batch(6, done=[False] * 6))
        return world, buffer

    def test_through_the_sample(self):
        _, buffer = self.make()
        sample = buffer.sample()
        sample["td_error"] = torch.arange(1.0, 7.0)
        buffer.update_tensordict_priority(sample)
        first, second = sample["index"][::3].tolist()
        assert buffer.sampler.tree.weights[second] == 6
        assert buffer.sampler.tree.weights[first] == (3 if first != second else 6)

    @pytest.mark.parametrize("by_attribute", [True, False])
    def test_stale_slices_are_left_alone(self, by_attribute):
        world, buffer = self.make()
        sample, info = buffer.sample(return_info=True)
        buffer.extend(world.batch(6, done=[False] * 6))
        before = buffer.sampler.tree.weights.clone()
        if by_attribute:
            buffer.update_priority(info["index"], torch.full((6,), 9.0))
        else:
            buffer.update_priority(sample["index"].clone(), torch.full((6,), 9.0), sample["index_generation"])
        assert buffer.sampler.tree.weights.equal(before)

    def test_a_row_that_starts_no_slice_does_not_become_one(self):
        _, buffer = self.make()
        buffer.update_priority(torch.tensor([[4], [1]]), torch.tensor([5.0, 7.0]))
        assert buffer.sampler.tree.weights.tolist() == [1, 7, 1, 1, 0, 0]

    @pytest.mark.parametrize("bad", [float("nan"), -1.0])
    def test_bad_priorities_are_ignored(self, bad):
        _, buffer = self.make()
        buffer.update_priority(torch.tensor([[0, 1, 2]]), torch.tensor([bad]))
        assert buffer.sampler.tree.weights[0] == 1

    def test_parts_of_slices_are_refused(self):
        _, buffer = self.make()
        with pytest.raises(ValueError, match="whole slices of 3"):
            buffer.update_priority(torch.arange(4), torch.ones(4))
        with pytest.raises(ValueError, match="one priority a row"):
            buffer.update_priority(torch.arange(6), torch.ones(4))

    def test_without_priorities_nothing_happens(self):
        world = World(1)
        buffer = make_buffer(world, 6, 3)
        buffer.extend(world.batch(6))
        before = buffer.sampler.tree.weights.clone()
        buffer.update_priority(torch.arange(3), torch.ones(3))
        assert buffer.sampler.tree.weights.equal(before)
