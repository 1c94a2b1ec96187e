"""A state that does not fit is refused with its entry's name, and leaves everything as it was."""

import copy
import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from torchrl_perf.replay import (
    BoundedHistory,
    DevicePrioritizedSampler,
    DeviceRandomSampler,
    DeviceReplayBuffer,
    DeviceSamplerWithoutReplacement,
    DeviceSliceSampler,
    DeviceStorage,
    DeviceWriter,
    OptionReplay,
    PriorityTree,
    RecentWindow,
)

SAMPLERS = {
    "random": DeviceRandomSampler,
    "masked": lambda: DevicePrioritizedSampler(mask_key="mask"),
    "epoch": DeviceSamplerWithoutReplacement,
    "prioritized": DevicePrioritizedSampler,
    "slice": lambda: DeviceSliceSampler(2),
    "prioritized slice": lambda: DeviceSliceSampler(2, alpha=0.5),
}


def batch(seed=0, N=2, T=5):
    generator = torch.Generator().manual_seed(seed)
    number = torch.rand(N, T, 1, generator=generator)
    no = torch.zeros(N, T, 1, dtype=torch.bool)
    following = {"observation": number + 1, "reward": number * 2, "done": no, "terminated": no.clone()}
    entries = {"observation": number, "mask": torch.rand(N, T, 1, generator=generator) < 0.7}
    return TensorDict({**entries, "next": {**following, "truncated": no.clone()}}, [N, T])


def make(sampler, **options):
    rb = DeviceReplayBuffer(storage=DeviceStorage(12, **options), sampler=SAMPLERS[sampler](), batch_size=4)
    rb.extend(batch())
    rb.extend(batch(1, T=2))
    rb.sample()
    return rb


def flat(state, path=()):
    """Every entry of a nested state with its path."""
    if isinstance(state, dict):
        items = state.items()
    elif isinstance(state, (list, tuple)):
        items = enumerate(state)
    else:
        return [(path, state)]
    return [(path, state)] + [entry for key, value in items for entry in flat(value, (*path, key))]


def equal(a, b):
    entries = zip(flat(a), flat(b), strict=True)
    return all(
        p == q and (x.equal(y) if isinstance(x, torch.Tensor) else isinstance(x, (dict, list, tuple)) or x == y)
        for (p, x), (q, y) in entries
    )


def replaced(state, path, value):
    """A copy of a state with one entry replaced, or removed where the value is ``...``."""
    state = copy.deepcopy(state)
    node = state
    for key in path[:-1]:
        if isinstance(node[key], tuple):
            node[key] = list(node[key])
        node = node[key]
    if value is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return state


def wrongs(value):
    """Wrong values of an entry."""
    if isinstance(value, torch.Tensor):
        wrong = [value.double() if value.dtype != torch.float64 else value.int(), value.unsqueeze(-1), "text", ...]
        return wrong + ([torch.cat([value, value])] if value.ndim else [])
    numbers = isinstance(value, (int, float)) and not isinstance(value, bool)
    return ["text", ..., torch.zeros(3)] + ([-7, -0.5, math.nan] if numbers else [])


# entries that older versions did not save, or that say nothing that could be wrong
FREE = {"admitted", "starts", "recorded", "ordered", "_consume_after_n_samples", "_rng", "_prefetch_state", "row_shape"}


