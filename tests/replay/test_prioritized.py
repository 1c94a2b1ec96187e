"""The prioritised sampler alone and in TorchRL's buffers: priorities, stale updates, masks, schedules, state."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from torchrl_perf.replay import DevicePrioritizedSampler, DeviceReplayBuffer, DeviceStorage, DeviceWriter
from torchrl_perf.runtime import no_host_sync

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def make_buffer(device, rows=4, capacity=None, plain=False, **options):
    """A buffer of ``rows`` rows whose "value" is their number. ``plain``: TorchRL's own shell."""
    sampler = DevicePrioritizedSampler(**{"alpha": 1.0, "beta": 1.0, **options})
    storage = DeviceStorage(capacity or rows, device=device)
    shell = TensorDictReplayBuffer if plain else DeviceReplayBuffer
    buffer = shell(storage=storage, sampler=sampler, writer=DeviceWriter(), batch_size=max(rows, 1))
    if rows:
        buffer.extend(batch_of(torch.arange(rows), device))
    return buffer, sampler


def batch_of(value, device, **entries):
    value = torch.as_tensor(value)
    return TensorDict({"value": value, **entries}, batch_size=value.shape).to(device)


def tensor(values, device, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=device)


def weights(sampler):
    return sampler.tree.weights.tolist()


class TestPriorities:
    def test_frequencies_and_weights_by_hand(self, device):
        buffer, _sampler = make_buffer(device)
        buffer.update_priority(torch.arange(4, device=device), tensor([1, 2, 3, 4], device))
        counts, seen = torch.zeros(4), {}
        for _ in range(500):
            batch = buffer.sample()
            counts += batch["value"].bincount(minlength=4).cpu()
            seen.update(zip(batch["value"].tolist(), batch["priority_weight"].tolist(), strict=True))
        expected = torch.tensor([0.1, 0.2, 0.3, 0.4]) * 2000
        assert ((counts - expected) ** 2 / expected).sum() < 20
        assert [seen[i] for i in range(4)] == pytest.approx([1.0, 0.5, 1 / 3, 0.25])

    def test_sample_carries_index_weight_and_generation(self, device):
        batch = make_buffer(device)[0].sample()
        assert batch["index"].dtype == batch["index_generation"].dtype == torch.int64
        assert batch["priority_weight"].dtype == torch.float32
        assert batch.batch_size == (4,)

    def test_new_rows_get_the_largest_priority(self, device):
        buffer, sampler = make_buffer(device, rows=2, capacity=4, alpha=0.7)
        assert weights(sampler) == [1.0, 1.0, 0.0, 0.0]
        buffer.update_priority(torch.tensor([0], device=device), tensor([100.0], device))
        buffer.extend(batch_of([5], device))
        assert weights(sampler)[:3] == pytest.approx([25.118864, 1.0, 25.118864])
        assert float(sampler.default_priority) == 100.0

    def test_bad_priorities(self, device):
        """NaN and negative priorities are ignored; infinity counts as the largest, but new rows do not get it."""
        buffer, sampler = make_buffer(device, capacity=6)
        index = torch.arange(4, device=device)
        buffer.update_priority(index, tensor([float("nan"), -1.0, float("inf"), 3.0], device))
        assert weights(sampler)[:4] == [1.0, 1.0, 2.0**64, 3.0]
        assert float(sampler.default_priority) == 3.0
        assert buffer.sample()["priority_weight"].isfinite().all()
        buffer.update_priority(index, tensor([0.0, 0.0, 1.0, 0.0], device))
        assert (buffer.sample()["value"] == 2).all()

    def test_all_zero_is_uniform(self, device):
        buffer, _sampler = make_buffer(device, rows=5, capacity=8)
        buffer.update_priority(torch.arange(5, device=device), 0.0)
        counts = torch.zeros(8)
        for _ in range(100):
            batch = buffer.sample()
            counts += batch["index"].bincount(minlength=8).cpu()
            assert (batch["priority_weight"] == 1).all()
        assert counts[5:].sum() == 0
        assert (counts[:5] > 50).all()

    def test_duplicates_and_scalars_and_lists(self, device):
        _buffer, sampler = make_buffer(device)
        sampler.update_priority([0, 0, 0], [3, 1, 2])
        sampler.update_priority(3, 5)
        sampler.update_priority(torch.tensor([1, 2], device=device), 7.0)
        assert weights(sampler) == [2.0, 7.0, 7.0, 5.0]

    def test_eps(self, device):
        _buffer, sampler = make_buffer(device, eps=0.5)
        sampler.update_priority([0, 1], [0.0, 1.0])
        assert weights(sampler) == [0.0, 1.5, 1.5, 1.5]

    def test_priorities_that_come_with_the_rows(self, device):
        buffer, sampler = make_buffer(device, rows=0, capacity=4)
        buffer.extend(batch_of([0, 1], device, td_error=torch.tensor([5.0, 6.0])))
        assert weights(sampler) == [5.0, 6.0, 0.0, 0.0]

    @pytest.mark.parametrize("shape", [(3,), (4, 2), (1,), (2, 2)])
    def test_wrong_shapes_are_refused(self, device, shape):
        _buffer, sampler = make_buffer(device)
        with pytest.raises(ValueError, match="one priority"):
            sampler.update_priority(torch.arange(4, device=device), torch.ones(shape, device=device))
        assert weights(sampler) == [1.0] * 4

    def test_no_host_wait(self, device):
        buffer, sampler = make_buffer(device, rows=8, capacity=16)
        more, priority = batch_of(torch.arange(8), device), torch.rand(8, device=device)
        with no_host_sync():
            buffer.extend(more)
            batch = buffer.sample()
            buffer.update_priority(batch["index"], priority, generation=batch["index_generation"])
            sampler.step()


