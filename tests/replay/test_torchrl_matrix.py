"""Samplers, writers and buffers of TorchRL on our storage, and the reverse: right rows, or a refusal with a reason."""

import importlib

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBufferEnsemble, TensorDictReplayBuffer
from torchrl.data.replay_buffers import PrioritizedSampler, PrioritizedSliceSampler, TensorStorageCheckpointer
from torchrl.data.replay_buffers.sample_units import Sequence
from torchrl_matrix import (
    BUFFERS,
    CAPACITY,
    SAMPLERS,
    SLICE,
    STORAGES,
    WRITERS,
    Cell,
    cells_on_our_storage,
    cells_on_storages_of_torchrl,
)

from torchrl_perf.replay import DeviceStorage, DeviceWriter

REFUSALS = (TypeError, ValueError)


def rows(first, count):
    """Rows whose every entry says which row it is; episodes have 6 rows, and the rank is a shuffled number."""
    number = torch.arange(first, first + count)
    done = (number % 6 == 5).unsqueeze(-1)
    following = {"observation": number[:, None] + 1.0, "reward": number[:, None] * 0.5, "done": done}
    following |= {"terminated": done.clone(), "truncated": torch.zeros_like(done)}
    entries = {
        "number": number,
        "observation": number[:, None] + 0.25,
        "episode": number // 6,
        "rank": number * 7 % 101 * 1.0,
    }
    entries |= {"policy_version": number * 0.0, "step_count": number % 6}
    return TensorDict({**entries, "next": following}, [count])


def fill(buffer, cell):
    """Extends by rows 0 to 41 of 24 slots; the numbers of the rows that must be left."""
    if cell.writer == "ImmutableDatasetWriter":
        buffer.storage.write(rows(0, CAPACITY))
        with pytest.raises(RuntimeError, match="allow writing"):
            buffer.extend(rows(0, 2))
        return set(range(CAPACITY))
    for first, count in ((0, 10), (10, 7), (17, 20)):
        buffer.extend(rows(first, count))
    assert len(buffer) == CAPACITY
    for first in range(37, 42):
        buffer.add(rows(first, 1)[0])
    assert len(buffer) == CAPACITY
    if cell.writer == "TensorDictMaxValueWriter":
        best = sorted(range(42), key=lambda number: number * 7 % 101)[-CAPACITY:]
        return set(best)
    return set(range(42 - CAPACITY, 42))


