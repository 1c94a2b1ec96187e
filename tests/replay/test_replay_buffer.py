"""DeviceReplayBuffer, the factory, and the parts in TorchRL's own buffers."""

import logging

import pytest
import torch
from ring_oracle import Stream
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement
from torchrl.envs.transforms import Compose, DoubleToFloat, RenameTransform

from torchrl_perf.replay import DeviceReplayBuffer, DeviceStorage, DeviceWriter, make_replay_buffer
from torchrl_perf.runtime import host_syncs, no_host_sync


def batch(num_envs=3, T=4, seed=0):
    return Stream(num_envs, torch.Generator().manual_seed(seed)).batch(T)[1]


def parts(capacity=30, sampler=RandomSampler, **options):
    return {"storage": DeviceStorage(capacity, **options), "sampler": sampler(), "writer": DeviceWriter()}


def rows_of(td):
    return {tuple(row) for row in td["observation"].reshape(-1, 3).tolist()}


class TestSample:
    """Samples are stored rows with TorchRL's keys."""

    @pytest.mark.parametrize("options", [{}, {"compact": True}, {"n_step": 3}, {"compact": True, "n_step": 3}])
    @pytest.mark.parametrize("sampler", ["random", "epoch", "prioritized"])
    def test_rows_and_keys(self, sampler, options):
        rb = make_replay_buffer(30, batch_size=8, sampler=sampler, **options)
        td = batch()
        index = rb.extend(td)
        assert index.shape == (3, 4)
        assert len(rb) == 12
        assert "index" not in td.keys()
        sample = rb.sample()
        assert sample.batch_size == (8,)
        assert rows_of(sample) <= rows_of(td)
        expected = {"observation", "action", "done", "next", "index"}
        expected |= {"priority_weight", "index_generation"} if sampler == "prioritized" else set()
        expected |= {"steps_to_next_obs", "gamma"} if options.get("n_step") else set()
        assert set(sample.keys()) == expected
        assert sample["index"].shape == (8,)
        assert sample["index"].dtype == torch.int64
        again = rb.storage.get(sample["index"])
        assert (sample.select(*again.keys(True, True)) == again).all()

    def test_batch_size(self):
        rb = DeviceReplayBuffer(**parts())
        rb.extend(batch())
        assert rb.sample(5).batch_size == (5,)
        with pytest.raises(RuntimeError, match="batch_size"):
            rb.sample()
        rb = DeviceReplayBuffer(**parts(), batch_size=4)
        rb.extend(batch())
        assert rb.sample(7).batch_size == (7,)  # and no warning
        data, info = rb.sample(return_info=True)
        assert torch.equal(info["index"], data["index"])

    def test_samples_can_be_written_to(self):
        rb = DeviceReplayBuffer(**parts(), batch_size=4)
        rb.extend(batch())
        sample = rb.sample()
        sample["loss"] = torch.zeros(4)
        sample["observation"].zero_()
        sample["next"]["value"] = torch.zeros(4, 1)
        assert rb[:]["observation"].abs().sum() > 0
        assert sample.clone().shape == sample.reshape(2, 2).reshape(-1).shape

    def test_forgotten_rows_are_not_drawn_by_torchrls_sampler(self):
        rb = DeviceReplayBuffer(**parts(16, compact=True, final_fraction=0.1), batch_size=64)
        stream = Stream(2, torch.Generator().manual_seed(0), p_done=0.9)
        for _ in range(6):
            rb.extend(stream.batch(3)[1])
        drawn = set(rb.sample()["index"].tolist())
        assert drawn <= set(rb.storage.ring.valid_slots().tolist())

    def test_a_transform_takes_the_long_path(self):
        rb = DeviceReplayBuffer(**parts(), batch_size=5)
        rb.append_transform(RenameTransform(["observation"], ["obs"]))
        td = batch()
        rb.extend(td)
        assert "obs" not in td.keys()
        sample = rb.sample()
        assert {"obs", "index"} <= set(sample.keys())

    def test_a_transform_on_extend(self):
        rb = DeviceReplayBuffer(**parts(), batch_size=5, transform=Compose(DoubleToFloat(in_keys_inv=["observation"])))
        rb.extend(batch())
        assert rb.storage.field("observation").dtype == torch.float64

    def test_prefetch(self):
        rb = DeviceReplayBuffer(**parts(), batch_size=5, prefetch=2)
        td = batch()
        rb.extend(td)
        for _ in range(4):
            sample = rb.sample()
            assert sample.batch_size == (5,)
            assert rows_of(sample) <= rows_of(td)
        rb.shutdown()

    def test_an_epoch_is_an_iteration(self):
        rb = make_replay_buffer(12, batch_size=5, sampler="epoch")
        rb.extend(batch())
        sizes = [sample["index"] for sample in rb]
        assert sorted(torch.cat(sizes).tolist()) == list(range(12))


