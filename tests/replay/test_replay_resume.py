"""State of the buffer: copies, filled part only, bitwise, refused where it does not fit, whole on disk or not there."""

import io
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_oracle import Stream
from tensordict import TensorDict

from torchrl_perf.replay import DeviceStorage, make_replay_buffer

OPTIONS = [{}, {"compact": True}, {"n_step": 3}, {"compact": True, "n_step": 2}]
SAMPLERS = ["random", "epoch", "prioritized"]


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def step(rb, stream, T=3):
    """One extend, two samples with priorities; what was sampled."""
    rb.extend(stream.batch(T)[1])
    seen = []
    for _ in range(2):
        sample = rb.sample()
        sample["td_error"] = sample["observation"][:, 1].abs() + 0.1
        rb.update_tensordict_priority(sample)
        seen.append(sample)
    return seen


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("fresh", [True, False])
def test_three_and_two_is_five(sampler, options, fresh):
    def make():
        return make_replay_buffer(20, batch_size=4, sampler=sampler, **options)

    rb, stream = make(), Stream(2, torch.Generator().manual_seed(3))
    for _ in range(3):
        step(rb, stream)
    state = through_file(rb.state_dict())
    random_state = torch.get_rng_state(), stream.generator.get_state()
    roots = [list(root) for root in stream.root], stream.count
    expected = [sample for _ in range(2) for sample in step(rb, stream)]

    other = make()
    if not fresh:
        other.extend(Stream(2, torch.Generator().manual_seed(9)).batch(17)[1])
    other.load_state_dict(state)
    torch.set_rng_state(random_state[0])
    stream.generator.set_state(random_state[1])
    stream.root, stream.count = roots
    received = [sample for _ in range(2) for sample in step(other, stream)]
    for a, b in zip(expected, received, strict=True):
        assert set(a.keys(True, True)) == set(b.keys(True, True))
        assert (a == b).all()
    assert len(rb) == len(other)
    assert rb.write_count == other.write_count


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    num_envs=st.integers(1, 3),
    steps=st.integers(1, 7),
    lengths=st.lists(st.integers(1, 9), max_size=4),
    after=st.integers(1, 9),
    compact=st.booleans(),
    n=st.sampled_from([1, 3]),
    emptied=st.booleans(),
)
def test_a_loaded_storage_goes_on_like_the_saved_one(seed, num_envs, steps, lengths, after, compact, n, emptied):
    options = {"compact": compact, "n_step": n, "final_fraction": 0.3}
    storage, other = (DeviceStorage(num_envs * steps, **options) for _ in range(2))
    stream = Stream(num_envs, torch.Generator().manual_seed(seed))
    for number, T in enumerate(lengths):
        storage.write(stream.batch(T)[1])
        if emptied and number == 1:
            storage._empty()
    other.load_state_dict(through_file(storage.state_dict()))
    _, td = stream.batch(after)
    assert torch.equal(storage.write(td), other.write(td))
    slots = storage.ring.valid_slots()
    assert torch.equal(slots, other.ring.valid_slots())
    assert torch.equal(storage.ring.generation(slots), other.ring.generation(slots))
    assert (storage.get(slots) == other.get(slots)).all()


def test_the_filled_part_only():
    rb = make_replay_buffer(100_000, batch_size=4)
    rb.extend(TensorDict({"observation": torch.randn(10, 32)}, [10]))
    file = io.BytesIO()
    torch.save(rb.state_dict(), file)
    assert file.tell() < 10_000  # 1,280 bytes of rows


def test_a_state_is_a_copy():
    rb = make_replay_buffer(8, batch_size=4)
    index = rb.extend(TensorDict({"x": torch.arange(6)}, [6]))
    state = rb.state_dict()
    rb.extend(TensorDict({"x": torch.full((8,), 99)}, [8]))
    rb.load_state_dict(state)
    assert rb.storage.get(index)["x"].tolist() == list(range(6))


def test_loading_keeps_addresses():
    rb = make_replay_buffer(8, batch_size=4, compact=True)
    stream = Stream(2, torch.Generator().manual_seed(0))
    rb.extend(stream.batch(3)[1])
    held = rb.storage.field("action"), rb.storage.ring.cursor, rb.storage.ring.length
    state = rb.state_dict()
    rb.extend(stream.batch(2)[1])
    rb.load_state_dict(state)
    now = rb.storage.field("action"), rb.storage.ring.cursor, rb.storage.ring.length
    assert [a.data_ptr() for a in held] == [b.data_ptr() for b in now]
    assert int(held[1]) == 3