def check_contents(sample):
    """That all entries of a row belong to its number."""
    number = sample["number"].float()
    assert (sample["observation"][:, 0] == number + 0.25).all()
    assert (sample["next", "observation"][:, 0] == number + 1).all()
    assert (sample["next", "reward"][:, 0] == number * 0.5).all()
    assert (sample["episode"] == sample["number"] // 6).all()


def check_slices(sample, length):
    windows = sample["number"].view(-1, length)
    assert (windows.diff(dim=1) == 1).all()
    assert (windows[:, 0] // 6 == windows[:, -1] // 6).all()


@pytest.mark.parametrize(
    "cell", [cell for cell in cells_on_our_storage() if not cell.refused], ids=lambda cell: cell.name
)
def test_works_on_our_storage(cell: Cell):
    torch.manual_seed(0)
    buffer = BUFFERS[cell.buffer](
        storage=DeviceStorage(CAPACITY), sampler=SAMPLERS[cell.sampler](), writer=WRITERS[cell.writer](), batch_size=6
    )
    kept, seen = fill(buffer, cell), []
    for _ in range(4):
        sample, info = buffer.sample(return_info=True)
        check_contents(sample)
        index = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
        assert (buffer.storage.get(index)["number"] == sample["number"]).all()
        if "Slice" in cell.sampler and "strict" not in cell.sampler:
            check_slices(sample, SLICE)
        seen += sample["number"].tolist()
    assert set(seen) <= kept
    if cell.sampler in ("SamplerWithoutReplacement", "DeviceSamplerWithoutReplacement", "ConsumingSampler"):
        assert sorted(seen) == sorted(kept)
    if "Consuming" not in cell.sampler and "Slice" not in cell.sampler:
        drawn, draws = set(), None if "WithoutReplacement" in cell.sampler else 400
        for _ in range(1 if draws else 25):
            index, _ = buffer.sampler.sample(buffer.storage, draws or 6)
            drawn |= set(buffer.storage.get(index)["number"].tolist())
        assert drawn == kept  # every row is drawn, none of those that are gone


try:
    importlib.import_module("torchrl._torchrl")
    HAS_EXTENSION = True
except ImportError:
    HAS_EXTENSION = False
OF_EXTENSION = {
    "PrioritizedSampler": lambda: PrioritizedSampler(CAPACITY, 1.0, 0.5),
    "PrioritizedSliceSampler(end_key)": lambda: PrioritizedSliceSampler(
        CAPACITY, 1.0, 0.5, slice_len=SLICE, end_key=("next", "done")
    ),
    "PrioritizedSliceSampler(traj_key)": lambda: PrioritizedSliceSampler(
        CAPACITY, 1.0, 0.5, num_slices=6 // SLICE, traj_key="episode"
    ),
}


@pytest.mark.skipif(not HAS_EXTENSION, reason="TorchRL's extension does not load with this torch")
@pytest.mark.parametrize("name", OF_EXTENSION)
@pytest.mark.parametrize("writer", ["DeviceWriter", "TensorDictRoundRobinWriter"])
@pytest.mark.parametrize("kind", BUFFERS)
def test_prioritized_samplers_of_torchrl(kind, name, writer):
    """Before and after the ring is full."""
    buffer = BUFFERS[kind](
        storage=DeviceStorage(CAPACITY), sampler=OF_EXTENSION[name](), writer=WRITERS[writer](), batch_size=6
    )
    for first, count in ((0, 10), (10, 10), (20, 10), (30, 10)):
        buffer.extend(rows(first, count))
        for _ in range(3):
            sample, info = buffer.sample(return_info=True)
            check_contents(sample)
            assert min(sample["number"]) >= first + count - CAPACITY
            if "Slice" in name:
                check_slices(sample, SLICE)
            index = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
            buffer.update_priority(index, torch.rand(6))


def make_refused(cell: Cell, folder):
    """Builds and uses a combination up to the first sample."""
    storage = STORAGES[cell.storage](folder) if cell.storage in STORAGES else DeviceStorage(CAPACITY)
    buffer = BUFFERS[cell.buffer](
        storage=storage, sampler=SAMPLERS[cell.sampler](), writer=WRITERS[cell.writer](), batch_size=6
    )
    batch = rows(0, 12)
    for _ in range(3):
        buffer.extend(batch.view(4, 3) if "ndim=2" in cell.storage else batch)
    buffer.sample()


@pytest.mark.parametrize("cell", [cell for cell in cells_on_our_storage() if cell.refused], ids=lambda cell: cell.name)
def test_refused_on_our_storage(cell: Cell, tmp_path):
    with pytest.raises(REFUSALS, match=r"write_at|order of time.*Remedy"):
        make_refused(cell, tmp_path)


@pytest.mark.parametrize("cell", cells_on_storages_of_torchrl(), ids=lambda cell: cell.name)
def test_refused_on_storages_of_torchrl(cell: Cell, tmp_path):
    with pytest.raises(TypeError, match=r"expected a (torchrl_perf\.replay\.)?DeviceStorage, received \w+\. Remedy"):
        make_refused(cell, tmp_path)


@pytest.mark.parametrize("sampler", ["RandomSampler", "DeviceRandomSampler", "DevicePrioritizedSampler"])
def test_ensembles(sampler):
    """Members with storages of ours, read and written through TorchRL's ensembles of storages, samplers and writers."""
    members = [
        TensorDictReplayBuffer(storage=DeviceStorage(CAPACITY), sampler=SAMPLERS[sampler](), batch_size=4) for _ in "ab"
    ]
    both = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=40)
    for first, member in zip((0, 60), members, strict=True):
        member.extend(rows(first, 12))
    sample = both.sample()
    for number, part in enumerate(sample):
        check_contents(part)
        assert set(part["number"].tolist()) <= set(range(60 * number, 60 * number + 12))


@pytest.mark.parametrize("kind", BUFFERS)
def test_windows_around_a_row(kind):
    """TorchRL's sample unit ``Sequence``, which reads the ends by their key."""
    buffer = BUFFERS[kind](
        storage=DeviceStorage(CAPACITY),
        writer=WRITERS["TensorDictRoundRobinWriter"](),
        sample_unit=Sequence(length=3, episode_boundary="stop"),
        batch_size=5,
    )
    buffer.extend(rows(0, 40))
    for _ in range(5):
        sample = buffer.sample()
        check_contents(sample)
        check_slices(sample, 3)


@pytest.mark.parametrize("kind", BUFFERS)
def test_what_follows_the_rows_of_one_env_refuses_several(kind):
    batch = torch.stack([rows(0, 8), rows(60, 8)])
    for options in ({"sampler": SAMPLERS["SliceSampler(traj_key)"]()}, {"sample_unit": Sequence(length=3)}):
        buffer = BUFFERS[kind](storage=DeviceStorage(CAPACITY), writer=DeviceWriter(), batch_size=6, **options)
        with pytest.raises(
            ValueError, match=r"rows of one env.*received a batch of 2 envs.*Nothing was written.*Remedy"
        ):
            buffer.extend(batch)
        assert not buffer.storage.initialized


@pytest.mark.parametrize("kind", ["ReplayBuffer", "TensorDictReplayBuffer"])
def test_checkpointers_of_torchrl(kind):
    with pytest.raises(ValueError, match=r"received TensorStorageCheckpointer: rows are packed.*Remedy"):
        BUFFERS[kind](storage=DeviceStorage(CAPACITY), checkpointer=TensorStorageCheckpointer())


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name != "ConsumingSampler"])
def test_files_of_torchrls_buffer_go_on(sampler, tmp_path):
    def make():
        return TensorDictReplayBuffer(storage=DeviceStorage(CAPACITY), sampler=SAMPLERS[sampler](), batch_size=6)

    first, again = make(), make()
    first.extend(rows(0, 30))
    first.sample()
    first.dumps(tmp_path)
    again.loads(tmp_path)
    for buffer in (first, again):
        buffer.extend(rows(30, 5))
    assert (first[:] == again[:]).all()
    check_contents(again.sample())


