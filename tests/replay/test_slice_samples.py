"""The contents of a sample of slices: marks, targets that stay in their slice, state, errors, cost."""

import pytest
import torch
from test_slice_sampler import World, first_rows, make_buffer
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from torchrl_perf.functional import generalized_advantage_estimate, td_lambda_targets
from torchrl_perf.replay import DeviceSliceSampler, DeviceStorage, DeviceWriter, make_replay_buffer
from torchrl_perf.runtime import capture, no_host_sync


class TestMarks:
    def test_the_end_of_a_slice_is_truncated_where_the_episode_goes_on(self):
        """Rows 0..3 of an episode that ends at 3: slice 0-2 is cut, slice 1-3 ends by itself."""
        world = World(1, with_init=True)
        buffer = make_buffer(world, 4, 3)
        buffer.extend(world.batch(4, done=[False, False, False, True]))
        seen = {}
        for _ in range(20):
            sample = buffer.sample(3)
            seen[first_rows(sample, 3)[0][1]] = sample
        for sample in seen.values():
            assert sample["next", "done"].flatten().tolist() == [False, False, True]
            assert sample["next", "truncated"].flatten().tolist() == [False, False, True]
            assert sample["next", "terminated"].any().logical_not()
            assert sample["is_init"].flatten().tolist() == [True, False, False]
        assert sorted(seen) == [0, 1]

    def test_a_terminal_end_is_not_called_truncated(self):
        world = World(1)
        buffer = make_buffer(world, 3, 3)
        batch = world.batch(3, done=[False, False, True])
        batch["next", "terminated"], batch["next", "truncated"] = (
            batch["next", "truncated"],
            batch["next", "terminated"],
        )
        buffer.extend(batch)
        sample = buffer.sample(3)
        assert sample["next", "terminated"].flatten().tolist() == [False, False, True]
        assert not sample["next", "truncated"].any()

    def test_windows_across_episodes_are_masked_behind_the_first_end(self):
        world = World(2, p_done=0.3)
        buffer = make_buffer(world, 60, 5, within_episode=False)
        buffer.extend(world.batch(30))
        sample = buffer.sample(60).view(12, 5)
        done = world.done[sample["env"], sample["time"]].squeeze(-1)
        for ends, mask in zip(done.tolist(), sample["collector", "mask"].tolist(), strict=True):
            first = ends.index(True) if True in ends else 4
            assert mask == [k <= first for k in range(5)]

    def test_inactive_rows_are_masked(self):
        world = World(2, p_done=0.0, p_active=0.6)
        buffer = make_buffer(world, 40, 5, within_episode=False, mask_key="active")
        buffer.extend(world.batch(20))
        sample = buffer.sample(40).view(8, 5)
        assert sample["collector", "mask"].equal(world.active[sample["env"], sample["time"]].squeeze(-1))
        cut = sample["collector", "mask"][:, :-1] & ~sample["collector", "mask"][:, 1:]
        assert sample["next", "truncated"].squeeze(-1)[:, :-1].equal(cut)

    def test_terminal_rows_count_as_active(self):
        world = World(1, p_active=0.0)
        buffer = make_buffer(world, 4, 1, mask_key="active")
        batch = world.batch(4, done=[False, True, False, False])
        batch["next", "terminated"] = batch["next", "done"].clone()
        buffer.extend(batch)
        assert buffer.sampler.tree.weights.tolist() == [0, 1, 0, 0]

    def test_without_an_episode_that_is_long_enough_slices_are_masked(self, device):
        world = World(2, device=device)
        buffer = make_buffer(world, 20, 4)
        buffer.extend(world.batch(6, done=[True] * 12))
        sample = buffer.sample(12).view(3, 4)
        assert sample["collector", "mask"].tolist() == [[True, False, False, False]] * 3
        assert set(first_rows(sample, 4)) <= world.windows(4, 6, within_episode=False)

    def test_flags_may_be_left_as_stored(self):
        world = World(1)
        buffer = make_buffer(world, 6, 3, truncated_key=None)
        buffer.extend(world.batch(6, done=[False] * 6))
        assert not buffer.sample(3)["next", "done"].any()


