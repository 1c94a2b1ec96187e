"""DeviceStorage: the ring against a list of rows, whatever the sizes; layouts, errors, memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_oracle import ListRing, Stream
from tensordict import LazyStackedTensorDict, TensorDict

from torchrl_perf.replay import DeviceStorage
from torchrl_perf.replay.rows import PackedRows

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def flat(values, **more):
    return TensorDict({"x": torch.as_tensor(values), **more}, [len(values)])


def check(storage, oracle, n=1, gamma=0.99):
    """Every valid row of the storage is the oracle's."""
    assert len(storage) == oracle.length * oracle.num_streams
    assert (storage.ring.host_cursor, int(storage.ring.cursor)) == (oracle.cursor, oracle.cursor)
    valid = oracle.valid()
    slots = torch.tensor([oracle.slot(*place) for place in valid])
    assert storage.ring.valid_slots().tolist() == sorted(slots.tolist())
    rows = storage.get(slots)
    expected = [oracle.n_step(*place, n, gamma) for place in valid]

    def column(name):
        return torch.tensor([row[name] for row in expected])

    assert torch.equal(rows["observation"], column("observation"))
    assert torch.equal(rows["next", "observation"], column("next_observation"))
    assert torch.equal(rows["action"], column("action"))
    torch.testing.assert_close(rows["next", "reward"].squeeze(-1), column("reward"), rtol=1e-5, atol=1e-5)
    assert torch.equal(rows["next", "done"].squeeze(-1), column("done"))
    assert torch.equal(rows["next", "terminated"].squeeze(-1), column("terminated"))
    if n > 1:
        steps = column("steps").unsqueeze(-1)
        assert torch.equal(rows["steps_to_next_obs"], steps)
        torch.testing.assert_close(rows["gamma"], (gamma ** steps.double()).float())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_envs=st.integers(1, 4),
    steps=st.integers(1, 9),
    spare=st.integers(0, 3),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    n=st.sampled_from([1, 1, 2, 3, 20]),
    compact=st.booleans(),
    final_fraction=st.sampled_from([0.05, 0.3, 1.0]),
    p_done=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_any_sequence_of_extends(seed, num_envs, steps, spare, lengths, n, compact, final_fraction, p_done):
    max_size = num_envs * steps + min(spare, num_envs - 1)
    stream = Stream(num_envs, torch.Generator().manual_seed(seed), p_done)
    storage = DeviceStorage(max_size, compact=compact, n_step=n, gamma=0.9, final_fraction=final_fraction)
    final_rows = storage.final_rows(num_envs) if compact else None
    oracle = ListRing(steps, num_envs, final_rows)
    for T in lengths:
        start = oracle.cursor
        rows, td = stream.batch(T)
        index = storage.write(td)
        expected = [[(start + t) % steps * num_envs + env for t in range(T)] for env in range(num_envs)]
        assert index.shape == (num_envs, T)
        assert index.tolist() == expected
        oracle.extend(rows)
        check(storage, oracle, n, 0.9)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("flat_rows", [False, True])
def test_the_write_on_the_device_is_the_write_by_runs(monkeypatch, n, flat_rows):
    def by_cursor(rows, leaves, time_rows, skipped):
        rows._write_on_device(leaves, skipped)

    def fill():
        storage = DeviceStorage(14, n_step=1 if flat_rows else n)
        stream = Stream(2, torch.Generator().manual_seed(0))
        for T in (3, 1, 7, 20, 2, 5):
            td = stream.batch(T)[1]
            storage.write((td[0] if flat_rows else td).set("empty", torch.zeros(*td.shape, 0)[0 if flat_rows else ...]))
        return storage.state_dict()["rows"]

    expected = fill()
    monkeypatch.setattr(PackedRows, "_write_runs", by_cursor)
    assert all(torch.equal(a, b) for a, b in zip(expected, fill(), strict=True))


