"""What users do to a buffer: wrong arguments, wrong batches, states of other buffers, TorchRL's own classes."""

import itertools
import math
import pickle

import pytest
import torch
from ring_oracle import ListRing, Stream
from tensordict import TensorDict
from torchrl.data import RandomSampler, ReplayBuffer, SamplerWithoutReplacement, TensorDictReplayBuffer

from torchrl_perf.replay import (
    DevicePrioritizedSampler,
    DeviceRandomSampler,
    DeviceReplayBuffer,
    DeviceSamplerWithoutReplacement,
    DeviceSliceSampler,
    DeviceStorage,
    DeviceWriter,
    RecentWindow,
    make_replay_buffer,
)

SAMPLERS = {
    "random": DeviceRandomSampler,
    "epoch": DeviceSamplerWithoutReplacement,
    "prioritized": DevicePrioritizedSampler,
    "slice": lambda: DeviceSliceSampler(2),
    "prioritized slice": lambda: DeviceSliceSampler(2, alpha=0.5),
}
BUFFERS = (ReplayBuffer, TensorDictReplayBuffer, DeviceReplayBuffer)


def batch(N=2, T=4, seed=0):
    return Stream(N, torch.Generator().manual_seed(seed)).batch(T)[1]


def buffer_of(kind, sampler, capacity=8, compact=False):
    storage = DeviceStorage(capacity, compact=compact)
    return kind(storage=storage, sampler=SAMPLERS[sampler](), writer=DeviceWriter(), batch_size=4)


def check_rows(sample, oracle, n, gamma=0.9):
    """Each row of a sample against the oracle's row of its slot; masked rows of slices are ignored."""
    by_slot = {oracle.slot(*row): row for row in oracle.valid()}
    for row in sample:
        if ("collector", "mask") in row.keys(True) and not row["collector", "mask"]:
            continue
        expected = oracle.n_step(*by_slot[int(row["index"])], n, gamma)
        assert row["observation"].tolist() == expected["observation"]
        assert row["next", "observation"].tolist() == expected["next_observation"]
        assert int(row["action"]) == expected["action"]
        assert float(row["next", "reward"]) == pytest.approx(expected["reward"], abs=1e-5)
        assert bool(row["next", "terminated"]) == expected["terminated"]


CASES = [case for case in itertools.product(SAMPLERS, (1, 3), (False, True)) if "slice" not in case[0] or case[1] == 1]


@pytest.mark.parametrize(("sampler", "n", "compact"), CASES)
def test_every_combination_samples_true_rows(sampler, n, compact):
    steps, N = 7, 2
    storage = DeviceStorage(steps * N + 1, n_step=n, compact=compact, gamma=0.9)
    rb = DeviceReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), batch_size=4)
    stream = Stream(N, torch.Generator().manual_seed(n), p_done=0.25)
    oracle = ListRing(steps, N, max(N, math.ceil(0.125 * steps * N)) if compact else None)
    for T in (3, 1, 9, 2, 2, 7, 1, 5):
        rows, td = stream.batch(T)
        rb.extend(td)
        oracle.extend(rows)
        assert len(rb) == oracle.length * N
        if len(rb) >= 4:
            for _ in range(2):
                check_rows(rb.sample(), oracle, n)


def test_slices_of_forgotten_rows_are_masked():
    """Each row begins an episode: a side ring of one row keeps two of them, fewer than a slice has."""
    rb = make_replay_buffer(8, batch_size=3, sampler="slice", slice_len=3, compact=True)
    stream = Stream(1, torch.Generator().manual_seed(0), p_done=1.0)
    oracle = ListRing(8, 1, 1)
    for _ in range(20):
        rows, td = stream.batch(1)
        rb.extend(td)
        oracle.extend(rows)
    assert oracle.length == 2
    for _ in range(5):
        sample = rb.sample()
        assert not sample["collector", "mask"].all()
        check_rows(sample, oracle, 1)


class TestArguments:
    @pytest.mark.parametrize("capacity", [0, -1, 2.5, math.inf, math.nan, "8", None])
    def test_capacity(self, capacity):
        with pytest.raises(ValueError, match=r"expected max_size >= 1 rows, received .* Remedy"):
            make_replay_buffer(capacity, batch_size=4)

    @pytest.mark.parametrize("batch_size", [0, -3, 2.5])
    def test_batch_size(self, batch_size):
        with pytest.raises(ValueError, match=r"expected a batch_size of at least 1, received .* Remedy"):
            make_replay_buffer(8, batch_size=batch_size)

    @pytest.mark.parametrize(
        ("sampler", "count"), [("random", 9), ("prioritized", 9), ("slice", 12), ("epoch", 8), (RandomSampler, 9)]
    )
    def test_a_batch_above_the_capacity(self, sampler, count):
        options = {"slice_len": 2} if sampler == "slice" else {}
        sampler = sampler if isinstance(sampler, str) else sampler()
        rb = make_replay_buffer(8, batch_size=max(count, 9), sampler=sampler, **options)
        rb.extend(batch(2, 4))
        assert rb.sample().shape == (count,)

    def test_a_batch_above_the_capacity_that_is_always_dropped(self):
        for options in ({"sampler": "epoch", "drop_last": True}, {"sampler": SamplerWithoutReplacement(True)}):
            with pytest.raises(ValueError, match=r"from 1 to the capacity of 8 rows, received 9 .*drop_last.* Remedy"):
                make_replay_buffer(8, batch_size=9, **options)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_device_that_is_not_there(self):
        with pytest.raises(ValueError, match=r"received 'cuda', and PyTorch sees no CUDA\. Remedy: device='cpu'"):
            make_replay_buffer(8, device="cuda")

    def test_a_list_of_rows(self):
        with pytest.raises(ValueError, match=r"expected a TensorDict, received list\. Remedy: torch\.stack"):
            make_replay_buffer(8).extend([batch()[0, 0]] * 2)  # pyright: ignore[reportArgumentType]