class TestInTorchRL:
    """The parts in TorchRL's buffers."""

    @pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
    @pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
    @pytest.mark.parametrize("options", [{}, {"compact": True, "n_step": 2}])
    def test_plain_buffers(self, kind, sampler, options):
        rb = kind(**parts(12, sampler, **options), batch_size=6)
        td = batch()
        index = rb.extend(td)
        assert index.shape == (3, 4)
        sample = rb.sample()
        assert rows_of(sample) <= rows_of(td)
        assert rb.write_count == 12
        assert rb.stats()["utilization"] == 1.0
        rb.empty()
        assert len(rb) == 0

    def test_the_same_rows_as_torchrls_storage(self):
        ours = DeviceReplayBuffer(**parts(7))
        theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(7))
        for size in (3, 5, 1, 7, 4):
            td = batch(1, size, seed=size).squeeze(0)
            assert torch.equal(ours.extend(td), theirs.extend(td.clone()))
            assert (ours[:] == theirs[:].exclude("index")).all()

    def test_one_buffer_tells_the_samplers_of_all(self):
        storage, seen = DeviceStorage(12), []

        class Listening(RandomSampler):
            def mark_update(self, index, *, storage=None):
                seen.append((index, storage))

        first = ReplayBuffer(storage=storage, sampler=Listening(), writer=DeviceWriter(), batch_size=2)
        second = ReplayBuffer(storage=storage, sampler=Listening(), writer=DeviceWriter(), batch_size=2)
        first.extend(batch())
        assert len(seen) == 2
        assert all(told is storage for _, told in seen)
        assert len(second) == 12

    def test_conveniences(self):
        rb = DeviceReplayBuffer(**parts(12), batch_size=2)
        td = batch()
        rb.extend(td)
        by_slot = td.transpose(0, 1).reshape(-1)
        assert (rb[:] == by_slot).all()
        assert (rb[3] == by_slot[3]).all()
        assert (rb[-1] == by_slot[-1]).all()
        assert (rb[:5] == by_slot[:5]).all()
        assert (rb[torch.tensor([1, 7])] == by_slot[[1, 7]]).all()
        assert torch.equal(rb["next", "reward"], by_slot["next", "reward"])
        assert (rb.read_all_in_order() == by_slot).all()
        rb[2] = by_slot[0]
        assert (rb[2] == by_slot[0]).all()
        rb.set_("action", torch.arange(12))
        rb.set_at_("action", torch.tensor([90, 91]), torch.tensor([0, 5]))
        assert rb[:]["action"].tolist() == [90, 1, 2, 3, 4, 91, *range(6, 12)]
        rb.update_({"action": torch.zeros(12, dtype=torch.int64)})
        assert rb[:]["action"].sum() == 0

    def test_set_in_compact_rows_is_not_lost(self):
        rb = DeviceReplayBuffer(**parts(12, compact=True), batch_size=2)
        rb.extend(batch())
        rb.set_(("next", "reward"), torch.ones(12, 1))
        assert rb[:]["next", "reward"].sum() == 12

    def test_add_is_one_row(self):
        rb = DeviceReplayBuffer(**parts(8), batch_size=2)
        for value in range(3):
            index = rb.add(TensorDict({"x": torch.tensor(float(value))}))
            assert index.shape == ()
            assert index == value
        assert rb[:]["x"].tolist() == [0.0, 1.0, 2.0]
        plain = ReplayBuffer(**parts(8), batch_size=2)
        plain.add(TensorDict({"x": torch.tensor(1.0)}))
        assert len(plain) == 1