@pytest.mark.parametrize("plain", [False, True])
class TestStaleUpdates:
    def test_overwritten_rows_keep_their_priority(self, device, plain):
        buffer, sampler = make_buffer(device, plain=plain)
        batch = buffer.sample()
        batch["td_error"] = torch.full((4,), 50.0, device=device)
        buffer.extend(batch_of(torch.arange(4), device))
        buffer.update_tensordict_priority(batch)
        assert weights(sampler) == [1.0] * 4

    def test_present_rows_take_it(self, device, plain):
        buffer, sampler = make_buffer(device, plain=plain)
        batch = buffer.sample()
        batch["td_error"] = torch.full((4,), 50.0, device=device)
        buffer.extend(batch_of([9], device))
        buffer.update_tensordict_priority(batch)
        drawn = {i for i in batch["index"].tolist() if i != 0}
        assert weights(sampler) == [1.0] + [50.0 if i in drawn else 1.0 for i in (1, 2, 3)]

    def test_the_index_tensor_knows_its_generation(self, device, plain):
        buffer, sampler = make_buffer(device, plain=plain)
        index, _ = sampler.sample(buffer._storage, 4)
        buffer.extend(batch_of(torch.arange(4), device))
        buffer.update_priority(index, torch.full((4,), 50.0, device=device))
        assert weights(sampler) == [1.0] * 4


class TestMasks:
    def test_masked_rows_are_never_drawn_and_terminal_ones_are(self, device):
        buffer, sampler = make_buffer(device, rows=0, capacity=4, mask_key="active")
        rows = batch_of(
            torch.arange(4),
            device,
            active=torch.tensor([[1, 0], [0, 0], [0, 0], [1, 1]], dtype=torch.bool),
            next=TensorDict({"terminated": torch.tensor([[0], [0], [1], [0]], dtype=torch.bool)}, [4]),
        )
        buffer.extend(rows)
        assert weights(sampler) == [1.0, 0.0, 1.0, 1.0]
        buffer.update_priority(torch.arange(4, device=device), 2.0)
        assert weights(sampler) == [2.0, 0.0, 2.0, 2.0]

    def test_a_missing_mask_is_named(self, device):
        with pytest.raises(KeyError, match="active"):
            make_buffer(device, mask_key="active")


class TestExponents:
    def test_schedules_are_closed_form(self, device):
        _buffer, sampler = make_buffer(device, alpha=1.0, alpha_end=0.5, beta=0.4, beta_end=1.0, anneal_steps=10)
        assert (float(sampler.alpha), float(sampler.beta)) == pytest.approx((1.0, 0.4))
        sampler.step()
        sampler.step(4)
        assert (float(sampler.alpha), float(sampler.beta)) == pytest.approx((0.75, 0.7))
        sampler.update_priority([0], [16.0])
        assert weights(sampler)[0] == pytest.approx(8.0)
        sampler.step(10**9)
        assert (float(sampler.alpha), float(sampler.beta)) == pytest.approx((0.5, 1.0))

    def test_steps_before_the_first_row_count(self, device):
        sampler = DevicePrioritizedSampler(1.0, 0.0, beta_end=1.0, anneal_steps=4)
        sampler.step(2)
        sampler.mark_update(torch.arange(2), storage=self.storage(device))
        assert float(sampler.beta) == pytest.approx(0.5)

    def storage(self, device):
        storage = DeviceStorage(4, device=device)
        buffer = TensorDictReplayBuffer(storage=storage, writer=DeviceWriter(), batch_size=1)
        buffer.extend(batch_of([0, 1], device))
        return storage

    def test_assignment_converts_weights(self, device):
        buffer, sampler = make_buffer(device)
        sampler.update_priority([0, 1], [4.0, 9.0])
        sampler.alpha = 0.5
        assert weights(sampler) == pytest.approx([2.0, 3.0, 1.0, 1.0])
        sampler.beta = 0.0
        assert (buffer.sample()["priority_weight"] == 1).all()
        sampler.alpha = 0.0
        assert weights(sampler) == [1.0] * 4
        with pytest.warns(UserWarning, match="priorities are lost"):
            sampler.alpha = 1.0

    @pytest.mark.parametrize(
        "options",
        [
            {"alpha": -0.1},
            {"alpha": float("nan")},
            {"beta": 1.1},
            {"beta": -0.1},
            {"eps": -1.0},
            {"reduction": "sum"},
            {"anneal_steps": 5},
            {"beta_end": 1.0},
            {"beta_end": 1.0, "anneal_steps": 0},
        ],
    )
    def test_out_of_range_is_refused(self, device, options):
        with pytest.raises(ValueError, match=r"expected"):
            DevicePrioritizedSampler(**options)


