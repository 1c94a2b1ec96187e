"""Metrics and episode statistics that record themselves hold the numbers of the plain calls."""

import copy

import pytest
import torch
from recording_device import recording_device

from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics

device = recording_device


def stream(seed, steps, shape=(5,)):
    draw = {"generator": torch.Generator().manual_seed(seed)}
    reward = torch.randint(-9, 9, (*shape, steps, 1), **draw).float()
    done = torch.rand(*shape, steps, 1, **draw) < 0.2
    return reward, done, torch.rand(*shape, steps, 1, **draw) < 0.9


@pytest.mark.parametrize("with_flags", [False, True])
def test_episodes(with_flags, device):
    """Over flushes, another batch size and a reloaded state."""
    plain, ours = EpisodeStatistics(5, device, window=7, capture=False), EpisodeStatistics(5, device, window=7)
    stored = []
    for call in range(14):
        reward, done, valid = (each.to(device) for each in stream(call, 3 if call % 5 == 4 else 8))
        for number, statistics in enumerate((plain, ours)):
            statistics.update(reward, done, valid if with_flags else None)
            if call == 6:
                stored.append(copy.deepcopy(statistics.state_dict()))
            if call == 10:
                statistics.load_state_dict(stored[number])
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=0, msg=f"{name} of call {call}")
        assert torch.equal(plain.mean_return.nan_to_num(), ours.mean_return.nan_to_num())
    assert ours._replays.recorded
    assert not plain._replays.recorded
    assert not copy.deepcopy(ours)._replays.recorded


def test_metrics(device):
    """Each reduction, masks, NaN, several at once; intervals end in between, and rows are equal."""
    plain, ours = DeviceMetrics(device, capture=False), DeviceMetrics(device)
    rows = []
    for metrics in (plain, ours):
        found = []
        for call in range(24):
            draw = torch.Generator().manual_seed(call)
            value = torch.randn(3, 4 if call % 6 else 2, generator=draw).to(device)
            mask = value > (9 if call == 9 else 0)
            for reduce in ("mean", "sum", "max", "last", "histogram"):
                metrics.add(f"plain/{reduce}", value, reduce=reduce)
                metrics.add(f"masked/{reduce}", value, reduce=reduce, mask=mask)
            numbers = dict(zip("abc", value.sum(-1).unbind(), strict=True)) | {"d": (value[0, 0] > 0).long()}
            metrics.add_all({f"all/{name}": number for name, number in numbers.items()})
            metrics.add_all({f"top/{name}": number for name, number in numbers.items()}, reduce="max")
            metrics.add("nan", value[0, 0] / (0.0 if call == 13 else 1.0))
            if call % 4 == 3:
                found.append((metrics.flush(call), copy.deepcopy(metrics.last_histograms)))
        rows.append(found)
    assert ours._replays.recorded
    assert not plain._replays.recorded
    assert len(rows[0][0][0]) >= 16
    for (one, left), (other, right) in zip(*rows, strict=True):
        assert one == other
        assert left == right


def test_values_are_taken_when_they_are_added(device):
    """The caller may overwrite its tensor right after, and another tensor may come."""
    metrics, value = DeviceMetrics(device), torch.zeros((), device=device)
    for call in range(8):
        value.fill_(call)
        metrics.add("own", value, reduce="sum")
        metrics.add("new", torch.full((), float(call), device=device), reduce="sum")
        value.fill_(-100.0)
    assert metrics.flush(0) == {"own": 28.0, "new": 28.0}