class TestPriorities:
    """What reaches the sampler."""

    class Recorder(RandomSampler):
        calls: list

        def update_priority(self, index, priority, *, storage=None, generation=None):
            self.calls.append((index, priority, generation))

    @pytest.fixture
    def rb(self):
        sampler = self.Recorder()
        sampler.calls = []
        rb = DeviceReplayBuffer(**{**parts(12), "sampler": sampler}, batch_size=4)
        rb.extend(batch())
        return rb

    def test_tensordict_priority(self, rb):
        sample = rb.sample()
        sample["td_error"] = torch.tensor([[1.0, 5], [2, 0], [3, 3], [0, 4]])
        sample["index_generation"] = torch.zeros(4, dtype=torch.int64)
        rb.update_tensordict_priority(sample)
        index, priority, generation = rb.sampler.calls[0]
        assert torch.equal(index, sample["index"])
        assert priority.tolist() == [5, 2, 3, 4]
        assert generation is sample["index_generation"]

    def test_missing_keys_are_named(self, rb):
        with pytest.raises(KeyError, match="td_error"):
            rb.update_tensordict_priority(rb.sample())

    def test_priorities_of_new_rows(self, rb):
        layout = rb.storage.state_dict()["layout"]["fields"]
        assert all(key != ["td_error"] for key, *_ in layout)
        other = DeviceReplayBuffer(**{**parts(12), "sampler": rb.sampler}, batch_size=4)
        td = batch().set("td_error", torch.rand(3, 4, 1))
        index = other.extend(td)
        told, priority, _ = rb.sampler.calls[-1]
        assert torch.equal(told, index)
        assert torch.equal(priority, td["td_error"].squeeze(-1))
        count = len(rb.sampler.calls)
        other.extend(td, update_priority=False)
        assert len(rb.sampler.calls) == count

    def test_without_a_prioritized_sampler(self):
        rb = DeviceReplayBuffer(**parts(), batch_size=4)
        rb.extend(batch())
        rb.update_tensordict_priority(rb.sample())


class TestHostWaits:
    """No wait in extend and sample, whatever the options."""

    @pytest.mark.parametrize("options", [{}, {"compact": True}, {"n_step": 3}, {"compact": True, "n_step": 3}])
    def test_none(self, options):
        rb = make_replay_buffer(30, batch_size=8, **options)
        td = batch(3, 7)
        rb.extend(td)
        with no_host_sync():
            for _ in range(4):
                rb.extend(td)
                rb.sample()
        with host_syncs() as report:
            rb.extend(td)
            rb.sample()
            rb.empty()
        assert not report.rows


class TestFactory:
    """Arguments of make_replay_buffer."""

    def test_unknown_sampler(self):
        with pytest.raises(ValueError, match=r"random.*slice.*'best'"):
            make_replay_buffer(8, sampler="best")

    def test_slices_and_n_step(self):
        with pytest.raises(ValueError, match="n_step=1"):
            make_replay_buffer(8, sampler="slice", n_step=3)

    def test_sampler_options(self):
        assert make_replay_buffer(8, sampler="prioritized", alpha=0.3, beta=0.2, eps=0.1).sampler.alpha == 0.3

    def test_the_announcement_is_quiet_by_default(self, capsys, caplog):
        caplog.set_level(logging.WARNING, logger="torchrl_perf")
        make_replay_buffer(30).extend(batch())
        assert capsys.readouterr() == ("", "")
        assert not caplog.records

    def test_more_rows_than_there_are(self):
        rb = make_replay_buffer(100, batch_size=64)
        rb.extend(batch())
        assert rb.sample().shape == (64,)
        assert rb.sample(1000)["index"].unique().tolist() == list(range(len(rb)))