class TestFirstBatch:
    """A first batch that a sampler cannot serve is refused before it is written, and a right one is taken then."""

    @pytest.mark.parametrize("sampler", ["random", "prioritized", "slice"])
    def test_without_the_mask(self, sampler):
        options = {"slice_len": 2} if sampler == "slice" else {}
        rb = make_replay_buffer(16, sampler=sampler, mask_key="active", **options)
        with pytest.raises(
            KeyError, match=r"expected the batch to have .*active.*, received keys .* Nothing was written"
        ):
            rb.extend(batch())
        assert len(rb) == 0
        assert not rb.storage.initialized
        rb.extend(batch().set("active", torch.ones(2, 4, dtype=torch.bool)))
        assert rb.sample(8).shape == (8,)

    def test_slices_longer_than_the_streams(self):
        rb = make_replay_buffer(9, sampler="slice", slice_len=5)
        with pytest.raises(ValueError, match=r"at most the 4 time rows .* each of 2 streams, received 5\. Nothing was"):
            rb.extend(batch())
        assert len(rb) == 0
        rb.extend(batch(1, 9))
        assert rb.sample(5).shape == (5,)

    def test_without_the_end_of_episodes(self):
        rb = make_replay_buffer(16, sampler="slice", slice_len=2)
        with pytest.raises(KeyError, match=r"expected the batch to have .*next.*done"):
            rb.extend(TensorDict({"observation": torch.zeros(2, 4)}, [2, 4]))
        assert len(rb) == 0

    def test_without_entries(self):
        rb = make_replay_buffer(16)
        with pytest.raises(ValueError, match="expected rows with entries"):
            rb.extend(TensorDict({"index": torch.zeros(2, 4)}, [2, 4]))
        assert not rb.storage.initialized

    def test_without_envs(self):
        with pytest.raises(ValueError, match=r"expected at least one env, received batch_size \[0, 4\]"):
            make_replay_buffer(16).extend(TensorDict({"observation": torch.zeros(0, 4)}, [0, 4]))


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("sampler", SAMPLERS)
class TestTorchRLBuffers:
    @pytest.mark.parametrize("compact", [False, True])
    def test_state_and_files_go_on_bitwise(self, kind, sampler, compact, tmp_path):
        rb = buffer_of(kind, sampler, compact=compact)
        rb.extend(batch())
        rb.sample()
        torch.save(rb.state_dict(), tmp_path / "state.pt")
        rb.dumps(tmp_path / "files")  # TorchRL's own writes one folder a part, without a warning
        by_state, by_files = buffer_of(kind, sampler, compact=compact), buffer_of(kind, sampler, compact=compact)
        by_state.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        by_files.loads(tmp_path / "files")
        for seed in range(3):
            samples = []
            for buffer in (rb, by_state, by_files):
                torch.manual_seed(seed)
                samples.append(buffer.sample())
                buffer.extend(batch(2, 3, seed))
            assert (samples[0] == samples[1]).all()
            assert (samples[0] == samples[2]).all()

    def test_first_used_in_inference_mode(self, kind, sampler):
        rb = buffer_of(kind, sampler, compact=True)
        with torch.inference_mode():
            rb.extend(batch())
            rb.sample()
        rb.extend(batch(seed=1))
        assert rb.sample().shape == (4,)

    def test_pickle(self, kind, sampler):
        rb = buffer_of(kind, sampler)
        rb.extend(batch())
        again = pickle.loads(pickle.dumps(rb))
        again.extend(batch(seed=1))
        assert len(again) == 8
        assert again.sample().shape == (4,)


def test_a_storage_of_torchrls_buffer_refuses_another_capacity(tmp_path):
    rb, other = buffer_of(ReplayBuffer, "random"), buffer_of(ReplayBuffer, "random", 10)
    rb.extend(batch())
    rb.dumps(tmp_path)
    other.extend(batch(T=1))
    before = other[:].clone()
    with pytest.raises(ValueError, match="expected a state with capacity = 10, received 8"):
        other.loads(tmp_path)
    assert (other[:] == before).all()
    with pytest.raises(NotImplementedError, match="no hooks"):
        other.register_save_hook(print)


@pytest.mark.parametrize(("saved", "made"), [*itertools.permutations(SAMPLERS, 2)])
def test_the_state_of_another_sampler_is_refused(saved, made):
    state = buffer_of(DeviceReplayBuffer, saved)
    state.extend(batch())
    rb = buffer_of(DeviceReplayBuffer, made)
    rb.extend(batch(seed=3))
    before = rb[:].clone()
    with pytest.raises(ValueError, match=r"expected (a|the) state .* Remedy: make the (buffer|sampler) with the"):
        rb.load_state_dict(state.state_dict())
    assert (rb[:] == before).all()
    rb.sample()


def test_uniform_slices_have_no_priorities():
    rb = make_replay_buffer(8, batch_size=4, sampler="slice", slice_len=2)
    rb.extend(batch())
    rb.update_tensordict_priority(rb.sample())  # without "td_error": nothing to do


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.complex128, torch.float16, torch.int64])
def test_recent_window_of_any_dtype(dtype):
    window = RecentWindow(2, TensorDict({"x": torch.zeros(3, dtype=dtype)}, [3]))
    window.append(TensorDict({"x": torch.ones(3).to(dtype)}, [3]))
    assert window.view()["x"].equal(torch.tensor([[0, 1]] * 3).to(dtype))