class TestOverfull:
    """A batch longer than the ring leaves its newest rows."""

    def test_flat(self):
        storage = DeviceStorage(8)
        index = storage.write(flat(torch.arange(20)))
        assert index.tolist() == [t % 8 for t in range(20)]
        assert len(storage) == 8
        assert sorted(storage.get(slice(None))["x"].tolist()) == list(range(12, 20))
        assert storage.get(index[12:])["x"].tolist() == list(range(12, 20))
        replaced = storage.write(flat(torch.tensor([99])))
        assert storage.get(replaced)["x"].tolist() == [99]
        assert sorted(storage.get(slice(None))["x"].tolist()) == [*range(13, 20), 99]

    def test_streams(self):
        storage = DeviceStorage(6)
        x = torch.arange(10).view(2, 5)
        index = storage.write(TensorDict({"x": x}, [2, 5]))
        assert len(storage) == 6
        assert torch.equal(storage.get(index[:, 2:])["x"], x[:, 2:])


class TestContent:
    """Copies, detached, in their dtype, of any layout."""

    def test_dtypes_and_nesting(self):
        td = TensorDict(
            {
                "image": torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8),
                "flag": torch.rand(5, 1) > 0.5,
                "f64": torch.randn(5, 2, dtype=torch.float64),
                "bf16": torch.randn(5, 3).bfloat16(),
                "i16": torch.arange(5, dtype=torch.int16),
                "complex": torch.randn(5, dtype=torch.complex64),
                "a": {"b": {"c": torch.arange(5)}},
                "empty": torch.zeros(5, 0),
                "next": {"image": torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)},
            },
            [5],
        )
        storage = DeviceStorage(7)
        index = storage.write(td)
        rows = storage.get(index)
        assert set(rows.keys(True, True)) == set(td.keys(True, True))
        for key in td.keys(True, True):
            assert rows[key].dtype == td[key].dtype
            assert torch.equal(rows[key], td[key]), key

    def test_rows_are_copies_and_detached(self):
        x = torch.ones(4, 2, requires_grad=True)
        td = TensorDict({"x": x * 2}, [4])
        storage = DeviceStorage(30)
        for _ in range(20):
            storage.write(td)
        td["x"].data.zero_()
        rows = storage.get(torch.arange(4))
        assert rows["x"].grad_fn is None
        assert storage.field("x").grad_fn is None
        assert not storage.field("x").requires_grad
        assert torch.equal(rows["x"], torch.full((4, 2), 2.0))

    @pytest.mark.parametrize("form", ["strided", "time_major", "feature_major", "lazy", "no_device", "locked"])
    def test_any_memory_layout(self, form):
        x = torch.arange(24.0).view(2, 6, 2)
        td = TensorDict({"x": x, "next": {"x": x + 1}}, [2, 6])
        if form == "strided":
            td = TensorDict({"x": x.flip(1), "next": {"x": x + 1}}, [2, 12 // 2])
            td = td.apply(lambda t: t.repeat_interleave(2, 2)[..., ::2])
        if form == "feature_major":
            td = td.apply(lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0))
        if form == "time_major":
            td = td.apply(lambda t: t.transpose(0, 1).contiguous().transpose(0, 1))
        if form == "lazy":
            td = LazyStackedTensorDict(*td.unbind(0), stack_dim=0)
        if form == "locked":
            td = td.lock_()
        if form == "no_device":
            td = td.clear_device_()
        for compact in (False, True):
            storage = DeviceStorage(14, compact=compact, final_fraction=1.0)
            index = storage.write(td)
            assert (storage.get(index) == td).all()

    def test_written_in_inference_mode(self):
        storage = DeviceStorage(6, compact=True, n_step=2)
        _, first = (stream := Stream(2, torch.Generator().manual_seed(0))).batch(2)
        with torch.inference_mode():
            storage.write(first)
        _, second = stream.batch(1)
        index = storage.write(second)
        assert torch.equal(storage.get(index)["observation"], second["observation"])
        assert len(storage) == 6

    @pytest.mark.parametrize("options", [{}, {"n_step": 3}, {"compact": True}])
    def test_an_empty_batch(self, options):
        _, td = Stream(2, torch.Generator().manual_seed(0)).batch(2)
        storage = DeviceStorage(6, **options)
        assert storage.write(td[:, :0]).shape == (2, 0)
        assert len(storage) == 0
        index = storage.write(td)
        storage.write(td[:, :0])
        assert (len(storage), storage.get(index[:0]).batch_size) == (4, (0, 2))

    def test_samples_keys_are_not_stored(self):
        storage = DeviceStorage(4)
        storage.write(flat([1.0, 2.0], index=torch.arange(2), priority_weight=torch.ones(2)))
        assert list(storage.get(slice(None)).keys()) == ["x"]


class TestAddressing:
    """Ints, slices, arrays, masks, tensors of any shape."""

    @pytest.fixture
    def storage(self):
        storage = DeviceStorage(6)
        storage.write(flat(torch.arange(4) * 10))
        return storage

    def test_shapes(self, storage):
        assert storage.get(2)["x"].item() == 20
        assert storage.get(2).batch_size == ()
        assert storage.get(-1)["x"].item() == 30
        assert storage.get(slice(None))["x"].tolist() == [0, 10, 20, 30]
        assert storage.get(slice(1, 3))["x"].tolist() == [10, 20]
        assert storage.get(slice(None, None, -1))["x"].tolist() == [30, 20, 10, 0]
        assert storage.get([3, 0])["x"].tolist() == [30, 0]
        assert storage.get(range(2))["x"].tolist() == [0, 10]
        grid = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
        assert storage.get(grid)["x"].tolist() == [[0, 10], [20, 30]]
        assert [row["x"].item() for row in storage] == [0, 10, 20, 30]

    def test_refused(self, storage):
        for index in (4, -5, 6):
            with pytest.raises(IndexError, match="4 valid rows"):
                storage.get(index)
        with pytest.raises(TypeError, match="slots"):
            storage.get(torch.ones(4, dtype=torch.bool))

    def test_contains(self, storage):
        assert 3 in storage
        assert 4 not in storage
        assert storage.contains(torch.tensor([-1, 0, 3, 4, 6])).tolist() == [False, True, True, False, False]

    def test_slices_of_plain_rows_are_live(self, storage):
        storage.get(slice(None)).set_("x", torch.arange(4))
        assert storage.get(torch.arange(4))["x"].tolist() == [0, 1, 2, 3]

    def test_set_in_place(self, storage):
        storage.set(torch.tensor([1, 3]), TensorDict({"x": torch.tensor([7, 8])}, [2]))
        storage[0] = TensorDict({"x": torch.tensor(5)})
        assert storage.get(slice(None))["x"].tolist() == [5, 7, 20, 8]
        with pytest.raises(ValueError, match=r"'y'"):
            storage.set(0, TensorDict({"y": torch.tensor(5)}))

    def test_field_is_live(self):
        storage = DeviceStorage(8)
        x = torch.arange(6).view(2, 3)
        storage.write(TensorDict({"x": x, "next": {"y": x.unsqueeze(-1)}}, [2, 3]))
        assert storage.field("x").shape == (4, 2)
        assert torch.equal(storage.field("x")[:3], x.t())
        assert torch.equal(storage.field(("next", "y"))[:3, :, 0], x.t())
        with pytest.raises(KeyError, match=r"expected one of .*x.*, .*next.*y"):
            storage.field("z")


class TestEmpty:
    """Forgetting all rows: the next one has slot 0, and no generation comes back."""

    def test_generations_do_not_come_back(self):
        storage = DeviceStorage(4)
        seen = set()
        for count in (3, 5, 4, 1):
            index = storage.write(flat(torch.arange(count)))
            valid = storage.ring.valid_slots()
            stamps = storage.ring.generation(valid).tolist()
            new = set(zip(valid.tolist(), stamps, strict=True))
            assert not seen & new
            seen |= new
            assert index[0] == 0
            storage._empty()
            assert len(storage) == 0
            assert int(storage.ring.cursor) == storage.ring.host_cursor

    def test_generation_counts_writes_before(self):
        storage = DeviceStorage(4)
        storage.write(flat(torch.arange(6)))
        assert storage.ring.generation(torch.arange(4)).tolist() == [1, 1, 0, 0]
        assert storage.ring.age(torch.arange(4)).tolist() == [1, 0, 3, 2]
