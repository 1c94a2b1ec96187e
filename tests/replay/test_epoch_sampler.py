"""DeviceSamplerWithoutReplacement: every row once an epoch, from Python and on the device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement, TensorDictReplayBuffer

from torchrl_perf.replay import (
    DeviceReplayBuffer,
    DeviceSamplerWithoutReplacement,
    DeviceStorage,
    DeviceWriter,
    make_replay_buffer,
)
from torchrl_perf.runtime import capture, no_host_sync


def rows(count, first=0, device="cpu"):
    return TensorDict({"x": torch.arange(first, first + count, device=device)}, [count], device=device)


def make_buffer(capacity, count, batch_size, device="cpu", **options):
    sampler = DeviceSamplerWithoutReplacement(**options)
    buffer = DeviceReplayBuffer(storage=DeviceStorage(capacity, device=device), sampler=sampler, batch_size=batch_size)
    if count:
        buffer.extend(rows(count, device=device))
    return buffer


def epoch_of(buffer):
    return [batch["x"] for batch in buffer]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 25), st.integers(0, 30), st.integers(1, 9), st.booleans(), st.booleans())
def test_an_epoch_has_every_row_once(capacity, extra, batch_size, drop_last, shuffle):
    count = min(capacity, batch_size + extra)
    batch_size = min(batch_size, count)
    buffer = make_buffer(capacity, count, batch_size, drop_last=drop_last, shuffle=shuffle)
    for _ in range(2):
        batches = epoch_of(buffer)
        whole, rest = divmod(count, batch_size)
        assert [len(b) for b in batches] == [batch_size] * whole + ([rest] if rest and not drop_last else [])
        drawn = torch.cat(batches)
        assert drawn.unique().shape == drawn.shape
        if not shuffle:
            assert drawn.equal(torch.arange(len(drawn)))


def test_epochs_differ_and_positions_are_uniform():
    """Where row 0 comes in 2,000 epochs of 8 rows: chi-square, 7 degrees of freedom, 24.3 at one in a thousand."""
    buffer = make_buffer(8, 8, 8)
    place = torch.stack([(buffer.sample()["x"] == 0).int().argmax() for _ in range(2000)])
    observed = torch.bincount(place, minlength=8).double()
    assert ((observed - 250) ** 2 / 250).sum() < 24.3


def test_new_rows_begin_a_new_epoch():
    buffer = make_buffer(20, 8, 4)
    buffer.sample()
    buffer.extend(rows(4, first=8))
    assert sorted(torch.cat(epoch_of(buffer)).tolist()) == list(range(12))


def test_a_full_ring_goes_on_with_its_epoch():
    """Only more rows begin a new epoch, as in TorchRL: the slots that are left of this one still come."""
    buffer = make_buffer(8, 8, 4)
    first = buffer.sample()["index"]
    buffer.extend(rows(3, first=8))
    assert sorted(torch.cat([first, buffer.sample()["index"]]).tolist()) == list(range(8))


def test_the_factory_makes_it():
    buffer = make_replay_buffer(10, batch_size=3, sampler="epoch", drop_last=True)
    buffer.extend(rows(10))
    assert [len(batch) for batch in buffer] == [3, 3, 3]


def test_another_batch_size_in_between():
    buffer = make_buffer(10, 10, 4, drop_last=True)
    drawn = torch.cat([buffer.sample(n)["x"] for n in (4, 3, 3)])
    assert sorted(drawn.tolist()) == list(range(10))


class TestOnTheDevice:
    """Inside a captured function position and order are device tensors; a CPU runs the same code."""

    @pytest.mark.parametrize("drop_last", [True, False])
    @pytest.mark.parametrize("shuffle", [True, False])
    def test_epochs(self, device, drop_last, shuffle):
        buffer = make_buffer(11, 11, 4, device, drop_last=drop_last, shuffle=shuffle)
        draw = capture(lambda: buffer.sample().get("x"), device=device)
        batches = [draw().clone() for _ in range(11)]
        per_epoch = 8 if drop_last else 11
        drawn = torch.cat(batches)
        whole = drawn[: drawn.numel() // per_epoch * per_epoch].view(-1, per_epoch).cpu()
        for order in whole:
            assert order.unique().shape == order.shape
        if shuffle:
            assert any(not order.equal(whole[0]) for order in whole[1:])
        else:
            assert whole[0].equal(torch.arange(per_epoch))

    def test_rows_written_in_between_begin_a_new_epoch(self, device):
        buffer = make_buffer(20, 8, 4, device)
        draw = capture(lambda: buffer.sample().get("x"), device=device)
        batch = rows(4, first=8, device=device)
        write = capture(lambda: buffer.extend(batch), device=device)
        draw()
        write()
        drawn = torch.cat([draw().clone() for _ in range(3)])
        assert sorted(drawn.tolist()) == list(range(12))

    def test_only_the_newest_rows_of_a_ring_that_forgot_some(self):
        """Steps 5, 6 and 7 of 8 are valid: their slots, and no others."""
        buffer = make_buffer(8, 8, 3)
        ring = buffer.storage.ring
        ring.length.fill_(3)
        ring.recorded = True
        assert sorted(buffer.sample()["x"].tolist()) == [5, 6, 7]
        ring.cursor.add_(2)  # now the newest are 7, 8 and 9, in slots 7, 0 and 1
        assert sorted(buffer.sample()["index"].tolist()) == [0, 1, 7]

    def test_iteration_ends_where_the_host_counts_no_more(self):
        buffer = make_buffer(8, 8, 3)
        buffer.storage.ring.recorded = True
        assert len(epoch_of(buffer)) == 3

    def test_no_host_wait(self, device):
        buffer = make_buffer(9, 9, 2, device)
        buffer.sample()
        with no_host_sync():
            buffer.sample()
        buffer.storage.ring.recorded = True
        buffer.sample()
        with no_host_sync():
            buffer.sample()


@pytest.mark.parametrize("recorded", [False, True])
def test_state_resumes_inside_an_epoch(recorded, tmp_path):
    buffer = make_buffer(20, 17, 3)
    buffer.storage.ring.recorded = recorded
    for _ in range(3):
        buffer.sample()
    buffer.sampler.dumps(tmp_path)
    state = torch.get_rng_state()
    expected = [buffer.sample()["x"] for _ in range(9)]

    for other in (make_buffer(20, 17, 3), make_buffer(20, 17, 3, shuffle=False)):
        other.storage.ring.recorded = recorded
        other.sample()
        other.sampler.loads(tmp_path)
        torch.set_rng_state(state)
        for batch in expected:
            assert other.sample()["x"].equal(batch)


def test_a_state_is_a_copy():
    buffer = make_buffer(8, 8, 3)
    buffer.sample()
    state = buffer.sampler.state_dict()
    order = state["order"].clone()
    for _ in range(5):
        buffer.sample()
    assert state["order"].equal(order)
    assert state["position"] == 3


def test_the_buffers_generator_is_used():
    draws = []
    for _ in range(2):
        sampler = DeviceSamplerWithoutReplacement()
        generator = torch.Generator().manual_seed(3)
        buffer = DeviceReplayBuffer(storage=DeviceStorage(50), sampler=sampler, batch_size=50, generator=generator)
        buffer.extend(rows(50))
        draws.append(buffer.sample()["x"])
    assert draws[0].equal(draws[1])


def test_empty_begins_anew():
    buffer = make_buffer(8, 8, 3)
    buffer.sample()
    buffer.empty()
    buffer.extend(rows(4, first=20))
    assert sorted(torch.cat(epoch_of(buffer)).tolist()) == [20, 21, 22, 23]


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer, DeviceReplayBuffer])
@pytest.mark.parametrize("shuffle", [True, False])
def test_more_than_is_filled_gives_all_rows(kind, shuffle):
    stock = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(shuffle=shuffle), batch_size=7
    )
    sampler = DeviceSamplerWithoutReplacement(shuffle=shuffle)
    ours = kind(storage=DeviceStorage(20), sampler=sampler, writer=DeviceWriter(), batch_size=7)
    for buffer in (stock, ours):
        assert not buffer.can_sample()
        buffer.extend(rows(6))
        assert buffer.can_sample()
        for _ in range(2):
            assert sorted(buffer.sample()["x"].tolist()) == list(range(6))
        assert [len(batch) for batch in buffer] == [6]
        buffer.extend(rows(3, first=6))
        assert [len(batch) for batch in buffer] == [7, 2]


def test_more_than_is_filled_is_refused_where_short_batches_are_dropped():
    for buffer in (
        make_buffer(20, 6, 7, drop_last=True),
        make_replay_buffer(20, batch_size=7, sampler="epoch", drop_last=True),
    ):
        buffer.empty()
        buffer.extend(rows(6))
        assert not buffer.can_sample(7)
        with pytest.raises(ValueError, match=r"from 1 to the 6 rows .* received 7: drop_last=True.*Remedy"):
            buffer.sample(7)
    with pytest.raises(ValueError, match="extend"):
        make_buffer(20, 0, 7).sample()