def broken(state):
    for path, value in flat(state):
        if not path or FREE & set(path) or path[-1] in (0, 1, 2, 3, 4, 5) or value is None or "fields" in path:
            continue
        for wrong in wrongs(value):
            if path[-1] != "order" or getattr(wrong, "shape", ()) != (2 * len(value),):  # an epoch may have any length
                yield path, wrong


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("options", [{}, {"compact": True}], ids=str)
def test_every_entry_of_a_buffer(sampler, options):
    """Each entry missing, of another type, dtype and shape: refused, in a buffer with rows and in an empty one."""
    if options and sampler not in ("random", "slice"):
        pytest.skip("one storage is enough for each sampler")
    state, rb = make(sampler, **options).state_dict(), make(sampler, **options)
    rb.extend(batch(3, T=1))
    before, tried = copy.deepcopy(rb.state_dict()), 0
    for path, wrong in broken(state):
        with pytest.raises((ValueError, TypeError), match=r"expected|must"):
            rb.load_state_dict(replaced(state, path, wrong))
        assert equal(rb.state_dict(), before), path
        tried += 1
    assert tried > 40
    rb.load_state_dict(state)
    assert equal(rb.state_dict(), state)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("_storage", "ring", "ordered"), torch.zeros(3)),
        (("_storage", "ring", "ordered"), "text"),
        (("_consume_after_n_samples",), 0),
        (("_consume_after_n_samples",), "text"),
        (("_batch_size",), 0),
        (("_sampler", "tree", "weights"), torch.full((12,), -1.0)),
        (("_sampler", "tree", "weights"), torch.full((12,), math.nan)),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_entries_that_may_be_missing_and_numbers_out_of_range(path, wrong):
    rb = make("prioritized")
    before = copy.deepcopy(rb.state_dict())
    with pytest.raises(ValueError, match=r"expected a state with .*received .*Nothing was changed.*Remedy"):
        rb.load_state_dict(replaced(before, path, wrong))
    assert equal(rb.state_dict(), before)
    rb.sample()


@pytest.mark.parametrize(
    "part",
    [{"sampler": SamplerWithoutReplacement()}, {"writer": TensorDictRoundRobinWriter()}, {"sampler": RandomSampler()}],
)
def test_parts_of_torchrl_are_put_back(part):
    """They check nothing themselves: one that fails half-way leaves the others as they were."""
    rb = DeviceReplayBuffer(storage=DeviceStorage(10), batch_size=4, **part)
    rb.extend(batch().reshape(-1))
    rb.sample()
    state = rb.state_dict()
    rb.extend(batch(2).reshape(-1)[:3])
    before = rb.state_dict()
    for path, wrong in ((("_writer",), {}), (("_storage", "rows"), []), (("_storage", "ring", "cursor"), "text")):
        with pytest.raises((ValueError, KeyError)):
            rb.load_state_dict(replaced(state, path, wrong))
        assert equal(rb.state_dict(), before)
    rb.load_state_dict(state)
    assert equal(rb.state_dict(), state)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_storage_of_torchrls_buffers(kind, sampler):
    rb = kind(storage=DeviceStorage(12), sampler=SAMPLERS[sampler](), writer=DeviceWriter(), batch_size=4)
    rb.extend(batch())
    state = rb.state_dict()
    rb.extend(batch(1, T=1))
    before = rb.storage.state_dict()
    for path, wrong in broken(state["_storage"]):
        with pytest.raises(ValueError, match="expected"):
            rb.storage.load_state_dict(replaced(state["_storage"], path, wrong))
        assert equal(rb.storage.state_dict(), before), path


class TestOthers:
    def check(self, part, state):
        before, tried = copy.deepcopy(part.state_dict()), 0
        for path, wrong in broken(state):
            if path[-1] == "columns" or not isinstance(path[-1], str):
                continue
            with pytest.raises(ValueError, match="expected"):
                part.load_state_dict(replaced(state, path, wrong))
            assert equal(part.state_dict(), before), path
            tried += 1
        assert tried > 1

    def test_option_replay(self):
        rows = TensorDict({"x": torch.ones(4), "mask": torch.ones(4, dtype=torch.bool)}, [4])
        part, other = OptionReplay(rows, capacity=6), OptionReplay(rows, capacity=6)
        other.extend(rows)
        self.check(part, other.state_dict())

    def test_recent_window(self):
        part, other = (RecentWindow(3, TensorDict({"x": torch.ones(2)}, [2])) for _ in range(2))
        other.append(TensorDict({"x": torch.ones(2)}, [2]))
        self.check(part, other.state_dict())

    def test_bounded_history(self):
        part = BoundedHistory([1.0, 2.0], maxlen=3)
        for wrong in ({}, {"values": 3}, {"values": [1.0, "text"]}):
            with pytest.raises(ValueError):
                part.load_state_dict(wrong)
            assert list(part) == [1.0, 2.0]

    def test_priority_tree(self):
        part, other = PriorityTree(8), PriorityTree(8)
        other.set_(torch.arange(3), torch.ones(3))
        self.check(part, other.state_dict())