@pytest.mark.parametrize("writer", ["RoundRobinWriter", "TensorDictRoundRobinWriter"])
@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("filled", [7, 30])
def test_a_batch_that_does_not_fit_leaves_writer_and_rows(kind, writer, filled):
    buffer = BUFFERS[kind](storage=DeviceStorage(CAPACITY), writer=WRITERS[writer](), batch_size=6)
    buffer.extend(rows(0, filled))
    before, count = buffer[:].clone(), buffer.write_count
    for wrong in (
        rows(0, 5).exclude("rank"),
        rows(0, 5).set("extra", torch.zeros(5)),
        rows(0, 5).set("rank", torch.ones(5, 2)),
    ):
        with pytest.raises(ValueError, match="Nothing was written"):
            buffer.extend(wrong)
        assert (buffer[:] == before).all()
    assert buffer.write_count == count
    buffer.extend(rows(filled, 5))
    assert buffer.storage.ring.ordered
    newest = range(max(filled + 5 - CAPACITY, 0), filled + 5)
    assert sorted(buffer[:]["number"].tolist()) == list(newest)


def test_two_buffers_on_one_storage():
    """A ring of several envs beside a writer that knows no envs: refused, and the rows stay as they were."""
    storage = DeviceStorage(CAPACITY)
    ours = BUFFERS["DeviceReplayBuffer"](storage=storage, batch_size=4)
    ours.extend(torch.stack([rows(0, 8), rows(60, 8)]))
    other, before = TensorDictReplayBuffer(storage=storage, batch_size=4), storage[:].clone()
    with pytest.raises(ValueError, match=r"storage of several streams.*Remedy: writer=DeviceWriter"):
        other.extend(rows(0, 4))
    assert (storage[:] == before).all()
    check_contents(other.sample())
