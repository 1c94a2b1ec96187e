"""DeviceStorage: bad input gets an error with expected, received and remedy, and changes nothing; memory."""

import copy
import logging
import pickle

import pytest
import torch
from ring_oracle import Stream
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from torchrl_perf.replay import DeviceStorage, DeviceWriter
from torchrl_perf.replay.memory import available_bytes, readable


def batch(num_envs=2, T=3):
    return Stream(num_envs, torch.Generator().manual_seed(0)).batch(T)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_size": 0}, "max_size >= 1"),
        ({"max_size": -3}, "max_size >= 1"),
        ({"max_size": 2.5}, "max_size >= 1"),
        ({"num_streams": 0}, "num_streams"),
        ({"num_streams": 9}, "num_streams"),
        ({"n_step": 0}, "n_step >= 1"),
        ({"gamma": 1.1}, "gamma in"),
        ({"final_fraction": 0.0}, "final_fraction"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        DeviceStorage(**{"max_size": 8, **options})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda td: td.exclude("action"), r"missing 'action'"),
        (lambda td: td.set("extra", torch.zeros(2, 3)), r"unexpected 'extra'"),
        (lambda td: td.set("action", td["action"].int()), r"expected 'action': int64\[\], received 'action': int32"),
        (lambda td: td.set("observation", torch.zeros(2, 3, 4)), r"float32\[3\], received .*float32\[4\]"),
        (lambda td: td.exclude("action").set("act", td["action"]), "missing 'action'.*unexpected 'act'"),
        (lambda td: td.reshape(-1), r"batches \[2, T\]"),
        (lambda td: td[:1], r"batches \[2, T\]"),
        (lambda td: td.unsqueeze(0), r"batches \[2, T\]"),
        (lambda td: td.set("word", "no tensor"), "tensors alone"),
    ],
)
@pytest.mark.parametrize("compact", [False, True])
def test_another_layout_changes_nothing(change, message, compact):
    storage = DeviceStorage(12, compact=compact)
    storage.write(batch())
    before = storage.state_dict()
    with pytest.raises(ValueError, match=message):
        storage.write(change(batch()))
    after = storage.state_dict()
    assert before["ring"] == after["ring"]
    assert all(torch.equal(a, b) for a, b in zip(before["rows"], after["rows"], strict=True))


class TestFirstBatch:
    """First batches that are refused."""

    def test_more_streams_than_rows(self):
        with pytest.raises(ValueError, match="5 envs"):
            DeviceStorage(4).write(batch(5, 2))

    def test_other_streams_than_announced(self):
        storage = DeviceStorage(8, num_streams=4)
        with pytest.raises(ValueError, match="num_streams=4"):
            storage.write(batch(2, 2))
        assert not storage.initialized
        storage.write(batch(4, 2))

    @pytest.mark.parametrize("options", [{"n_step": 3}, {"compact": True}])
    def test_flat_rows_have_no_order(self, options):
        storage = DeviceStorage(8, **options)
        with pytest.raises(ValueError, match=r"flat rows.*unsqueeze"):
            storage.write(batch(2, 2).reshape(-1))
        assert not storage.initialized
        storage.write(batch(1, 2))

    def test_n_step_keys(self):
        with pytest.raises(ValueError, match="reward"):
            DeviceStorage(8, n_step=2).write(batch().exclude(("next", "reward")))
        with pytest.raises(ValueError, match="gamma"):
            DeviceStorage(8, n_step=2).write(batch().set("gamma", torch.zeros(2, 3, 1)))
        agents = batch().set(("next", "done"), torch.zeros(2, 3, 4, 1, dtype=torch.bool))
        with pytest.raises(ValueError, match="one bool done flag"):
            DeviceStorage(8, n_step=2).write(agents)

    def test_compact_without_next_observations(self):
        with pytest.raises(ValueError, match="compact=True"):
            DeviceStorage(8, compact=True).write(batch().exclude(("next", "observation")))

    def test_too_many_dimensions(self):
        with pytest.raises(ValueError, match=r"\[N, T\].*reshape"):
            DeviceStorage(8).write(batch().unsqueeze(0))


def test_reading_before_the_first_batch():
    storage = DeviceStorage(8)
    assert len(storage) == 0
    assert storage.nbytes == 0
    assert list(storage) == []
    with pytest.raises(RuntimeError, match="first extend"):
        storage.get(slice(None))


@pytest.mark.parametrize("options", [{"compact": True}, {"n_step": 3}])
def test_writers_of_torchrl_hand_over_no_streams(options):
    rb = ReplayBuffer(storage=DeviceStorage(8, **options))
    with pytest.raises(ValueError, match=r"expected the order of time.*Nothing was written.*DeviceWriter"):
        rb.extend(batch(2, 2).reshape(-1))
    assert not rb.storage.initialized


def test_our_writer_needs_our_storage():
    with pytest.raises(TypeError, match="DeviceStorage"):
        ReplayBuffer(storage=LazyTensorStorage(8), writer=DeviceWriter())


def test_compact_observations_cannot_be_set():
    storage = DeviceStorage(12, compact=True)
    storage.write(batch())
    storage.set(0, TensorDict({"action": torch.tensor(3)}))
    assert storage.get(0)["action"] == 3
    for key in ("observation", ("next", "observation")):
        with pytest.raises(ValueError, match="shared"):
            storage.set(0, TensorDict({}).set(key, torch.zeros(3)))
    with pytest.raises(KeyError, match="compact"):
        storage.field(("next", "observation"))


class TestMemory:
    """Bytes are checked before allocating, and announced."""

    def test_too_much_is_refused_with_both_numbers(self):
        storage = DeviceStorage(10**12)
        with pytest.raises(ValueError, match=r"expected .*TB .*free.*smaller max_size"):
            storage.write(batch())
        assert not storage.initialized
        assert storage.max_size == 10**12

    def test_announced(self, caplog):
        with caplog.at_level(logging.INFO, logger="torchrl_perf"):
            storage = DeviceStorage(13)
            storage.write(batch(2, 3))
        assert storage.max_size == 12
        assert f"12 rows take {readable(storage.nbytes)} on cpu" in caplog.text
        assert "12 rows, not 13" in caplog.text

    def test_numbers(self):
        assert readable(3.1e9) == "3.10 GB"
        assert readable(999) == "999 B"
        assert available_bytes(torch.device("cpu")) > 10**8

    def test_compact_takes_little_more_than_half(self):
        def rows(n):
            x = torch.zeros(1, n, 376)
            small = torch.zeros(1, n, 16)
            one = torch.zeros(1, n, 1)
            return TensorDict(
                {"observation": x, "action": small, "next": {"observation": x, "reward": one, "done": one}}, [1, n]
            )

        plain, compact = DeviceStorage(10_000), DeviceStorage(10_000, compact=True)
        plain.write(rows(2))
        compact.write(rows(2))
        assert plain.nbytes == 10_000 * 3088  # 2 x 376 + 18 floats, padded to a multiple of 16 bytes
        assert 0.57 < compact.nbytes / plain.nbytes < 0.58


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda storage: pickle.loads(pickle.dumps(storage))])
def test_a_duplicate_is_independent(duplicate):
    storage = DeviceStorage(12, compact=True, n_step=2, final_fraction=1.0)
    storage.write(batch())
    other = duplicate(storage)
    other.write(batch())
    assert (len(storage), len(other)) == (6, 12)
    first = storage.get(storage.ring.valid_slots())
    assert torch.equal(other.get(storage.ring.valid_slots())["observation"], first["observation"])