def test_targets_never_reach_into_another_slice():
    """TD(lambda) and GAE of the flat sample, as one long stream, equal those of each slice alone."""
    world = World(2, p_done=0.15)
    buffer = make_buffer(world, 60, 6, batch_size=24)
    buffer.extend(world.batch(30))
    sample = buffer.sample()
    value, following = torch.randn(24, 1, dtype=torch.float64), torch.randn(24, 1, dtype=torch.float64)
    flags = (sample["next", "reward"].double(), sample["next", "done"], sample["next", "terminated"])

    def slices(*tensors):
        return [tensor.view(4, 6, 1) for tensor in tensors]

    long = td_lambda_targets(0.9, 0.8, following, *flags)
    torch.testing.assert_close(td_lambda_targets(0.9, 0.8, *slices(following, *flags)), long.view(4, 6, 1))
    long, _ = generalized_advantage_estimate(0.9, 0.8, value, following, *flags)
    each, _ = generalized_advantage_estimate(0.9, 0.8, *slices(value, following, *flags))
    torch.testing.assert_close(each, long.view(4, 6, 1))


@pytest.mark.parametrize("alpha", [None, 0.6])
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_in_torchrls_buffers(kind, alpha):
    world = World(2, p_done=0.2)
    sampler = DeviceSliceSampler(3, alpha=alpha)
    buffer = kind(storage=DeviceStorage(40), sampler=sampler, writer=DeviceWriter(), batch_size=12)
    buffer.extend(world.batch(15))
    sample, info = buffer.sample(return_info=True)
    assert set(first_rows(sample, 3)) <= world.windows(3, 15)
    assert info["next", "done"].view(4, 3)[:, -1].all()
    buffer.update_priority(info["index"], torch.full((12,), 7.0))
    if alpha is not None:
        assert sampler.tree.weights[info["index"][::3]].tolist() == pytest.approx([7**0.6] * 4)


class TestOnTheDevice:
    @pytest.mark.parametrize("options", [{}, {"alpha": 0.6}, {"within_episode": False}, {"mask_key": "active"}])
    @pytest.mark.parametrize("compact", [False, True])
    def test_no_host_wait(self, options, compact, device):
        world = World(3, device=device)
        buffer = make_buffer(world, 33, 4, batch_size=12, compact=compact, **options)
        batches = [world.batch(5) for _ in range(4)]
        buffer.extend(batches[0])
        buffer.sample()
        with no_host_sync():
            for batch in batches[1:]:
                buffer.extend(batch)
                sample = buffer.sample()
                if "alpha" in options:
                    buffer.update_priority(sample["index"], torch.rand(12, device=device), sample["index_generation"])

    @pytest.mark.parametrize("options", [{}, {"alpha": 0.6}])
    def test_captured_writes_and_draws(self, options, device):
        """Starts after captured writes are those of the oracle; draws are fresh at each call."""
        world = World(2, device=device)
        buffer = make_buffer(world, 26, 3, batch_size=15, **options)
        static = world.batch(4)
        buffer.extend(static)

        def step():
            buffer.extend(static)
            return buffer.sample().select("index")

        run = capture(step, device=device)
        draws = set()
        for _ in range(8):
            static.copy_(world.batch(4))
            draws.add(tuple(run()["index"].tolist()))
            slots = {slot for slot, weight in enumerate(buffer.sampler.tree.weights.tolist()) if weight > 0}
            valid = world.windows(3, min(world.time, 13))
            assert slots == {start % 13 * 2 + env for env, start in valid}
        assert len(draws) == 8

    def test_cost_does_not_depend_on_the_capacity(self):
        """The same operations on the same sizes, but for the search in the tree's sums."""
        from torch.utils._python_dispatch import TorchDispatchMode

        class Count(TorchDispatchMode):
            elements = operations = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                self.operations += 1
                returns = func._schema.returns
                if isinstance(out, torch.Tensor) and returns[0].alias_info is None:  # not a view
                    self.elements = max(self.elements, out.numel())
                return out

        counts = []
        for capacity in (2_000, 40_000):
            world = World(2, p_done=0.1)
            buffer = make_buffer(world, capacity, 4, batch_size=64, within_episode=False)
            buffer.extend(world.batch(100))
            with Count() as count:
                buffer.sample()
            counts.append((count.operations, count.elements))
        assert counts[0] == counts[1]