class TestRows:
    def test_more_rows_than_are_filled(self, device):
        buffer, _ = make_buffer(device, rows=4, capacity=8)
        assert set(buffer.sample(200)["index"].tolist()) == {0, 1, 2, 3}
        with pytest.raises(ValueError, match="empty"):
            make_buffer(device, rows=0, capacity=8)[0].sample(1)

    def test_rows_from_before_the_sampler_can_be_drawn(self, device):
        storage = DeviceStorage(4, device=device)
        TensorDictReplayBuffer(storage=storage, writer=DeviceWriter(), batch_size=1).extend(batch_of([0, 1], device))
        sampler = DevicePrioritizedSampler()
        sampler.sample(storage, 2)
        assert weights(sampler) == [1.0, 1.0, 0.0, 0.0]

    def test_forgotten_rows_are_not_drawn(self, device):
        buffer, sampler = make_buffer(device)
        buffer._storage.ring.length.fill_(2)
        sampler.update_priority([0, 3], [5.0, 6.0])
        assert weights(sampler) == [1.0, 1.0, 1.0, 6.0]
        sampler.tree.forget_(buffer._storage.ring)
        assert weights(sampler) == [0.0, 0.0, 1.0, 6.0]

    def test_empty(self, device):
        buffer, sampler = make_buffer(device)
        sampler.update_priority([0], [5.0])
        buffer.empty()
        assert weights(sampler) == [0.0] * 4
        buffer.extend(batch_of([1], device))
        assert weights(sampler) == [1.0, 0.0, 0.0, 0.0]

    def test_other_storages_are_refused(self, device):
        with pytest.raises(TypeError, match="DeviceStorage"):
            DevicePrioritizedSampler().sample(object(), 1)

    def test_max_capacity(self, device):
        with pytest.raises(ValueError, match="max_capacity=3"):
            make_buffer(device, max_capacity=3)


class TestState:
    def trained(self, device, capacity=40):
        options = {"alpha": 0.7, "beta": 0.5, "beta_end": 1.0, "anneal_steps": 100}
        buffer, sampler = make_buffer(device, rows=6, capacity=capacity, **options)
        sampler.update_priority(torch.arange(6, device=device), torch.rand(6, device=device) * 9)
        sampler.step(7)
        return buffer, sampler

    def test_resumes_bitwise_into_fresh_and_used_samplers(self, device, tmp_path):
        buffer, sampler = self.trained(device)
        state, storage = sampler.state_dict(), buffer._storage
        assert state["tree"]["weights"].shape == (6,)
        sampler.dumps(tmp_path / "sampler")
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        torch.manual_seed(1)
        index, info = sampler.sample(storage, 6)
        fresh, used = DevicePrioritizedSampler(), self.trained(device)[1]
        used.load_state_dict(state)
        for other in (fresh, used):
            other.load_state_dict(state)
            torch.manual_seed(1)
            again, other_info = other.sample(storage, 6)
            assert torch.equal(again, index)
            assert torch.equal(other_info["priority_weight"], info["priority_weight"])
            assert torch.equal(other.default_priority, sampler.default_priority)
            assert torch.equal(other.tree._sums, sampler.tree._sums)
            assert float(other.beta) == float(sampler.beta)
        loaded = DevicePrioritizedSampler()
        loaded.loads(tmp_path / "sampler")
        assert torch.equal(loaded.state_dict()["tree"]["weights"].cpu(), state["tree"]["weights"].cpu())

    def test_another_capacity_is_refused_and_changes_nothing(self, device):
        state = self.trained(device, capacity=41)[1].state_dict()
        buffer, sampler = self.trained(device)
        before = weights(sampler)
        with pytest.raises(ValueError, match="40 slots"):
            sampler.load_state_dict(state)
        assert weights(sampler) == before
        fresh = DevicePrioritizedSampler()
        fresh.load_state_dict(state)
        with pytest.raises(ValueError, match="41 slots"):
            fresh.sample(buffer._storage, 1)
