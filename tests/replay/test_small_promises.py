"""What the parts of a buffer promise in a line: memory, signatures, what is watched, windows of several rewards."""

import inspect
import logging
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from torchrl_perf.replay import (
    DevicePrioritizedSampler,
    DeviceRandomSampler,
    DeviceReplayBuffer,
    DeviceSamplerWithoutReplacement,
    DeviceSliceSampler,
    DeviceStorage,
    DeviceWriter,
    memory,
)
from torchrl_perf.replay.memory import available_bytes, readable, reserve
from torchrl_perf.replay.priority_tree import PriorityTree
from torchrl_perf.replay.random import reads

CPU = torch.device("cpu")
SAMPLERS = [DevicePrioritizedSampler, DeviceRandomSampler, DeviceSamplerWithoutReplacement, DeviceSliceSampler]


class TestMemory:
    @pytest.mark.parametrize(("left", "expected"), [(None, 7 * 1024), (9_000, 7 * 1024), (2_000, 2_000)])
    def test_what_is_available_is_read_from_its_line(self, monkeypatch, left, expected):
        text = "MemTotal:   100 kB\nMemAvailable:   7 kB\nSwapTotal:  50 kB\n"
        monkeypatch.setattr(Path, "read_text", lambda path: text)
        monkeypatch.setattr(memory, "memory_left", lambda: left)
        assert available_bytes(CPU) == expected

    def test_an_allocation_is_announced_or_refused(self, monkeypatch, caplog):
        monkeypatch.setattr(memory, "available_bytes", lambda device: 2_000_000)
        with caplog.at_level(logging.INFO, "torchrl_perf"):
            reserve(1_000, CPU, "DeviceStorage: 10 rows", "fewer rows")
        assert [record.getMessage() for record in caplog.records] == [
            "DeviceStorage: 10 rows take 1.00 kB on cpu (2.00 MB free)"
        ]
        reserve(2_000_000, CPU, "all of it", "fewer rows")
        with pytest.raises(ValueError, match=r"2.00 MB \(2000001 bytes\) free on cpu, received 2.00 MB.*fewer rows"):
            reserve(2_000_001, CPU, "one more", "fewer rows")

    def test_units(self):
        assert [readable(count) for count in (0, 999, 1_000, 3.1e9, 5e15)] == [
            *("0 B", "999 B", "1.00 kB", "3.10 GB", "5000.00 TB")
        ]


@pytest.mark.parametrize("kind", [*SAMPLERS, DeviceReplayBuffer])
def test_help_shows_every_argument_and_not_self(kind):
    own = list(inspect.signature(kind.__init__).parameters)
    assert own[0] == "self"
    assert list(inspect.signature(kind).parameters) == own[1:]


def test_what_a_sampler_watches():
    assert not reads(["mask"], None)
    assert reads(None, "mask")
    assert reads(["mask"], "mask")
    assert reads([("next", "terminated")], "mask")
    assert not reads([("next", "terminated")], None, "end")
    assert reads([("next", "end")], None, ("next", "end"))
    assert not reads(["observation", ("next", "reward")], "mask", ("next", "end"))


def test_priorities_that_carry_a_gradient_leave_none():
    sampler = DevicePrioritizedSampler(alpha=1.0, beta=1.0)
    buffer = DeviceReplayBuffer(storage=DeviceStorage(4), sampler=sampler, writer=DeviceWriter(), batch_size=4)
    buffer.extend(TensorDict({"value": torch.arange(4)}, [4]))
    loss = torch.ones(4, requires_grad=True) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    buffer.update_priority(torch.arange(4), loss)
    assert not sampler.tree.weights.requires_grad
    assert sampler.tree.weights.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert not buffer.sample()["priority_weight"].requires_grad


class TestTree:
    def test_written_weights_are_the_numbers_themselves(self):
        tree = PriorityTree(5)
        tree.set_(torch.arange(5), torch.tensor([0.0, 0.5, 1.0, 2.0, 4.0]))
        assert tree.weights.tolist() == [0.0, 0.5, 1.0, 2.0, 4.0]
        tree.set_(torch.tensor([], dtype=torch.int64), torch.tensor([]))
        tree.set_(torch.tensor([1, 2]), torch.tensor([9.0, 9.0]), keep=torch.tensor([True, False]))
        assert tree.weights.tolist() == [0.0, 9.0, 1.0, 2.0, 4.0]

    def test_weights_are_raised_to_a_power_within_the_numbers_there_are(self):
        tree = PriorityTree(4)
        tree.set_(torch.arange(4), torch.tensor([0.0, 2.0, 1e30, 1e-30]))
        tree.raise_(2.0)
        limits = torch.finfo(torch.float32)
        assert tree.weights.tolist() == [0.0, 4.0, limits.max, limits.tiny]


@pytest.mark.parametrize("size", [(1,), (2,), (2, 3)])
def test_windows_of_several_rewards(size):
    reward = torch.arange(5.0).view(5, *(1 for _ in size)).expand(5, *size) + torch.rand(size)
    done = torch.tensor([False, False, True, False, False]).unsqueeze(-1)
    buffer = DeviceReplayBuffer(
        storage=DeviceStorage(5, n_step=2, gamma=0.5),
        sampler=DeviceRandomSampler(),
        writer=DeviceWriter(),
        batch_size=64,
    )
    rows = {"observation": torch.arange(5.0), "next": {"reward": reward, "done": done, "terminated": done}}
    rows["next"]["observation"] = torch.arange(5.0) + 1
    buffer.extend(TensorDict(rows, [5]).unsqueeze(0))
    sample = buffer.sample()
    assert sample["next", "reward"].shape == (64, *size)
    for row in sample:
        first = int(row["observation"])
        last = first if first in (2, 4) else first + 1
        expected = reward[first] if last == first else reward[first] + 0.5 * reward[last]
        torch.testing.assert_close(row["next", "reward"], expected)
        assert row["next", "observation"] == last + 1


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.int64, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.float32)]
)
def test_windows_are_summed_in_the_dtype_of_rewards_or_float32(dtype, stored):
    reward = torch.tensor([[1.0], [3.0], [5.0]], dtype=torch.float64) + (1e-12 if dtype == torch.float64 else 0.0)
    flags = {name: torch.zeros(3, 1, dtype=torch.bool) for name in ("done", "terminated")}
    buffer = DeviceReplayBuffer(
        storage=DeviceStorage(3, n_step=2, gamma=0.5),
        sampler=DeviceRandomSampler(),
        writer=DeviceWriter(),
        batch_size=32,
    )
    rows = {"observation": torch.arange(3.0), "next": {"reward": reward.to(dtype), **flags}}
    rows["next"]["observation"] = torch.arange(3.0) + 1
    buffer.extend(TensorDict(rows, [3]).unsqueeze(0))
    sample = buffer.sample()
    assert sample["next", "reward"].dtype == stored
    expected = torch.stack([reward[0] + reward[1] / 2, reward[1] + reward[2] / 2, reward[2]]).to(stored)
    assert torch.equal(sample["next", "reward"], expected[sample["observation"].long()])