class TestState:
    @pytest.mark.parametrize("options", [{}, {"alpha": 0.6}, {"within_episode": False}])
    @pytest.mark.parametrize("is_fresh", [True, False])
    def test_a_loaded_buffer_goes_on_bitwise(self, options, is_fresh):
        world = World(2)
        buffer = make_buffer(world, 26, 3, batch_size=6, **options)
        for _ in range(3):
            buffer.extend(world.batch(5))
        sample = buffer.sample()
        buffer.update_priority(sample["index"], torch.rand(6))
        other = make_buffer(world, 26, 3, batch_size=6, **options)
        if not is_fresh:
            other.extend(world.batch(9))
        other.load_state_dict(buffer.state_dict())
        batch = world.batch(4)
        for _ in range(2):
            state = torch.get_rng_state()
            expected = buffer.sample()
            torch.set_rng_state(state)
            assert (other.sample() == expected).all()
            buffer.extend(batch)
            other.extend(batch)

    def test_on_disk(self, tmp_path):
        world = World(2)
        buffer = make_buffer(world, 26, 3, alpha=0.6)
        buffer.extend(world.batch(5))
        buffer.sampler.dumps(tmp_path)
        other = make_buffer(world, 26, 3, alpha=0.6)
        other.storage.load_state_dict(buffer.storage.state_dict())
        other.sampler.loads(tmp_path)
        other.sample(3)
        assert other.sampler.tree.weights.equal(buffer.sampler.tree.weights)

    def test_another_slice_length_is_refused(self):
        state = make_buffer(World(1), 8, 3).sampler.state_dict()
        with pytest.raises(ValueError, match="slices of 2"):
            make_buffer(World(1), 8, 2).sampler.load_state_dict(state)

    def test_a_state_from_before_the_first_write(self):
        world = World(1)
        buffer = make_buffer(world, 8, 3, batch_size=3)
        buffer.load_state_dict(make_buffer(world, 8, 3, batch_size=3).state_dict())
        buffer.extend(world.batch(5, done=[False] * 5))
        assert buffer.sampler.tree.weights.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]

    def test_empty(self):
        world = World(1)
        buffer = make_buffer(world, 8, 3)
        buffer.extend(world.batch(5, done=[False] * 5))
        buffer.empty()
        assert buffer.sampler.tree.total == 0
        world.done = world.done[:, :0]
        world.active = world.active[:, :0]
        buffer.extend(world.batch(4, done=[False] * 4))
        assert buffer.sampler.tree.weights.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


class TestErrors:
    def test_batches_are_whole_slices(self):
        world = World(1)
        buffer = make_buffer(world, 12, 4)
        buffer.extend(world.batch(12))
        with pytest.raises(ValueError, match="batch_size=8"):
            buffer.sample(10)
        with pytest.raises(ValueError, match="batch_size=4"):
            buffer.sample(3)

    def test_a_number_of_slices_that_does_not_fit(self):
        world = World(1)
        buffer = make_buffer(world, 12, 4, num_slices=2)
        buffer.extend(world.batch(12))
        assert buffer.sample(8).shape == (8,)
        with pytest.raises(ValueError, match="batch_size=8"):
            buffer.sample(12)

    def test_a_slice_longer_than_the_streams(self):
        world = World(3)
        buffer = make_buffer(world, 30, 4)
        buffer.extend(world.batch(3))
        with pytest.raises(ValueError, match="slice_len=4"):
            buffer.sample(4)

    def test_a_slice_longer_than_the_ring(self):
        world = World(3)
        with pytest.raises(ValueError, match="3 streams"):
            make_buffer(world, 30, 11).extend(world.batch(3))

    def test_a_batch_larger_than_what_is_filled(self):
        world = World(1)
        buffer = make_buffer(world, 30, 2)
        buffer.extend(world.batch(5, done=[False] * 5))
        assert buffer.sample(60)["index"].unique().tolist() == [0, 1, 2, 3, 4]  # with replacement
        with pytest.raises(ValueError, match="whole slices of 2 rows, received 0"):
            buffer.sampler.sample(buffer.storage, 0)

    def test_n_step_storages(self):
        with pytest.raises(ValueError, match="n_step"):
            make_replay_buffer(30, batch_size=4, sampler="slice", n_step=3)

    @pytest.mark.parametrize(
        "options", [{"slice_len": 0}, {"num_slices": 0}, {"alpha": -1.0}, {"alpha": 1.0, "beta": 2.0}]
    )
    def test_numbers_out_of_range(self, options):
        with pytest.raises(ValueError, match="expected"):
            make_buffer(World(1), 8, **{"slice_len": 3, **options})