def test_a_generator_of_its_own_goes_on():
    def make():
        rb = make_replay_buffer(8, batch_size=4)
        rb.set_rng(torch.Generator().manual_seed(5))
        rb.extend(TensorDict({"x": torch.arange(6)}, [6]))
        return rb

    rb, other = make(), make()
    rb.sample()
    generator = other._rng
    other.load_state_dict(through_file(rb.state_dict()))
    assert other._rng is generator
    assert torch.equal(rb.sample()["index"], other.sample()["index"])


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 22}, "capacity = 22, received 20"),
        ({"compact": True}, "compact = True, received False"),
        ({"n_step": 2}, "n_step > 1 = True, received False"),
        ({"num_envs": 4}, "num_streams = 4, received 2"),
    ],
)
@pytest.mark.parametrize("filled", [True, False])
def test_another_layout_is_refused_and_changes_nothing(sampler, change, message, filled):
    def make(capacity=20, num_envs=2, **options):
        rb = make_replay_buffer(capacity, batch_size=4, sampler=sampler, **options)
        rb.extend(Stream(num_envs, torch.Generator().manual_seed(1)).batch(3)[1])
        return rb

    state = make().state_dict()
    other = make(**change)
    if not filled:
        if "num_envs" in change:
            pytest.skip("an empty buffer takes the number of envs from the state")
        other = make_replay_buffer(**{"capacity": 20, **change}, batch_size=4, sampler=sampler)
    before = other.state_dict()
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    after = other.state_dict()
    assert str(before) == str(after)


def test_other_entries_are_refused():
    rb, other = (make_replay_buffer(8, batch_size=4) for _ in range(2))
    rb.extend(TensorDict({"x": torch.arange(6)}, [6]))
    other.extend(TensorDict({"x": torch.arange(6.0)}, [6]))
    with pytest.raises(ValueError, match="fields"):
        other.load_state_dict(rb.state_dict())
    assert other[:]["x"].tolist() == list(range(6))


def test_nothing_saved_is_nothing_loaded():
    rb, other = (make_replay_buffer(8, batch_size=4) for _ in range(2))
    other.extend(TensorDict({"x": torch.arange(6.0)}, [6]))
    other.load_state_dict(through_file(rb.state_dict()))
    assert len(other) == 0
    rb.load_state_dict(through_file(rb.state_dict()))
    rb.extend(TensorDict({"y": torch.arange(6.0)}, [6]))
    assert len(rb) == 6


class TestOnDisk:
    """dumps and loads."""

    @pytest.mark.parametrize("sampler", SAMPLERS)
    @pytest.mark.parametrize("options", OPTIONS)
    def test_round_trip(self, tmp_path, sampler, options):
        def make():
            return make_replay_buffer(20, batch_size=4, sampler=sampler, **options)

        rb, other = make(), make()
        step(rb, Stream(2, torch.Generator().manual_seed(3)))
        rb.dumps(tmp_path / "buffer")
        other.loads(tmp_path / "buffer")
        assert [path.name for path in (tmp_path / "buffer").iterdir()] == ["replay.pt"]
        assert (rb[:] == other[:]).all()

    def test_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"replay\.pt"):
            make_replay_buffer(8).loads(tmp_path)

    def test_a_killed_process_leaves_a_file_that_loads(self, tmp_path):
        code = f"""
            import torch
            from tensordict import TensorDict
            from torchrl_perf.replay import make_replay_buffer
            rb = make_replay_buffer(4000, batch_size=4)
            for i in range(1000000):
                rb.extend(TensorDict({{"x": torch.full((2000,), i), "y": torch.randn(2000, 64)}}, [2000]))
                rb.dumps({str(tmp_path)!r})
                if i == 2:
                    print("ready", flush=True)
        """
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
        assert process.stdout.readline().strip() == b"ready"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        rb = make_replay_buffer(4000, batch_size=4)
        rb.loads(tmp_path)
        assert len(rb) == 4000
        values = rb[:]["x"].unique()
        assert values.tolist() == [values[-1] - 1, values[-1]]


def test_a_state_from_before_the_first_extend_empties_a_filled_buffer():
    """The capacity is rounded down to whole time rows at the first extend, after that state was taken."""
    rb = make_replay_buffer(10, batch_size=3, device="cpu")
    state = rb.state_dict()
    rb.extend(Stream(3, torch.Generator().manual_seed(0)).batch(2)[1])
    assert rb.storage.max_size == 9
    rb.load_state_dict(state)
    assert len(rb) == 0
    with pytest.raises(ValueError, match="max_size"):
        rb.load_state_dict(make_replay_buffer(8, batch_size=3, device="cpu").state_dict())
